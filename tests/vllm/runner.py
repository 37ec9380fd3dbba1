# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's model runners the tests run through: V1, or V2 with VLLM_USE_V2_MODEL_RUNNER=1 in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
if V2:  # Here, and by the environment in all processes that are started from here.
    _folder = str(Path(__file__).parent / "v2")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_folder, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, _folder)
    import sitecustomize  # noqa: F401

# For tests of what is refused on V2, see test_v2.py.
IN_LLM = pytest.mark.only_v1("tokens leave inside the language model there alone")


def skips(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.MarkDecorator]]:
    """What to skip, and why: tests that are for the other runner."""
    for item in items:
        needs_v1 = item.get_closest_marker("only_v1")
        if V2 and needs_v1 is not None:
            yield item, pytest.mark.skip(reason=f"Model Runner V1 only: {needs_v1.args[0]}")
        if not V2 and item.get_closest_marker("only_v2") is not None:
            yield item, pytest.mark.skip(reason="Model Runner V2 only: VLLM_USE_V2_MODEL_RUNNER=1 runs it")
