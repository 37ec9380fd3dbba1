# SPDX-License-Identifier: Apache-2.0
"""Generated parts of docs/start/choose.md, docs/serving/start.md and docs/results/advice.md.

dev/readme.py writes them from the table of advice and its evidence."""

from __future__ import annotations

from tables import format_table

from tokenprune_bench.recommend import advice
from tokenprune_bench.recommend.advice import Advice, Evidence

UP = "../../"
PIECES, ELSEWHERE = 2, 1  # pieces of evidence per row, for the same questions and for others
ASKED = ("general", "signs", "documents", "grounding", "counting", "video", "long-video")  # rows by question
SERVED = ("general", "signs", "documents", "video", "tower")  # rows on the page of the vLLM server


def tables(up: str = UP) -> str:
    """Return the table of advice in two parts, by question and by environment. up: path to the repository root."""
    known = advice.load_advice()
    by_question = [known[name] for name in ASKED]
    by_place = [row for name, row in known.items() if name not in ASKED]
    parts = {"question": ("you ask about", by_question), "where it runs": ("you have", by_place)}
    return "\n\n".join(f"### By {title}\n\n{_table(*part, up)}" for title, part in parts.items())


def _table(title: str, rows: list[Advice], up: str) -> str:
    lines = []
    for row in rows:
        call = f"[`{row.method}`]({up}docs/methods/{row.method}.md), `keep={row.keep!r}`"
        call += f", `{row.more}`" if row.more else ""
        why = f"{row.reason} ([more]({up}{row.reason_page}))"
        lines.append([row.title, call, why, f"`{row.situation}`"])
    return format_table([title, "take", "why", "`--task`"], lines)


def served() -> str:
    """Return the advice for a vLLM server as a table."""
    rows = (advice.load_advice()[name] for name in SERVED)
    lines = [[row.title, f"[`{row.method}`](methods/{row.method}.md), `keep={row.keep!r}`"] for row in rows]
    return format_table(["you serve", "take"], lines)


def pieces() -> str:
    """Return the evidence of each row. Evidence that an earlier row shows is not repeated."""
    parts, shown = [], set()
    for row in advice.load_advice().values():
        pieces_near, elsewhere = row.evidence()
        lines = [f"**{row.title[0].upper()}{row.title[1:]}**: `{row.method}` at {row.keep:g} ({_graded(row)})", ""]
        strongest = sorted(pieces_near, key=lambda piece: piece.grade != "strong")[:PIECES]
        evidence = [*map(_line, strongest), *(f"- elsewhere: {_line(piece)[2:]}" for piece in elsewhere[:ELSEWHERE])]
        lines += (line for line in evidence if line not in shown)
        if any(line in shown for line in evidence):
            lines.append("- same evidence as above for this setting")
        if not any(piece.about == "accuracy" for piece in pieces_near):
            lines.append(f"- accuracy: {advice.NONE}")
        shown |= set(evidence)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _graded(row: Advice) -> str:
    grades = [piece.grade for piece in row.evidence()[0]]
    counts = (f"{grades.count(grade)} {grade}" for grade in ("strong", "weak") if grade in grades)
    return ", ".join(counts) or "none"


def _line(piece: Evidence) -> str:
    is_raw_file = piece.source.startswith("benchmarks/")
    source = f"[{piece.source.rsplit('/')[-1]}](../{piece.source})" if is_raw_file else piece.source
    return f"- {piece.kind}, {piece.grade}: {piece.figure.replace(' (shipped)', '')} ({source})"


def rule() -> str:
    """Return the rules for choosing and grading evidence, from the docstring of advice.py."""
    return advice.__doc__.partition("\n\n")[2].strip()
