# SPDX-License-Identifier: Apache-2.0
"""The measured table of a method's own page, from the entry of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenprune_bench.json_lines import write_text
from tokenprune_bench.leaderboard.entry import LeaderboardEntry, Line

BESIDE = ("divprune", "uniform")  # `random` and `downsample` always run
_BEGIN, _END = "<!-- measured:begin (tokenprune leaderboard submit) -->", "<!-- measured:end -->"
_BLOCK = re.compile(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)


def table(entry: LeaderboardEntry) -> str:
    """Return what an entry measured, as Markdown: each budget's lines, the best first, under device and model."""
    about = (
        f"{entry.model} on {entry.device}, {entry.dtype}; {entry.questions} questions ({entry.data}), unpatched "
        f"{_share(entry.unpatched)} %. `keep` is the share of visual tokens averaged over the decoder's layers; "
        "intervals are of 95 %; ≤rnd, ≤down: not shown to beat `random`, `downsample`."
    )
    lines = ["| method | keep | right, % | tokens, % |", "|---|---|---|---|"]
    lines += map(_row, sorted(entry.lines, key=lambda one: (-one.keep, -one.score[0], one.method)))
    made = ", ".join(f"{name} {version}" for name, version in entry.versions.items())
    return "\n".join([about, "", *lines, "", f"By `tokenprune leaderboard submit`, {entry.date[:10]}, {made}."])


def write_table(page: Path, entry: LeaderboardEntry) -> None:
    """Write the table of an entry into a page: in place of the one that it has, else at its end."""
    text, block = page.read_text(encoding="utf-8"), f"{_BEGIN}\n\n{table(entry)}\n\n{_END}"
    if not _BLOCK.search(text):
        text = f"{text.rstrip()}\n\n## Measured\n\n{block}\n"
    write_text(page, _BLOCK.sub(lambda _: block, text))


def _row(line: Line) -> str:
    marks = "".join(f" {mark}" for mark in line.marks)
    return f"| `{line.method}` | {line.keep:g} | {_share(line.score)}{marks} | {100 * line.tokens:.1f} |"


def _share(score: Sequence[float]) -> str:
    value, low, high = score
    return f"{100 * value:.1f} [{100 * low:.0f}–{100 * high:.0f}]"
