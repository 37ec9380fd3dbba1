# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/kernels.md, from experiments/results; dev/readme.py writes them."""

from __future__ import annotations

from pathlib import Path

from performance import rows, sheets

RESULTS = Path(__file__).parent.parent / "experiments/results"
SHOWN = ("sm_90",)  # of the GPUs in the raw file


def compiled() -> str:
    """The table of compiled kernels: of each on each GPU, what the programs for all models need at most."""
    first, records = rows.read(RESULTS / "kernels.jsonl")
    gpus = [gpu for gpu in first["gpus"] if gpu in SHOWN]
    dtypes = ", ".join(first["dtypes"])
    lines = ["| kernel | programs | " + " | ".join(gpus) + " |", "|---" * (2 + len(gpus)) + "|"]
    for kernel in sorted({one["kernel"] for one in records}):
        cells = []
        for gpu in gpus:
            own = [one for one in records if (one["kernel"], one["gpu"]) == (kernel, gpu)]
            most = {what: max(one[what] for one in own) for what in ("registers", "spills", "shared", "size")}
            spilled = f", {most['spills']} B spilled" if most["spills"] else ""
            least = min(one["occupancy"] for one in own)
            shared, size = (f"{most[what] / 1024:.0f} KiB" for what in ("shared", "size"))
            cells.append(f"{most['registers']}, {shared}, {least:.0%}, {size}{spilled}")
        number = sum(one["kernel"] == kernel for one in records)
        lines.append(f"| `{kernel.strip('_')}` | {number} | {' | '.join(cells)} |")
    spills = sum(one["spills"] > 0 for one in records)
    said = "None of them spills a register." if not spills else f"{spills} of them spill registers."
    note = (
        f"{len(records)} programs ({dtypes}; Triton {first['triton']}): those that the shapes of "
        f"{len(first['models'])} models ask for on four GPUs. Of each kernel, over them: the most registers of a "
        f"thread, the most shared memory of a block, the least occupancy, the largest program. {said}"
    )
    path = "experiments/results/kernels.jsonl"
    return "\n\n".join([note, "\n".join(lines), f"By `dev/measure kernels`; raw data: [{path}](../{path})."])


def measured() -> str:
    """Return the table of kernels beside their references, as measured on a GPU."""
    return sheets.pages(("e_kernels",))
