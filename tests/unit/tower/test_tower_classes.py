# SPDX-License-Identifier: Apache-2.0
"""Parts that act in a vision tower own a reducer and do not inherit from it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from tokenprune.integrations.shared.attachable import Attachable

FOLDERS = ("shared.towers", "hf.towers", "vllm.worker")
NEEDS_VLLM = {"items", "models", "positions", "rope", "weights"}  # modules without tower classes that import vLLM


def test_towers_inherit_from_at_most_four_classes() -> None:
    modules = [importlib.import_module("tokenprune.integrations.timm")]
    for folder in FOLDERS:
        package = importlib.import_module(f"tokenprune.integrations.{folder}")
        names = {module.name for module in pkgutil.iter_modules(package.__path__)} - NEEDS_VLLM
        modules += [importlib.import_module(f"{package.__name__}.{name}") for name in sorted(names)]
    classes = {cls for module in modules for cls in vars(module).values() if inspect.isclass(cls)}
    towers = [cls for cls in classes if issubclass(cls, Attachable)]
    assert len(towers) >= 10
    deep = {cls.__qualname__: len(cls.__mro__) - 1 for cls in towers if len(cls.__mro__) - 1 > 4}  # without object
    assert not deep
