# SPDX-License-Identifier: Apache-2.0
"""Draw the speed benchmarks from their JSON lines: a picture beside each file of results.

python benchmarks/plots.py                                   # all of benchmarks/results/<device>/
python benchmarks/plots.py benchmarks/results/cpu            # one of them
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import RESULTS, read
from matplotlib.figure import Figure


def efficiency(header: dict[str, Any], records: list[dict[str, Any]]) -> Figure:
    """Efficiency of each method, one panel a case; whiskers from p20 to p80."""
    cases = sorted({(one["visual"], one["keep"]) for one in records})
    figure = Figure(figsize=(5 * len(cases), 4), layout="constrained")
    for axes, (visual, keep) in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        shown = [one for one in records if (one["visual"], one["keep"]) == (visual, keep) and "efficiency" in one]
        for which, marker in (("efficiency", "o"), ("cpu_efficiency", "x")):
            middle = [one[which]["p50"] for one in shown]
            whiskers = [[one[which]["p50"] - one[which]["p20"] for one in shown],
                        [one[which]["p80"] - one[which]["p50"] for one in shown]]  # fmt: skip
            label = "wall time" if which == "efficiency" else "CPU time"
            axes.errorbar([one["method"] for one in shown], middle, yerr=whiskers, fmt=marker, capsize=3, label=label)
        axes.axhline(0.95, color="grey", linestyle=":")
        axes.set_title(f"{visual} -> {keep} visual tokens, {header['device']}")
        axes.tick_params(axis="x", rotation=45)
        axes.set_ylabel("oracle time / patched time")
        axes.legend()
    return figure


def scaling(header: dict[str, Any], records: list[dict[str, Any]]) -> Figure:
    """Seconds and bytes against tokens, both logarithmic."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, key, label in zip(figure.subplots(1, 2), ("seconds", "peak"), ("seconds", "peak, bytes"), strict=True):
        for one in records:
            points = {int(n): p.get(key) for n, p in one["points"].items() if p.get(key)}
            if points:
                style = "-" if one["what"] == "selection" else "--"
                axes.plot(points.keys(), points.values(), style, marker=".", label=f"{one['what']}: {one['method']}")
        axes.set(xscale="log", yscale="log", xlabel="visual tokens of a picture", ylabel=label, title=header["device"])
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def ttft(header: dict[str, Any], records: list[dict[str, Any]]) -> Figure:
    """Time to the first token against the share kept, one panel a model."""
    models = list(dict.fromkeys(one["model"] for one in records))
    figure = Figure(figsize=(4 * len(models), 3.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        own = [one for one in records if one["model"] == model]
        for method in dict.fromkeys(one["method"] for one in own if one["method"] != "unpatched"):
            line = sorted((one["keep"], one["ttft_ms"]["p50"]) for one in own if one["method"] == method)
            axes.plot(*zip(*line, strict=True), marker="o", label=method)
        axes.axhline(own[0]["ttft_ms"]["p50"], color="grey", linestyle=":", label="unpatched")
        axes.set(title=f"{model}\n{header['device']}", xlabel="keep", ylabel="time to first token, ms", ylim=(0, None))
    axes.legend(fontsize=8)
    return figure


PLOTS = {"efficiency": efficiency, "scaling": scaling, "ttft": ttft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*")
    args = parser.parse_args()
    for folder in args.folders or sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for name, draw in PLOTS.items():
            if (path := folder / f"{name}.jsonl").exists():
                draw(*read(path)).savefig(folder / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main()
