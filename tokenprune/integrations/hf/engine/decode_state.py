# SPDX-License-Identifier: Apache-2.0
"""State on a cache from which visual tokens are removed step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenprune.kernels.compact import partition
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.decode import DecodeMethod, TokenType
from tokenprune.statistics import Cut, Stats


@dataclass
class DecodeState:
    """Lives on a cache, beside its `Reduction`. B rows, N visual tokens in the row with most.

    stats: those of the prefill, which the steps go on. record: whether every cut is noted there.
    types: long `[B, prompt]`, the `TokenType` of each position of the prompt. real: bool, what of it is no padding.
    position: long `[B, N]`, logical position of each visual token, -1 = none. available: bool `[B, N]`, those whose
    keys and values the layers from the cut on hold; kept: those that they attend to.
    visual, start, count: long `[B]`, visual tokens of each row, kept by prefill, kept now; on the host, like
    rate: float64 `[B]`, the rate in force.
    masses: float32 `[B, 1 + T, H, 4]`, see `DecodeMethod.next_rate`; times: the logical position of each of T steps.
    """

    method: DecodeMethod
    stats: Stats
    record: bool
    types: Tensor
    real: Tensor
    position: Tensor
    available: Tensor
    kept: Tensor
    visual: Tensor
    start: Tensor
    count: Tensor
    rate: Tensor
    masses: Tensor
    times: list[int]

    @property
    def layer(self) -> int:
        return self.method.layer

    @property
    def prompt(self) -> int:
        return self.types.shape[1]

    @property
    def has_hidden(self) -> bool:
        """True if the cache holds tokens that its layers must not see."""
        return self.method.mode != "evict" and bool((self.count < self.start).any())

    # -- following the cache

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the cache's rows."""
        for item in dataclasses.fields(self):
            if isinstance(value := getattr(self, item.name), Tensor):
                setattr(self, item.name, change(value))

    def crop(self, length: int) -> None:
        """Forget the steps of tokens that were taken back; what these steps dropped stays dropped."""
        self.times = [time for time in self.times if time < length]
        self.masses = self.masses[:, : 1 + len(self.times)]

    def hide(self, columns: Tensor) -> Tensor:
        """Return the logical positions `[B, K]` of the keys of a layer from the cut on, -1 = those it must not see."""
        return columns.masked_fill(self.pruned_mask(columns), -1) if self.has_hidden else columns

    def pruned_mask(self, columns: Tensor) -> Tensor:
        """bool like `columns` (logical positions): those of visual tokens that are available but not kept."""
        gone = self.available & ~self.kept
        # What is not gone is written to a scratch entry at the end.
        flags = gone.new_zeros(gone.shape[0], self.prompt + 1)
        flags.scatter_(1, torch.where(gone, self.position, self.prompt), True)[:, -1] = False
        return flags.to(columns.device).gather(1, columns.clamp(0, self.prompt))

    # -- a step

    def decide(self, row: Tensor, time: int) -> bool:
        """Take in a decode step; returns whether tokens are dropped (or return) by it.

        row: float32 `[B, H, time + 1]`, attention of the token at the logical position `time`.
        """
        self.masses = torch.cat([self.masses, sum_by_type(row, self.types)[:, None].to(self.masses.device)], dim=1)
        self.times.append(time)
        changed = self.method.decides(len(self.times)) and self._choose(row)
        self.stats.decode_rates.append(self.rate.tolist())
        self.stats.decode_kept.append(self.count.tolist())
        if changed and self.record:
            self.stats.defer(partial(_add_cut, self.method, time - self.prompt + 1, self._alive()))
        return changed

    def _choose(self, row: Tensor) -> bool:
        method, prunable = self.method, self.start < self.visual
        share = self.start.double() / self.visual.clamp(min=1)
        # What the method makes of the attention decides how much memory is freed: the host has to wait for it.
        rate = method.next_rate(self.masses, to_device(share, self.masses.device))
        rate = rate.double().cpu().clamp(0, method.max_rate)
        if method.batch_policy == "shared" and bool(prunable.any()):
            rate = rate.masked_fill(~prunable, 0).max().expand_as(rate)
        if method.monotone:
            rate = torch.maximum(rate, self.rate)
        self.rate = torch.where(prunable, rate, 0.0)
        count = ((1 - self.rate) * self.visual - 1e-6).ceil().long()
        count = torch.maximum(
            count, torch.tensor([method.count_min_kept(number) for number in self.visual.tolist()], device="cpu")
        )
        count = torch.where(prunable, torch.minimum(count, self.start), self.start)
        if method.monotone:
            count = torch.minimum(count, self.count)
        if method.monotone and torch.equal(count, self.count):
            return False
        index = self.position.clamp(min=0)[:, None].expand(-1, row.shape[1], -1)
        score = row.to(index.device).gather(2, index).mean(1)
        pool = self.kept if method.monotone else self.available
        self.kept, before = top_mask(score, pool, to_device(count, score.device), int(count.max())), self.kept
        self.count = count
        return method.monotone or not torch.equal(self.kept, before)

    def _alive(self) -> Tensor:
        """bool `[B, prompt]`: what is left of the prompt."""
        alive = self.real & (self.types != TokenType.IMG)
        alive = torch.cat([alive, alive.new_zeros(alive.shape[0], 1)], dim=1)
        alive.scatter_(1, torch.where(self.kept, self.position, self.prompt), True)
        return alive[:, :-1]


def _add_cut(method: DecodeMethod, step: int, alive: Tensor, stats: Stats) -> None:
    kept = [row.nonzero().flatten().tolist() for row in alive.cpu()]
    stats.cuts.append(Cut(method.site, method.layer, method.name, kept, step=step))


def sum_by_type(row: Tensor, types: Tensor) -> Tensor:
    """float32 `[B, H, 4]`: a row of attention `[B, H, L]` summed over the types of its tokens; after the prompt all is
    answer."""
    types = torch.nn.functional.pad(types.to(row.device), (0, row.shape[2] - types.shape[1]), value=int(TokenType.RES))
    masses = row.new_zeros(*row.shape[:2], len(TokenType))
    return masses.scatter_add_(2, types[:, None].expand_as(row), row)


def right_align(stays: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the slots (long `[B, width]`) that bring those that stay, `width` in a row at most, to the right end, and
    which of them do stay."""
    view = partition(~stays)[:, stays.shape[1] - width :]
    return view, stays.gather(1, view)


def gather_keys(states: Tensor, view: Tensor) -> Tensor:
    """`[B, H, K, D]` -> `[B, H, K', D]`, in memory of its own."""
    index = view.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
