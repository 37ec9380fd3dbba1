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

from tokenprune_bench.plan import BASELINES  # noqa: E402
from tokenprune_bench.recommend import advice  # noqa: E402
from tokenprune_bench.results import UNPATCHED, Results, Row, read_records, summarise  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
HEADLINE = RESULTS / "headline.jsonl"  # by benchmarks/experiments/headline.py
ABOUT = {"demo_smol": "a LLaVA around the pretrained SmolLM2-135M, with photographs, pages, charts and drawings"}
SHOWN = "divprune"
COMMON = ("general", "signs", "documents", "grounding", "video")  # rows of the table of advice


def measured() -> tuple[Results, list[tuple[Row, dict[str, Any]]]]:
    """Return the results of the headline's file, and the rows of methods that were timed on a quiet machine, each with
    its record. Raises ValueError where there is none."""
    records = read_records(HEADLINE)
    raw = {(one["method"], one["keep"]): one for one in records if one["record"] == "result"}
    results = summarise(records)
    found = [(row, raw[row.method, row.keep]) for row in results.rows[1:] if row.method not in BASELINES]
    quiet = [(row, one) for row, one in found if row.timing and not rows.is_loaded(one)]
    if not quiet:
        raise ValueError(f"{HEADLINE.name} has no row of a quiet machine: run benchmarks/experiments/headline.py")
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


def _threads(one: dict[str, Any]) -> str:
    return f"{one['threads']} CPU thread{'' if one['threads'] == 1 else 's'}"


def headline(up: str = "") -> str:
    """Return the table of what is saved and lost: one model, and one setting a row, whose speed and accuracy come from
    the same record. up: from the page to the root of the repository."""
    results, found = measured()
    header = ("setting", "visual tokens", "correct answers", "time to first token", "KV cache", "peak memory")
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    whole = results.baseline
    unpatched = next(one for one in read_records(HEADLINE) if one.get("method") == UNPATCHED)
    lines.append(_line("all tokens", whole, unpatched, f"{results.unpatched_ms():.0f} ms"))
    lines += [
        _line(f"`{row.method}` {row.keep:g}", row, one, f"{1 / row.ttft_ratio:.2f}x faster")
        for row, one in found
        if row.method == SHOWN
    ]
    random = [row for row in results.rows if row.method == "random"]
    chance = ", ".join(f"{100 * row.overall.value:.1f} % at keep={row.keep:g}" for row in random)
    name = _model(results)
    note = (
        f"`{name}`, {ABOUT[name]}; {whole.questions} held-out questions, 95 % intervals, {_threads(unpatched)}, vision "
        f"tower included. Keeping random tokens scores {chance}. [Limits of these numbers]({up}docs/results/trust.md); "
        f"[raw data]({up}{HEADLINE.relative_to(ROOT).as_posix()})."
    )
    return "\n\n".join(["\n".join(lines), note, gpu_page.short(up)])


def _line(title: str, row: Row, one: dict[str, Any], time: str) -> str:
    share, kv = row.overall, row.stats["kv_bytes"] / row.questions / 2**20
    right = f"{100 * share.value:.1f} % [{100 * share.low:.0f}–{100 * share.high:.0f}]"
    cells = (title, f"{row.tokens_average:.0f}", right, time, f"{kv:.1f} MiB", f"{one['peak_bytes'] / 2**20:.0f} MiB")
    return "| " + " | ".join(cells) + " |"


def choice() -> str:
    """Return the advice for the five most common situations as a table."""
    lines = ["| you have | take |", "|---|---|"]
    known = advice.load_advice()
    for one in (known[name] for name in COMMON):
        lines.append(f"| {one.title} | [`{one.method}`](docs/methods/{one.method}.md), `keep={one.keep!r}` |")
    return "\n".join(lines)
