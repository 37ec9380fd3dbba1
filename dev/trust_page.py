# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/trust.md, from the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

import front_page
from accuracy_pages import RESULTS, link
from all_methods import PUBLISHED, results_file
from rank_agreement import agreement, answers, images_of, published_scores

from tokenprune_bench.results import Row, read_records

LLAVA = RESULTS.parent / "papers/llava15_7b.json"


def kinds() -> str:
    """Return the table of what the headline's model answers right, by kind of question."""
    results, found = front_page.measured()
    rows = [results.baseline, *(row for row, _ in found)]
    names = ["all tokens", *(f"`{row.method}` {row.keep:g}" for row in rows[1:])]
    lines = ["| kind | questions | " + " | ".join(names) + " |", "|---|---:" + "|---:" * len(names) + "|"]
    for kind in results.kinds:
        asked = results.header["kind_of_question"].count(str(results.kinds.index(kind)))
        lines.append(f"| {kind} | {asked} | " + " | ".join(_share(row, kind) for row in rows) + " |")
    note = f"Percent right. Raw data: {link(front_page.HEADLINE, '../')}."
    return "\n\n".join(["\n".join(lines), note])


def _share(row: Row, kind: str) -> str:
    share = row.kinds[kind]
    return f"{100 * share.value:.0f}{'▼' if share.collapsed else ''}"


def order() -> str:
    """Return how far the order of methods is that of the papers, at each budget that has a published one."""
    path = results_file("demo_smol")
    if not path.exists():
        return ""
    records, lines = read_records(path), []
    for at, budget in PUBLISHED.items():
        scores = answers(records, at)
        theirs = published_scores(list(scores), budget)
        if len(theirs) < 3:
            continue
        one = agreement(scores, theirs, images_of(records[0]))
        lines.append(
            f"- {100 * at:.0f} % beside {budget} of 576 tokens: Kendall's tau **{one['tau']:.2f}** "
            f"[{one['low']:.2f}, {one['high']:.2f}] over {len(theirs)} methods."
        )
    return "\n".join([*lines, "", f"Raw data: {link(path, '../')}, {link(LLAVA, '../')}."])
