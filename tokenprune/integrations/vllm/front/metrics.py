# SPDX-License-Identifier: Apache-2.0
"""Counters beside vLLM's own at /metrics, in the process that has the processor and answers there."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Counter


@cache
def _counter() -> Counter:
    # Made at the first request: by then vLLM has decided whether several processes answer at /metrics together.
    return Counter(
        "tokenprune:visual_tokens",
        "Visual tokens of requests: what the model makes of their images and videos (in), and what is left (out).",
        ["model_name", "stage"],
    )


def count(model_config: Any, before: int, after: int) -> None:
    """Add one request's visual tokens."""
    for stage, tokens in (("in", before), ("out", after)):
        _counter().labels(model_config.served_model_name, stage).inc(tokens)
