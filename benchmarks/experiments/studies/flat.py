# SPDX-License-Identifier: Apache-2.0
"""Measure whether a session stays constant over 10,000 frames: bytes, time per block, and time to first token.

    python experiments/studies/flat.py                         # a tiny Qwen2.5-VL with random weights, on the CPU
    python benchmarks/experiments/studies/flat.py --policy infinipot_v --memory 1000 --device cuda

The raw file has a line per block and per question. A question is asked in the session, and for comparison with the last
8 frames sent again, each time with `max_new_tokens=1` through `generate`, including the tower. Slopes are linear fits
to the medians of 50 equal parts of the stream after the first compression. Their 95 % intervals come from 2,000
bootstrap samples of parts.
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
SIDE = 8  # patches per side: 16 visual tokens per frame, plus two tags
START, END, QUESTION = 7, 8, (30, 31, 32, 33, 34, 35, 36, 37)
DIFFERENT = 32  # number of distinct frames, which the stream repeats


class Frames:
    """A stream of random frames in the format of Qwen2.5-VL."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(DIFFERENT, SIDE * SIDE, 3 * 2 * 4 * 4, generator=generator).to(device)
        self.device = device

    def block(self, first: int, count: int, question: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """Return the model's inputs for `count` frames from index `first`, and a question."""
        frame_ids = [START, *[IMAGE_ID] * (SIDE * SIDE // 4), END]
        which = torch.arange(first, first + count) % DIFFERENT
        return {
            "input_ids": torch.tensor([frame_ids * count + list(question)], device=self.device),
            "pixel_values": self.pixels[which.to(self.device)].flatten(0, 1),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * count, device=self.device),
        }


def stored(session: sessions.Session) -> int:
    """Return the storage bytes of the session's cache and tables, including the parts that views do not show."""
    memory = session._stream.memory
    tensors = [tensor for layer in memory.cache.layers for tensor in (layer.keys, layer.values)] + memory.tables
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def anew(model: Any, frames: Frames, end: int, last: int) -> torch.Tensor:
    """Return the logits of the first answer token with the last frames sent again, shape (vocabulary,)."""
    inputs = frames.block(end - last, last, QUESTION)
    types = (inputs["input_ids"] == IMAGE_ID).int()
    output = model.generate(
        **inputs, mm_token_type_ids=types, max_new_tokens=1, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return output.logits[0][0]


def measure_stream(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a stream."""
    device = next(model.parameters()).device
    frames, clock, rows = Frames(device), Clock(device), []
    session = sessions.session(model, memory=args.memory, policy=args.policy, horizon=args.horizon, reanchor=True)
    for index, first in enumerate(range(0, args.frames, args.block)):
        count = min(args.block, args.frames - first)
        block = frames.block(first, count)
        wall, cpu = clock(lambda block=block: session.see(**block))
        stats = session.stats
        rows.append({
            "record": "block", "frames": first + count, "seconds": wall, "cpu_seconds": cpu, "bytes": stored(session),
            "kv_bytes": stats.kv_bytes, "kv_bytes_peak": stats.kv_bytes_peak, "visual": stats.visual,
            "compressions": stats.compressions, "reanchored": stats.reanchored, "next_position": stats.next_position,
        })  # fmt: skip
        if index % args.every == args.every - 1 and first + count >= args.last:
            ask_time, cpu = clock(lambda: session.ask(QUESTION, max_new_tokens=1, return_dict=True))
            anew_time, again_cpu = clock(lambda end=first + count: anew(model, frames, end, args.last))
            rows.append({
                "record": "question", "frames": first + count, "seconds": ask_time, "cpu_seconds": cpu,
                "anew_seconds": anew_time, "anew_cpu_seconds": again_cpu, "last": args.last,
            })  # fmt: skip
    return rows


def slope(frames: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Return the rise of a value per 1,000 frames with its 95 % interval, and the median of the value."""
    cuts = np.array_split(np.arange(len(values)), min(PARTS, len(values)))
    x = np.array([median(frames[i] for i in cut) for cut in cuts]) / 1000
    y = np.array([median(values[i] for i in cut) for cut in cuts])
    draws, rng = [], np.random.default_rng(0)
    while len(draws) < DRAWS:
        sample = rng.integers(0, len(x), len(x))
        if np.ptp(x[sample]) > 0:
            draws.append(_rise(x[sample], y[sample]))
    low, high = np.percentile(draws, (2.5, 97.5))
    return {"rise": _rise(x, y), "low": float(low), "high": float(high), "median": float(np.median(values))}


def _rise(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the slopes of a stream after its first compression, when the memory is full."""
    blocks = [row for row in rows if row["record"] == "block" and row["compressions"] > 0][1:]
    begin = blocks[0]["frames"] if blocks else 0
    questions = [row for row in rows if row["record"] == "question" and row["frames"] >= begin]
    if len(blocks) < 3 or len(questions) < 3:
        raise SystemExit("Too few frames for a slope. Increase --frames, or decrease --memory and --every.")

    def line(rows_of_kind: list[dict[str, Any]], name: str) -> dict[str, float]:
        return slope([row["frames"] for row in rows_of_kind], [row[name] for row in rows_of_kind])

    return {
        "record": "summary",
        "bytes": line(blocks, "bytes")
        | {"least": min(r["bytes"] for r in blocks), "most": max(r["bytes"] for r in blocks)},
        "block_seconds": line(blocks, "seconds"),
        "question_seconds": line(questions, "seconds"),
        "anew_seconds": line(questions, "anew_seconds"),
        "reanchored": blocks[-1]["reanchored"],
    }


def table(summary_row: dict[str, Any]) -> Table:
    """Format a summary as a table."""
    result_table = Table("", "median", "rise in 1,000 frames, 95 %")
    names = {"bytes": "bytes after a block", "block_seconds": "block, ms", "question_seconds": "first token, ms",
             "anew_seconds": "first token, frames sent anew, ms"}  # fmt: skip
    for name, words in names.items():
        line, scale = summary_row[name], 1 if name == "bytes" else 1000
        rise, low, high = (scale * line[key] for key in ("rise", "low", "high"))
        result_table.add_row(words, f"{scale * line['median']:.4g}", f"{rise:.3g} [{low:.3g}, {high:.3g}]")
    return result_table


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--block", type=int, default=10, help="frames in one forward")
    parser.add_argument("--memory", type=int, default=720, help="visual tokens; a frame has 18 tokens")
    parser.add_argument("--policy", default="window")
    parser.add_argument("--horizon", type=int, default=2**14, help="maximum position, which moves all positions down")
    parser.add_argument("--every", type=int, default=5, help="blocks between two questions")
    parser.add_argument("--last", type=int, default=8, help="number of frames that are sent again")
    parser.add_argument("--decoder", default="tiny", help="size of the decoder: tiny or 100m")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--out", type=Path)
    add_options(parser, resume=False)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = options(argv)
    device, load = torch.device(args.device), Load(args.allow_load)
    torch.set_num_threads(1)
    rows = measure_stream(qwen(args.decoder, device, torch.float32), args)
    summary_row = summary(rows)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "allow_load", "device")}
    first = header(device, code=code_version(), **settings)
    write(args.out or results_path(device, f"flat-{args.policy}"), [first, *rows, summary_row | load.record()])
    get_console().print(table(summary_row))


if __name__ == "__main__":
    main()
