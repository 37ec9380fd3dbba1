# SPDX-License-Identifier: Apache-2.0
"""State of a method that drops visual tokens during decoding. It is stored on the cache."""

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
    """State on a cache, stored in its `Reduction`.

    Attributes:
        method: The method.
        stats: Statistics of the prefill. Decoding steps add to them.
        record: Whether the statistics keep a record of each cut.
        types: `TokenType` of each position of the prompt, shape (batch, prompt), int64.
        is_real: False at padding, shape (batch, prompt), bool.
        position: Logical position of each visual token, shape (batch, tokens), int64, padded with -1.
        available: Visual tokens whose keys the layers after the cut hold, shape (batch, tokens), bool.
        kept: Visual tokens that these layers attend to, shape (batch, tokens), bool.
        visual: Number of visual tokens of each row, shape (batch,), int64, on the host.
        start: Number of visual tokens that the prefill kept, like `visual`.
        count: Number of visual tokens that are kept now, like `visual`.
        rate: Current pruning rate of each row, shape (batch,), float64, on the host.
        masses: See `DecodeMethod.next_rate`, shape (batch, 1 + steps, heads, 4), float32.
        times: Logical position of the token of each step.
    """

    method: DecodeMethod
    stats: Stats
    record: bool
    types: Tensor
    is_real: Tensor
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
        """Reorder, repeat or select the rows of all tensors, like the rows of the cache.

        Args:
            change: Function from a tensor to a tensor with other rows.
        """
        for item in dataclasses.fields(self):
            if isinstance(value := getattr(self, item.name), Tensor):
                setattr(self, item.name, change(value))

    def crop(self, length: int) -> None:
        """Forget the steps of removed tokens. Visual tokens that these steps dropped stay dropped."""
        self.times = [time for time in self.times if time < length]
        self.masses = self.masses[:, : 1 + len(self.times)]

    def hide(self, columns: Tensor) -> Tensor:
        """Replace the logical positions of hidden keys by -1. columns: Shape (batch, keys)."""
        return columns.masked_fill(self.pruned_mask(columns), -1) if self.has_hidden else columns

    def pruned_mask(self, columns: Tensor) -> Tensor:
        """Return True for logical positions of visual tokens that are available but not kept."""
        dropped = self.available & ~self.kept
        # All other tokens are written to a scratch entry at the end.
        flags = dropped.new_zeros(dropped.shape[0], self.prompt + 1)
        flags.scatter_(1, torch.where(dropped, self.position, self.prompt), True)[:, -1] = False
        return flags.to(columns.device).gather(1, columns.clamp(0, self.prompt))

    # -- a step

    def decide(self, row: Tensor, time: int) -> bool:
        """Process a decoding step.

        Args:
            row: Attention of the step's token, shape (batch, heads, time + 1), float32.
            time: Logical position of the token.

        Returns:
            Whether the set of kept tokens changed.
        """
        self.masses = torch.cat([self.masses, sum_by_type(row, self.types)[:, None].to(self.masses.device)], dim=1)
        self.times.append(time)
        changed = self.method.decides(len(self.times)) and self._choose(row)
        self.stats.decode_rates.append(self.rate.tolist())
        self.stats.decode_kept.append(self.count.tolist())
        if changed and self.record:
            self.stats.defer(partial(_add_cut, self.method, time - self.prompt + 1, self._compute_alive_mask()))
        return changed

    def _choose(self, row: Tensor) -> bool:
        method, prunable = self.method, self.start < self.visual
        share = self.start.double() / self.visual.clamp(min=1)
        # The rate decides how much memory is freed, so the host waits for it here.
        rate = method.next_rate(self.masses, to_device(share, self.masses.device))
        rate = rate.double().cpu().clamp(0, method.max_rate)
        if method.batch_policy == "shared" and bool(prunable.any()):
            rate = rate.masked_fill(~prunable, 0).max().expand_as(rate)
        if method.monotone:
            rate = torch.maximum(rate, self.rate)
        self.rate = torch.where(prunable, rate, 0.0)
        count = ((1 - self.rate) * self.visual - 1e-6).ceil().long()
        count = torch.maximum(
            count,
            torch.tensor([method.count_min_kept(num_visual) for num_visual in self.visual.tolist()], device="cpu"),
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

    def _compute_alive_mask(self) -> Tensor:
        """Return the mask of the prompt's tokens that are kept, shape (batch, prompt), bool."""
        alive = self.is_real & (self.types != TokenType.IMG)
        alive = torch.cat([alive, alive.new_zeros(alive.shape[0], 1)], dim=1)
        alive.scatter_(1, torch.where(self.kept, self.position, self.prompt), True)
        return alive[:, :-1]


def _add_cut(method: DecodeMethod, step: int, alive: Tensor, stats: Stats) -> None:
    kept = [row.nonzero().flatten().tolist() for row in alive.cpu()]
    stats.cuts.append(Cut(method.site, method.layer, method.name, kept, step=step))


def sum_by_type(row: Tensor, types: Tensor) -> Tensor:
    """Sum attention over the types of tokens.

    Args:
        row: Attention of one token, shape (batch, heads, length).
        types: `TokenType` of the prompt's tokens, shape (batch, prompt). Later tokens have the type RES.

    Returns:
        Sums, shape (batch, heads, 4), float32.
    """
    types = torch.nn.functional.pad(types.to(row.device), (0, row.shape[2] - types.shape[1]), value=int(TokenType.RES))
    masses = row.new_zeros(*row.shape[:2], len(TokenType))
    return masses.scatter_add_(2, types[:, None].expand_as(row), row)


def right_align(kept: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return slots that move the kept slots to the right end of each row, and a mask of kept slots.

    Args:
        kept: Mask of kept slots, shape (batch, slots), bool.
        width: Largest number of kept slots in a row.

    Returns:
        Two tensors of shape (batch, width), int64 and bool.
    """
    index = partition(~kept)[:, kept.shape[1] - width :]
    return index, kept.gather(1, index)


def gather_keys(states: Tensor, slots: Tensor) -> Tensor:
    """Gather slots of keys or values, shape (batch, heads, slots, channels), into new memory."""
    expanded = slots.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, expanded)
