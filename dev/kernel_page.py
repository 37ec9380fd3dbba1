# SPDX-License-Identifier: Apache-2.0
"""Generated parts of docs/results/kernels.md, from benchmarks/results; dev/readme.py writes them."""

from __future__ import annotations

from pathlib import Path

from performance import rows, sheets
from tables import format_table

RESULTS = Path(__file__).parent.parent / "benchmarks/results"


def compiled() -> str:
    """Return the number of compiled programs and their largest resource use."""
    header, records = rows.read(RESULTS / "kernels.jsonl")
    largest = {key: max(record[key] for record in records) for key in ("registers", "spills", "shared", "size")}
    spills = "no spills" if not largest["spills"] else f"{sum(record['spills'] > 0 for record in records)} with spills"
    return (
        f"{len(records)} programs of {len({record['kernel'] for record in records})} kernels for the shapes of "
        f"{len(header['models'])} models ({', '.join(header['dtypes'])}; Triton {header['triton']}): at most "
        f"{largest['registers']} registers per thread, {spills}, and {largest['shared'] / 1024:.0f} KiB of shared "
        "memory ([raw data](benchmarks/results/kernels.jsonl))."
    )


def measured() -> str:
    """Return the times of kernels and their references on a GPU: the last case of each operation."""
    parts = []
    for path, header, records in sheets.found("e_kernels"):
        timed = {record["operation"]: record for record in records if record.get("triton_ms")}
        lines = []
        for operation, record in timed.items():
            kernel, reference = record["triton_ms"]["p50"], record["reference_ms"]["p50"]
            ratio = f"{reference / kernel:.1f}x" if reference >= kernel else f"{kernel / reference:.1f}x slower"
            lines.append([f"`{operation}`", record["case"], f"{kernel:.3g}", f"{reference:.3g}", ratio])
        source = f"benchmarks/results/{path.parent.name}/{path.name}"
        by = f"By `python benchmarks/experiments/gpu/e_kernels.py`; [raw data with all cases]({source})."
        table = format_table(["operation", "case", "kernel, ms", "PyTorch, ms", "faster"], lines, left=2)
        parts.append("\n\n".join([sheets.where(header), table, by]))
    return "\n\n".join(parts)
