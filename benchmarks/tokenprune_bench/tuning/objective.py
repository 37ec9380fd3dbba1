# SPDX-License-Identifier: Apache-2.0
"""The objective of the tuner: a share of the cost of the unpatched model on the same questions."""

from __future__ import annotations

from typing import Any

from tokenprune.errors import OptionError

OBJECTIVES = {
    "ttft": "measured time from the image to the first token",
    "throughput": "measured time of a batch of questions",
    "tokens": "visual tokens, averaged over the decoder's layers",
    "flops": "prefill FLOPs of the decoder",
    "kv": "bytes of the KV cache",
}
# What is measured, each with the name of its ratio of times; until it is, `WORK` stands for it.
TIMED = {"ttft": "ttft_ratio", "throughput": "batch_ratio"}
WORK = "work"
TITLES = OBJECTIVES | {WORK: "prefill FLOPs of vision tower and decoder"}
MAX_SPREAD = 0.4  # of a time's ratio, (p80 - p20) / p50: what is wider ranks nothing


def check_objective(name: str) -> str:
    """Return the name; raises OptionError for one that is not in `OBJECTIVES`."""
    if name not in OBJECTIVES:
        raise OptionError(f"objective {name!r} is none of {', '.join(OBJECTIVES)}")
    return name


def compute_shares(
    cost: dict[str, Any], timing: dict[str, Any] | None, predicted: dict[str, float] | None = None
) -> dict[str, float]:
    """Return what a setting spends for each objective, as a share of the unpatched model's; those of `TIMED` only where
    they were measured.

    cost: `bench.cost.record`. timing: of `Evaluator.time`. predicted: of `Evaluator.predict`, for the tower's
    share: the back end counts the decoder alone.
    """
    known = {
        "tokens": cost["visual_tokens_average"] / max(1, cost["visual_tokens_in"]),
        "flops": cost["prefill_flops_ratio"],
        "kv": cost["kv_bytes"] / max(1, cost["kv_bytes_full"]),
    }
    tower = (predicted or {}).get("tower_share", 0.0)
    known[WORK] = (1 - tower) * known["flops"] + (tower * predicted["tower"] if tower else 0.0)
    return known | {name: timing[ratio]["p50"] for name, ratio in TIMED.items() if timing and ratio in timing}


def compute_spread(timing: dict[str, Any], objective: str = "ttft") -> float:
    """Return how far the runs of one comparison lie apart: (p80 - p20) / p50 of the ratio of times, by default of those
    to a first token."""
    ratio = timing[TIMED.get(objective, "ttft_ratio")]
    return (ratio["p80"] - ratio["p20"]) / ratio["p50"]


__all__ = ["MAX_SPREAD", "OBJECTIVES", "TIMED", "TITLES", "WORK", "check_objective", "compute_shares", "compute_spread"]
