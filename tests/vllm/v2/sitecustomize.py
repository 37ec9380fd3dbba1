# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's Model Runner V2 run without a GPU: Triton's kernels are interpreted, and vLLM is told that Triton has a
backend for CPUs. Python imports this file at its start, in each process that has this folder in PYTHONPATH
(`conftest.py`)."""

import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends
from triton.runtime.interpreter import InterpreterBuilder


class Driver:
    """What vLLM and Triton ask a backend before they use it."""

    @staticmethod
    def is_active() -> bool:
        return True


# The kernels are not compiled.
backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)


def _store(builder: InterpreterBuilder, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    """Store under a mask of bools: the interpreter makes none of numbers of one element, as structured output does."""
    mask.data = mask.data.astype(bool)
    return _masked_store(builder, pointers, value, mask, *rest)


_masked_store = InterpreterBuilder.create_masked_store
InterpreterBuilder.create_masked_store = _store
