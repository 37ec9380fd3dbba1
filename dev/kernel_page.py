# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/kernels.md, from experiments/results; dev/readme.py writes them."""

from __future__ import annotations

from pathlib import Path

import performance
from performance import rows

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


# Of the models in the raw file one of each family, and a long video.
MODELS = (
    "LLaVA-1.5-7B", "LLaVA-NeXT-7B", "LLaVA-OneVision-7B", "Qwen2.5-VL-7B", "Qwen2.5-VL-7B, 16k video", "InternVL3-8B",
    "Gemma3-4B", "SmolVLM-500M",
)  # fmt: skip


def costs() -> str:
    """The table of what selection must cost by the model of time, per model and method."""
    _, records = rows.read(RESULTS / "selection_cost.jsonl")
    gpus = list(records[0]["predicted_us"])
    methods = list(dict.fromkeys(one["method"] for one in records))
    lines = ["| model, visual tokens | prefill, ms | " + " | ".join(f"`{name}`" for name in methods) + " |"]
    lines.append("|---" * (2 + len(methods)) + "|")
    models = list(dict.fromkeys(one["model"] for one in records))
    for model in (name for name in models if name in MODELS):
        own = {one["method"]: one for one in records if one["model"] == model}
        prefill = " / ".join(f"{next(iter(own.values()))['prefill_us'][gpu] / 1e3:.1f}" for gpu in gpus)
        cells = [" / ".join(_time(own[name]["predicted_us"][gpu]) for gpu in gpus) for name in methods]
        visual = next(iter(own.values()))["visual"]
        lines.append(f"| {model}, {visual} | {prefill} | {' | '.join(cells)} |")
    launches = []
    for name in methods:
        counts = sorted({one["launches"] for one in records if one["method"] == name})
        spread = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        launches.append(f"`{name}` {spread}")
    note = (
        f"**Predicted, not measured.** Microseconds on {' / '.join(gpus)}; beside them the arithmetic of the unpruned "
        "prefill at the data sheet's peak, in milliseconds. One request, bfloat16, one visual token of nine stays. "
        f"Launches: {', '.join(launches)}. The raw file has {len(models)} models."
    )
    path = "experiments/results/selection_cost.jsonl"
    return "\n\n".join([note, "\n".join(lines), f"By `dev/measure kernels`; raw data: [{path}](../{path})."])


def _time(us: float) -> str:
    return f"{us:.0f}" if us < 1e4 else f"{us / 1e3:.0f}k"


def checked() -> str:
    """The lines that a GPU was asked about: predicted, measured, ratio."""
    found = performance.found("selection_cost")
    if not found:
        return "(No GPU was at hand: nothing of this is measured.)"
    parts = []
    for device, (header, records) in found.items():
        lines = ["| model | method | launches | predicted, µs | measured, µs | ratio |", "|---" * 6 + "|"]
        lines += [
            f"| {one['model']} | `{one['method']}` | {one['launches']} | {one['predicted_us'][one['against']]:.0f} "
            f"| {one['measured_us']:.0f} | {one['ratio']:.2f} |"
            for one in records
        ]
        where = f"{performance.where(header)}, against the {records[0]['against']}."
        parts += [where, "\n".join(lines), performance.source("selection_cost", device)]
    return "\n\n".join(parts)
