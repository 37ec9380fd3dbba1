# SPDX-License-Identifier: Apache-2.0
"""Cases of the operations in tokenprune/kernels with shapes of 7 B models, for e_kernels.py.

To measure an operation, decorate a function that yields its cases with `@cases("its_name")`. Each case states the
minimum bytes and FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenprune.kernels.pairing import as_sources


@dataclass(frozen=True)
class Case:
    """A call of an operation, with minimum bytes and FLOPs, and the allowed difference from the reference."""

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
    """Register a function that yields the cases of an operation for a device, or tiny cases."""

    def add(make: Make) -> Make:
        CASES[operation] = make
        return make

    return add


def size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _attention(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return queries, keys and options. `shape` is (batch, heads, KV heads, queries, keys, head width)."""
    batch, heads, kv_heads, queries, keys, width = shape
    torch.manual_seed(0)
    query = torch.randn(batch, heads, queries, width, dtype=dtype, device=device)
    key = torch.randn(batch, kv_heads, keys, width, dtype=dtype, device=device)
    return query, key, dict(scaling=width**-0.5)


# The decoder's attention in the models that papers measure, and in a decoding step.
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
            moved = size(key) + size(query) // shape[3] + out
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
        # Two passes: a probability needs its row's sum.
        flops, moved = 2 * 2 * batch * heads * pairs * width, size(query, key) + 4 * batch * heads * queries
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
    for name, (rows, num_a, other, width) in (
        {"tiny": (2, 9, 7, 8), "all pairs": (1, 9, 0, 8)} if tiny else shapes
    ).items():
        a = _features(device, rows, num_a, width, tiny=tiny)
        b = _features(device, rows, other, width, tiny=tiny) if other else a
        moved, flops = size(a, *([b] if other else [])) + 12 * rows * num_a, 2 * rows * num_a * (other or num_a) * width
        yield Case(name, (a, b), moved, flops, a.dtype, {"exclude_self": not other}, atol=1e-4)


