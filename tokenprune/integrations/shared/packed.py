# SPDX-License-Identifier: Apache-2.0
"""Units of patches on their way through towers that pack the patches of all images into one sequence (the Qwen-VL
make, GLM), whichever library runs the tower.

After these towers the patches of a unit, which stand side by side in the sequence, become one visual token. Units leave
as wholes: some are dropped at the input of a block, some join others between a block's attention and its MLP. What
attends to itself (an image, a frame, a window) shrinks to its units that are left; these keep their rotary places. What
comes after the blocks gets back the sequence of all units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.shared.packed_merging import PackedMatch
from tokenprune.kernels.compact import partition
from tokenprune.kernels.join import join
from tokenprune.ops.transfer import to_device

# Returns which units stay at the input of a block, bool `[n]`, of the hidden states `[n * size, ...]` that reach it.
Drop = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PackedUnits:
    """Of the N units that entered a tower, the n that are left.

    size: patches in one. kept: long `[n]`, which are left, ascending. owner: long `[N]`, for each unit that entered the
    place among those left of the one that it is part of, -1 for one that was dropped. weight: float32 `[n]`, units that
    each is made of; None before a merge. drops: whether any was dropped.
    """

    size: int
    kept: Tensor
    owner: Tensor
    weight: Tensor | None = None
    drops: bool = False

    @staticmethod
    def of(count: int, size: int, device: torch.device) -> PackedUnits:
        """Return the units of a tower that `count` of them enter."""
        units = torch.arange(count, device=device)
        return PackedUnits(size, units, units)

    def keep(self, stays: Tensor, hidden: Tensor) -> tuple[PackedUnits, Tensor]:
        """Return the rest where only some stay, bool `[n]`, and of `hidden` `[n * size, ...]` what belongs to them."""
        places = to_device(stays.nonzero()[:, 0], self.kept.device)
        # One entry more than there are places: those that were dropped before stay so.
        place = places.new_full((len(stays) + 1,), -1)
        place = place.index_copy(0, places, torch.arange(len(places), device=places.device))
        weight = None if self.weight is None else self.weight[places]
        units = PackedUnits(self.size, self.kept[places], place[self.owner], weight, drops=True)
        return units, hidden.unflatten(0, (-1, self.size))[to_device(places, hidden.device)].flatten(0, 1)

    def merge(self, into: Tensor, hidden: Tensor, count: int) -> tuple[PackedUnits, Tensor]:
        """Return the rest after a merge, `count` units, and their hidden states `[count * size, D]`.

        into: long `[n]`, the place of the unit that each joins (itself: it stays). hidden: `[n * size, D]`. Two units
        merge patch by patch, each with the one at its place of the other.
        """
        stays = into == torch.arange(len(into), device=into.device)
        target = (stays.cumsum(0) - 1)[into]
        weight = torch.ones(len(into), dtype=torch.float32, device=into.device) if self.weight is None else self.weight
        order = partition(stays[None])[0]
        kept, gone = order[:count], order[count:]
        merged = join(hidden.view(len(into), -1), kept, weight[kept], gone, target[gone], weight[gone])
        total = weight.new_zeros(count).index_add(0, target, weight)
        owner = target[self.owner].masked_fill(self.owner < 0, -1) if self.drops else target[self.owner]
        units = replace(self, kept=self.kept[kept], owner=owner, weight=total)
        return units, merged.view(-1, hidden.shape[-1])

    def rows(self, x: Tensor) -> Tensor:
        """`[N * size, ...]` -> `[n * size, ...]`: what is known of all patches, of those that are left."""
        return x.unflatten(0, (-1, self.size))[to_device(self.kept, x.device)].flatten(0, 1)

    def borders(self, ends: Tensor) -> Tensor:
        """Return the borders of what attends to itself, in patches that are left; what is empty disappears. ends: those
        among all patches."""
        left = torch.searchsorted(self.kept, ends.to(self.kept) // self.size)  # units that are left before each border
        return (left * self.size).unique_consecutive().to(ends)

    def full(self, x: Tensor) -> Tensor:
        """`[n * size, D]` -> `[N * size, D]`, or `[n, D]` -> `[N, D]`: each unit that entered gets what the one has
        that it is part of, zeros where it was dropped. What has a row for each patch is left alone."""
        if len(self.kept) == len(self.owner) or len(x) == len(self.owner) * self.size:
            return x
        units = x.view(len(self.kept), -1, x.shape[-1])
        if self.drops:  # of which -1 is the last row
            units = torch.nn.functional.pad(units, (0, 0, 0, 0, 0, 1))
        return units[to_device(self.owner, x.device)].flatten(0, 1)

    def log_weight(self, dtype: torch.dtype) -> Tensor | None:
        """Return the logarithm of the weight of each patch's unit, `[n * size]`; None before a merge."""
        return None if self.weight is None else self.weight.log().repeat_interleave(self.size).to(dtype)


