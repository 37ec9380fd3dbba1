# SPDX-License-Identifier: Apache-2.0
"""Merge the frames of videos inside towers whose rows are frames (CLIP and SigLIP of LLaVA-OneVision and
LLaVA-NeXT-Video).

After some blocks frames become one, and the blocks after them run on fewer rows. As the tower ends each frame of the
video gets the features of the one that holds it, so that the model finds the number of rows that it counts on. At the
decoder's entry the tokens of all frames but the first of each leave, and those that the method does not choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.errors import BudgetError, TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.hf.attention.observer import Observer
from tokenprune.integrations.hf.encoded.record import open_record
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Encode, Encoding
from tokenprune.integrations.hf.sequence.segments import feature_total
from tokenprune.integrations.hf.tower.base import GroupedTokens
from tokenprune.integrations.hf.tower.blocks import attention_of, check_layer, find_blocks
from tokenprune.integrations.shared.attachable import hidden_states, states, with_output
from tokenprune.integrations.shared.observation import Observation
from tokenprune.integrations.shared.patch_grid import place
from tokenprune.integrations.shared.reducer import check_checkpointing
from tokenprune.integrations.shared.tower_scores import block_observable
from tokenprune.ops.transfer import to_device
from tokenprune.shapes.decoder import DecoderShape
from tokenprune.sites.frames import FrameMerger, FrameMix

_CLASS_TOKENS = {"CLIPEncoderLayer": 1, "SiglipEncoderLayer": 0}  # before the patches, by the class of blocks


@dataclass
class FramesEncoded:
    """One encoding of V videos; of images there are no frames.

    frames: of each video, as they enter the tower. left: of each video, so far. owners: before each block, and after
    the last, for each frame that entered the row that holds it. counts: tokens that entered each block. groups: of each
    video, see `FrameMerger.groups`. received: float32 `[rows, patches]`, attention in the last block that merges.
    """

    frames: list[int]
    left: list[int]
    owners: list[list[int]]
    counts: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    received: Tensor | None = None

    @staticmethod
    def of(frames: list[int]) -> FramesEncoded:
        return FramesEncoded(frames, frames, [list(range(sum(frames)))])

    def apply(self, mixes: list[FrameMix], x: Tensor) -> Tensor:
        """Return rows `[R, ...]`, those of all videos, as they are left by one mix for each video."""
        pairs = zip(mixes, x.split(self.left), strict=True)
        return torch.cat([mix.apply(rows) for mix, rows in pairs])

    def follow(self, mixes: list[FrameMix]) -> None:
        """Note what became of the rows after a block."""
        rows: list[int] = []  # that hold the rows so far
        left = [len(mix.first) for mix in mixes]
        for number, (mix, before) in enumerate(zip(mixes, self.left, strict=True)):
            rows += [sum(left[:number]) + own for own in mix.owners(before)]
        self.owners.append([rows[own] for own in self.owners[-1]])
        self.left = left

    def restore(self, x: Tensor, stage: int = -1) -> Tensor:
        """Give each frame that entered the row that holds it. Rows that are as many are as they should be."""
        owners = self.owners[stage]
        return x if len(x) == len(owners) else x[to_device(owners, x.device)]


class FrameMerging(GroupedTokens):
    """Has `method` merge frames in the tower of `adapter`'s model, and takes what it leaves out from the prompt.

    Raises UnsupportedSetupError for towers whose rows are no frames, BudgetError for a budget that is not one of a
    video by itself, OptionError for blocks that there are not.
    """

    modalities = ("video",)

    def __init__(self, adapter: Adapter, method: FrameMerger, budget: Budget) -> None:
        super().__init__()
        self.belong(adapter, method, budget)
        self.merges = method.merges
        if budget.per != "image" or budget.flops_share is not None or budget.of_videos or budget.age is not None:
            raise BudgetError(
                f"{method.name} decides before the prompt is known, for each video by itself: of {budget}, say keep, "
                'average_tokens, average_share or kv_share, with per="image"'
            )
        knows = f"{method.name} merges frames in the towers CLIP and SigLIP"
        self.tower, self.encoder, self.layers = find_blocks(adapter, _CLASS_TOKENS, knows)
        self.protected = _CLASS_TOKENS[type(self.layers[0]).__name__]
        self.layer = getattr(adapter.config, "vision_feature_layer", -1)
        depth = self.layer if self.layer >= 0 else len(self.layers) + 1 + self.layer
        self.blocks = method.blocks(depth)
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.observer = Observer(attention_of(self.layers[self.blocks[-1]]), self._observe)

    def _attach(self) -> None:
        self.attach_part(self.observer)
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)
        self.hook(self.tower.register_forward_hook, self._leave_tower)
        for index, layer in enumerate(self.layers):
            # Before the hooks of others: what they see is the block's output.
            leave = partial(self._leave_block, index)
            self.hook(layer.register_forward_hook, leave, prepend=True, with_kwargs=True)

    def _state(self) -> FramesEncoded | None:
        state = states().get(self)
        return state if isinstance(state, FramesEncoded) else None

    # -- inside the tower

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        states().pop(self, None)  # what a call that failed may have left
        frames = self.adapter.video_frames(encoding.on_host) if encoding.modality == "video" else []
        if frames is None:
            raise UnsupportedSetupError(f"{self.method.name}: nothing tells how many frames these videos have")
        check_layer(self.method.name, self.layer, encoding.on_host)
        states()[self] = frames  # until the tower begins
        output = encode(encoding)
        self._leave_frames(encoding, output)
        return output

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # A tower that is called by itself gets no frames of which it is known what they are.
        announced = states().pop(self, None)
        states()[self] = FramesEncoded.of(announced if isinstance(announced, list) else [])

    def _observe(self, observation: Observation) -> None:
        state = self._state()
        if state is not None and state.frames:
            with torch.no_grad():
                shown = block_observable(self.method.reads).of_patches(observation, self.protected)
            state.received = shown.float().mean(1)

    def _leave_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        state = self._state()
        if state is None:
            return None  # a block that checkpointing runs again
        hidden = output[0] if isinstance(output, tuple) else output
        state.counts.append(math.prod(hidden.shape[:2]))
        if not state.frames:
            return None
        if index not in self.blocks:
            state.owners.append(state.owners[-1])
            return None
        check_checkpointing(module, hidden_states(args, kwargs))
        with torch.no_grad():
            mixes = [self.method.mix(rows[:, self.protected :]) for rows in hidden.split(state.left)]
        mixed = state.apply(mixes, hidden)
        last = index == self.blocks[-1]
        if last:
            if state.received is None:
                raise UnsupportedSetupError(f"{self.method.name}: block {index} of the tower showed no attention")
            state.received = state.apply(mixes, state.received)
        state.follow(mixes)
        if last:
            with torch.no_grad():
                state.groups = [self.method.groups(rows[:, self.protected :]) for rows in mixed.split(state.left)]
        return with_output(lambda _: mixed, output)

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        state = self._state()
        return with_output(state.restore, output) if state is not None and state.frames else None

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        open_record(output)  # raises what cannot have one
        state = self._state()
        if state is not None and state.frames and output.hidden_states is not None:
            restored = [None if x is None else state.restore(x, i) for i, x in enumerate(output.hidden_states)]
            output.hidden_states = tuple(restored)
        return output

    # -- after the tower

    def _leave_frames(self, encoding: Encoding, output: Any) -> None:
        """Write to the encoder's output what became of frames and tokens."""
        state = self._state()
        states().pop(self, None)
        if state is None:
            return
        self.leave_tokens(output, state.counts)
        if not state.frames:
            return
        # On the host from here on: how many tokens stay is what it has to know.
        assert state.received is not None  # see `_leave_block`
        received = state.restore(state.received).cpu()
        total = feature_total(output)
        placed = place(self.adapter, encoding.modality, encoding.on_host, total, received.unsqueeze(-1), None)
        size = len(placed.cells) // len(state.frames)  # videos of one call have as many frames
        starts, groups = state.owners[-1], []
        for number, cells in enumerate(placed.cells.split(size)):
            rows = [r for r in starts if sum(state.left[:number]) <= r < sum(state.left[: number + 1])]
            scores = placed.scores[number * size :][:size, 0]
            found = self._groups_of(rows, cells[:, 0], scores, state, number)
            groups.append(to_device(found, state.received.device))
        self.leave_groups(output, groups)

    def _groups_of(self, rows: list[int], tile: Tensor, score: Tensor, state: FramesEncoded, number: int) -> Tensor:
        """Return for each token of a video the one that stands for it, -1 for none; long `[tokens]`.

        rows: of each frame, which of the rows left holds it. tile: long `[tokens]`, which frame each is of, -1 for what
        is of none and stays. score: float32 `[tokens]`.
        """
        frames = len(rows)
        inside = tile >= 0
        position = inside.nonzero().view(frames, -1)  # [F, P]
        held = torch.tensor(rows, device="cpu") - rows[0]
        first = torch.tensor([rows.index(row) for row in dict.fromkeys(rows)], device="cpu")
        (most,) = self.budget.resolve([len(tile)], layer=0, shape=self.shape, text_tokens=0)
        received = score[position[first]]
        keep = self.method.choose_tokens(received, state.groups[number], max(1, most - int((~inside).sum())))
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != received.shape:
            raise TokenPruneError(
                f"{self.method.name}.choose_tokens() must return a bool tensor {list(received.shape)}"
            )
        found = torch.arange(len(tile), device="cpu")
        stands = torch.where(keep, position[first], -1)
        found[position] = stands[held]
        return found

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        super().before_decoder(call, inputs)
        if call.has_images and "image" in call.held.segments.modality:
            call.notes.append(f"{self.method.name}: images keep all tokens, because it compares the frames of videos")
