# SPDX-License-Identifier: Apache-2.0
"""Obstacles to a method on a family in transformers, and with a kind of cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenprune.abilities.obstacle import (
    AFTER_THE_TOWER,
    ON_IMAGES_TOO,
    OTHER_OF_THE_TOWER,
    Obstacle,
    not_on,
    or_less,
    reads_tower,
)
from tokenprune.base import Method, ResizeMethod, Site
from tokenprune.errors import OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.families import REFUSED, Family, family_of
from tokenprune.sites.encoder import EncoderMethod
from tokenprune.sites.frames import FrameMerger
from tokenprune.sites.units import UnitDropper
from tokenprune.view.observable import Backend
from tokenprune.view.registry import compares_frames, not_served


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


# A draft reads the prompt of its target: where methods may act in it.
IN_DRAFTS = frozenset(Site) - {Site.PRE_ENCODER}


def in_drafts(site: Site, name: str) -> Iterator[Obstacle]:
    """Yield what keeps a method at `site`, called `name`, from acting in a draft."""
    if site not in IN_DRAFTS:
        yield Obstacle(
            OptionError,
            f"{name} acts on pixels, and a draft reads the prompt of its target: the target would see less too. Use a "
            "method that acts in the model, such as divprune or fastv",
        )


def in_transformers(method: Method, family: Family | str | None, acts: bool) -> Iterator[Obstacle]:
    """Yield what keeps `method` from acting on `family` in transformers; see `check`."""
    if missing := not_served(method.needs, Backend.HF):
        yield Obstacle(
            OptionError, f"{method.name} needs {', '.join(missing)}, which is not to be had of models of transformers"
        )
    if family is None:
        return
    row = family if isinstance(family, Family) else family_of(family)
    if family in REFUSED:  # by its name: an adapter of the user's may serve it
        yield Obstacle(UnsupportedModelError, f"model type {row.name!r} is not supported: {REFUSED[row.name]}")
    elif not row.in_transformers:
        yield Obstacle(UnsupportedModelError, f"model type {row.name!r} is not one of transformers: vLLM alone has it")
    yield from _by_row(method, row, acts)


def _by_row(method: Method, row: Family, acts: bool) -> Iterator[Obstacle]:
    name, family = method.name, row.name
    if row.stateful and method.site is Site.DECODE:
        yield Obstacle(
            OptionError,
            f"{name}: the decoder of {family!r} has layers that carry a state instead of keys, and no token can be "
            "taken from a state while decoding; use a PRE_LLM or IN_LLM method, which cuts before it is built",
        )
    on_videos = compares_frames(method)
    if row.videos == "none" and (method.site is Site.ATTENTION or (on_videos and acts)):
        yield Obstacle(
            UnsupportedSetupError,
            f"{name} acts on videos, and prompts of {family!r} hold none: its config names no video token. Frames that "
            f"its processor hands over as images have a budget each: {ON_IMAGES_TOO}",
        )
    if not acts:
        return
    if on_videos and row.after_frames is None:
        yield Obstacle(
            UnsupportedSetupError,
            f"{name} compares the frames of a video, and of {family!r} it is not known which tokens are a frame; use "
            "a method that does not, such as divprune, or say so in its row (videos)",
        )
    if isinstance(method, UnitDropper) and not row.units:
        yield Obstacle(
            UnsupportedSetupError,
            f"{name} cannot act in the tower of {family!r}: a visual token has to be a few patches that stand together "
            "in one sequence of all images, and this one has a fixed grid, or joins its patches in another way "
            f"(docs/families.md lists those that fit); {AFTER_THE_TOWER}",
        )
    if isinstance(method, FrameMerger) and row.videos == "frames" and not row.frame_rows:
        yield Obstacle(
            UnsupportedSetupError,
            f"{name} cannot merge frames in the tower of {family!r}: a frame of a video has to be a row of a CLIP or "
            "SigLIP tower, as in LLaVA-OneVision and LLaVA-NeXT-Video; use a method that merges them after the tower, "
            "such as holitom or fastvid",
        )
    if isinstance(method, EncoderMethod) and not row.merges:
        yield Obstacle(
            UnsupportedSetupError,
            f"{name} cannot act in the tower of {family!r}: it is not known what becomes of its patches",
        )
    if isinstance(method, ResizeMethod) and row.resizing is None:
        yield Obstacle(
            UnsupportedSetupError,
            f"{name}: the processor of {family!r} makes as many tokens of a small image as of a large one; use "
            "method='pool' for a baseline without fine detail",
        )
    if reads_tower(method) and row.patches is None:
        yield Obstacle(
            UnsupportedSetupError,
            f"{name} looks into the vision tower, but of {family!r} it is not known how its patches become visual "
            f"tokens; {AFTER_THE_TOWER}{or_less(method)}, or say so in its row (patches)",
        )
    elif unknown := not_on(method, row):
        yield Obstacle(
            UnsupportedSetupError, f"{name} needs {unknown}, which {family!r} does not have: {OTHER_OF_THE_TOWER}"
        )


def with_cache(site: Site, family: Family | str | None, cache: Cache, name: str) -> Iterator[Obstacle]:
    """Yield what keeps a method at `site`, called `name`, from acting on `family` with `cache`."""
    if site is Site.DECODE and site not in cache.sites:
        yield Obstacle(
            UnsupportedSetupError,
            f"{name} drops tokens while decoding, and a {cache.name} cache keeps its slots: {cache.instead}",
        )
    elif site not in cache.sites:
        yield Obstacle(
            UnsupportedSetupError, f"cannot prune with a {cache.name} cache and attention in blocks: {cache.instead}"
        )
    row = family_of(family) if isinstance(family, str) else family
    if row is not None and not (cache.every_family or row.static_cache):
        yield Obstacle(
            UnsupportedSetupError,
            f"cannot prune with a {cache.name} cache in the decoder of {row.name!r}: {cache.instead}",
        )