@cases("farthest")
def _farthest(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, keep, width in [(11, 4, 8)] if tiny else [(576, 64, 4096), (2880, 320, 4096), (16384, 1802, 3584)]:
        x = _features(device, 1, count, width, tiny=tiny)
        mask, budget = torch.ones(1, count, dtype=torch.bool, device=device), torch.tensor([keep], device=device)
        # The first pick needs the nearest neighbor of each token, hence all pairs.
        yield Case(
            f"{count} -> {keep} of width {width}", (x, mask, budget, keep), size(x), 2 * count**2 * width, x.dtype
        )


@cases("take_in_turn")
def _turns(device: torch.device, tiny: bool) -> Iterator[Case]:
    for pickers, count, keep in [(2, 11, 3)] if tiny else [(1, 2880, 320), (8, 2880, 40), (1, 16384, 1802)]:
        score = _features(device, 1, pickers, count, tiny=True)
        mask = torch.ones(1, count, dtype=torch.bool, device=device)
        each = torch.full((1, pickers), keep, device=device)
        yield Case(f"{pickers} x {keep} of {count}", (score, mask, each, keep), size(score, mask, mask), 0, score.dtype)


@cases("coverage_gain")
def _coverage(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count in [11] if tiny else [576, 2880, 8192]:
        table = _features(device, 1, count, count, tiny=True)
        cover = torch.zeros(1, count, device=device)
        yield Case(f"one pick of {count}", (table, cover), size(table, cover) + 4 * count, 0, table.dtype, atol=1e-3)


@cases("most_covering")
def _covering(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, keep in [(11, 4)] if tiny else [(576, 64), (2880, 320)]:
        table = _features(device, 1, count, count, tiny=True)
        mask, budget = torch.ones(1, count, dtype=torch.bool, device=device), torch.tensor([keep], device=device)
        yield Case(f"{count} -> {keep}", (table, mask, budget, keep), keep * size(table), 0, table.dtype)


@cases("greedy_dpp")
def _determinants(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, keep, width in [(11, 4, 8)] if tiny else [(576, 64, 4096), (2880, 320, 4096), (16384, 1802, 3584)]:
        x = torch.nn.functional.normalize(_features(device, 1, count, width, tiny=True), dim=2)
        mask, budget = torch.ones(1, count, dtype=torch.bool, device=device), torch.tensor([keep], device=device)
        moved = keep * size(x) + 2 * count * keep**2  # half of the factor on average
        yield Case(f"{count} -> {keep} of width {width}", (x, x, mask, budget, keep), moved, 0, x.dtype)


@cases("join")
def _joins(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, keep, width in [(11, 4, 8)] if tiny else [(2880, 320, 4096), (16384, 1802, 3584)]:
        x = _features(device, count, width, tiny=tiny)
        order = torch.randperm(count, device=device)
        stays, source = order[:keep].sort().values, order[keep:].sort().values
        target = torch.randint(keep, source.shape, device=device)
        kept_weight, weight = torch.ones(keep, device=device), torch.ones(count - keep, device=device)
        moved = size(x) + size(x) * keep // count + size(stays, source, target, kept_weight, weight)
        yield Case(
            f"{count} -> {keep} of width {width}",
            (x, stays, kept_weight, source, target, weight),
            moved,
            0,
            x.dtype,
            atol=0.02,
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
        moved = 2 * size(x) * keep // count + size(index)
        yield Case(f"{rows} x {count} -> {keep} of width {width}", (x, index, 1), moved, 0, x.dtype)


@cases("cosines")
def _cosines(device: torch.device, tiny: bool) -> Iterator[Case]:
    for count, few, width in [(11, 3, 8)] if tiny else [(576, 8, 4096), (2880, 8, 4096), (16384, 8, 3584)]:
        x = _features(device, 1, count, width, tiny=tiny)
        moved, flops = size(x) + 4 * count * few, 2 * count * few * width
        yield Case(f"{count} with {few} of width {width}", (x, x[:, :few]), moved, flops, x.dtype, atol=1e-4)


@cases("rank_in_group")
def _ranks(device: torch.device, tiny: bool) -> Iterator[Case]:
    for rows, count, groups in [(2, 11, 3)] if tiny else [(1, 576, 4), (1, 2880, 5), (1, 16384, 16)]:
        group = torch.arange(count, device=device).expand(rows, -1) * groups // count
        score = torch.rand(rows, count, device=device)
        yield Case(f"{rows} x {count} in {groups} groups", (group, score), 20 * rows * count, 0, torch.float32)


@cases("as_sources")
def _sources(device: torch.device, tiny: bool) -> Iterator[Case]:
    for rows, count in [(2, 11)] if tiny else [(1, 577), (5, 577), (1, 4096)]:
        best, partner = _pairs(device, rows, count)
        yield Case(f"{rows} x {count} tokens", (best, partner, 1, None), 24 * best.numel(), 0, torch.float32)


@cases("pairing")
def _pairings(device: torch.device, tiny: bool) -> Iterator[Case]:
    for rows, count, num_dropped in [(2, 11, 3)] if tiny else [(1, 577, 22), (5, 577, 22), (1, 4096, 400)]:
        best, partner = as_sources.reference(*_pairs(device, rows, count), 1, None)
        moved = 12 * best.numel() + 8 * rows * (count + num_dropped)
        yield Case(
            f"{num_dropped} of {rows} x {count} tokens", (best, partner, [num_dropped] * rows, [count] * rows, 1),
            moved, 0, torch.float32,
        )  # fmt: skip


def _pairs(device: torch.device, rows: int, count: int) -> tuple[Tensor, Tensor]:
    best = torch.rand(rows, (count + 1) // 2, device=device)
    return best, torch.randint(count // 2, best.shape, device=device)


@cases("destinations")
def _destinations(device: torch.device, tiny: bool) -> Iterator[Case]:
    for rows, count, keep in [(2, 11, 4)] if tiny else [(1, 2880, 320), (8, 2880, 320), (1, 16384, 1802)]:
        positions = torch.arange(rows * count, device=device).view(rows, count)
        assign = (torch.arange(count, device=device) % keep).expand(rows, -1)
        arguments = (assign, torch.ones_like(assign, dtype=torch.bool), positions, None, rows * count)
        yield Case(f"{rows} x {count} -> {keep}", arguments, 33 * rows * count, 0, torch.float32)
