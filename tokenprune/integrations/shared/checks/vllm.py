# SPDX-License-Identifier: Apache-2.0
"""Checks of a method in vLLM: on any model, by its declarations, and on a family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.shared.checks.reading import (
    AFTER_THE_TOWER,
    ON_IMAGES_TOO,
    find_joined_layers_error,
    find_reading_error,
)
from tokenprune.models.families import FAMILIES, REFUSED_IN_VLLM, SERVED, Family, get_tower, get_tower_type
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.observable import Backend
from tokenprune.selection.observable_registry import compares_frames, list_unserved
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.selection.sites.units import UnitDropper
from tokenprune.settings import IN_LLM


def find_error(method: Method, family: Family | str | None, in_llm: bool, config: Any) -> TokenPruneError | None:
    """Return an error if `method` is not supported on `family` in vLLM; see `checks.check`."""
    if reason := find_unserved_reason(method, in_llm):
        return OptionError(reason)
    if family is None:
        return None
    row = family if isinstance(family, Family) else SERVED.get(family) or FAMILIES.get(family)
    if row is None or not row.vllm.architecture:
        return UnsupportedModelError(
            f"tokenprune {describe_unserved_family(family if isinstance(family, str) else family.name)}."
        )
    served = row.vllm.architecture
    if in_llm and not row.vllm.in_llm:
        inside = ", ".join(one.name for one in SERVED.values() if one.vllm.in_llm)
        return UnsupportedModelError(
            f"{IN_LLM} does not serve {served}, it serves {inside}. Use a method that acts before the language model."
        )
    if compares_frames(method) and row.after_frames is None:
        return UnsupportedSetupError(
            f"{method.name} compares the frames of a video, and for {served} the tokens of a frame are not known, or "
            f"its prompts hold no videos. {ON_IMAGES_TOO}"
        )
    tower = None if _traced(row, config) else "" if config is None else f" with the tower {get_tower_type(config)!r}"
    error = find_reading_error(method, row, served, tower, json.dumps)
    return error or _find_merging_error(method, row, config) or _find_dropping_error(method, row, config)


def describe_unserved_family(architecture: str) -> str:
    """Return that an architecture is not served, with the reason where one is known."""
    reason = REFUSED_IN_VLLM.get(architecture)
    return f"does not serve {architecture}" + (f", because {reason}" if reason else "")


def _traced(row: Family, config: Any) -> bool:
    if config is None:
        return row.patches is not None
    return row.layout(config) is not None and get_tower(config) is not None


def _find_merging_error(method: Method, row: Family, config: Any) -> TokenPruneError | None:
    """Return an error if the number of tokens that a merge leaves is not known before the tower runs."""
    if not isinstance(method, EncoderMethod) or (row.merges and row.tower_rows == "all images"):
        return None
    if not _in_rows(row, config, "tiles", "packed"):
        return UnsupportedSetupError(
            f"{method.name} merges inside the vision tower, and the number of tokens that this leaves of this "
            f"{row.name!r} is not known before (docs/serving/start.md lists other families). {AFTER_THE_TOWER}"
        )
    return find_joined_layers_error(method, config)


def _find_dropping_error(method: Method, row: Family, config: Any) -> TokenPruneError | None:
    """Return an error if patches cannot be dropped in the tower of a family, or before it."""
    if not isinstance(method, UnitDropper) or row.tower_rows == "all images":
        return None
    error = find_joined_layers_error(method, config)
    if error is not None or _drops(method, row, config):
        return error
    others = ", ".join(
        one.name for one in SERVED.values() if one.tower_rows == "all images" or _drops(method, one, None)
    )
    what = "tiles share a budget and are cropped after it" if row.patches == "packed" else "grids stay whole"
    return UnsupportedSetupError(
        f"{method.name} drops patches in the vision tower, or before it, and in the tower of {row.vllm.architecture} "
        f"{what}. Use a method that acts after the tower, such as divprune, or one of {others}."
    )


def _drops(method: UnitDropper, row: Family, config: Any) -> bool:
    """Return True where units can leave a tower whose images or tiles have rows of their own, each with a budget."""
    return method.sees != "pixels" and _in_rows(row, config, "tiles")


def _in_rows(row: Family, config: Any, *layouts: str) -> bool:
    """Return True where an image or tile is a row of the tower, of which it is known what becomes of its patches."""
    return row.merges and row.layout(config) in layouts and (config is None or _shows_patches(config))


def _shows_patches(config: Any) -> bool:
    """Return True where visual tokens are made of all patches of a tower that can merge, and not of a class token."""
    tower, chosen = get_tower(config), getattr(config, "vision_feature_select_strategy", None)
    if tower is None or tower.merging is None:
        return False
    return chosen is None or (chosen == "full") == (not tower.class_tokens)  # None: the model has no such choice


# -- declarations of a method, for which vLLM cannot serve it on any model


def find_unserved_reason(method: Method, in_llm: bool = False) -> str | None:
    """Return why vLLM cannot serve a method on any model, or None if its declarations allow it.

    The method does not run, so torch is not loaded.
    """
    reason = _uncounted(method) or (_unserved_in_llm(method) if in_llm else _unserved(method))
    return None if reason is None else format_refusal(method, reason, in_llm)


def format_refusal(method: Method, reason: str, in_llm: bool = False) -> str:
    """Return the message that vLLM cannot serve a method for `reason`."""
    return f"{method.name} cannot be served by vLLM{f' with {IN_LLM}' if in_llm else ''}: {reason}"


def _uncounted(method: Method) -> str | None:
    """Return why vLLM cannot know the number of kept tokens before the tower runs; None if it can."""
    if isinstance(method, UnitDropper) and method.sees == "pixels":
        return None  # the front end has the pixels
    if method.chooses_count or not method.min_tokens:
        return "the content decides how many tokens stay, and vLLM must know before. Use transformers."
    return None


def _unserved_in_llm(method: Method) -> str | None:
    if method.site is not Site.IN_LLM:
        return f"it does not act inside the language model ({method.site}). Leave {IN_LLM} out."
    if _stages(method) != [method]:
        return "it cuts at several layers, and only one cut is supported. Use a method with one cut, such as fastv."
    return None


def _unserved(method: Method) -> str | None:
    if isinstance(method, ImageChooser):
        return "it needs all images of a prompt. Let clients leave out images that no question is about."
    if isinstance(method, ResizeMethod):
        reading = "question_guard reads the question, and all prompts with an image share the features of the image."
        return f"{reading} Leave question_guard out." if method.reads_question else None
    if isinstance(method, UnitDropper):
        if not method.removes:
            return "it restores its tokens at the end of the tower, which needs transformers. Use towerdrop or tome."
        return _asking(method) if method.query_aware else None
    if isinstance(method, EncoderMethod):
        if method.vtu != "off":
            return f'vtu="{method.vtu}" changes attention inside the language model. Use vtu="off".'
        why = method.inexact
        return why and f"the length of a prompt is set before the tower runs, and {why}"
    if method.site is Site.IN_LLM and _unserved_in_llm(method) is None:
        return (
            f'it acts inside the language model, after the length of the prompt is set. "{IN_LLM}": true allows it, '
            "with limits (docs/serving/start.md)."
        )
    if method.site is not Site.PRE_LLM:
        return (
            f"it acts inside the language model, after the length of the prompt is set ({method.site}). Use a PRE_LLM "
            "method."
        )
    if _stages(method) != [method]:
        options = _written(method.query_free)
        fix = f"{method.name} with {options}" if options else "its options that switch the later stages off"
        return f"it acts at several stages, and only the entry of the language model is supported. Use {fix}."
    if isinstance(method, Pruner) and method.weighs_attention:
        return f"it weighs attention inside the language model. Use {_written(method.fallback_options)}."
    if missing := list_unserved(method.needs, Backend.VLLM):
        less = method.fallback_hint(missing, json.dumps)
        fix = f"{method.name} with {less}" if less else "a method that does not need it, such as divprune"
        return f"it needs {', '.join(missing)}, which the fused layers of vLLM do not provide. Use {fix}."
    return _asking(method) if method.query_aware else None


def _asking(method: Method) -> str:
    """Return why vLLM cannot serve a method that reads the question."""
    options = _written(method.query_free)
    fix = f"{method.name} with {options}" if options else "a method that does not, such as divprune"
    return f"it reads the question, and all prompts with an image share the features of the image. Use {fix}."


def _written(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())


def _stages(method: Method) -> list[Method]:
    return [stage for stage, _ in method.stages(Budget.from_keep(0.5), 32)]
