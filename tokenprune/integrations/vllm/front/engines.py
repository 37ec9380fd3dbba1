# SPDX-License-Identifier: Apache-2.0
"""Engines that start in this process, and what the plugin does with each once it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenprune.integrations.vllm.compat import then

_acts: list[Callable[[Any], None]] = []


def on_start(act: Callable[[Any], None]) -> None:
    """Call `act` with each engine (vLLM's `AsyncLLM` or `LLMEngine`) that starts in this process from now on, in the
    order in which acts were named. Naming one again changes nothing."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    if act not in _acts:
        _acts.append(act)
    for engine in (AsyncLLM, LLMEngine):
        then(engine, "__init__", _started)


def _started(result: None, engine: Any, *_: Any, **__: Any) -> None:
    for act in _acts:
        act(engine)
