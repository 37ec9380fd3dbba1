# SPDX-License-Identifier: Apache-2.0
"""Merging inside towers that pack the patches of all images into one sequence (Qwen2-VL to Qwen3.5).

Behind these towers 2 x 2 patches, which stand side by side in the sequence, become one visual token. What merges is
therefore such a unit with another of the same image (or frame), patch by patch at the same place of the unit: the
2 x 2 stay together, and the unit keeps the rotary places of the one that others merged into. A unit that stays, stays
in its attention window; units of other windows may have merged into it. At the tower's end each patch gets the feature
of its merged one back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.encoder import EncoderMethod, Matcher, Tower
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.attention.observer import Observer
from tokenprune.integrations.hf.encoded.record import record_of
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.tower.base import TowerPatch
from tokenprune.integrations.shared.attachable import states
from tokenprune.integrations.shared.block_merging import Block, check_checkpointing
from tokenprune.integrations.shared.packed_features import first_of_group
from tokenprune.kernels.compact import partition
from tokenprune.kernels.join import join
from tokenprune.transfer import to_device

BLOCKS = frozenset(
    f"{name}VisionBlock" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
)


@dataclass
class Packed:
    """One forward of a packed tower. N units entered, n are left so far.

    grids: (frames, height, width) in patches of each image. frame: long `[N]`, the image or frame of each unit that
    entered. plans: for each kind of frame (its units and its budget) its frames, and what finds the merge of each
    block. left: units of each frame so far. kept: long `[n]`, which units are left, ascending. owner: long `[N]`, for
    each unit that entered the place among those left of the one that it is part of. size: float32 `[n]`, units that
    each is made of; None before a merge. start: the patch at which the next piece of a block's attention starts.
    """

    grids: list[list[int]]
    frame: Tensor
    plans: list[tuple[list[int], list[Matcher | None]]]
    left: list[int]
    kept: Tensor
    owner: Tensor
    size: Tensor | None = None
    keys: Tensor | None = None
    merged: Tensor | None = None
    output: Tensor | None = None
    start: int = 0
    counts: list[int] = field(default_factory=list)
    owners: list[Tensor] = field(default_factory=list)
    memo: dict[Any, Any] = field(default_factory=dict)


class PackedTowerPatch(TowerPatch):
    """Merges inside a packed tower of `adapter`'s model, and tells which visual tokens became one.

    Raises UnsupportedSetupError for attention back ends that take no bias.
    """

    uneven = False  # frames lie end to end

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget) -> None:
        self.tower = adapter.base.visual
        self.unit = self.tower.spatial_merge_size**2  # patches that become one visual token
        blocks = [Block(block, block.norm2, block.mlp) for block in self.tower.blocks]
        # How many units an image has, only the image tells: 1 stands for that.
        super().__init__(adapter, method, budget, blocks, Tower(1, 0, len(blocks), len(blocks), self.tower))
        self.observers = []
        if method.proportional:
            attentions = [block.attn for block in self.tower.blocks]
            self.observers = [Observer(attention, self._bias) for attention in attentions]
        self._check_attention()

    def _check_attention(self) -> None:
        self.check_bias(self.tower.blocks[0].attn.config if not self.observers else self.observers[0].config)

    def _attach(self) -> None:
        super()._attach()
        for observer in self.observers:
            self.attach_part(observer)
        for index, block in enumerate(self.tower.blocks):
            self.hook(block.attn.qkv.register_forward_hook(partial(self._note_qkv, index)))
        for merger in (self.tower.merger, *getattr(self.tower, "deepstack_merger_list", ())):
            self.hook(merger.register_forward_pre_hook(self._enter_merger))
        self.hook(self.tower.register_forward_pre_hook(self._enter_tower, with_kwargs=True))
        self.hook(self.tower.register_forward_hook(self._leave_tower, with_kwargs=True))

    # -- the tower's outside contract

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._check_attention()  # it may have been changed after the patch
        self.end()
        left: list[int] = []
        kinds: dict[tuple, list[int]] = defaultdict(list)
        grids = (kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]).tolist()
        for t, h, w in grids:
            count = h * w // self.unit
            for keep in self._keeps(t):
                kinds[count, keep].append(len(left))
                left.append(count)
        plans = [(frames, self.method.plan(*self._asked(count, keep))) for (count, keep), frames in kinds.items()]
        pixels, weight = args[0] if args else kwargs["hidden_states"], next(self.tower.merger.parameters())
        device = pixels.device if weight.is_meta else weight.device  # that of offloaded weights is not known yet
        units = torch.arange(sum(left), device=device)
        frame = torch.repeat_interleave(to_device(left, device), output_size=len(units))
        states()[self] = Packed(grids, frame, plans, left, units, units)

    def _keeps(self, frames: int) -> list[float | int]:
        """The budget's keep for each of the frames of a video: a number of tokens is for all of them."""
        keep = self.budget.keep
        if isinstance(keep, int):
            share, over = divmod(max(keep, frames), frames)
            return [share + (frame < over) for frame in range(frames)]
        return [keep] * frames

    def _asked(self, count: int, keep: float | int) -> tuple[Budget, Tower]:
        return replace(self.budget, keep=keep), self.shape.of(count)

    def _enter_merger(self, module: nn.Module, args: tuple) -> tuple | None:
        """What reads the blocks' output gets the full grid."""
        state = self.state()
        return None if state is None else (self._restore(state, args[0], state.owner), *args[1:])

    def _restore(self, state: Packed, x: Tensor, owner: Tensor) -> Tensor:
        """`[n * unit, D]` -> `[N * unit, D]`"""
        if len(x) == len(owner) * self.unit:
            return x
        return x.view(-1, self.unit, x.shape[-1])[owner].flatten(0, 1)

    def _leave_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        state = self.end()
        if isinstance(output, tuple):
            raise UnsupportedSetupError(f"{self.method.name}: the tower must return an output object; use return_dict")
        output.last_hidden_state = self._restore(state, output.last_hidden_state, state.owner)
        if getattr(output, "hidden_states", None) is not None:
            stages = zip(output.hidden_states, [*state.owners, state.owner], strict=True)
            output.hidden_states = tuple(self._restore(state, x, owner) for x, owner in stages)
        owner = state.owner
        if hasattr(self.tower, "window_size"):  # its units stand in the order of windows, its output in that of rows
            owner = owner[to_device(window_order(self.tower, args, kwargs), owner.device).argsort()]
        sizes = [t * h * w // self.unit for t, h, w in state.grids]
        self.leave_tokens(output, list(owner.split(sizes)), [count * self.unit for count in state.counts])
        features = getattr(output, "deepstack_features", None)
        if features:  # of blocks at which not all members of a group were one yet
            output.deepstack_features = [_mean_of_groups(x, owner) for x in features]
        return output

    # -- behind the tower

    def groups_of(self, modality: str, arguments: dict[str, Any], output: Any) -> list[Tensor] | None:
        owners = record_of(output).owners
        if owners is None:
            return None
        units = sum(map(len, owners))  # more than there are groups
        return [first_of_group(of_image[None], units)[0] for of_image in owners]

    # -- hooks of the blocks

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        state = self.state()
        if state is None:
            return None
        check_checkpointing(module)
        state.keys = state.merged = state.output = None
        state.start = 0
        state.counts.append(len(state.kept))
        state.owners.append(state.owner)
        if state.size is None:
            return None
        lengths = self._lengths(state, kwargs["cu_seqlens"])
        changed = {"cu_seqlens": lengths}
        if kwargs.get("max_seqlen") is not None:
            longest = lengths.diff().max()
            changed["max_seqlen"] = longest if isinstance(kwargs["max_seqlen"], Tensor) else int(longest)
        places = kwargs["position_embeddings"]
        changed["position_embeddings"] = tuple(self._gathered(state, x) for x in places)
        return args, kwargs | changed

    def _lengths(self, state: Packed, ends: Tensor) -> Tensor:
        """Borders of the pieces that attend to themselves, in patches, for the units that are left. ends: those for all
        units."""
        unit = state.kept * self.unit
        piece = torch.bucketize(unit, ends[1:].to(unit), right=True)
        counts = piece.unique_consecutive(return_counts=True)[1]  # pieces from which all units went disappear
        return torch.cat([counts.new_zeros(1), counts.cumsum(0) * self.unit]).to(ends.dtype)

    def _gathered(self, state: Packed, x: Tensor) -> Tensor:
        return x.view(-1, self.unit, x.shape[-1])[state.kept].flatten(0, 1)

    def _note_qkv(self, index: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Keys before the rotary embedding: what is compared is content, not place."""
        state = self.state()
        if state is not None and any(plan[index] for _, plan in state.plans):
            heads = self.tower.blocks[index].attn.num_heads
            state.keys = output.view(len(output), 3, heads, -1)[:, 1].float().mean(1)

    def _bias(self, observation: Any) -> Tensor | None:
        """The logarithm of the units' sizes, for the next piece that attends to itself."""
        state = self.state()
        if state is None or state.size is None:
            return None
        width = observation.key.shape[2]
        if state.start == 0:
            state.memo["bias"] = state.size.log().repeat_interleave(self.unit).to(observation.key.dtype)
        bias = state.memo["bias"][state.start : state.start + width]
        state.start += width
        return bias[None, None, None, :].expand(1, 1, width, width)

    def _merge(self, index: int, module: nn.Module, args: tuple) -> tuple | None:
        state = self.state()
        if state is None or state.keys is None:
            return None
        hidden = args[0]
        with torch.no_grad():
            into = self._match(state, index)
        state.keys = None
        if into is None:
            return None
        # into: for each unit left the place of the one that it joins (itself: it stays).
        places = torch.arange(len(into), device=into.device)
        stays = into == places
        target = (stays.cumsum(0) - 1)[into]
        size = torch.ones(len(into), device=into.device) if state.size is None else state.size
        count = sum(state.left)
        order = partition(stays[None])[0]
        kept, gone = order[:count], order[count:]
        merged = join(hidden.view(len(into), -1), kept, size[kept], gone, target[gone], size[gone])
        state.merged = merged.view(-1, hidden.shape[-1])
        total = size.new_zeros(count).index_add(0, target, size)
        state.size, state.kept, state.owner = total, state.kept[kept], target[state.owner]
        return (state.merged, *args[1:])

    def _match(self, state: Packed, index: int) -> Tensor | None:
        """Return for each unit left the place of the one that it joins; None if none does."""
        metric = state.keys.view(len(state.kept), -1)
        starts = [sum(state.left[:frame]) for frame in range(len(state.left))]
        into = torch.arange(len(metric) + 1, device=metric.device)
        merges = False
        for frames, plan in state.plans:
            if plan[index] is None:
                continue
            counts = [state.left[frame] for frame in frames]
            ragged = min(counts) < max(counts)
            places = torch.arange(max(counts), device=metric.device)
            rows = to_device([starts[frame] for frame in frames], metric.device)[:, None] + places
            # What lies behind a shorter frame is padding to the matcher, whatever it holds.
            merge = plan[index](metric[rows.clamp(max=len(metric) - 1)], counts if ragged else None)
            if merge is None:
                continue
            merges = True
            target = rows.gather(1, merge.keep.gather(1, merge.assign))
            if ragged:
                # Padding is written to a scratch entry at the end.
                rows = torch.where(places < to_device(counts, metric.device)[:, None], rows, len(metric))
            into[rows] = target
            for frame, left in zip(frames, merge.left or [merge.keep.shape[1]] * len(frames), strict=True):
                state.left[frame] = left
        return into[:-1] if merges else None


def window_order(tower: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return long `[N]`, the units of all images in the order in which a tower of windows, called with these arguments,
    lines them up."""
    if kwargs.get("window_index") is not None:
        return kwargs["window_index"]
    from transformers.vision_utils import get_vision_window_index

    grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
    return get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)[0]


def _mean_of_groups(x: Tensor, owner: Tensor) -> Tensor:
    """`[N, D]`: each row becomes the mean of the rows with its owner."""
    total = torch.zeros(len(owner), x.shape[1], device=x.device).index_add(0, owner, x.float())
    count = total.new_zeros(len(owner)).index_add(0, owner, total.new_ones(len(owner)))
    return (total / count.clamp(min=1)[:, None])[owner].to(x.dtype)
