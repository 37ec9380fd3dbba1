# SPDX-License-Identifier: Apache-2.0
"""State of the units during a forward of a vision tower, for all engines.

A unit is dropped or merged as a whole. In most towers each image or tile is a row, and a unit is a token. Packed towers
(Qwen-VL, GLM) concatenate the patches of all images in one row, and a unit is the patches of one visual token, which
are adjacent. Attention sequences of a packed tower (an image, a frame, a window) shrink to their kept units, which keep
their rotary positions.
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
    """Restores dropped units at the end of a tower.

    Attributes:
        drop: The merge that dropped the units.
        attending: Blocks in which all units attend. The MLP runs only on the kept units.
        end: Index of the block after which all units are restored.
        hidden: Hidden states before the drop.
        kept: Indices of the kept rows of `hidden`, int64, in their new order.
        dropped: Indices of the dropped rows of `hidden`, int64.
        guides: Guides of all dropped rows, concatenated: indices of kept rows, int64.
        starts: Offset of the guides of each dropped row.
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
        """Return True if the output of the block at `index` must contain all units."""
        return index + 1 in self.attending or index == self.end

    def restore(self, x: Tensor) -> Tensor:
        """Return the states of all rows, shape (N, channels), given the states of the kept rows.

        A dropped row moves by the mean change of its guides since the drop.
        """
        current, before = x.flatten(0, -2), self.hidden.flatten(0, -2)
        moved = current.float() - before[self.kept].float()
        moved = torch.nn.functional.embedding_bag(self.guides, moved, self.starts, mode="mean")
        restored = (before[self.dropped].float() + moved).to(x.dtype)
        return torch.cat([current, restored])[torch.cat([self.kept, self.dropped]).argsort()]


