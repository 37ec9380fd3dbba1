# SPDX-License-Identifier: Apache-2.0
"""Obstacles to a method on a family in transformers, and with a kind of cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.integrations.shared.abilities.obstacle import (
    AFTER_THE_TOWER,
    ON_IMAGES_TOO,
    Obstacle,
    in_joined_layers,
    in_reading,
)
from tokenprune.methods.registry import without_base
from tokenprune.models.families import FAMILIES, REFUSED, UNCUT, Family, family_of
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.observable import Backend, ObservedAt
from tokenprune.selection.observable_registry import compares_frames, not_served, observables_of
from tokenprune.selection.sites.encoder import VTU_FORMS, EncoderMethod
from tokenprune.selection.sites.frames import FrameMerger
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.selection.sites.units import UnitDropper


@dataclass(frozen=True)
class Cache:
    """A kind of cache.

    sites: where methods may act with it. every_family: it goes with any decoder, else with those whose row says
    `static_cache`. instead: what to use elsewhere.
    """

    name: str
    sites: frozenset[Site]
    every_family: bool
    instead: str = ""


DYNAMIC = Cache("dynamic", frozenset(Site), every_family=True)
STATIC = Cache(
    "static",
    frozenset(Site) - {Site.ATTENTION, Site.DECODE},
    every_family=False,
    instead='leave out cache_implementation="static", or use a dynamic cache',
)


# What is read of layers, of which none ran yet at the decoder's entry.
_LATER = (ObservedAt.LAYER_BEFORE, ObservedAt.NEXT_LAYER, ObservedAt.INPUT_BEFORE, ObservedAt.UNROTATED, ObservedAt.OWN)


def in_transformers(method: Method, family: Family | str | None, acts: bool, config: Any) -> Iterator[Obstacle]:
    """Yield what keeps `method` from acting on `family` in transformers; see `check`."""
    if missing := not_served(method.needs, Backend.HF):
        yield Obstacle(
            f"{method.name} needs {', '.join(missing)}, which is not to be had of models of transformers", OptionError
        )
    if method.site is Site.PRE_LLM and (seen := [one.name for one in observables_of(method.needs, *_LATER)]):
        yield Obstacle(f"{method.name}: a PRE_LLM method cannot need {seen}: no layer ran yet", OptionError)
    if problem := without_base(type(method), method.site):
        yield Obstacle(f"{method.name}: {problem}", OptionError)
    if isinstance(method, EncoderMethod) and method.vtu not in VTU_FORMS:
        yield Obstacle(f"{method.name}: vtu={method.vtu!r} must be one of {', '.join(VTU_FORMS)}", OptionError)
    if family is None:
        return
    row = family if isinstance(family, Family) else family_of(family)
    uncut = row.name in UNCUT and row.name not in FAMILIES  # an adapter of the user's may bring a row, and serve it
    if (acts and method.site is not Site.PRE_ENCODER) if uncut else family in REFUSED:
        yield Obstacle(f"model type {row.name!r} is not supported: {REFUSED[row.name]}", UnsupportedModelError)
    elif row.since is None:
        yield Obstacle(f"model type {row.name!r} is not one of transformers: vLLM alone has it", UnsupportedModelError)
    yield from _by_row(method, row, acts, config)


def _by_row(method: Method, row: Family, acts: bool, config: Any) -> Iterator[Obstacle]:
    name, family = method.name, row.name
    if row.stateful and method.site is Site.DECODE:
        yield Obstacle(
            f"{name}: the decoder of {family!r} has layers that carry a state instead of keys, and no token can be "
            "taken from a state while decoding; use a PRE_LLM or IN_LLM method, which cuts before it is built",
            OptionError,
        )
    if row.vectors and method.site is Site.DECODE:
        yield Obstacle(
            f"{name} acts while an answer is written, and {family!r} writes none: use a PRE_LLM or IN_LLM method",
            OptionError,
        )
    on_videos = compares_frames(method)
    if row.videos == "none" and (method.site is Site.ATTENTION or (on_videos and acts)):
        yield Obstacle(
            f"{name} acts on videos, and prompts of {family!r} hold none: its config names no video token. Frames that "
            f"its processor hands over as images have a budget each: {ON_IMAGES_TOO}"
        )
    if not acts:
        return
    if on_videos and row.after_frames is None:
        yield Obstacle(
            f"{name} compares the frames of a video, and of {family!r} it is not known which tokens are a frame; use "
            "a method that does not, such as divprune, or say so in its row (videos)"
        )
    packed = row.tower_rows == "all images"
    # Elsewhere tiles share a budget, or have no row.
    rows = row.tower_rows == "one image" or (row.merges and row.layout(config) not in ("packed", "sized"))
    if isinstance(method, UnitDropper) and not (packed or (rows and method.sees != "pixels")):
        yield Obstacle(
            f"{name} cannot act in the tower of {family!r}: a visual token has to be a few patches that stand together "
            "in one sequence of all images, and this one has a fixed grid, or joins its patches in another way "
            f"(docs/families.md lists those that fit); {AFTER_THE_TOWER}"
        )
    if isinstance(method, FrameMerger) and row.videos == "frames" and row.tower_rows != "one frame":
        yield Obstacle(
            f"{name} cannot merge frames in the tower of {family!r}: a frame of a video has to be a row of a CLIP or "
            "SigLIP tower, as in LLaVA-OneVision and LLaVA-NeXT-Video; use a method that merges them after the tower, "
            "such as holitom or fastvid"
        )
    if isinstance(method, EncoderMethod) and not (row.merges or (method.drops and packed)):
        yield Obstacle(f"{name} cannot act in the tower of {family!r}: it is not known what becomes of its patches")
    if isinstance(method, ResizeMethod) and row.resizing is None:
        yield Obstacle(
            f"{name}: the processor of {family!r} makes as many tokens of a small image as of a large one; use "
            "method='pool' for a baseline without fine detail"
        )
    if isinstance(method, (EncoderMethod, FrameMerger, UnitDropper)):
        yield from in_joined_layers(method, config)
    unknown = "" if row.patches is None else None
    yield from in_reading(method, row, repr(family), unknown, more=", or say so in its row (patches)")


def with_cache(site: Site, family: Family | str | None, cache: Cache, name: str) -> Iterator[Obstacle]:
    """Yield what keeps a method at `site`, called `name`, from acting on `family` with `cache`."""
    if site not in cache.sites:
        decoding = f"{name} drops tokens while decoding, and a {cache.name} cache keeps its slots"
        in_blocks = f"cannot prune with a {cache.name} cache and attention in blocks"
        yield Obstacle(f"{decoding if site is Site.DECODE else in_blocks}: {cache.instead}")
    row = family_of(family) if isinstance(family, str) else family
    if row is not None and not (cache.every_family or row.static_cache):
        yield Obstacle(f"cannot prune with a {cache.name} cache in the decoder of {row.name!r}: {cache.instead}")


def in_company(methods: Sequence[Method]) -> Iterator[Obstacle]:
    """Yield what keeps `methods`, in the order in which data meets them, from acting in one model."""
    for method in methods:
        later = [other.name for other in methods if other.site.order > Site.IN_ENCODER.order]
        if isinstance(method, EncoderMethod) and method.vtu != "off" and later:
            yield Obstacle(
                f'{method.name} with vtu="{method.vtu}" cannot be composed with {", ".join(later)}: what the decoder '
                'attends to and caches are not the tokens that its layers hold; use vtu="off"',
                OptionError,
            )
        inside = [other.name for other in methods if other.site.order > Site.PRE_LLM.order]
        if isinstance(method, Pruner) and method.weighs and inside:
            yield Obstacle(
                f"{method.name} weighs attention by the tokens that enter the language model, and {inside[0]} acts "
                "inside it: use one of the two, or calibrate=False",
                OptionError,
            )
    decoding = [method.name for method in methods if method.site is Site.DECODE]
    if len(decoding) > 1:
        yield Obstacle(f"{decoding[0]}: only one of the composed methods can act while decoding", OptionError)
    blocks = [method.name for method in methods if method.site is Site.ATTENTION]
    if blocks and (ranks := [one.name for one in methods if any(of.all_rows for of in observables_of(one.needs))]):
        yield Obstacle(
            f"{ranks[0]} ranks tokens by the attention they receive from all others, but with {blocks[0]} the tokens "
            "of a block never see another block, nor the question; use a method that reads the last token's "
            "attention, or none",
            OptionError,
        )
