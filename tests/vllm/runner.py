# SPDX-License-Identifier: Apache-2.0
"""Select vLLM's model runner for the tests: V1, or V2 with VLLM_USE_V2_MODEL_RUNNER=1 in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
if V2:  # Applies to this process and, through the environment, to all processes started from it.
    _folder = str(Path(__file__).parent / "v2")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_folder, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, _folder)
    import sitecustomize  # noqa: F401

# test_v2.py tests the settings that V2 refuses.
IN_LLM = pytest.mark.only_v1("only V1 drops tokens inside the language model")


def skips(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.MarkDecorator]]:
    """Yield each test for the other runner, with a mark that skips it."""
    for item in items:
        needs_v1 = item.get_closest_marker("only_v1")
        if V2 and needs_v1 is not None:
            yield item, pytest.mark.skip(reason=f"Model Runner V1 only: {needs_v1.args[0]}")
        if not V2 and item.get_closest_marker("only_v2") is not None:
            yield item, pytest.mark.skip(reason="Model Runner V2 only: VLLM_USE_V2_MODEL_RUNNER=1 runs it")
