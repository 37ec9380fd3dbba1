# SPDX-License-Identifier: Apache-2.0
"""The generated parts of README.md, from the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "benchmarks" / "experiments")]
import gpu_page  # noqa: E402
import rows  # noqa: E402
from tables import format_table  # noqa: E402

from tokenprune_bench.plan import BASELINES  # noqa: E402
from tokenprune_bench.recommend import advice  # noqa: E402
from tokenprune_bench.results import UNPATCHED, Results, Row, read_records, summarise  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
HEADLINE = RESULTS / "headline.jsonl"  # by benchmarks/experiments/headline.py
ABOUT = {"demo_smol": "a LLaVA around the pretrained SmolLM2-135M, with photographs, pages, charts and drawings"}
SHOWN = "divprune"
COMMON = ("general", "signs", "documents", "grounding", "video")  # rows of the table of advice


def measured() -> tuple[Results, list[tuple[Row, dict[str, Any]]]]:
    """Return the results of headline.jsonl, and the rows of methods timed on a quiet machine with their records.

    Raises:
        ValueError: If no such row exists.
    """
    records = read_records(HEADLINE)
    raw = {(record["method"], record["keep"]): record for record in records if record["record"] == "result"}
    results = summarise(records)
    timed = [(row, raw[row.method, row.keep]) for row in results.rows[1:] if row.method not in BASELINES]
    quiet = [(row, record) for row, record in timed if row.timing and not rows.is_loaded(record)]
    if not quiet:
        raise ValueError(f"{HEADLINE.name} has only rows of a busy machine: run benchmarks/experiments/headline.py")
    return results, quiet


def _model(results: Results) -> str:
    return results.header["environment"]["model"].partition(" ")[0]


def speed_and_accuracy() -> str:
    """Return one sentence with the speed and the accuracy of the first setting, the vision tower included."""
    results, ((row, record), *_) = measured()
    name, unpatched, ratio = _model(results), results.baseline, row.timing["ttft_ratio"]["p50"]
    return (
        f"On `{name}`, {ABOUT[name].partition(',')[0]}, `{row.method}` with {100 * row.keep:.0f} % of the visual "
        f"tokens reaches the first token {1 / ratio:.2f}x faster ({_threads(record)}, vision tower included) and "
        f"answers {100 * row.overall.value:.1f} % of {unpatched.questions} held-out questions correctly, against "
        f"{100 * unpatched.overall.value:.1f} % with all tokens."
    )


def _threads(record: dict[str, Any]) -> str:
    return f"{record['threads']} CPU thread{'' if record['threads'] == 1 else 's'}"


def headline(up: str = "") -> str:
    """Return the table of savings and losses of one model. Speed and accuracy of a row are from one record.

    Args:
        up: Path from the page to the root of the repository.
    """
    results, timed = measured()
    header = ("setting", "visual tokens", "correct answers", "time to first token", "KV cache", "peak memory")
    baseline = results.baseline
    unpatched = next(record for record in read_records(HEADLINE) if record.get("method") == UNPATCHED)
    lines = [_line("all tokens", baseline, unpatched, f"{results.unpatched_ms():.0f} ms")]
    lines += [
        _line(f"`{row.method}` {row.keep:g}", row, record, f"{1 / row.ttft_ratio:.2f}x faster")
        for row, record in timed
        if row.method == SHOWN
    ]
    random = [row for row in results.rows if row.method == "random"]
    chance = ", ".join(f"{100 * row.overall.value:.1f} % at keep={row.keep:g}" for row in random)
    name = _model(results)
    note = (
        f"`{name}`, {ABOUT[name]}; {baseline.questions} held-out questions, 95 % intervals, {_threads(unpatched)}, "
        f"vision tower included. Keeping random tokens scores {chance}. "
        f"[Limits of these numbers]({up}docs/results/trust.md); "
        f"[raw data]({up}{HEADLINE.relative_to(ROOT).as_posix()})."
    )
    return "\n\n".join([format_table(header, lines, left=1), note, gpu_page.short(up)])


def _line(title: str, row: Row, record: dict[str, Any], time: str) -> list[str]:
    share, kv = row.overall, row.stats["kv_bytes"] / row.questions / 2**20
    right = f"{100 * share.value:.1f} % [{100 * share.low:.0f}–{100 * share.high:.0f}]"
    return [
        title,
        f"{row.tokens_average:.0f}",
        right,
        time,
        f"{kv:.1f} MiB",
        f"{record['peak_bytes'] / 2**20:.0f} MiB",
    ]


def choice() -> str:
    """Return the advice for the five most common situations as a table."""
    rows = (advice.load_advice()[name] for name in COMMON)
    lines = [[row.title, f"[`{row.method}`](docs/methods/{row.method}.md), `keep={row.keep!r}`"] for row in rows]
    return format_table(["you have", "take"], lines)
