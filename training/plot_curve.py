# SPDX-License-Identifier: Apache-2.0
"""Plot the training log: per-patch accuracy of stage 1, then accuracy per kind of question."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--log", type=Path, default=Path("training/log.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("training/curve.png"))
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.log.read_text().splitlines()]
    measured = [row for row in rows if "accuracy" in row]
    split = max(row["time"] for row in measured if row["stage"] == 1) / 60
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), width_ratios=(2, 3))
    titles = ("Stage 1: vision tower, patches read by a linear head", "Stages 3 and 4: questions on fresh pictures")
    for axis, stages, title in zip(axes, ((1,), (3, 4)), titles, strict=True):
        part = [row for row in measured if row["stage"] in stages]
        for name in part[-1]["accuracy"] if part else ():
            points = [(row["time"] / 60, row["accuracy"][name]) for row in part]
            axis.plot(*zip(*points, strict=True), marker=".", label=name)
        axis.set(
            title=title,
            xlabel="minutes on one CPU core (grey: stopped and changed by hand, see README)",
            ylabel="accuracy",
            ylim=(0, 1.02),
        )
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    clock = 0.0
    for row in rows:
        clock = row["time"] / 60 if "time" in row else clock
        if row.get("event") == "note" or (row.get("event") == "start" and row["stage"] > 1):
            axis = axes[0] if row.get("stage", 0) <= 1 and clock < split else axes[1]
            axis.axvline(clock, color="grey", linestyle=":" if row["event"] == "note" else "-", linewidth=0.8)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
