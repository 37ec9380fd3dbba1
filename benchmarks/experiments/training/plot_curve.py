# SPDX-License-Identifier: Apache-2.0
"""Plot a training log: the tower's accuracy per patch label, then accuracy per kind of question.

python experiments/training/plot_curve.py experiments/training/smol/log.jsonl  # writes curve.png beside the log
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PARTS = (
    ((1, "tower", "motion"), "Patch labels read from the tower"),
    ((3, 4, "questions"), "Questions about new images"),  # stages 3 and 4 of demo_vlm
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.log.read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(1, len(PARTS), figsize=(17, 5.5), width_ratios=(2, 3))
    for axis, (stages, title) in zip(axes, PARTS, strict=True):
        stage_rows = [row for row in rows if row.get("stage") in stages]
        back = [
            index for index in range(1, len(stage_rows)) if stage_rows[index]["time"] < stage_rows[index - 1]["time"]
        ]
        stage_rows = stage_rows[back[-1] if back else 0 :]  # without earlier trials
        measured = [row for row in stage_rows if "accuracy" in row]
        axis.set_prop_cycle(color=plt.colormaps["tab20"].colors[::2] + plt.colormaps["tab20"].colors[1::2])
        for name in dict.fromkeys(key for row in measured for key in row["accuracy"]):
            points = [(row["time"] / 60, row["accuracy"][name]) for row in measured if name in row["accuracy"]]
            axis.plot(*zip(*points, strict=True), marker=".", label=name)
        for row in stage_rows:
            if row.get("event") == "start":
                axis.axvline(row["time"] / 60, color="grey", linewidth=0.8)
        axis.set(title=title, xlabel="minutes on a CPU (gray: restarts, see README)", ylabel="accuracy")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), ncols=1 + len(axis.lines) // 40)
    figure.tight_layout()
    figure.savefig(args.log.with_name(f"{args.log.stem.replace('log', 'curve')}.png"), dpi=100)


if __name__ == "__main__":
    main()
