# SPDX-License-Identifier: Apache-2.0
"""Made-up benchmark runs for the report."""

from __future__ import annotations

from typing import Any

from tokenprune_bench import results
from tokenprune_bench.report.runs import Run

QUESTIONS = 200  # half of each kind


def header(**changes: Any) -> dict[str, Any]:
    environment = dict(
        model="tiny", device="cpu", machine="x86_64", threads=1, dtype="float32", cores=2, tokenprune="0", torch="2"
    )
    environment |= changes.pop("environment", {})
    return dict(
        record="header", schema=results.SCHEMA, date="2026-01-01T00:00:00+00:00", kinds=["colour", "word"],
        kind_of_question="01" * (QUESTIONS // 2), plan=dict(seeds=[0]), environment=environment,
    ) | changes  # fmt: skip


def result(method: str, keep: float, colours: int, words: int, tokens: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Return a result with the given right answers of 100 for each kind, and `tokens` of 100 in both layers, by default
    its keep."""
    tokens = tokens or 100 * keep
    right = "".join(f"{index < colours:d}{index < words:d}" for index in range(QUESTIONS // 2))
    per_layer = [tokens * QUESTIONS] * 2
    stats = dict(
        visual_tokens_in=100 * QUESTIONS, visual_tokens_out=tokens * QUESTIONS, visual_tokens_per_layer=per_layer,
        visual_tokens_average=tokens * QUESTIONS, keep_ratio=keep, prefill_flops_ratio=keep, kv_bytes=2048,
        kv_bytes_full=8192, overhead_ms=1.0,
    )  # fmt: skip
    return dict(
        record="result", method=method, keep=keep, site=None if method == "unpatched" else "PRE_LLM", seeds=None,
        right=[right], questions=QUESTIONS, stats=stats,
    ) | changes  # fmt: skip


def timing(ratio: float, load: float = 0.5) -> dict[str, Any]:
    times = {
        f"{name}_{unit}": dict(p20=1.0, p50=ratio, p80=3.0) for name in ("ttft", "token") for unit in ("ms", "ratio")
    }
    times["ttft_ms"]["p50"] = 40 * ratio
    return dict(repeats=1, rows=1, load=load, **times)


BASE = result("unpatched", 1.0, 100, 100)

RIVALS = [result("random", 0.25, 60, 60), result("downsample", 0.25, 50, 50)]

GOOD = result("good", 0.25, 99, 98)


def made(label: str = "", *records: dict[str, Any], **changes: Any) -> Run:
    records = records or (*RIVALS, GOOD)
    return Run(f"run{label}", results.summarise([header(**changes), BASE, *records]), label=label)
