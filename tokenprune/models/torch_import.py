# SPDX-License-Identifier: Apache-2.0
"""Control how and when a process imports torch: OpenMP settings, and imports on first use."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

_HIDDEN = ("torch", "torchvision")
_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def set_passive_threads() -> None:
    """Let OpenMP's threads sleep while they wait, unless the user's environment says otherwise.

    Threads that spin take the cores from whatever else runs, and count as CPU time. libgomp reads the variable once,
    when torch loads it: afterwards this changes nothing.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


class _Deferred(ModuleType):
    """A module that loads itself the first time anything of it is read."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None  # `defer_torch` found them
        self.__class__ = ModuleType  # type: ignore[assignment]  # from now on a plain module
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)


def defer_torch() -> None:
    """Let `import torch` load torch when it is first used, for commands that describe models and methods and run none.

    Only for a process of our own: `from torch import ...` still loads it at once, and transformers goes without it
    (`torch_hidden`).
    """
    if "torch" in sys.modules or (spec := importlib.util.find_spec("torch")) is None:
        return
    module = importlib.util.module_from_spec(spec)
    del module.__path__  # so that `import torch.nn` loads torch first
    module.__class__ = _Deferred
    sys.modules["torch"] = module


@contextmanager
def hide_torch() -> Iterator[None]:
    """Have transformers do without torch from its first import on, if torch is deferred; else change nothing.

    To read a config it would load torch, and to look for model classes all that generates text.
    """
    deferred = sys.modules.get("torch")
    if not isinstance(deferred, _Deferred) or "transformers" in sys.modules:
        yield
        return
    before = {name: sys.modules.get(name) for name in _HIDDEN}
    os.environ.setdefault(_QUIET, "1")  # it would report torch as missing
    sys.modules.update(dict.fromkeys(_HIDDEN, cast(ModuleType, None)))  # None: not to be found
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
