# SPDX-License-Identifier: Apache-2.0
"""Units on their way through a vision tower, whichever library runs it.

A unit leaves as a whole: it is dropped, or joins another one. Most towers have a row for each image or tile, and a unit
is a token of it. Towers of packed patches (the Qwen-VL make, GLM) lay the patches of all images end to end: there is
one row, and a unit is the patches, side by side, that become one visual token. What attends to itself there (an image,
a frame, a window) shrinks to its units that are left; these keep their rotary places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenprune.kernels.compact import gather_tokens
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.transfer import to_device


@dataclass(frozen=True)
class Restoration:
    """The way back of units that left.

    drop: by which they left. attending: the blocks in which all attend, and the MLP runs on those that stayed. end: the
    block after which all are back. hidden: the states before they left. stayed, gone: long, rows of these states, in
    the order in which they go on. guides: long, for each row that is gone some of those that stayed, end to end;
    starts: where those of each begin.
    """

    drop: Merge
    attending: range
    end: int
    hidden: Tensor
    kept: Tensor
    dropped: Tensor
    guides: Tensor
    starts: Tensor

    def is_due(self, index: int) -> bool:
        """Return whether what leaves the block at `index` is of all units."""
        return index + 1 in self.attending or index == self.end

    def restore(self, x: Tensor) -> Tensor:
        """Return `[N, D]` of all rows, of what those became that stayed."""
        left, before = x.flatten(0, -2), self.hidden.flatten(0, -2)
        moved = left.float() - before[self.kept].float()
        moved = torch.nn.functional.embedding_bag(self.guides, moved, self.starts, mode="mean")
        back = (before[self.dropped].float() + moved).to(x.dtype)
        return torch.cat([left, back])[torch.cat([self.kept, self.dropped]).argsort()]


@dataclass(frozen=True)
class Units:
    """Units of B rows that are left of the N of each that entered a tower: n in the row that has most; the others are
    padded to it, after their units.

    owner: long `[B, N]`, for each unit that entered the place among those left of the one that it is part of, -1 for
    one that was dropped. left: units in each row. weight: float32 `[B, n]`, units that each is made of, 0 for padding;
    None before a merge. masked: whether `weight` is 0 for what the tower masks, too. drops: whether any was dropped.
    patches: of a packed tower, patches in a unit; else 0. kept: of a packed tower long `[n]`, which units are left.
    back: the way of units that come back, if they do.
    """

    owner: Tensor
    num_units: list[int]
    weight: Tensor | None = None
    masked: bool = False
    drops: bool = False
    patches: int = 0
    kept: Tensor | None = None
    restoration: Restoration | None = None

    @staticmethod
    def from_rows(rows: int, count: int, device: torch.device) -> Units:
        """Return the tokens of a tower that `rows` images enter with `count` tokens each."""
        return Units(torch.arange(count, device=device).expand(rows, -1), [count] * rows)

    @staticmethod
    def from_packed(count: int, patches: int, device: torch.device) -> Units:
        """Return the units of a packed tower that `count` of them enter, of so many patches each."""
        units = torch.arange(count, device=device)
        return Units(units[None], [count], patches=patches, kept=units)

    @property
    def is_complete(self) -> bool:
        """True where all are left, as they entered."""
        return sum(self.num_units) == self.owner.numel()

    @property
    def has_padding(self) -> bool:
        """True if the rows differ in length."""
        return len(set(self.num_units)) > 1

    def apply(self, merge: Merge, hidden: Tensor) -> tuple[Units, Tensor]:
        """Return the rest after a merge, and of the hidden states, `[B, n, D]` or, packed, `[n * patches, ...]`, what
        they become. Two units of a packed tower merge patch by patch, each with the one at its place of the other."""
        x = hidden.reshape(1, self.num_units[0], -1) if self.patches else hidden
        left = merge.num_kept or [merge.keep.shape[1]] * len(self.num_units)
        weight = self.weight
        if weight is None and (not merge.is_drop or len(set(left)) > 1):
            weight = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
        x = merge.mean(x, weight)
        owner = merge.assign.gather(1, self.owner.clamp(min=0) if self.drops else self.owner)
        units = replace(
            self,
            owner=owner.masked_fill_(self.owner < 0, -1) if self.drops else owner,
            num_units=left,
            weight=None if weight is None else merge.sum(weight),
            drops=self.drops or merge.is_drop,
            kept=None if self.kept is None else self.kept[merge.keep[0]],
        )
        return units, x.reshape(-1, *hidden.shape[1:]) if self.patches else x

    def expand(self, x: Tensor) -> Tensor:
        """`[B, n, D]` -> `[B, N, D]`, and of a packed tower `[n * patches, D]` or `[n, D]` -> all: each unit that
        entered gets what the one has that it is part of, and where it was dropped zeros, or what `back` says. What has
        a row for each patch of a packed tower is left alone."""
        entered = self.owner.shape[1]
        if self.is_complete or (self.patches and len(x) == entered * self.patches):
            return x
        if self.restoration is not None:
            rows = self.restoration.restore(x)
            return rows if self.patches else rows.view(len(x), entered, -1)
        rows = x.view(1, self.num_units[0], -1) if self.patches else x
        if self.drops:  # of which -1 is the last
            rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))
        owner = to_device(self.owner, x.device)
        if self.patches:
            return rows[0, owner[0]].view(-1, *x.shape[1:])
        return gather_tokens(rows, owner % rows.shape[1] if self.drops else owner, 1)

    def compute_bias(self, proportional: bool, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to attention logits, `[B, 1, 1, n]`, or, packed, `[1, 1, 1, n * patches]`; None for
        nothing. Padding gets log(0) = -inf."""
        if self.weight is None or not (proportional or self.has_padding or self.masked):
            return None
        weight = (self.weight if proportional else (self.weight > 0).float()).log()
        if self.patches:
            weight = weight.repeat_interleave(self.patches, dim=1)
        return weight.to(dtype)[:, None, None, :]

    # -- packed towers

    def select_patches(self, x: Tensor) -> Tensor:
        """`[N * patches, ...]` -> `[n * patches, ...]`: what is known of all patches, of those that are left."""
        assert self.kept is not None  # the tower is a packed one
        return x.unflatten(0, (-1, self.patches))[to_device(self.kept, x.device)].flatten(0, 1)

    def compute_cu_seqlens(self, ends: Tensor) -> Tensor:
        """Return the borders of what attends to itself, in patches that are left; what is empty disappears. ends: those
        among all patches."""
        assert self.kept is not None
        left = torch.searchsorted(self.kept, ends.to(self.kept) // self.patches)  # units left before each border
        return (left * self.patches).unique_consecutive().to(ends)

    def update_arguments(self, given: Mapping[str, Any], known: dict[int, tuple[Any, Any]]) -> dict[str, Any]:
        """Return the arguments of a block that are others for the units that are left. given: those for all units, by
        the names of either library. known: what was found for these units before: blocks are handed the same again and
        again."""
        changed: dict[str, Any] = {}
        if self.kept is None or self.is_complete:
            return changed
        for name, carry in _CARRIED.items():
            if (value := given.get(name)) is not None:
                if id(value) not in known:
                    known[id(value)] = value, carry(self, value)  # both, so that no id is given out again
                changed[name] = known[id(value)][1]
        if (longest := given.get("max_seqlen")) is not None:
            changed["max_seqlen"] = _longest(longest, changed["cu_seqlens"])
        return changed


def average_groups(x: Tensor, owner: Tensor) -> Tensor:
    """`[N, D]`: each row becomes the mean of the rows with its owner."""
    total = torch.zeros(len(owner), x.shape[1], dtype=torch.float32, device=x.device).index_add(0, owner, x.float())
    count = total.new_zeros(len(owner)).index_add(0, owner, total.new_ones(len(owner)))
    return (total / count.clamp(min=1)[:, None])[owner].to(x.dtype)


def _longest(before: Tensor | int, borders: Tensor) -> Tensor | int:
    """Return the length of the longest piece; 0 where an attention that does not ask for it got that."""
    if isinstance(before, Tensor):
        asked = before.device.type != "cpu" or bool(before)
        return borders.diff().max().to(before) if asked else before
    return int(borders.diff().max())


# How the arguments of a block follow from those for all units, under the names of transformers and of vLLM.
_CARRIED: dict[str, Callable[[Units, Any], Any]] = {
    "cu_seqlens": Units.compute_cu_seqlens,
    "position_embeddings": lambda units, places: tuple(map(units.select_patches, places)),
    "rotary_pos_emb_cos": Units.select_patches,
    "rotary_pos_emb_sin": Units.select_patches,
}
