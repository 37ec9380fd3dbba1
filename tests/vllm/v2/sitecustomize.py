# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's Model Runner V2 without a GPU: Triton interprets its kernels and has a backend for CPUs.

Python imports this file at startup, in each process with this folder in PYTHONPATH (`runner.py`).
"""

import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends
from triton.runtime.interpreter import InterpreterBuilder


class Driver:
    """Stand-in for the driver that vLLM and Triton query."""

    @staticmethod
    def is_active() -> bool:
        return True


# The kernels are not compiled.
backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)


def _store(builder: InterpreterBuilder, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    """Store with a mask of bools. For one element the interpreter leaves integers, for example in structured output."""
    mask.data = mask.data.astype(bool)
    return _masked_store(builder, pointers, value, mask, *rest)


_masked_store = InterpreterBuilder.create_masked_store
InterpreterBuilder.create_masked_store = _store
