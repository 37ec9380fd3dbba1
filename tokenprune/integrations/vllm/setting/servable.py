# SPDX-License-Identifier: Apache-2.0
"""Which methods vLLM can serve, and why it cannot serve the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from tokenprune.base import ImageChooser, Method, Site
from tokenprune.budget import Budget
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.registry import available_methods, method_class
from tokenprune.setting import IN_LLM
from tokenprune.sites.encoder import EncoderMethod
from tokenprune.sites.units import UnitDropper
from tokenprune.view.observable import Backend
from tokenprune.view.registry import not_served

__all__ = ["IN_LLM", "KEY", "check_method", "servable"]

KEY = "tokenprune"


def check_method(method: Method, in_llm: bool = False) -> None:
    """Raise OptionError if vLLM cannot serve this method, saying what to use instead."""
    reason = _uncounted(method) or (_unservable_in_llm(method) if in_llm else _unservable(method))
    if reason:
        raise OptionError(f"{_refusal(method, reason, in_llm)}. Servable are {', '.join(servable(in_llm))}")


def declared_obstacle(method: Method) -> str | None:
    """Return why vLLM cannot serve this method, by what it says of itself; None if that does not stand against it. The
    method is not run, so that nothing loads torch."""
    reason = _uncounted(method) or _unservable(method, run=False)
    return reason and _refusal(method, reason)


def _refusal(method: Method, reason: str, in_llm: bool = False) -> str:
    return f"{method.name} cannot be served by vLLM{f' with {IN_LLM}' if in_llm else ''}: {reason}"


def servable(in_llm: bool = False) -> list[str]:
    """Return the names of the methods that can be served with their default options."""
    return [name for name in available_methods() if _is_served(method_class(name), in_llm)]


# To know it each method is run, and the answer to a refused request names all of them: the front end is not to run them
# each time.
@lru_cache(maxsize=1024)
def _is_served(cls: type[Method], in_llm: bool) -> bool:
    method = cls()
    return not (_uncounted(method) or (_unservable_in_llm(method) if in_llm else _unservable(method)))


def _uncounted(method: Method) -> str | None:
    """Return why vLLM cannot tell ahead how many tokens a method leaves; None if it can."""
    if isinstance(method, UnitDropper):
        return None  # by pixels alone, which the front end has
    if method.by_content_count or not method.least:
        return "what it sees decides how many tokens stay, and vLLM has to know before; use the Hugging Face engine"
    return None


def _unservable_in_llm(method: Method, run: bool = True) -> str | None:
    if method.site is not Site.IN_LLM:
        return f"it does not act inside the language model ({method.site}); leave {IN_LLM} out"
    if _stages(method) != [method]:
        return "it cuts at several layers, and one is what there is"
    if not run:
        return None
    from tokenprune.integrations.vllm.selection.in_llm import probe

    try:
        probe(method)
    except TokenPruneError as error:
        return str(error)
    return None


def _unservable(method: Method, run: bool = True) -> str | None:
    if method.site is Site.PRE_ENCODER:
        if isinstance(method, ImageChooser):
            return "vLLM needs all of a prompt's images; let clients leave out those that no question is about"
        if method.reads_question:
            return "with question_guard it reads the question, and an image is shared by all prompts that hold it"
        return None
    if isinstance(method, UnitDropper):
        return None
    if isinstance(method, EncoderMethod):
        if method.vtu != "off":
            return f"vtu={method.vtu} changes attention inside the language model; leave it out"
        why = method.inexact
        return why and f"the prompt's length is settled before the tower runs, and {why}"
    if method.site is Site.IN_LLM and _unservable_in_llm(method, run) is None:
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
    if not run:
        return None
    from tokenprune.integrations.vllm.selection.before_llm import probe

    try:
        probe(method)
    except TokenPruneError as error:
        return str(error)
    return None


def _options(method: Method) -> str:
    """Return the options that switch the others off, as a request writes them; empty if there are none."""
    options = _written(method.query_free)
    return f" ({method.name}: {options})" if options else ""


def _written(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())


def _stages(method: Method) -> list[Method]:
    return [stage for stage, _ in method.stages(Budget.of(0.5), 32)]