@dataclass
class PackedRun:
    """One forward of a packed tower: an engine tells it what happens, and hands on what it returns.

    units: those that are left so far. sizes: of each image how many units entered, in the order of rows. order: long
    `[N]`, the units in the order in which the tower lines them up; None where that is the order of rows. drops: what is
    asked at the input of blocks, by their index. match: finds what merges in a block; None: nothing does. kept: of each
    image which units stay, bool on the host, where that is known before the tower runs.

    counts: units that entered each block. history: the units that its hidden states are of. keys: those of the block
    that runs, if some may merge there. merged: what enters its MLP, if some did; output: what leaves it then. bias,
    start: what is added to its attention, and the patch at which the next piece of that starts.
    """

    units: PackedUnits
    sizes: list[int]
    order: Tensor | None = None
    drops: Mapping[int, Drop] = field(default_factory=dict)
    match: PackedMatch | None = None
    kept: list[Tensor] | None = None
    counts: list[int] = field(default_factory=list)
    history: list[PackedUnits] = field(default_factory=list)
    keys: Tensor | None = None
    merged: Tensor | None = None
    output: Tensor | None = None
    bias: Tensor | None = None
    start: int = 0
    _memo: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def drop(self, index: int, hidden: Tensor) -> Tensor:
        """Return what is left of the input of the block at `index`, one of `drops`."""
        with torch.no_grad():
            stays = self.drops[index](hidden)
        if index:  # of the first block its input as it begins is noted in the end
            self.history.append(self.units)
        self.units, hidden = self.units.keep(stays, hidden)
        self._memo = {}
        return hidden

    def enter(self, index: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Note that the block at `index` begins, and return its arguments that are others for the units that are left.
        given: its arguments for all units, by the names of either library."""
        self.keys = self.merged = self.output = None
        self.start = 0
        self.counts.append(len(self.units.kept))
        if len(self.history) == index:
            self.history.append(self.units)
        changed: dict[str, Any] = {}
        if len(self.units.kept) == len(self.units.owner):
            return changed
        for name, carry in _CARRIED.items():
            if (value := given.get(name)) is not None:
                if id(value) not in self._memo:  # blocks are handed the same again and again
                    self._memo[id(value)] = value, carry(self.units, value)  # both, so that no id is given out again
                changed[name] = self._memo[id(value)][1]
        if (longest := given.get("max_seqlen")) is not None:
            changed["max_seqlen"] = _longest(longest, changed["cu_seqlens"])
        return changed

    def merge(self, index: int, hidden: Tensor) -> Tensor | None:
        """Return what `hidden` `[n * size, D]` becomes between attention and MLP of the block at `index`, by the keys
        that were noted there; None if nothing merges."""
        if self.match is None or self.keys is None:
            return None
        with torch.no_grad():
            into = self.match.find(index, self.keys.view(len(self.units.kept), -1))
        self.keys = None
        if into is None:
            return None
        self.units, merged = self.units.merge(into, hidden, sum(self.match.left))
        self._memo = {}
        return merged

    def spread(self, states: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return hidden states, from the first block's input to the last one's output, with a row for each patch."""
        return tuple(units.full(x) for units, x in zip([*self.history, self.units], states, strict=True))

    def owners(self) -> list[Tensor]:
        """Return `PackedUnits.owner` image by image, in the order of rows."""
        owner = self.units.owner
        if self.order is not None:
            owner = owner[to_device(self.order, owner.device).argsort()]
        return list(owner.split(self.sizes))


def _longest(before: Tensor | int, borders: Tensor) -> Tensor | int:
    """Return the length of the longest piece; 0 where an attention that does not ask for it got that."""
    if isinstance(before, Tensor):
        asked = before.device.type != "cpu" or bool(before)
        return borders.diff().max().to(before) if asked else before
    return int(borders.diff().max())


# How the arguments of a block follow from those for all units, under the names of transformers and of vLLM.
_CARRIED: dict[str, Callable[[PackedUnits, Any], Any]] = {
    "cu_seqlens": PackedUnits.borders,
    "position_embeddings": lambda units, places: tuple(map(units.rows, places)),
    "rotary_pos_emb_cos": PackedUnits.rows,
    "rotary_pos_emb_sin": PackedUnits.rows,
}
