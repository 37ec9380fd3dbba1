# SPDX-License-Identifier: Apache-2.0
"""How far a benchmark puts methods into the order in which papers put them: Kendall's tau, with its interval.

    python benchmarks/rank_agreement.py benchmarks/results/bench.jsonl --json benchmarks/results/rank_agreement.jsonl

The published order is that of LLaVA-1.5-7B at 64 of 576 tokens (11 %): the mean of what the sources in
benchmarks/papers/llava15_7b.json print for a method. Ours is the share of right answers at one `keep`. The interval
comes from drawing the benchmark's images anew, with all their questions; the published numbers have none, so it says
nothing of theirs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
from papers.published import published
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from tokenprune_bench.results import read_records

BUDGET = 64  # of 576 visual tokens
KEEP = 0.11
RESAMPLES = 500


def published_scores(methods: Sequence[str], budget: int = BUDGET) -> dict[str, float]:
    """Return the mean published percentage at 192, 128 or 64 tokens of each of `methods` that has one."""
    data = published()
    found = {name: [row.average for row in data.of(name, budget) if row.average is not None] for name in methods}
    return {name: fmean(values) for name, values in found.items() if values}


def answers(records: Sequence[Mapping[str, Any]], keep: float) -> dict[str, np.ndarray]:
    """Return for each method at `keep` how right each question is, averaged over its seeds: float `[questions]`."""
    rows = [one for one in records if one["record"] == "result" and one["keep"] == keep and one["site"] is not None]
    return {row["method"]: np.mean([[int(c) for c in seed] for seed in row["right"]], axis=0) for row in rows}


def images_of(header: Mapping[str, Any]) -> list[int]:
    """Return the number of each question's image. Older headers lack it: each image has one question of each kind."""
    if "image_of_question" in header:
        return header["image_of_question"]
    return [number // len(header["kinds"]) for number in range(len(header["kind_of_question"]))]


def agreement(
    scores: Mapping[str, np.ndarray], theirs: Mapping[str, float], images: Sequence[int], resamples: int = RESAMPLES
) -> dict[str, float]:
    """Return Kendall's tau-b between the order of our means and `theirs`, with its 95 % interval.

    scores: by method, of each question. images: the number of each question's image.
    """
    names = sorted(theirs)
    _, places, asked = np.unique(images, return_inverse=True, return_counts=True)
    ours = np.zeros((len(names), len(asked)))  # right answers of each image
    for row, name in zip(ours, names, strict=True):
        np.add.at(row, places, scores[name])
    ranks = [theirs[name] for name in names]
    generator = np.random.default_rng(0)
    draws = generator.integers(len(asked), size=(resamples, len(asked)))
    taus = [kendalltau(ours[:, draw].sum(1) / asked[draw].sum(), ranks).statistic for draw in draws]
    low, high = np.nanpercentile(taus, [2.5, 97.5])
    tau = kendalltau(ours.sum(1), ranks).statistic
    return {"tau": round(float(tau), 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def compare(path: Path, keep: float) -> dict[str, Any]:
    """Return one record: our accuracies, the published ones, and how far their orders agree."""
    records = read_records(path)
    scores = answers(records, keep)
    theirs = published_scores(list(scores))
    if len(theirs) < 3:
        raise SystemExit(f"{path} has {len(theirs)} methods with published numbers at keep {keep:g}; an order takes 3")
    layers = {
        one["method"]: one["stats"]["visual_tokens_per_layer"]
        for one in records
        if one["record"] == "result" and one["keep"] == keep
    }
    full = next(one["stats"]["visual_tokens_in"] for one in records if one.get("method") == "unpatched")
    rows = [
        {
            "method": name,
            "accuracy": round(100 * float(scores[name].mean()), 2),
            "published": round(theirs[name], 2),
            "share_of_tokens": round(float(np.mean(layers[name])) / full, 4),
        }
        for name in sorted(theirs, key=theirs.get, reverse=True)
    ]
    about = {"record": "rank_agreement", "bench": path.name, "model": records[0]["environment"]["model"], "keep": keep}
    return about | {"methods": rows} | agreement(scores, theirs, images_of(records[0]))


def show(record: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{record['model']}, keep {record['keep']:g}")
    for title in ("method", "published, % of unpruned", "here, % right", "tokens, average over layers"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for row in record["methods"]:
        share = f"{100 * row['share_of_tokens']:.0f} %"
        table.add_row(row["method"], f"{row['published']:.1f}", f"{row['accuracy']:.1f}", share)
    console.print(table)
    console.print(f"Kendall's tau {record['tau']:.2f} [{record['low']:.2f}, {record['high']:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files or folders that tokenprune bench wrote")
    parser.add_argument("--keep", type=float, default=KEEP)
    parser.add_argument("--json", type=Path, help="write the records there, as JSON lines")
    args = parser.parse_args()
    records = [compare(path, args.keep) for path in args.results]
    for record in records:
        show(record, Console())
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
