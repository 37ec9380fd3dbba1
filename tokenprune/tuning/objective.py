# SPDX-License-Identifier: Apache-2.0
"""What the tuner makes small: a share of what the unpatched model spends on the same questions."""

from __future__ import annotations

from typing import Any

from tokenprune.errors import OptionError

OBJECTIVES = {
    "ttft": "measured time to the first token",
    "tokens": "visual tokens, averaged over the decoder's layers",
    "flops": "prefill FLOPs of the decoder",
    "kv": "bytes of the KV cache",
}
MAX_SPREAD = 0.4  # of a time's ratio, (p80 - p20) / p50: what is wider ranks nothing


def check_objective(name: str) -> str:
    """Return the name; raises OptionError for one that is not in `OBJECTIVES`."""
    if name not in OBJECTIVES:
        raise OptionError(f"objective {name!r} is none of {', '.join(OBJECTIVES)}")
    return name


def shares(cost: dict[str, Any], timing: dict[str, Any] | None) -> dict[str, float]:
    """Return what a setting spends for each objective, as a share of the unpatched model's; "ttft" only where timed.

    cost: `bench.cost.record`. timing: of `bench.timing.compare`.
    """
    known = {
        "tokens": cost["visual_tokens_average"] / max(1, cost["visual_tokens_in"]),
        "flops": cost["prefill_flops_ratio"],
        "kv": cost["kv_bytes"] / max(1, cost["kv_bytes_full"]),
    }
    return known if timing is None else known | {"ttft": timing["ttft_ratio"]["p50"]}


def spread(timing: dict[str, Any]) -> float:
    """Return how far the runs of one comparison lie apart: (p80 - p20) / p50 of the ratio of times to a first token."""
    ratio = timing["ttft_ratio"]
    return (ratio["p80"] - ratio["p20"]) / ratio["p50"]


__all__ = ["MAX_SPREAD", "OBJECTIVES", "check_objective", "shares", "spread"]