@dataclass(frozen=True)
class Units:
    """Kept units of a batch.

    B is the number of rows, N the number of units of a row at the entry of the tower, and n the number of kept units of
    the longest row. Shorter rows are padded at the end.

    Attributes:
        owner: Index of the kept unit that contains each unit of the entry, shape (B, N), int64, -1 if dropped.
        num_units: Number of kept units of each row.
        weight: Number of members of each kept unit, shape (B, n), float32, 0 for padding. None before a merge.
        masked: Whether `weight` is also 0 for units that the tower masks.
        drops: Whether a unit was dropped.
        patches: Packed towers: number of patches of a unit, else 0.
        kept: Packed towers: indices of the kept units, shape (n,), int64.
        restoration: Restores dropped units, if the method does so.
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
        """Return the initial state for `rows` images with `count` tokens each."""
        return Units(torch.arange(count, device=device).expand(rows, -1), [count] * rows)

    @staticmethod
    def from_packed(count: int, patches: int, device: torch.device) -> Units:
        """Return the initial state of a packed tower for `count` units of `patches` patches each."""
        units = torch.arange(count, device=device)
        return Units(units[None], [count], patches=patches, kept=units)

    @property
    def is_complete(self) -> bool:
        """True if all units are kept and none is merged."""
        return sum(self.num_units) == self.owner.numel()

    @property
    def has_padding(self) -> bool:
        """True if the rows differ in length."""
        return len(set(self.num_units)) > 1

    def apply(self, merge: Merge, hidden: Tensor) -> tuple[Units, Tensor]:
        """Merge units.

        In packed towers two units merge patch by patch: each patch merges with the patch at the same position.

        Args:
            hidden: Hidden states, shape (B, n, channels), or (n * patches, ...) for packed towers.

        Returns:
            The state and the hidden states after the merge.
        """
        x = hidden.reshape(1, self.num_units[0], -1) if self.patches else hidden
        num_units = merge.num_kept or [merge.keep.shape[1]] * len(self.num_units)
        weight = self.weight
        if weight is None and (not merge.is_drop or len(set(num_units)) > 1):
            weight = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
        x = merge.mean(x, weight)
        owner = merge.assign.gather(1, self.owner.clamp(min=0) if self.drops else self.owner)
        units = replace(
            self,
            owner=owner.masked_fill_(self.owner < 0, -1) if self.drops else owner,
            num_units=num_units,
            weight=None if weight is None else merge.sum(weight),
            drops=self.drops or merge.is_drop,
            kept=None if self.kept is None else self.kept[merge.keep[0]],
        )
        return units, x.reshape(-1, *hidden.shape[1:]) if self.patches else x

    def expand(self, x: Tensor) -> Tensor:
        """Expand values of the kept units to all units.

        Args:
            x: Values, shape (B, n, channels), or (n * patches, channels) or (n, channels) for packed towers. Values
                packed tower with a row for each patch are returned unchanged.

        Returns:
            Values of all units, shape (B, N, channels). A merged unit has the value of its group. A dropped unit is
            zero, or restored by `restoration`.
        """
        entered = self.owner.shape[1]
        if self.is_complete or (self.patches and len(x) == entered * self.patches):
            return x
        if self.restoration is not None:
            rows = self.restoration.restore(x)
            return rows if self.patches else rows.view(len(x), entered, -1)
        rows = x.view(1, self.num_units[0], -1) if self.patches else x
        if self.drops:  # index -1 then selects the zeros
            rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))
        owner = to_device(self.owner, x.device)
        if self.patches:
            return rows[0, owner[0]].view(-1, *x.shape[1:])
        return gather_tokens(rows, owner % rows.shape[1] if self.drops else owner, 1)

    def compute_bias(self, proportional: bool, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of the attention logits, or None if it is zero.

        Padding has the bias log(0) = -inf.

        Args:
            proportional: Whether attention weighs a unit by its number of members.
            dtype: Dtype of the result.

        Returns:
            Bias, shape (B, 1, 1, n), or (1, 1, 1, n * patches) for packed towers.
        """
        if self.weight is None or not (proportional or self.has_padding or self.masked):
            return None
        weight = (self.weight if proportional else (self.weight > 0).float()).log()
        if self.patches:
            weight = weight.repeat_interleave(self.patches, dim=1)
        return weight.to(dtype)[:, None, None, :]

    # -- packed towers

    def select_patches(self, x: Tensor) -> Tensor:
        """Select the values of the kept units, (N * patches, ...) -> (n * patches, ...)."""
        assert self.kept is not None  # the tower is packed
        return x.unflatten(0, (-1, self.patches))[to_device(self.kept, x.device)].flatten(0, 1)

    def compute_cu_seqlens(self, ends: Tensor) -> Tensor:
        """Return the boundaries of the attention sequences among the kept patches. Empty sequences are removed.

        Args:
            ends: Boundaries among all patches.
        """
        assert self.kept is not None
        num_before = torch.searchsorted(self.kept, ends.to(self.kept) // self.patches)
        return (num_before * self.patches).unique_consecutive().to(ends)

    def update_arguments(self, kwargs: Mapping[str, Any], cache: dict[int, tuple[Any, Any]]) -> dict[str, Any]:
        """Return the arguments of a block that change with the kept units.

        Args:
            kwargs: Arguments for all units, with the names of transformers or vLLM.
            cache: Results for this state by the id of the argument. All blocks get the same tensors.
        """
        changed: dict[str, Any] = {}
        if self.kept is None or self.is_complete:
            return changed
        for name, update in _UPDATES.items():
            if (value := kwargs.get(name)) is not None:
                if id(value) not in cache:
                    cache[id(value)] = value, update(self, value)  # keeping the value alive keeps its id unique
                changed[name] = cache[id(value)][1]
        if (longest := kwargs.get("max_seqlen")) is not None:
            changed["max_seqlen"] = _compute_max_seqlen(longest, changed["cu_seqlens"])
        return changed


def average_groups(x: Tensor, owner: Tensor) -> Tensor:
    """Replace each row by the mean of the rows with the same owner.

    Args:
        x: Values, shape (rows, channels).
        owner: Group of each row, shape (rows,), int64.
    """
    total = torch.zeros(len(owner), x.shape[1], dtype=torch.float32, device=x.device).index_add(0, owner, x.float())
    count = total.new_zeros(len(owner)).index_add(0, owner, total.new_ones(len(owner)))
    return (total / count.clamp(min=1)[:, None])[owner].to(x.dtype)


def _compute_max_seqlen(before: Tensor | int, cu_seqlens: Tensor) -> Tensor | int:
    """Return the length of the longest sequence. Keep a value of 0, which means that attention does not need it."""
    if isinstance(before, Tensor):
        is_needed = before.device.type != "cpu" or bool(before)
        return cu_seqlens.diff().max().to(before) if is_needed else before
    return int(cu_seqlens.diff().max())


# Functions that compute the arguments of a block, by their names in transformers and vLLM.
_UPDATES: dict[str, Callable[[Units, Any], Any]] = {
    "cu_seqlens": Units.compute_cu_seqlens,
    "position_embeddings": lambda units, tables: tuple(map(units.select_patches, tables)),
    "rotary_pos_emb_cos": Units.select_patches,
    "rotary_pos_emb_sin": Units.select_patches,
}
