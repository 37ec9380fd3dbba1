# SPDX-License-Identifier: Apache-2.0
"""Plot the training log: accuracy per cell of stage 1, then accuracy per kind of question."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from draws import KINDS
from questions import MAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--log", type=Path, default=Path("training/qwen/log.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("training/qwen/curve.png"))
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.log.read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(1, 3, figsize=(19, 5.5))
    helpers = [kind for kind in KINDS if kind not in MAIN]
    parts = (
        ("tower", None, "Stage 1: what the tower reads in each cell of 16 x 16 px"),
        ("questions", MAIN, "Stage 2: questions on fresh images, kinds of the benchmark"),
        ("questions", helpers, "Stage 2: the helpers, videos and several images"),
    )
    for axis, (stage, names, title) in zip(axes, parts, strict=True):
        measured = [row for row in rows if row.get("stage") == stage and "accuracy" in row]
        for name in dict.fromkeys(key for row in measured for key in row["accuracy"]):
            if names is None or name in names:
                points = [(row["time"] / 60, row["accuracy"][name]) for row in measured if name in row["accuracy"]]
                axis.plot(*zip(*points, strict=True), marker=".", label=name)
        for row in rows:
            if row.get("event") == "start" and row["stage"] == stage:
                axis.axvline(row["time"] / 60, color="grey", linewidth=0.8)
        axis.set(title=title, xlabel="minutes of one CPU core (grey: begun anew, see README)", ylabel="accuracy")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
