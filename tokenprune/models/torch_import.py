# SPDX-License-Identifier: Apache-2.0
"""Steps of a process of our own that come before torch is imported, and packages that are installed apart. This module
imports nothing heavy itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

from tokenprune.errors import MissingPackageError

# The method of who names none; it stands here because a command's help is shown without torch. Why this one:
# docs/guide/which-method.md.
DEFAULT_METHOD = "divprune"
_HIDDEN = ("torch", "torchvision")
_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def require(module: str, what: str) -> Any:
    """Import a module of tokenprune-demo or tokenprune-bench. what: what to say in front of "pip install".

    Raises MissingPackageError, which says what to install, where the package is absent.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingPackageError(f"{what}: pip install {package.replace('_', '-')}") from None


def calm_threads() -> None:
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
def torch_hidden() -> Iterator[None]:
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
