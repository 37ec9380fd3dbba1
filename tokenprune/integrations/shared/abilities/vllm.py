# SPDX-License-Identifier: Apache-2.0
"""Obstacles to a method in vLLM: on a family, and those that it declares, on any."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.integrations.shared.abilities.obstacle import (
    AFTER_THE_TOWER,
    ON_IMAGES_TOO,
    Obstacle,
    in_joined_layers,
    in_reading,
)
from tokenprune.models.families import FAMILIES, REFUSED_IN_VLLM, SERVED, Family, tower_kind, tower_of
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.observable import Backend
from tokenprune.selection.observable_registry import compares_frames, not_served
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.selection.sites.units import UnitDropper
from tokenprune.settings import IN_LLM


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
    if isinstance(method, UnitDropper) and row.tower_rows != "all images":
        yield from in_joined_layers(method, config)
        if not _drops(method, row, config):
            others = ", ".join(
                one.name for one in SERVED.values() if one.tower_rows == "all images" or _drops(method, one, None)
            )
            what = "tiles share a budget and are cropped after it" if row.patches == "packed" else "grids stay whole"
            yield Obstacle(
                f"{name} drops patches in the vision tower, or ahead of it, and in that of {served} {what}; it is "
                f"served for {others}. For this one {AFTER_THE_TOWER}"
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
    if row.merges and row.tower_rows == "all images":
        return
    if not _in_rows(row, config, "tiles", "packed"):
        yield Obstacle(
            f"{method.name} merges inside the vision tower. vLLM has to know before how many tokens that leaves, which "
            "can be said of LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision (with CLIP or SigLIP, and a visual token for "
            f"each patch), Idefics3, SmolVLM, InternVL, Gemma 3 and Qwen2-VL to Qwen3.5, not of this {row.name!r}; "
            f"{AFTER_THE_TOWER}"
        )
    yield from in_joined_layers(method, config)


def _drops(method: UnitDropper, row: Family, config: Any) -> bool:
    """Return True where units can leave a tower whose images or tiles have rows of their own, each with a budget."""
    return method.sees != "pixels" and _in_rows(row, config, "tiles")


def _in_rows(row: Family, config: Any, *layouts: str) -> bool:
    """Return True where an image or tile is a row of the tower, of which it is known what becomes of its patches."""
    return row.merges and row.layout(config) in layouts and (config is None or _shows_patches(config))


def _shows_patches(config: Any) -> bool:
    """Return True where visual tokens are made of all patches of a tower that can merge, and not of a class token."""
    tower, chosen = tower_of(config), getattr(config, "vision_feature_select_strategy", None)
    if tower is None or tower.merging is None:
        return False
    return chosen is None or (chosen == "full") == (not tower.class_tokens)  # None: the model has no such choice


# -- what a method declares, for which vLLM cannot serve it on any model


def unserved(method: Method, in_llm: bool = False) -> str | None:
    """Return why vLLM cannot serve a method on any model, None if nothing that it declares is against it. The method is
    not run, so that nothing loads torch."""
    reason = _uncounted(method) or (_unserved_in_llm(method) if in_llm else _unserved(method))
    return None if reason is None else refusal(method, reason, in_llm)


def refusal(method: Method, reason: str, in_llm: bool = False) -> str:
    """Return the sentence that vLLM cannot serve a method for `reason`."""
    return f"{method.name} cannot be served by vLLM{f' with {IN_LLM}' if in_llm else ''}: {reason}"


def _uncounted(method: Method) -> str | None:
    """Return why vLLM cannot know ahead how many tokens a method leaves; None if it can."""
    if isinstance(method, UnitDropper) and method.sees == "pixels":
        return None  # the front end has them
    if method.by_content_count or not method.least:
        return "what it sees decides how many tokens stay, and vLLM has to know before; use the Hugging Face engine"
    return None


def _unserved_in_llm(method: Method) -> str | None:
    if method.site is not Site.IN_LLM:
        return f"it does not act inside the language model ({method.site}); leave {IN_LLM} out"
    if _stages(method) != [method]:
        return "it cuts at several layers, and one is what there is"
    return None


def _unserved(method: Method) -> str | None:
    if isinstance(method, ImageChooser):
        return "vLLM needs all of a prompt's images; let clients leave out those that no question is about"
    if isinstance(method, ResizeMethod):
        if method.reads_question:
            return "with question_guard it reads the question, and an image is shared by all prompts that hold it"
        return None
    if isinstance(method, UnitDropper):
        back = (
            "its tokens come back at the end of the tower, which is done in transformers alone: use towerdrop or tome"
        )
        if not method.removes:
            return back
        return _asking(method) if method.query_aware else None
    if isinstance(method, EncoderMethod):
        if method.vtu != "off":
            return f"vtu={method.vtu} changes attention inside the language model; leave it out"
        why = method.inexact
        return why and f"the prompt's length is settled before the tower runs, and {why}"
    if method.site is Site.IN_LLM and _unserved_in_llm(method) is None:
        return (
            f'it acts inside the language model, after the prompt\'s length is settled; "{IN_LLM}": true allows it, '
            "with limits (docs/serving.md)"
        )
    if method.site is not Site.PRE_LLM:
        return f"it acts inside the language model, after the prompt's length is settled ({method.site})"
    if _stages(method) != [method]:
        others = f" ({method.name}: {options})" if (options := _written(method.query_free)) else ""
        return (
            "it acts at several places, and only what enters the language model can be changed; switch the others off "
            f"where it has an option for that{others}"
        )
    if isinstance(method, Pruner) and method.weighs:
        return f"it weighs attention inside the language model; leave that out with {_written(method.fallback_options)}"
    if missing := not_served(method.needs, Backend.VLLM):
        less = method.fallback_hint(missing, json.dumps)
        instead = f"; {method.name} does without with {less}" if less else ""
        return f"it needs {', '.join(missing)}, and vLLM's fused layers give no such thing{instead}"
    return _asking(method) if method.query_aware else None


def _asking(method: Method) -> str:
    """Return why vLLM cannot serve a method that reads the question."""
    options = _written(method.query_free)
    instead = f"; {method.name} does without with {options}" if options else ""
    return f"it reads the question, but an image's features are shared by all prompts that hold it{instead}"


def _written(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())


def _stages(method: Method) -> list[Method]:
    return [stage for stage, _ in method.stages(Budget.of(0.5), 32)]
