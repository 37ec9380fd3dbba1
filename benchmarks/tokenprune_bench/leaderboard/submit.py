# SPDX-License-Identifier: Apache-2.0
"""Measured table of a method's page, from the entry of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenprune_bench.json_lines import write_text
from tokenprune_bench.leaderboard.entry import LeaderboardEntry, Line

BESIDE = ("divprune", "uniform")  # `random` and `downsample` always run
_BEGIN, _END = "<!-- measured:begin (tokenprune leaderboard submit) -->", "<!-- measured:end -->"
_BLOCK = re.compile(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)


def build_markdown_table(entry: LeaderboardEntry) -> str:
    """Return the measurements of an entry as Markdown: keeps in descending order, the best method first."""
    about = (
        f"{entry.model} on {entry.device}, {entry.dtype}; {entry.questions} questions ({entry.data}), unpatched "
        f"{_share(entry.unpatched)} %. `keep` is the share of visual tokens averaged over the decoder's layers; "
        "brackets are 95 % intervals; ≤rnd, ≤down: not shown to beat `random`, `downsample`."
    )
    lines = ["| method | keep | right, % | tokens, % |", "|---|---|---|---|"]
    lines += map(_format_row, sorted(entry.lines, key=lambda line: (-line.keep, -line.score[0], line.method)))
    versions = ", ".join(f"{name} {version}" for name, version in entry.versions.items())
    return "\n".join([about, "", *lines, "", f"By `tokenprune leaderboard submit`, {entry.date[:10]}, {versions}."])


def write_table(page: Path, entry: LeaderboardEntry) -> None:
    """Write the table of an entry into a page. It replaces an existing table or is appended."""
    text, block = page.read_text(encoding="utf-8"), f"{_BEGIN}\n\n{build_markdown_table(entry)}\n\n{_END}"
    if not _BLOCK.search(text):
        text = f"{text.rstrip()}\n\n## Measured\n\n{block}\n"
    write_text(page, _BLOCK.sub(lambda _: block, text))


def _format_row(line: Line) -> str:
    marks = "".join(f" {mark}" for mark in line.marks)
    return f"| `{line.method}` | {line.keep:g} | {_share(line.score)}{marks} | {100 * line.tokens:.1f} |"


def _share(score: Sequence[float]) -> str:
    value, low, high = score
    return f"{100 * value:.1f} [{100 * low:.0f}–{100 * high:.0f}]"
