# SPDX-License-Identifier: Apache-2.0
"""Obstacles to a method on a family in vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenprune.abilities.declared import unserved
from tokenprune.abilities.obstacle import AFTER_THE_TOWER, ON_IMAGES_TOO, Obstacle, in_joined_layers, in_reading
from tokenprune.base import Method
from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.families import FAMILIES, REFUSED_IN_VLLM, SERVED, Family, tower_kind, tower_of
from tokenprune.setting import IN_LLM
from tokenprune.sites.encoder import EncoderMethod
from tokenprune.sites.units import UnitDropper
from tokenprune.view.registry import compares_frames


def in_vllm(method: Method, family: Family | str | None, in_llm: bool, config: Any) -> Iterator[Obstacle]:
    """Yield what keeps `method` from acting on `family` in vLLM; see `check`."""
    if reason := unserved(method, in_llm):
        yield Obstacle(reason, OptionError)
    if family is None:
        return
    row = family if isinstance(family, Family) else SERVED.get(family) or FAMILIES.get(family)
    if row is None or not row.vllm.architecture:
        name = family if isinstance(family, str) else family.name
        yield Obstacle(f"tokenprune {unserved_family(name)}", UnsupportedModelError)
        return
    name, served = method.name, row.vllm.architecture
    if in_llm and not row.vllm.in_llm:
        inside = ", ".join(one.name for one in SERVED.values() if one.vllm.in_llm)
        yield Obstacle(
            f"{IN_LLM} does not serve {served}: it serves {inside}. Use a method that acts before the language model",
            UnsupportedModelError,
        )
    if compares_frames(method) and row.after_frames is None:
        yield Obstacle(
            f"{name} compares the frames of a video, and of {served} it is not known which tokens are a frame, or its "
            f"prompts hold no videos; {ON_IMAGES_TOO}"
        )
    kind = "" if config is None else f" with the tower {tower_kind(config)!r}"
    yield from in_reading(method, row, served, None if _traced(row, config) else kind, json.dumps)
    if isinstance(method, EncoderMethod):
        yield from _merging_in_vllm(method, row, config)
    if isinstance(method, UnitDropper) and not row.units:
        packed = ", ".join(one.name for one in SERVED.values() if one.units)
        yield Obstacle(
            f"{name} drops patches ahead of the vision tower, and that of {served} takes whole grids alone; it is "
            f"served for {packed}. For this one {AFTER_THE_TOWER}"
        )


def unserved_family(architecture: str) -> str:
    """Return that an architecture is not served, with the reason where one is known."""
    reason = REFUSED_IN_VLLM.get(architecture)
    return f"does not serve {architecture}" + (f", because {reason}" if reason else "")


def _traced(row: Family, config: Any) -> bool:
    if config is None:
        return row.patches is not None
    return row.layout(config) is not None and tower_of(config) is not None


def _merging_in_vllm(method: EncoderMethod, row: Family, config: Any) -> Iterator[Obstacle]:
    """Yield why the tokens that a merge leaves cannot be known before the tower runs."""
    if row.merges and row.units:
        return
    tiles = row.merges and (row.patches if config is None else row.layout(config)) in ("tiles", "packed")
    if not tiles or not (config is None or _shows_patches(config)):
        yield Obstacle(
            f"{method.name} merges inside the vision tower. vLLM has to know before how many tokens that leaves, which "
            "can be said of LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision (with CLIP or SigLIP, and a visual token for "
            f"each patch), Idefics3, SmolVLM, InternVL, Gemma 3 and Qwen2-VL to Qwen3.5, not of this {row.name!r}; "
            f"{AFTER_THE_TOWER}"
        )
    yield from in_joined_layers(method, config)


def _shows_patches(config: Any) -> bool:
    """Return True where visual tokens are made of all patches of a tower that can merge, and not of a class token."""
    tower, chosen = tower_of(config), getattr(config, "vision_feature_select_strategy", None)
    if tower is None or tower.merging is None:
        return False
    return chosen is None or (chosen == "full") == (not tower.class_tokens)  # None: the model has no such choice
