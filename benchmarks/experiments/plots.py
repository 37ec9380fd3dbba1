# SPDX-License-Identifier: Apache-2.0
"""Draw the rows of the speed benchmarks that were measured on an idle machine, as PNG files beside their raw files.

python benchmarks/experiments/plots.py                                   # all folders benchmarks/results/DEVICE/
python benchmarks/experiments/plots.py benchmarks/results/cpu            # one folder
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
from common import RESULTS, quiet

from tokenprune_bench.report.png import create_panels, draw_curve, to_png, use_default_style


def efficiency(header: dict[str, Any], records: list[dict[str, Any]]) -> bytes:
    """Draw the efficiency of each method, with one panel per case and error bars from p20 to p80."""
    cases = sorted({(record["visual"], record["keep"]) for record in records})
    titles = [f"{visual} -> {keep} visual tokens, {header['device']}" for visual, keep in cases]
    figure, row = create_panels(titles, 5, 4)
    for axes, case in zip(row, cases, strict=True):
        case_records = [
            record for record in records if (record["visual"], record["keep"]) == case and "efficiency" in record
        ]
        for which, marker, label in (("efficiency", "o", "wall time"), ("cpu_efficiency", "x", "CPU time")):
            points = [
                (record["method"], *(record[which][name] for name in ("p50", "p20", "p80"))) for record in case_records
            ]
            draw_curve(axes, points, label, marker=marker, linestyle="none")
        axes.axhline(0.95, color="grey", linestyle=":")
        axes.tick_params(axis="x", rotation=45)
        axes.set_ylabel("oracle time / patched time")
        axes.legend()
    return to_png(figure, dpi=100)


def scaling(header: dict[str, Any], records: list[dict[str, Any]]) -> bytes:
    """Draw seconds and bytes over tokens, both logarithmic."""
    figure, row = create_panels([header["device"]] * 2, 5.5, 4.5)
    for axes, key, label in zip(row, ("seconds", "peak"), ("seconds", "peak, bytes"), strict=True):
        for record in records:
            points = [(int(n), p[key]) for n, p in record["points"].items() if p.get(key)]
            if points:
                line = "-" if record["what"] == "selection" else "--"
                draw_curve(axes, points, f"{record['what']}: {record['method']}", linestyle=line)
        axes.set(xscale="log", yscale="log", xlabel="visual tokens of an image", ylabel=label)
    row[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return to_png(figure, dpi=100)


PLOTS = {"efficiency": efficiency, "scaling": scaling}


@use_default_style()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*")
    args = parser.parse_args()
    for folder in args.folders or sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for name, draw in PLOTS.items():
            path, image = folder / f"{name}.jsonl", folder / f"{name}.png"
            header, records = quiet(path) if path.exists() else ({}, [])
            if records:
                image.write_bytes(draw(header, records))
            else:
                image.unlink(missing_ok=True)  # all rows are from a loaded machine


if __name__ == "__main__":
    main()
