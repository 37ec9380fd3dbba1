# SPDX-License-Identifier: Apache-2.0
"""Control of the torch import: OpenMP settings, and loading on first use."""

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
    """Let idle OpenMP threads sleep, unless the environment sets GOMP_SPINCOUNT.

    Spinning threads block cores and count as CPU time. libgomp reads the variable when torch is loaded; later changes
    have no effect.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


class _Deferred(ModuleType):
    """Module that loads itself on first attribute access."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None  # set by `defer_torch`
        self.__class__ = ModuleType  # type: ignore[assignment]  # a plain module from now on
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)


def defer_torch() -> None:
    """Make `import torch` load torch on first use, for commands that only describe models and methods.

    Use only in a command line process: `from torch import ...` still loads torch immediately, and after `hide_torch`
    transformers behaves as if torch were not installed.
    """
    if "torch" in sys.modules or (spec := importlib.util.find_spec("torch")) is None:
        return
    module = importlib.util.module_from_spec(spec)
    del module.__path__  # so that `import torch.nn` loads torch first
    module.__class__ = _Deferred
    sys.modules["torch"] = module


@contextmanager
def hide_torch() -> Iterator[None]:
    """Hide deferred torch from the first import of transformers. No effect if torch is loaded.

    transformers would load torch to read a config, and all generation code to find model classes.
    """
    deferred = sys.modules.get("torch")
    if not isinstance(deferred, _Deferred) or "transformers" in sys.modules:
        yield
        return
    before = {name: sys.modules.get(name) for name in _HIDDEN}
    os.environ.setdefault(_QUIET, "1")  # suppress the warning about missing torch
    sys.modules.update(dict.fromkeys(_HIDDEN, cast(ModuleType, None)))  # None makes the import fail
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
