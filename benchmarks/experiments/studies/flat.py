# SPDX-License-Identifier: Apache-2.0
"""Does a session stay flat over 10,000 frames: bytes, time of a block, and time to the first token of a question?

    python experiments/studies/flat.py                         # a tiny Qwen2.5-VL with random weights, on the CPU
    python benchmarks/experiments/studies/flat.py --policy infinipot_v --memory 1000 --device cuda

One line for each block, and one for each question: in the session, and beside it with the last 8 frames sent anew, each
with `max_new_tokens=1` through `generate`, tower included. Slopes are those of straight lines through the medians of
50 equal parts of the stream, after the first compression; their intervals of 95 % come from 2,000 draws of parts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import calm_threads  # noqa: F401
import numpy as np
import torch
from common import IMAGE_ID, Clock, Load, add_options, code_version, default_device, header, qwen, results_path, write
from rich.table import Table

from tokenprune.cli.common import get_console
from tokenprune.integrations.hf import sessions

PARTS, DRAWS = 50, 2000
SIDE = 8  # patches: 16 visual tokens a frame, and two that wrap it
START, END, QUESTION = 7, 8, (30, 31, 32, 33, 34, 35, 36, 37)
DIFFERENT = 32  # frames that are drawn once; the stream repeats them


class Frames:
    """A stream of random frames, as a Qwen2.5-VL takes them."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(DIFFERENT, SIDE * SIDE, 3 * 2 * 4 * 4, generator=generator).to(device)
        self.device = device

    def block(self, first: int, count: int, question: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """Return the model's arguments for `count` frames from number `first` on, and a question."""
        one = [START, *[IMAGE_ID] * (SIDE * SIDE // 4), END]
        which = torch.arange(first, first + count) % DIFFERENT
        return {
            "input_ids": torch.tensor([one * count + list(question)], device=self.device),
            "pixel_values": self.pixels[which.to(self.device)].flatten(0, 1),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * count, device=self.device),
        }


def stored(session: sessions.Session) -> int:
    """Return the bytes of the storages that the session's cache and tables hold, not of what views show of them."""
    memory = session._stream.memory
    tensors = [one for layer in memory.cache.layers for one in (layer.keys, layer.values)] + memory.tables
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def anew(model: Any, frames: Frames, end: int, last: int) -> torch.Tensor:
    """Return the logits of the answer's first token when the last frames before number `end` are sent anew, `[V]`."""
    inputs = frames.block(end - last, last, QUESTION)
    types = (inputs["input_ids"] == IMAGE_ID).int()
    output = model.generate(
        **inputs, mm_token_type_ids=types, max_new_tokens=1, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return output.logits[0][0]


def streamed(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the lines of a stream."""
    device = next(model.parameters()).device
    frames, clock, rows = Frames(device), Clock(device), []
    session = sessions.session(model, memory=args.memory, policy=args.policy, horizon=args.horizon, reanchor=True)
    for number, first in enumerate(range(0, args.frames, args.block)):
        count = min(args.block, args.frames - first)
        block = frames.block(first, count)
        wall, cpu = clock(lambda block=block: session.see(**block))
        stats = session.stats
        rows.append({
            "record": "block", "frames": first + count, "seconds": wall, "cpu_seconds": cpu, "bytes": stored(session),
            "kv_bytes": stats.kv_bytes, "kv_bytes_peak": stats.kv_bytes_peak, "visual": stats.visual,
            "compressions": stats.compressions, "reanchored": stats.reanchored, "next_position": stats.next_position,
        })  # fmt: skip
        if number % args.every == args.every - 1 and first + count >= args.last:
            asked, cpu = clock(lambda: session.ask(QUESTION, max_new_tokens=1, return_dict=True))
            again, again_cpu = clock(lambda end=first + count: anew(model, frames, end, args.last))
            rows.append({
                "record": "question", "frames": first + count, "seconds": asked, "cpu_seconds": cpu,
                "anew_seconds": again, "anew_cpu_seconds": again_cpu, "last": args.last,
            })  # fmt: skip
    return rows


def slope(frames: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Return by how much a value rises in 1,000 frames, with its interval of 95 %, and the value's median."""
    cuts = np.array_split(np.arange(len(values)), min(PARTS, len(values)))
    x = np.array([median(frames[i] for i in cut) for cut in cuts]) / 1000
    y = np.array([median(values[i] for i in cut) for cut in cuts])
    draws, rng = [], np.random.default_rng(0)
    while len(draws) < DRAWS:
        drawn = rng.integers(0, len(x), len(x))
        if np.ptp(x[drawn]) > 0:
            draws.append(_rise(x[drawn], y[drawn]))
    low, high = np.percentile(draws, (2.5, 97.5))
    return {"rise": _rise(x, y), "low": float(low), "high": float(high), "median": float(np.median(values))}


def _rise(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the slopes of a stream. Blocks before the first compression, when the memory fills, are left out."""
    full = [row for row in rows if row["record"] == "block" and row["compressions"] > 0][1:]
    begin = full[0]["frames"] if full else 0
    asked = [row for row in rows if row["record"] == "question" and row["frames"] >= begin]
    if len(full) < 3 or len(asked) < 3:
        raise SystemExit("too few frames for a slope: raise --frames, or lower --memory and --every")

    def line(many: list[dict[str, Any]], name: str) -> dict[str, float]:
        return slope([row["frames"] for row in many], [row[name] for row in many])

    return {
        "record": "summary",
        "bytes": line(full, "bytes") | {"least": min(r["bytes"] for r in full), "most": max(r["bytes"] for r in full)},
        "block_seconds": line(full, "seconds"),
        "question_seconds": line(asked, "seconds"),
        "anew_seconds": line(asked, "anew_seconds"),
        "reanchored": full[-1]["reanchored"],
    }


def table(made: dict[str, Any]) -> Table:
    """Return a summary as a table."""
    shown = Table("", "median", "rise in 1,000 frames, 95 %")
    names = {"bytes": "bytes after a block", "block_seconds": "block, ms", "question_seconds": "first token, ms",
             "anew_seconds": "first token, frames sent anew, ms"}  # fmt: skip
    for name, words in names.items():
        line, scale = made[name], 1 if name == "bytes" else 1000
        rise, low, high = (scale * line[one] for one in ("rise", "low", "high"))
        shown.add_row(words, f"{scale * line['median']:.4g}", f"{rise:.3g} [{low:.3g}, {high:.3g}]")
    return shown


def options(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--block", type=int, default=10, help="frames in one forward")
    parser.add_argument("--memory", type=int, default=720, help="visual tokens; a frame has 18")
    parser.add_argument("--policy", default="window")
    parser.add_argument("--horizon", type=int, default=2**14, help="the last position; there all moves down")
    parser.add_argument("--every", type=int, default=5, help="blocks between two questions")
    parser.add_argument("--last", type=int, default=8, help="frames that are sent anew")
    parser.add_argument("--decoder", default="tiny", help="tiny or 100m: the sizes of the decoder")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--out", type=Path)
    add_options(parser, resume=False)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = options(given)
    device, load = torch.device(args.device), Load(args.allow_load)
    torch.set_num_threads(1)
    rows = streamed(qwen(args.decoder, device, torch.float32), args)
    made = summary(rows)
    asked = {name: value for name, value in vars(args).items() if name not in ("out", "allow_load", "device")}
    first = header(device, code=code_version(), **asked)
    write(args.out or results_path(device, f"flat-{args.policy}"), [first, *rows, made | load.record()])
    get_console().print(table(made))


if __name__ == "__main__":
    main()
