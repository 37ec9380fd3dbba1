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
    """Return an error if a method is not supported on a family in vLLM; see `checks.check`."""
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
        inside = ", ".join(family.name for family in SERVED.values() if family.vllm.in_llm)
        return UnsupportedModelError(
            f"{IN_LLM} does not support {served}, only {inside}. Use a method that acts before the language model."
        )
    if compares_frames(method) and row.after_frames is None:
        return UnsupportedSetupError(
            f"{method.name} compares the frames of a video, and the tokens of a frame are not known for {served}. "
            f"{ON_IMAGES_TOO}"
        )
    tower = None if _can_trace(row, config) else "" if config is None else f" with the tower {get_tower_type(config)!r}"
    error = find_reading_error(method, row, served, tower, json.dumps)
    return error or _find_merging_error(method, row, config) or _find_dropping_error(method, row, config)


def describe_unserved_family(architecture: str) -> str:
    """Return a message that vLLM does not serve an architecture, with the reason if it is known."""
    reason = REFUSED_IN_VLLM.get(architecture)
    return f"does not serve {architecture}" + (f", because {reason}" if reason else "")


def _can_trace(row: Family, config: Any) -> bool:
    """Return True if patches of the tower can be traced to visual tokens."""
    if config is None:
        return row.patches is not None
    return row.layout(config) is not None and get_tower(config) is not None


def _find_merging_error(method: Method, row: Family, config: Any) -> TokenPruneError | None:
    """Return an error if the number of tokens after a merge is not known before the tower runs."""
    if not isinstance(method, EncoderMethod) or (row.merges and row.tower_rows == "all images"):
        return None
    if not _has_rows(row, config, "tiles", "packed"):
        return UnsupportedSetupError(
            f"{method.name} merges inside the vision tower, and the number of kept tokens of {row.name!r} is not known "
            f"before the tower runs (docs/serving/reference.md lists other families). {AFTER_THE_TOWER}"
        )
    return find_joined_layers_error(method, config)


def _find_dropping_error(method: Method, row: Family, config: Any) -> TokenPruneError | None:
    """Return an error if patches cannot be dropped in the tower of a family, or before it."""
    if not isinstance(method, UnitDropper) or row.tower_rows == "all images":
        return None
    error = find_joined_layers_error(method, config)
    if error is not None or _can_drop(method, row, config):
        return error
    reason = "which crops tiles after the tower" if row.patches == "packed" else "which needs complete grids"
    return UnsupportedSetupError(
        f"{method.name} cannot drop patches in the tower of {row.vllm.architecture}, {reason} "
        f"(docs/serving/reference.md lists other families). {AFTER_THE_TOWER}"
    )


def _can_drop(method: UnitDropper, row: Family, config: Any) -> bool:
    """Return True if units can be dropped in a tower where each image or tile is a row with its own budget."""
    return method.sees != "pixels" and _has_rows(row, config, "tiles")


def _has_rows(row: Family, config: Any, *layouts: str) -> bool:
    """Return True if each image or tile is a row of the tower, and its patches can be traced to visual tokens.

    Args:
        layouts: Results of `Family.layout` that the caller supports.
    """
    return row.merges and row.layout(config) in layouts and (config is None or _uses_all_patches(config))


def _uses_all_patches(config: Any) -> bool:
    """Return True if the visual tokens are made of all patches of a tower that can merge, without its class token."""
    tower, chosen = get_tower(config), getattr(config, "vision_feature_select_strategy", None)
    if tower is None or tower.merging is None:
        return False
    return chosen is None or (chosen == "full") == (not tower.class_tokens)  # None: the model lacks the option


# -- declarations of a method that exclude every served model


def find_unserved_reason(method: Method, in_llm: bool = False) -> str | None:
    """Return why vLLM cannot serve a method on any model, or None if its declarations allow it.

    The method does not run, so torch is not imported.
    """
    reason = _find_count_obstacle(method) or (
        _find_in_llm_obstacle(method) if in_llm else _find_before_llm_obstacle(method)
    )
    return None if reason is None else format_refusal(method, reason, in_llm)


def format_refusal(method: Method, reason: str, in_llm: bool = False) -> str:
    """Return the message that vLLM cannot serve a method for `reason`."""
    return f"{method.name} cannot be served by vLLM{f' with {IN_LLM}' if in_llm else ''}: {reason}"


def _find_count_obstacle(method: Method) -> str | None:
    """Return why the number of kept tokens is not known before the tower runs, or None if it is."""
    if isinstance(method, UnitDropper) and method.sees == "pixels":
        return None  # the front end counts from the pixels
    if method.chooses_count or not method.min_tokens:
        return "the number of kept tokens depends on the content, and vLLM must know it before. Use transformers."
    return None


def _find_in_llm_obstacle(method: Method) -> str | None:
    if method.site is not Site.IN_LLM:
        return f"it does not act inside the language model ({method.site}). Leave {IN_LLM} out."
    if _list_stages(method) != [method]:
        return "it cuts at several layers, and only one cut is supported. Use a method with one cut, such as fastv."
    return None


def _find_before_llm_obstacle(method: Method) -> str | None:
    if isinstance(method, ImageChooser):
        return "it needs all images of a prompt. Let clients leave out the images that the question does not need."
    if isinstance(method, ResizeMethod):
        reason = "question_guard reads the question, and all prompts with an image share the features of the image."
        return f"{reason} Leave question_guard out." if method.reads_question else None
    if isinstance(method, UnitDropper):
        if not method.removes:
            return "it restores its tokens at the end of the tower, which needs transformers. Use towerdrop or tome."
        return _find_question_obstacle(method) if method.query_aware else None
    if isinstance(method, EncoderMethod):
        if method.vtu != "off":
            return f'vtu="{method.vtu}" changes attention inside the language model. Use vtu="off".'
        inexact = method.inexact
        return inexact and f"the length of a prompt is set before the tower runs, and {inexact}"
    if method.site is Site.IN_LLM and _find_in_llm_obstacle(method) is None:
        return (
            f'it acts inside the language model, after the length of the prompt is set. "{IN_LLM}": true allows it, '
            "with limits (docs/serving/reference.md)."
        )
    if method.site is not Site.PRE_LLM:
        return (
            f"it acts inside the language model, after the length of the prompt is set ({method.site}). Use a PRE_LLM "
            "method."
        )
    if _list_stages(method) != [method]:
        options = _format_options(method.query_free)
        fix = f"{method.name} with {options}" if options else "its options that switch the later stages off"
        return f"it acts at several stages, and only the entry of the language model is supported. Use {fix}."
    if isinstance(method, Pruner) and method.weighs_attention:
        return f"it weighs attention inside the language model. Use {_format_options(method.fallback_options)}."
    if missing := list_unserved(method.needs, Backend.VLLM):
        options = method.fallback_hint(missing, json.dumps)
        fix = f"{method.name} with {options}" if options else "a method that does not need it, such as divprune"
        return f"it needs {', '.join(missing)}, which the fused layers of vLLM do not provide. Use {fix}."
    return _find_question_obstacle(method) if method.query_aware else None


def _find_question_obstacle(method: Method) -> str:
    """Return why vLLM cannot serve a method that reads the question."""
    options = _format_options(method.query_free)
    fix = f"{method.name} with {options}" if options else "a method that does not, such as divprune"
    return f"it reads the question, and all prompts with an image share the features of the image. Use {fix}."


def _format_options(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())


def _list_stages(method: Method) -> list[Method]:
    return [stage for stage, _ in method.stages(Budget.from_keep(0.5), 32)]
