# SPDX-License-Identifier: Apache-2.0
"""Checks of a method in transformers: on a family, with a kind of cache, and combined with other methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError, TokenPruneError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.shared.checks.reading import (
    AFTER_THE_TOWER,
    ON_IMAGES_TOO,
    find_joined_layers_error,
    find_reading_error,
)
from tokenprune.methods.registry import find_missing_base
from tokenprune.models.families import FAMILIES, PIXELS_ONLY, REFUSED, Family, get_family
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.observable import Backend, ObservedAt
from tokenprune.selection.observable_registry import compares_frames, list_unserved, select_observables
from tokenprune.selection.sites.encoder import VTU_FORMS, EncoderMethod
from tokenprune.selection.sites.frames import FrameMerger
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.selection.sites.units import UnitDropper


@dataclass(frozen=True)
class Cache:
    """A kind of cache.

    Attributes:
        sites: Sites at which methods may act with this cache.
        every_family: Whether every decoder supports it. If not, only families with `static_cache` in their row do.
        fix: Sentence of error messages with the remedy.
    """

    name: str
    sites: frozenset[Site]
    every_family: bool
    fix: str = ""


DYNAMIC = Cache("dynamic", frozenset(Site), every_family=True)
STATIC = Cache(
    "static",
    frozenset(Site) - {Site.ATTENTION, Site.DECODE},
    every_family=False,
    fix='Leave out cache_implementation="static", or use a dynamic cache.',
)

# Observables of decoder layers. At the decoder's entry no layer has run yet.
_LATER = (ObservedAt.LAYER_BEFORE, ObservedAt.NEXT_LAYER, ObservedAt.INPUT_BEFORE, ObservedAt.UNROTATED, ObservedAt.OWN)


def find_error(method: Method, family: Family | str | None, config: Any, acts: bool) -> TokenPruneError | None:
    """Return an error if a method is not supported on a family in transformers; see `checks.check`."""
    if (error := _find_declared_error(method)) is not None or family is None:
        return error
    row = family if isinstance(family, Family) else get_family(family)
    uncut = row.name in PIXELS_ONLY and row.name not in FAMILIES  # an adapter of a user may register a row
    if (acts and method.site is not Site.PRE_ENCODER) if uncut else family in REFUSED:
        return UnsupportedModelError(f"Model type {row.name!r} is not supported: {REFUSED[row.name]}.")
    if row.since is None:
        return UnsupportedModelError(f"transformers does not have model type {row.name!r}. Use the vLLM plugin.")
    error = _find_site_error(method, row, acts)
    if error is not None or not acts:
        return error
    error = _find_tower_error(method, row, config)
    unknown = "" if row.patches is None else None
    return error or find_reading_error(method, row, repr(row.name), unknown, more=", or set `patches` in its row")


def _find_declared_error(method: Method) -> TokenPruneError | None:
    """Return an error if the declarations or options of a method exclude every model."""
    name = method.name
    if missing := list_unserved(method.needs, Backend.HF):
        return OptionError(f"{name} needs {', '.join(missing)}, which models of transformers do not provide.")
    if method.site is Site.PRE_LLM and (later := [item.name for item in select_observables(method.needs, *_LATER)]):
        return OptionError(f"{name}: a PRE_LLM method cannot need {later}, because no layer has run yet.")
    if problem := find_missing_base(type(method), method.site):
        return OptionError(f"{name}: {problem}")
    if isinstance(method, EncoderMethod) and method.vtu not in VTU_FORMS:
        return OptionError(f"{name}: vtu={method.vtu!r} is not an option. Use one of {', '.join(VTU_FORMS)}.")
    return None


def _find_site_error(method: Method, row: Family, acts: bool) -> TokenPruneError | None:
    """Return an error if a method needs decoding or videos and the family has none."""
    name, family, on_videos = method.name, row.name, compares_frames(method)
    if method.site is Site.DECODE and (row.stateful or row.vectors):
        why = "has layers with a state instead of keys" if row.stateful else "writes no answer"
        return OptionError(f"{name} acts while decoding, and {family!r} {why}. Use a PRE_LLM or IN_LLM method.")
    if row.videos == "none" and (method.site is Site.ATTENTION or (on_videos and acts)):
        return UnsupportedSetupError(f"{name} acts on videos, which {family!r} does not support. {ON_IMAGES_TOO}")
    if acts and on_videos and row.after_frames is None:
        return UnsupportedSetupError(
            f"{name} compares the frames of a video, and the tokens of a frame are not known for {family!r}. Use a "
            "method that does not, such as divprune, or set `videos` in its row."
        )
    return None


def _find_tower_error(method: Method, row: Family, config: Any) -> TokenPruneError | None:
    """Return an error if a method cannot act on the pixels or in the vision tower of a family."""
    name, family, packed = method.name, row.name, row.tower_rows == "all images"
    if isinstance(method, UnitDropper):
        own_grids = row.tower_rows == "one image"
        # In other layouts the tiles share a budget, or are not rows of the tower.
        in_rows = own_grids or (row.merges and row.layout(config) not in ("packed", "sized"))
        if not (packed or (in_rows and method.sees != "pixels")):
            return UnsupportedSetupError(
                f"{name} cannot drop patches in the tower of {family!r}, where the patches of a visual token are not "
                f"adjacent in one sequence (docs/reference/families.md lists other families). {AFTER_THE_TOWER}"
            )
        if own_grids and not method.removes:
            return UnsupportedSetupError(
                f"{name} cannot restore dropped patches in the tower of {family!r}, where each image has its own grid. "
                "Use towerdrop."
            )
    if isinstance(method, FrameMerger) and row.videos == "frames" and row.tower_rows != "one frame":
        return UnsupportedSetupError(
            f"{name} cannot merge frames in the tower of {family!r}: a frame must be a row of a CLIP or SigLIP tower, "
            "as in LLaVA-OneVision. Use a method that merges after the tower, such as holitom or fastvid."
        )
    if isinstance(method, EncoderMethod) and not (row.merges or (method.drops and packed)):
        return UnsupportedSetupError(
            f"{name} cannot act in the tower of {family!r}, where the visual token of each patch is not known. "
            f"{AFTER_THE_TOWER}"
        )
    if isinstance(method, ResizeMethod) and row.resizing is None:
        return UnsupportedSetupError(
            f"{name} does not shorten prompts of {family!r}: small and large images get the same number of tokens. "
            'Use method="pool" for a baseline without fine detail.'
        )
    if isinstance(method, (EncoderMethod, FrameMerger, UnitDropper)):
        return find_joined_layers_error(method, config)
    return None


def find_cache_error(site: Site, family: Family | str | None, cache: Cache, name: str) -> TokenPruneError | None:
    """Return an error if the method `name` at `site` is not supported on a family with a kind of cache."""
    if site not in cache.sites:
        decoding = f"{name} drops tokens while decoding, and a {cache.name} cache keeps its slots."
        in_blocks = f"Pruning with a {cache.name} cache and attention in blocks is not supported."
        return UnsupportedSetupError(f"{decoding if site is Site.DECODE else in_blocks} {cache.fix}")
    row = get_family(family) if isinstance(family, str) else family
    if row is not None and not (cache.every_family or row.static_cache):
        return UnsupportedSetupError(
            f"Pruning with a {cache.name} cache is not supported in the decoder of {row.name!r}. {cache.fix}"
        )
    return None


def find_combination_error(methods: Sequence[Method]) -> TokenPruneError | None:
    """Return an error if `methods`, in the order in which they act, cannot be combined in one model."""
    for method in methods:
        later = [other.name for other in methods if other.site.order > Site.IN_ENCODER.order]
        if isinstance(method, EncoderMethod) and method.vtu != "off" and later:
            return OptionError(
                f'{method.name} with vtu="{method.vtu}" cannot be combined with {", ".join(later)}, because virtual '
                'unmerging changes the tokens that the decoder attends to. Use vtu="off".'
            )
        inside = [other.name for other in methods if other.site.order > Site.PRE_LLM.order]
        if isinstance(method, Pruner) and method.weighs_attention and inside:
            return OptionError(
                f"{method.name} weighs attention by the tokens that enter the language model, and {inside[0]} acts "
                "inside it. Use one of the two, or calibrate=False."
            )
    decoding = [method.name for method in methods if method.site is Site.DECODE]
    if len(decoding) > 1:
        return OptionError(f"{decoding[0]}: only one of the combined methods can act while decoding.")
    blocks = [method.name for method in methods if method.site is Site.ATTENTION]
    ranking = [method.name for method in methods if any(item.all_rows for item in select_observables(method.needs))]
    if blocks and ranking:
        return OptionError(
            f"{ranking[0]} ranks tokens by the attention they receive from all others, but with {blocks[0]} tokens "
            "attend only within their block. Use a method that reads the last token's attention, or none."
        )
    return None
