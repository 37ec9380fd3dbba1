# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/guides/gpu.md and that of README, from rows of an H200; dev/readme.py calls this."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
import rows  # noqa: E402

FOLDER = ROOT / "benchmarks/results/nvidia-h200"
METHOD, SERVED = "divprune", "divprune 0.25"


class Line(NamedTuple):
    """A line of the table: what was measured, unpatched and pruned. more: whether more is better."""

    what: str
    unpatched: float
    pruned: float
    unit: str = " ms"
    more: bool = False

    @property
    def gain(self) -> float:
        return self.pruned / self.unpatched if self.more else self.unpatched / self.pruned


def _row(name: str, **wanted: Any) -> dict[str, Any]:
    _, found = rows.read(FOLDER / f"{name}.jsonl")
    return next(row for row in found if all(row.get(key) == value for key, value in wanted.items()))


def _prefills(visual: int, keep: int, batch: int) -> list[Line]:
    """Return the lines of a prefill. Eager and graphed times are of one run, in turn; what is graphed is compared with
    the faster unpatched prefill."""
    whole = _row("i_graphs", method="none", visual=visual, batch=batch, what="prefill")
    less = _row("i_graphs", method=METHOD, visual=visual, keep=keep, batch=batch, what="prefill")
    eager, graphed = (whole["eager_ms"], less["eager_ms"]), (whole["graphs_ms"], less["graphs_ms"])
    best = min(eager[0], graphed[0])
    made = [
        Line(f"prefill, {visual:,} to {keep} tokens, batch {batch}", *eager),
        Line("... with `graphs=True`", best, graphed[1]),
    ]
    if batch == 1:
        source = "f_llava15" if visual == 576 else "b_llava_next"
        busy = [
            _row(source, method=one, visual=visual, batch=1, keep=left)["device_ms"]
            for one, left in (("none", visual), (METHOD, keep))
        ]
        made.append(Line("... the time that the GPU is busy", min(best, busy[0]), busy[1]))
    return made


def lines() -> list[Line]:
    """Return all lines of the table."""
    batches = [_row("g_decode", method=one, what="largest batch")["batch"] for one in ("none", METHOD)]
    steps = [_row("g_decode", method=one, what="step, static cache", batch=32)["graph_ms"] for one in ("none", METHOD)]
    made = [*_prefills(576, 64, 1), *_prefills(2880, 320, 1), _prefills(576, 64, 8)[0]]
    made += [
        Line("a step of decoding, 2,880 to 320, batch 32, as a graph", *steps),
        Line("requests of 2,880 to 320 tokens that fit into memory", *batches, "", True),
    ]
    engines = {"llava7b.default": "LLaVA-1.5-7B, 576 tokens", "qwen7b.eager": "eager, Qwen2.5-VL-7B, 2,116"}
    for engine, model in engines.items():
        whole, less = (_row("h_vllm_times", engine=engine, setting=one) for one in ("off", SERVED))
        made += [
            Line(f"vLLM, {model}, keep 0.25: first token, alone", whole["first_ms"], less["first_ms"]),
            Line("... requests a second, 64 at once", whole["rate"], less["rate"], "", True),
        ]
    return [*made, *_answers()]


def _answers() -> list[Line]:
    """Return the lines of an answer of 64 tokens, at batch 1, where they are measured."""
    _, found = rows.read(FOLDER / "i_graphs.jsonl")
    whole, less = ([row for row in found if row["method"] == one and "64 tokens" in row["place"][0]]
                   for one in ("none", METHOD))  # fmt: skip
    ways = {
        "an answer of 64 tokens, 576 to 64, batch 1": "eager_ms",
        "... with a static cache, whose steps are compiled": "static_ms",
        "... and with `graphs=True`": "both_ms",
    }
    times = {key: [next((row[key] for row in one if key in row), None) for one in (whole, less)]
             for key in ways.values()}  # fmt: skip
    return [Line(what, *times[key]) for what, key in ways.items() if None not in times[key]]


def table() -> str:
    """Return the table of docs/guides/gpu.md."""
    header, found = rows.read(FOLDER / "i_graphs.jsonl")
    static = next(row["static_ms"] for row in found if row["method"] == "none" and "static_ms" in row)
    shown = ["| | all tokens | `divprune` | gain |", "|---|---:|---:|---:|"]
    shown += [_cells(line.what, line) for line in lines()]
    note = (
        f"{header['device']}, {header['date']}, torch {header['torch']}, vLLM 0.32 (compiled, as by default, where not "
        "called eager), bfloat16, random weights of LLaVA-1.5-7B's and LLaVA-NeXT-7B's decoder where no more is said. "
        "Eager times at batch 1 differ by up to twice between runs: the host decides. With a static cache, whose steps "
        f"transformers compiles, the unpatched answer takes {static:.0f} ms. "
        "[All tables](docs/results/speed.md#on-a-gpu); raw data: `benchmarks/results/nvidia-h200`."
    )
    return "\n".join(shown) + f"\n\n{note}"


def short(up: str = "") -> str:
    """Return README's table of a GPU, and what to know of batch 1. up: from the page to the root of the repository."""
    eager, graphed, _, _, long, _, many, _, memory, first, rate, *_ = lines()
    titles = {
        "prefill, 2,880 to 320 tokens, batch 1, `graphs=True`": long,
        "prefill, 576 to 64 tokens, batch 1, `graphs=True`": graphed,
        "prefill, 576 to 64 tokens, batch 8": many,
        "vLLM under load, 576 to 144 tokens, requests a second": rate,
        "requests of 2,880 to 320 tokens that fit into memory": memory,
    }
    device = rows.read(FOLDER / "f_llava15.jsonl")[0]["device"].removeprefix("NVIDIA ")
    shown = [f"| an {device}, 7B models, random weights | all tokens | `{METHOD}` | gain |", "|---|---:|---:|---:|"]
    shown += [_cells(what, line) for what, line in titles.items()]
    note = (
        f"At batch 1 a short prompt is {_faster(eager)} without `graphs=True`, which replays CUDA graphs; "
        f"vLLM's first token is {_faster(first)}: "
        f"[what to expect on a GPU]({up}docs/guides/gpu.md)."
    )
    return "\n".join(shown) + f"\n\n{note}"


def _faster(line: Line) -> str:
    """Describe the change of a time: how much faster or slower the pruned model is, within 5 % the same."""
    if abs(line.pruned / line.unpatched - 1) <= 0.05:
        return f"as fast as before ({line.gain:.1f}x)"
    if line.gain < 1:
        return f"{line.pruned / line.unpatched - 1:.0%} slower".replace("%", " %")
    return f"{line.gain:.1f}x as fast"


def _cells(what: str, line: Line) -> str:
    values = (_number(one) + line.unit for one in (line.unpatched, line.pruned))
    return f"| {what} | {' | '.join(values)} | {line.gain:.1f}x |"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.1f}" if value < 100 else f"{value:.0f}"
