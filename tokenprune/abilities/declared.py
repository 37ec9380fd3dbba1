# SPDX-License-Identifier: Apache-2.0
"""Obstacles that a method itself declares, for which vLLM cannot serve it on any model."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenprune.base import ImageChooser, Method, ResizeMethod, Site
from tokenprune.budget import Budget
from tokenprune.setting import IN_LLM
from tokenprune.sites.encoder import EncoderMethod
from tokenprune.sites.units import UnitDropper
from tokenprune.view.observable import Backend
from tokenprune.view.registry import not_served


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
    if isinstance(method, UnitDropper):
        return None  # by pixels, which the front end has; others: see `_unserved`
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
    if isinstance(method, UnitDropper) and method.sees != "pixels":
        return "it chooses units inside the vision tower, and vLLM knows those alone that are chosen by their pixels"
    if isinstance(method, UnitDropper):
        return None
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
        return (
            "it acts at several places, and only what enters the language model can be changed; switch the others off "
            f"where it has an option for that{_options(method)}"
        )
    if missing := not_served(method.needs, Backend.VLLM):
        less = method.fallback_hint(missing, json.dumps)
        instead = f"; {method.name} does without with {less}" if less else ""
        return f"it needs {', '.join(missing)}, and vLLM's fused layers give no such thing{instead}"
    if method.query_aware:
        options = _written(method.query_free)
        instead = f"; {method.name} does without with {options}" if options else ""
        return f"it reads the question, but an image's features are shared by all prompts that hold it{instead}"
    return None


def _options(method: Method) -> str:
    """Return the options that switch the others off, as a request writes them; empty if there are none."""
    options = _written(method.query_free)
    return f" ({method.name}: {options})" if options else ""


def _written(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())


def _stages(method: Method) -> list[Method]:
    return [stage for stage, _ in method.stages(Budget.of(0.5), 32)]
