# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/guide/which-method.md, from the table of advice and its evidence; dev/readme.py writes
them."""

from __future__ import annotations

from tokenprune_bench.recommend import advice
from tokenprune_bench.recommend.advice import Advice, Evidence

UP = "../../"
ELSEWHERE = 2  # pieces of evidence from elsewhere, of each row


def table(up: str = UP) -> str:
    """Return the table of advice. up: from the page to the root of the repository."""
    lines = ["| you have | method | keep | why | evidence | `--task` |", "|---" * 6 + "|"]
    for one in advice.advice().values():
        call = f"[`{one.method}`]({up}docs/methods/{one.method}.md)" + (f" with `{one.more}`" if one.more else "")
        why = f"{one.reason} ([more]({up}{one.reason_page}))"
        lines.append(f"| {one.title} | {call} | {one.keep!r} | {why} | {_graded(one)} | `{one.situation}` |")
    return "\n".join(lines)


def _graded(one: Advice) -> str:
    grades = [piece.grade for piece in one.evidence()[0]]
    counts = (f"{grades.count(grade)} {grade}" for grade in ("strong", "weak") if grade in grades)
    return ", ".join(counts) or "none"


def pieces() -> str:
    """Return the evidence of each row."""
    parts = []
    for one in advice.advice().values():
        near, elsewhere = one.evidence()
        lines = [f"**{one.title[0].upper()}{one.title[1:]}**: `{one.method}` at {one.keep:g}", ""]
        lines += map(_line, near)
        if not any(piece.about == "accuracy" for piece in near):
            lines.append(f"- Accuracy: {advice.NONE}")
        lines += (f"- elsewhere: {_line(piece)[2:]}" for piece in elsewhere[:ELSEWHERE])
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(piece: Evidence) -> str:
    inside = piece.source.startswith("benchmarks/")
    source = f"[{piece.source.rsplit('/')[-1]}]({UP}{piece.source})" if inside else piece.source
    return f"- {piece.kind}, {piece.grade}: {piece.figure} ({source})"


def rule() -> str:
    """Return how evidence is chosen and graded, as the docstring of advice.py says it."""
    return advice.__doc__.partition("\n\n")[2].strip()


PARTS = {"which": table, "evidence": pieces, "rule": rule}
