# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/results/kernels.md, from benchmarks/results; dev/readme.py writes them."""

from __future__ import annotations

from pathlib import Path

from performance import rows, sheets

RESULTS = Path(__file__).parent.parent / "benchmarks/results"


def compiled() -> str:
    """Return how many programs were compiled, and what they take at most; the raw file has each."""
    first, records = rows.read(RESULTS / "kernels.jsonl")
    most = {what: max(one[what] for one in records) for what in ("registers", "spills", "shared", "size")}
    spills = "none spills one" if not most["spills"] else f"{sum(one['spills'] > 0 for one in records)} spill some"
    path = "benchmarks/results/kernels.jsonl"
    return (
        f"{len(records)} programs of {len({one['kernel'] for one in records})} kernels for the shapes of "
        f"{len(first['models'])} models ({', '.join(first['dtypes'])}; Triton {first['triton']}): at most "
        f"{most['registers']} registers of a thread, and {spills}; {most['shared'] / 1024:.0f} KiB of shared memory, "
        f"programs of {most['size'] / 1024:.0f} KiB ([raw data](../{path}))."
    )


def measured() -> str:
    """Return the table of kernels beside their references, as measured on a GPU."""
    return sheets.pages(("e_kernels",))
