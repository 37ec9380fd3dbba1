# SPDX-License-Identifier: Apache-2.0
"""Objectives of the tuner. Each is a share of the unpatched model's cost on the same questions."""

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
# Objectives that need timing, with the name of their time ratio. Until they are timed, `WORK` replaces them.
TIMED = {"ttft": "ttft_ratio", "throughput": "batch_ratio"}
WORK = "work"
TITLES = OBJECTIVES | {WORK: "prefill FLOPs of vision tower and decoder"}
MAX_SPREAD = 0.4  # largest (p80 - p20) / p50 of a time ratio that is used for ranking


def check_objective(name: str) -> str:
    """Return `name` if it is a known objective.

    Raises:
        OptionError: If `name` is not in `OBJECTIVES`.
    """
    if name not in OBJECTIVES:
        raise OptionError(f"objective {name!r} is not known. Use one of {', '.join(OBJECTIVES)}.")
    return name


def compute_shares(
    cost: dict[str, Any], timing: dict[str, Any] | None, predicted: dict[str, float] | None = None
) -> dict[str, float]:
    """Return the cost of a setting for each objective, as a share of the unpatched cost.

    Args:
        cost: Result of `Evaluator.cost`.
        timing: Result of `Evaluator.time`, or None. Objectives in `TIMED` need it.
        predicted: Result of `Evaluator.predict`, or None. `WORK` takes the cost of the vision tower from it, because
            `cost` covers only the decoder.
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
    """Return the relative spread (p80 - p20) / p50 of the time ratio. Other objectives use the time to first token."""
    ratio = timing[TIMED.get(objective, "ttft_ratio")]
    return (ratio["p80"] - ratio["p20"]) / ratio["p50"]


__all__ = ["MAX_SPREAD", "OBJECTIVES", "TIMED", "TITLES", "WORK", "check_objective", "compute_shares", "compute_spread"]
