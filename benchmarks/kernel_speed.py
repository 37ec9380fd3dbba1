# SPDX-License-Identifier: Apache-2.0
"""Time each kernel against its reference, the compiled reference, and what the device could do at best.

    python benchmarks/kernel_speed.py                   # all, into benchmarks/results/<device>/kernels.jsonl
    python benchmarks/kernel_speed.py --only attention_rows
    python benchmarks/kernel_speed.py --tiny            # proves the script on a machine without a GPU

floor_ms is the time in which this device moves the bytes that must be moved, or does the arithmetic, whichever takes
longer; both speeds are measured here, by copying 512 MB and by multiplying large matrices of the case's dtype. share =
floor / median: 1 is perfect. A buffer larger than the cache is written between two runs, so that inputs come from
memory. difference, other_choices: between kernel and reference, the largest of numbers, and the share of chosen tokens.
Without a GPU, kernels run in Triton's interpreter: such times mean nothing (`"interpreted": true`).

An operation of tokenprune/kernels is measured if `@cases("its_name")` stands before a function that yields its cases.

(This file cannot be called kernels.py: scripts beside it would hand it to transformers as the package of that name.)
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from common import header, results_path, write
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tokenprune.kernels.dispatch import Operation, has_triton, operations
from tokenprune.profiling.timing import quantiles


@dataclass(frozen=True)
class Case:
    """One call of an operation. bytes, flops: that are needed at least. atol: allowed difference from the reference."""

    name: str
    args: tuple
    bytes: int
    flops: int
    dtype: torch.dtype
    kwargs: dict[str, Any] = field(default_factory=dict)
    atol: float = 1e-5


Make = Callable[[torch.device, bool], Iterator[Case]]
CASES: dict[str, Make] = {}


def cases(operation: str) -> Callable[[Make], Make]:
    """Register what yields the cases of an operation, given the device and whether they are to be tiny."""

    def add(make: Make) -> Make:
        CASES[operation] = make
        return make

    return add


# -- what is measured


def _size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _attention(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """shape: B, H, Hkv, Q, K, D."""
    batch, heads, kv_heads, queries, keys, width = shape
    torch.manual_seed(0)
    query = torch.randn(batch, heads, queries, width, dtype=dtype, device=device)
    key = torch.randn(batch, kv_heads, keys, width, dtype=dtype, device=device)
    return query, key, dict(scaling=width**-0.5)


# The decoder's attention in the models that the papers measure, and in a decode step.
_ROWS = {
    "LLaVA-1.5-7B, 576 tokens": (1, 32, 32, 640, 640, 128),
    "LLaVA-NeXT-7B, 2880 tokens": (1, 32, 32, 2944, 2944, 128),
    "Qwen2.5-VL-7B, 4k video tokens": (1, 28, 4, 4160, 4160, 128),
    "Qwen2.5-VL-7B, 16k video tokens": (1, 28, 4, 16448, 16448, 128),
    "LLaVA-NeXT-7B, decode step of 8 rows": (8, 32, 32, 1, 2944, 128),
}


@cases("attention_rows")
def _rows(device: torch.device, tiny: bool) -> Iterator[Case]:
    dtype = torch.float32 if tiny else torch.bfloat16
    for name, shape in {"tiny": (1, 4, 2, 5, 70, 16)}.items() if tiny else _ROWS.items():
        query, key, options = _attention(device, shape, dtype)
        index = torch.full((shape[0], 1), shape[3] - 1, device=device)
        for heads in (None, "mean"):
            out = 4 * shape[0] * shape[4] * (shape[1] if heads is None else 1)
            moved = _size(key) + _size(query) // shape[3] + out
            flops = 2 * shape[0] * shape[1] * shape[4] * shape[5]
            yield Case(f"{name}, heads={heads}", (query, key, index), moved, flops, dtype, options | {"heads": heads})


_COLUMNS = {
    "LLaVA-NeXT-7B decoder, 2880 tokens": ((1, 32, 32, 2944, 2944, 128), True, 1),
    "Qwen2.5-VL-7B decoder, 16k tokens": ((1, 28, 4, 16448, 16448, 128), True, 1),
    "SigLIP so400m, 5 tiles": ((5, 16, 16, 729, 729, 72), False, 1),
    "Qwen2.5-VL tower, 16 frames of 1024 patches": ((1, 16, 16, 16384, 16384, 80), False, 16),
}


@cases("attention_column_means")
def _columns(device: torch.device, tiny: bool) -> Iterator[Case]:
    dtype = torch.float32 if tiny else torch.bfloat16
    small = {"tiny": ((1, 2, 1, 40, 40, 16), True, 1), "tiny, packed": ((1, 2, 2, 40, 40, 16), False, 2)}
    for name, (shape, causal, sequences) in (small if tiny else _COLUMNS).items():
        query, key, options = _attention(device, shape, dtype)
        batch, heads, _, queries, keys, width = shape
        starts = None
        if sequences > 1:
            starts = torch.arange(0, keys + 1, keys // sequences, dtype=torch.int32, device=device)
        pairs = queries * keys // sequences // (2 if causal else 1)
        # Two passes: a row's sum is needed before any of its probabilities.
        flops, moved = 2 * 2 * batch * heads * pairs * width, _size(query, key) + 4 * batch * heads * queries
        yield Case(name, (query, key, None, None, starts), moved, flops, dtype, options | {"causal": causal})


def _features(device: torch.device, *shape: int, tiny: bool) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, device=device, dtype=torch.float32 if tiny else torch.bfloat16)


@cases("best_match")
def _matches(device: torch.device, tiny: bool) -> Iterator[Case]:
    shapes = {
        "CLIP tower, 5 images of 577 tokens": (5, 289, 288, 64),
        "16k tokens of width 1024": (1, 8192, 8192, 1024),
        "2880 tokens of width 4096, all pairs": (1, 2880, 0, 4096),
    }
    for name, (rows, one, other, width) in (
        {"tiny": (2, 9, 7, 8), "all pairs": (1, 9, 0, 8)} if tiny else shapes
    ).items():
        a = _features(device, rows, one, width, tiny=tiny)
        b = _features(device, rows, other, width, tiny=tiny) if other else a
        moved, flops = _size(a, *([b] if other else [])) + 12 * rows * one, 2 * rows * one * (other or one) * width
        yield Case(name, (a, b), moved, flops, a.dtype, {"others": not other}, atol=1e-4)


@cases("farthest")
def _farthest(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, keep, width in [(11, 4, 8)] if tiny else [(576, 64, 4096), (2880, 320, 4096), (16384, 1802, 3584)]:
        x = _features(device, 1, count, width, tiny=tiny)
        mask, budget = torch.ones(1, count, dtype=torch.bool, device=device), torch.tensor([keep], device=device)
        # The first pick needs each token's nearest, so all pairs.
        yield Case(
            f"{count} -> {keep} of width {width}", (x, mask, budget, keep), _size(x), 2 * count**2 * width, x.dtype
        )


@cases("take_in_turn")
def _turns(device: torch.device, tiny: bool) -> Iterator[Case]:
    for pickers, count, keep in [(2, 11, 3)] if tiny else [(1, 2880, 320), (8, 2880, 40), (1, 16384, 1802)]:
        score = _features(device, 1, pickers, count, tiny=True)
        mask = torch.ones(1, count, dtype=torch.bool, device=device)
        each = torch.full((1, pickers), keep, device=device)
        yield Case(
            f"{pickers} x {keep} of {count}", (score, mask, each, keep), _size(score, mask, mask), 0, score.dtype
        )


@cases("coverage_gain")
def _coverage(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count in [11] if tiny else [576, 2880, 8192]:
        table = _features(device, 1, count, count, tiny=True)
        cover = torch.zeros(1, count, device=device)
        yield Case(f"one pick of {count}", (table, cover), _size(table, cover) + 4 * count, 0, table.dtype, atol=1e-3)


@cases("most_covering")
def _covering(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, keep in [(11, 4)] if tiny else [(576, 64), (2880, 320)]:
        table = _features(device, 1, count, count, tiny=True)
        mask, number = torch.ones(1, count, dtype=torch.bool, device=device), torch.tensor([keep], device=device)
        yield Case(f"{count} -> {keep}", (table, mask, number, keep), keep * _size(table), 0, table.dtype)


@cases("greedy_dpp")
def _determinants(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, keep, width in [(11, 4, 8)] if tiny else [(576, 64, 4096), (2880, 320, 4096), (16384, 1802, 3584)]:
        x = torch.nn.functional.normalize(_features(device, 1, count, width, tiny=True), dim=2)
        mask, number = torch.ones(1, count, dtype=torch.bool, device=device), torch.tensor([keep], device=device)
        moved = keep * _size(x) + 2 * count * keep**2  # the factor, half of it on average
        yield Case(f"{count} -> {keep} of width {width}", (x, x, mask, number, keep), moved, 0, x.dtype)


@cases("join")
def _joins(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, keep, width in [(11, 4, 8)] if tiny else [(2880, 320, 4096), (16384, 1802, 3584)]:
        x = _features(device, count, width, tiny=tiny)
        order = torch.randperm(count, device=device)
        stays, source = order[:keep].sort().values, order[keep:].sort().values
        target = torch.randint(keep, source.shape, device=device)
        own, weight = torch.ones(keep, device=device), torch.ones(count - keep, device=device)
        moved = _size(x) + _size(x) * keep // count + _size(stays, source, target, own, weight)
        yield Case(
            f"{count} -> {keep} of width {width}", (x, stays, own, source, target, weight), moved, 0, x.dtype, atol=0.02
        )


@cases("partition")
def _partitions(device: torch.device, tiny: bool) -> Iterator[Case]:
    for rows, count in [(2, 11)] if tiny else [(1, 2944), (8, 2944), (1, 32768)]:
        first = torch.rand(rows, count, device=device) < 0.2
        yield Case(f"{rows} x {count}", (first,), 9 * rows * count, 0, torch.float32)


@cases("gather_tokens")
def _gathers(device: torch.device, tiny: bool) -> Iterator[Case]:
    for rows, count, keep, width in [(2, 11, 4, 8)] if tiny else [(1, 2944, 384, 4096), (8, 2944, 384, 4096)]:
        x = _features(device, rows, count, width, tiny=tiny)
        index = torch.rand(rows, count, device=device).argsort(1)[:, :keep].sort(1).values
        moved = 2 * _size(x) * keep // count + _size(index)
        yield Case(f"{rows} x {count} -> {keep} of width {width}", (x, index, 1), moved, 0, x.dtype)


# -- how it is measured


@dataclass
class Meter:
    """Times functions on one device."""

    device: torch.device
    tiny: bool
    seconds: float

    def __post_init__(self) -> None:
        self.cuda = self.device.type == "cuda"
        self.flush = torch.empty(2**28 if self.cuda else 1, dtype=torch.uint8, device=self.device)
        self._matmul: dict[torch.dtype, float] = {}
        words = 2**14 if self.tiny else 2**26
        source, target = (torch.zeros(words, device=self.device) for _ in range(2))
        self.bandwidth = 2 * _size(source) / self.time(lambda: target.copy_(source))["p50"] * 1e3

    def matmul(self, dtype: torch.dtype) -> float:
        """FLOP/s of a large product."""
        if dtype not in self._matmul:
            n = 64 if self.tiny else 8192
            a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
            self._matmul[dtype] = 2 * n**3 / self.time(lambda: a @ b)["p50"] * 1e3
        return self._matmul[dtype]

    def time(self, run: Callable[[], Any]) -> dict[str, float]:
        """Quantiles in milliseconds, after one run that does not count."""
        run()
        taken: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(taken) < 3 or (time.perf_counter() < end and len(taken) < 200):
            if self.cuda:
                self.flush.zero_()
                begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                done.record()
                torch.cuda.synchronize()
                taken.append(begin.elapsed_time(done))
            else:
                start = time.perf_counter()
                run()
                taken.append(1e3 * (time.perf_counter() - start))
            if self.tiny and len(taken) == 3:
                break
        return quantiles(taken)

    def memory(self, run: Callable[[], Any]) -> int | None:
        """Peak bytes that a run takes on a GPU beside its input."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure(meter: Meter, operation: Operation, case: Case, compiled: Callable | None) -> dict[str, Any]:
    """Return the record of one case."""

    def call(function: Callable) -> Callable[[], Any]:
        return lambda: function(*case.args, **case.kwargs)

    arithmetic = case.flops / meter.matmul(case.dtype) if case.flops else 0.0
    floor = 1e3 * max(case.bytes / meter.bandwidth, arithmetic)
    record: dict[str, Any] = {
        "operation": operation.name, "case": case.name, "dtype": str(case.dtype).removeprefix("torch."),
        "bytes": case.bytes, "flops": case.flops, "floor_ms": round(floor, 6),
    }  # fmt: skip
    want = call(operation.reference)()
    if (reason := operation.obstacle(*case.args, **case.kwargs)) is not None:
        record["kernel"] = reason
    else:
        record["difference"], record["other_choices"] = compare(call(operation.triton)(), want, case.atol)
        record["interpreted"] = not meter.cuda
        record["triton_ms"] = meter.time(call(operation.triton))
        record["triton_bytes"] = meter.memory(call(operation.triton))
        if meter.cuda:
            record["share"] = round(floor / record["triton_ms"]["p50"], 4)
    record["reference_ms"] = meter.time(call(operation.reference))
    record["reference_bytes"] = meter.memory(call(operation.reference))
    if compiled is not None:
        record["compiled_ms"] = meter.time(call(compiled))
    return record


