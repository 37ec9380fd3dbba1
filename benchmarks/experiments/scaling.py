# SPDX-License-Identifier: Apache-2.0
"""Measure the growth of time and peak memory of token selection and removal with the visual tokens of an image.

    python benchmarks/experiments/scaling.py --resume

"selection": the selection of a method (with its attention rows) on random features of width 1024 (256 on a CPU), which
keeps a ninth of the tokens. For methods with several cuts, the first cut, which sees all tokens. "products": this time
as a multiple of one matrix product of all tokens and the kept tokens. "merge": one step of a tower's merging. "engine":
the engine's addition to a prefill (`overhead_ms` of `uniform` in a small model), and its KV bytes against the closed
form. Memory is the rise of the peak: on a CPU of a fresh process with limited memory and CPU time (a point beyond the
limit is marked, and larger points are skipped), on a GPU from the allocator. Times are the best of a few runs, on a CPU
as CPU time (wall time is in the file, too). Exponents are slopes of linear fits to the logarithms from 2880 tokens on.
The raw file is benchmarks/results/DEVICE/scaling.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import resource
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import (
    AFTER,
    BEFORE,
    Clock,
    Peak,
    Rows,
    add_options,
    code_version,
    default_device,
    encoded,
    header,
    llava,
    prompt,
    results_path,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scaling_inputs import HEADS, SHARE, WIDTH, choice_of, selecting_methods

import tokenprune
from tokenprune.errors import TokenPruneError
from tokenprune.kernels.merging import bipartite_match, threshold_match
from tokenprune.models.decoder_shape import DecoderShape

COUNTS = (576, 2880, 8192, 16384, 32768)
_M_MMAP_THRESHOLD = -3  # see mallopt(3)
MERGES = {
    "tome": lambda keys: bipartite_match(keys, keys.shape[1] // 8, protected=1),
    "dymu": lambda keys: threshold_match(keys, None, threshold=0.02, protected=1),
}


def prepared(operation: str, name: str, count: int, device: torch.device) -> Callable[[], Any]:
    """Return a function that runs the measured operation once."""
    torch.manual_seed(0)
    if operation == "merge":
        keys = torch.randn(1, count, 64, device=device)
        return partial(MERGES[name], keys)
    if operation == "selection":
        return choice_of(name, count, device)[0]
    model = llava("tiny", device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    ids = prompt(count, device)
    images = encoded([torch.randn(count, model.config.text_config.hidden_size, device=device, dtype=model.dtype)])
    tokenprune.patch(model, name, keep=count // SHARE, guard="off")

    def run() -> Any:
        model(input_ids=ids, mm_encoder_outputs={"image": images}, use_cache=True, logits_to_keep=1)
        stats = tokenprune.stats(model)
        shape = DecoderShape.from_config(model.config.text_config)
        tokens = [BEFORE + AFTER + visual for visual in stats.visual_tokens_per_layer]
        return {
            "overhead_ms": stats.overhead_ms, "kv_bytes": stats.kv_bytes,
            "kv_bytes_predicted": shape.kv_bytes(tokens, model.dtype.itemsize),
        }  # fmt: skip

    return run


def measure_point(
    operation: str,
    name: str,
    count: int,
    device: torch.device,
    threads: int,
    limit: int | None,
    max_seconds: float | None = None,
) -> dict[str, Any]:
    """Measure one point.

    Args:
        operation: "selection", "merge" or "engine".
        name: Method or merging.
        count: Number of visual tokens.
        device: Device of the run.
        threads: Number of threads.
        limit: Maximum bytes of a separate process, or None if this process measures.
        max_seconds: Maximum CPU seconds of the first run.
    """
    torch.set_num_threads(threads)
    if limit is not None:
        # glibc keeps large freed blocks, in growing numbers in a loop. Return them at once, so that the peak
        # only has memory in use.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    clock = Clock(device)
    try:
        with torch.inference_mode():
            prepared(operation, name, min(count, 64 * SHARE), device)()  # one-time allocations
            run = prepared(operation, name, count, device)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_AS, (limit + _address_space(), resource.RLIM_INFINITY))
            output: dict[str, Any] = {}
            with _at_most(max_seconds), Peak(device) as peak:
                seconds_of_runs = [clock(lambda: output.update(result=run()))]
            if seconds_of_runs[0][0] < 1:
                seconds_of_runs += [clock(run) for _ in range(3)]
    except TokenPruneError as error:
        return {"failed": str(error)}
    except TimeoutError:
        return {"failed": "more time than the limit"}
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        return {"failed": "more memory than the limit"}
    if operation == "engine":
        return output["result"] | {"seconds": output["result"]["overhead_ms"] / 1000, "peak": None}
    seconds, cpu = map(min, zip(*seconds_of_runs, strict=True))
    measured = {"seconds": seconds, "peak": peak.bytes} | ({"cpu": cpu} if device.type == "cpu" else {})
    if operation == "selection":
        tokens = choice_of(name, count, device)[1]
        all_, kept_features = tokens.hidden[0], tokens.hidden[0, : tokens.keep[0]].T
        measured |= {
            "tokens": tokens.counts[0],
            "product": min(clock(lambda: all_ @ kept_features)[-1] for _ in range(2)),
        }
    return measured


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError after a number of CPU seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def exponent(values: dict[int, float | None]) -> float | None:
    """Return the slope of log(value) over log(tokens) from 2880 tokens on."""
    points = {n: v for n, v in values.items() if v and n >= 2880}
    if len(points) < 2:
        return None
    x, y = ([math.log(v) for v in side] for side in (points.keys(), points.values()))
    return statistics.linear_regression(x, y).slope


def record(
    operation: str, name: str, counts: Sequence[int], args: argparse.Namespace, limit: int | None
) -> dict[str, Any]:
    """Measure a method at all counts, up to the first count beyond the limit."""
    device, points = torch.device(args.device), {}
    for count in counts:
        if limit is None:
            points[count] = measure_point(operation, name, count, device, args.threads, None)
            torch.cuda.empty_cache()
        else:
            # Fork before this process computes anything, so that no tensors are shared.
            with multiprocessing.get_context("fork").Pool(1) as pool:
                points[count] = pool.apply(
                    measure_point, (operation, name, count, device, args.threads, limit, args.seconds)
                )
        if "failed" in points[count]:
            break
    ran = {count: point for count, point in points.items() if "failed" not in point}
    if operation == "engine" and any(p["kv_bytes"] != p["kv_bytes_predicted"] for p in ran.values()):
        raise SystemExit(f"KV bytes differ from the closed form: {ran}")
    row = {"what": operation, "method": name, "points": {str(count): point for count, point in points.items()}}
    for key in ("seconds", "cpu", "peak"):
        values = {point.get("tokens", count): point.get(key) for count, point in ran.items()}
        if any(values.values()):
            row[f"{key}_exponent"] = exponent(values)
    return row


def rows_of(row: dict[str, Any], counts: Sequence[int]) -> Iterator[list[str]]:
    """Yield the lines of the printed table for a row: time, time in products, and memory."""
    time = "cpu" if "cpu_exponent" in row else "seconds"
    for key, unit, digits, label in ((time, 1e-3, 2, "ms"), ("product", 0, 1, "products"), ("peak", 2**20, 1, "MiB")):
        points = [row["points"].get(str(count), {}) for count in counts]
        if not any(point.get(key) for point in points):
            continue
        values = [point.get(key) and (point[key] / unit if unit else point[time] / point[key]) for point in points]
        cells = [">" if "failed" in p else "" if v is None else f"{v:.{digits}f}"
                 for p, v in zip(points, values, strict=True)]  # fmt: skip
        slope = row.get(f"{key}_exponent")
        yield [f"{row['what']}, {label}", row["method"], *cells, "" if slope is None else f"{slope:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--methods", default=",".join(selecting_methods()))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=3.0, help="maximum GiB of a measurement on the CPU")
    parser.add_argument("--seconds", type=float, default=60.0, help="maximum CPU seconds of a run on the CPU")
    parser.add_argument("--device", default=default_device())
    add_options(parser)
    parser.add_argument("--tiny", action="store_true", help="check the code in seconds")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/scaling.jsonl")
    args = parser.parse_args()
    device, console = torch.device(args.device), Console()
    counts = (576, 2880) if args.tiny else args.counts
    operations = [("selection", name) for name in args.methods.split(",")] + [("merge", name) for name in MERGES]
    limit = None if device.type == "cuda" else int(args.limit * 2**30)
    first = header(
        device, threads=args.threads, width=WIDTH[device.type], heads=HEADS, share=SHARE, limit=limit, counts=counts,
        most=None if limit is None else args.seconds,
    )  # fmt: skip
    path = args.json or results_path(device, "scaling", args.tiny)
    known = Rows(path, first, args, code=code_version(), threads=args.threads, counts=list(counts))
    table = Table(title=f"One image, {first['device']}, {args.threads} threads")
    for column in ("", "method", *map(str, counts), "exponent"):
        table.add_column(column, justify="right" if column.isdigit() or column == "exponent" else "left")
    for operation, name in track([*operations, ("engine", "uniform")], description="scaling", console=console):
        (row,) = known.measure((operation, name), partial(record, operation, name, counts, args, limit))
        for cells in rows_of(row, counts):
            table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
