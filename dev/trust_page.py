# SPDX-License-Identifier: Apache-2.0
"""Generated parts of docs/results/trust.md, from the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

from typing import Any

import front_page
import numpy as np
from accuracy_pages import RESULTS, link
from all_methods import PUBLISHED, results_file
from rank_agreement import agreement, answers, images_of, published_scores
from tables import format_table

from tokenprune_bench.results import Row, read_records
from tokenprune_demo.heldout import SMOL, load_heldout

TOKEN = 14  # pixels a side of a visual token of demo_smol

LLAVA = RESULTS.parent / "experiments/papers/llava15_7b.json"


def kinds() -> str:
    """Return accuracy of the headline model by kind of question."""
    results, timed = front_page.measured()
    rows = [results.baseline, *(row for row, _ in timed)]
    names = ["all tokens", *(f"`{row.method}` {row.keep:g}" for row in rows[1:])]
    lines = []
    for index, kind in enumerate(results.kinds):
        asked = results.header["kind_of_question"].count(str(index))
        lines.append([kind, str(asked), *(_share(row, kind) for row in rows)])
    note = f"Raw data: {link(front_page.HEADLINE, '../')}."
    return f"{format_table(['kind', 'questions', *names], lines, left=1)}\n\n{note}"


def _share(row: Row, kind: str) -> str:
    share = row.kinds[kind]
    return f"{100 * share.value:.0f}{'▼' if share.collapsed else ''}"


def order() -> str:
    """Return Kendall's tau between our order and the published order, for all questions and by object size."""
    path = results_file("demo_smol")
    if not path.exists():
        return ""
    records, rows = read_records(path), []
    sizes = _sizes(records[0])
    middle = np.nanmedian(sizes)
    groups = {"all": np.full(len(sizes), True), "smaller": sizes < middle, "larger": sizes >= middle}
    for keep, budget in PUBLISHED.items():
        scores = answers(records, keep)
        theirs = published_scores(list(scores), budget)
        if len(theirs) >= 3:
            taus = [_tau(records, scores, theirs, chosen) for chosen in groups.values()]
            rows.append(f"| {100 * keep:.0f} % | {budget} of 576 | {len(theirs)} | {' | '.join(taus)} |")
    titles = ["here", "papers", "methods", *(f"{name}: {chosen.sum()} questions" for name, chosen in groups.items())]
    note = (
        f"Smaller, larger: the object covers fewer or more than {middle:.0f} tokens (median). Raw data: "
        f"{link(path, '../')}, {link(LLAVA, '../')}."
    )
    table = [f"| {' | '.join(titles)} |", "|---|---|---:|---|---|---|", *rows]
    return "\n".join(table) + "\n\n" + note


def _tau(records: list[dict[str, Any]], scores: dict[str, Any], theirs: dict[str, float], chosen: Any) -> str:
    images = [image for image, here in zip(images_of(records[0]), chosen, strict=True) if here]
    result = agreement({name: right[chosen] for name, right in scores.items()}, theirs, images)
    return f"**{result['tau']:.2f}** [{result['low']:.2f}, {result['high']:.2f}]"


def _sizes(header: dict[str, Any]) -> Any:
    """Return the visual tokens that each question's object covers, float (questions,). NaN without an object."""
    images = set(images_of(header))
    asked = [example for example in load_heldout(folder=SMOL) if example.index in images]
    areas = [sum((right - left) * (low - top) for left, top, right, low in example.boxes) for example in asked]
    return np.array([area / TOKEN**2 if area else np.nan for area in areas])