def compare(got: Any, want: Any, atol: float) -> tuple[float, float]:
    """The largest difference between numbers of two results, and the largest share of choices (indices, masks) that
    differ, as they may where numbers all but tie. Raises AssertionError where numbers differ by more than `atol`."""
    if isinstance(want, Tensor):
        got, want = (got,), (want,)
    largest = other = 0.0
    for mine, theirs in zip(got, want, strict=True):
        if theirs.is_floating_point():
            torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-3)
            largest = max(largest, float((mine.double() - theirs.double()).nan_to_num(0, 0, 0).abs().max()))
        else:
            other = max(other, float((mine != theirs).double().mean()))
    return largest, round(other, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="operations")
    parser.add_argument("--tiny", action="store_true", help="small cases, three runs each")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each thing that is timed")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/kernels.jsonl")
    args = parser.parse_args()
    device, console = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Console()
    if device.type == "cpu" and not args.tiny:
        sys.exit("there is no GPU: kernels would run in Triton's interpreter, so only --tiny makes sense")
    if not has_triton():
        sys.exit("Triton is not installed: pip install triton")
    known = operations()
    wanted = args.only or list(known)
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"no operation is called {', '.join(unknown)}; there are {', '.join(known)}")
    if missing := [name for name in wanted if name not in CASES]:
        console.print(f"[yellow]no cases for {', '.join(missing)}: add a function with @cases(...) to this file")

    meter = Meter(device, args.tiny, args.seconds)
    # Tiny runs prove that the reference can be traced, and need no C++ compiler.
    backend = "aot_eager" if args.tiny else "inductor"
    table = Table(title=f"{torch.cuda.get_device_name() if meter.cuda else 'CPU, interpreted'}: medians in ms")
    for column in ("operation", "case", "floor", "kernel", "share", "reference", "compiled"):
        table.add_column(column, justify="left" if column in ("operation", "case") else "right")
    records = []
    with torch.inference_mode():
        for name in wanted:
            for case in CASES[name](device, args.tiny) if name in CASES else ():
                torch.compiler.reset()
                compiled = None if args.no_compile else torch.compile(known[name].reference, backend=backend)
                record = measure(meter, known[name], case, compiled)
                records.append(record)
                times = [record.get(which, {}).get("p50") for which in ("triton_ms", "reference_ms", "compiled_ms")]
                shown = ["-" if value is None else f"{value:.3f}" for value in times]
                share = f"{record['share']:.2f}" if "share" in record else "-"
                table.add_row(name, case.name, f"{record['floor_ms']:.4f}", shown[0], share, *shown[1:])
    console.print(table)
    import triton

    more = {
        "triton": triton.__version__, "cuda": torch.version.cuda, "tiny": args.tiny,
        "compile_backend": None if args.no_compile else backend, "copy_bytes_per_second": round(meter.bandwidth),
        "matmul_flops": {str(dtype): round(speed) for dtype, speed in meter._matmul.items()}, "seed": 0,
    }  # fmt: skip
    write(args.json or results_path(device, "kernels", args.tiny), [header(device, **more), *records])


if __name__ == "__main__":
    main()
