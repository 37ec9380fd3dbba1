# SPDX-License-Identifier: Apache-2.0
"""Merge the frames of videos inside towers whose rows are frames (CLIP and SigLIP of LLaVA-OneVision and
LLaVA-NeXT-Video).

After some blocks frames become one, and the blocks after them run on fewer rows. As the tower ends each frame of the
video gets the features of the one that holds it, so that the model finds the number of rows that it counts on. At the
decoder's entry the tokens of all frames but the first of each leave, and those that the method does not choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Encode, Encoding
from tokenprune.integrations.hf.sequence.record import open_record
from tokenprune.integrations.hf.sequence.segments import feature_total
from tokenprune.integrations.hf.towers.base import TowerPart
from tokenprune.integrations.hf.towers.blocks import attention_of, check_layer, find_blocks
from tokenprune.integrations.shared.attachable import change_output, get_hidden_states, get_thread_states
from tokenprune.integrations.shared.towers.patch_grid import trace_tokens
from tokenprune.integrations.shared.towers.reducer import Host, TowerLayout, TowerReducer, check_checkpointing
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.integrations.shared.towers.tower_scores import get_block_observable
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.observation import Observation
from tokenprune.kernels.transfer import to_device
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.sites.frames import FrameMerger, FrameMix

_CLASS_TOKENS = {"CLIPEncoderLayer": 1, "SiglipEncoderLayer": 0}  # before the patches, by the class of blocks


@dataclass
class FramesRun(TowerRun):
    """One encoding of V videos, whose `sizes` are their frames; of images there are none. A unit is a frame, `width`
    tokens.

    left: frames of each video so far. groups: of each video, see `FrameMerger.groups`. received: float32 `[rows,
    patches]`, attention in the last block that merges.
    """

    width: int = 0
    left: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    received: Tensor | None = None

    def mix(self, mixes: list[FrameMix], x: Tensor) -> Tensor:
        """Return rows `[R, ...]`, those of all videos, as they are left by one mix for each video."""
        pairs = zip(mixes, x.split(self.left), strict=True)
        return torch.cat([mix.apply(rows) for mix, rows in pairs])

    def follow(self, mixes: list[FrameMix]) -> None:
        """Note what became of the rows after a block."""
        rows: list[int] = []  # that hold the rows so far
        left = [len(mix.first) for mix in mixes]
        for number, (mix, before) in enumerate(zip(mixes, self.left, strict=True)):
            rows += [sum(left[:number]) + own for own in mix.find_owners(before)]
        owner = to_device(rows, self.units.owner.device)[self.units.owner]
        self.units, self.left = replace(self.units, owner=owner, num_units=[sum(left)]), left


class FrameLayout(TowerLayout):
    """One frame per row. `frames` returns the number of frames of each video of a forward."""

    starts_at_first_block = True

    def __init__(self, method: FrameMerger, blocks: Sequence[Block], frames: Callable[[], list[int]]) -> None:
        self.method, self.blocks, self.frames = method, blocks, frames

    def begin(self, hidden: Tensor) -> TowerRun:
        frames, (rows, width) = self.frames(), hidden.shape[:2]
        units, plan = Units.from_packed(rows, 1, torch.device("cpu")), [None] * len(self.blocks)
        return FramesRun(units, plan, sizes=frames, width=width, left=frames)


class FrameMerging(TowerPart):
    """Has `method` merge frames in the tower of `adapter`'s model, and takes what it leaves out from the prompt.

    Raises UnsupportedSetupError for towers whose rows are no frames, BudgetError for a budget that is not one of a
    video by itself, OptionError for blocks that there are not.
    """

    modalities = ("video",)

    def __init__(self, adapter: Adapter, method: FrameMerger, budget: Budget) -> None:
        super().__init__(adapter, method, budget)
        self.merges = method.merges
        depends_on_prompt = budget.per != "image" or budget.target == "flops_share" or budget.ages is not None
        if depends_on_prompt or budget.video is not None:
            raise BudgetError(
                f"{method.name} acts before the prompt is known and does not support {budget}. Use keep, "
                'average_tokens, average_share or kv_share, with per="image".'
            )
        knows = f"{method.name} merges frames in the towers CLIP and SigLIP"
        self.tower, self.encoder, self.layers = find_blocks(adapter, _CLASS_TOKENS, knows)
        self.protected = _CLASS_TOKENS[type(self.layers[0]).__name__]
        self.layer = getattr(adapter.config, "vision_feature_layer", -1)
        depth = self.layer if self.layer >= 0 else len(self.layers) + 1 + self.layer
        layout = FrameLayout(method, [Block(layer, layer, layer) for layer in self.layers], self._take_frames)
        self.reducer = TowerReducer(layout, Host())
        self.mixed = method.blocks(depth)
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.observer = Observer(attention_of(self.layers[self.mixed[-1]]), self._observe)

    def _attach(self) -> None:
        self.attach_part(self.observer)
        self.attach_part(self.reducer)
        for index in self.mixed:
            self.reducer.add_hooks(self.layers[index], self._enter_mixed, partial(self._leave_mixed, index))
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)
        self.hook(self.tower.register_forward_hook, self._leave_tower)

    def _state(self) -> FramesRun | None:
        run = self.reducer.get_run()
        assert run is None or isinstance(run, FramesRun)
        return run

    # -- inside the tower

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        self.reducer.pop_run()  # what a call that failed may have left
        frames = self.adapter.video_frames(encoding.on_host) if encoding.modality == "video" else []
        if frames is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: the number of frames of these videos is not known. Pass the arguments of the "
                "processor."
            )
        check_layer(self.method.name, self.layer, encoding.on_host)
        get_thread_states()[self] = frames  # until the tower begins
        try:
            output = encode(encoding)
        finally:
            get_thread_states().pop(self, None)
        self._leave_frames(encoding, output)
        return output

    def _take_frames(self) -> list[int]:
        """Return the number of frames of each video; empty if the tower is called outside of the encoder."""
        return get_thread_states().pop(self, None) or []

    def _enter_mixed(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        run = self._state()
        if run is not None and run.sizes:
            check_checkpointing(module, get_hidden_states(args, kwargs))

    def _observe(self, observation: Observation) -> None:
        run = self._state()
        if run is not None and run.sizes:
            with torch.no_grad():
                shown = get_block_observable(self.method.reads).compute_per_patch(observation, self.protected)
            run.received = shown.float().mean(1)

    def _leave_mixed(self, index: int, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self._state()
        if run is None or not run.sizes:
            return None  # images, or a block that checkpointing runs again
        hidden = output[0] if isinstance(output, tuple) else output
        with torch.no_grad():
            mixes = [self.method.mix(rows[:, self.protected :]) for rows in hidden.split(run.left)]
        mixed = run.mix(mixes, hidden)
        last = index == self.mixed[-1]
        if last:
            if run.received is None:
                raise UnsupportedSetupError(
                    f"{self.method.name}: block {index} of the tower did not call its attention function."
                )
            run.received = run.mix(mixes, run.received)
        run.follow(mixes)
        if last:
            with torch.no_grad():
                run.groups = [self.method.groups(rows[:, self.protected :]) for rows in mixed.split(run.left)]
        return change_output(lambda _: mixed, output)

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self._state()
        return None if run is None else change_output(run.units.expand, output)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        open_record(output)  # raises what cannot have one
        run = self._state()
        if run is not None:
            run.restore_states(output)
        return output

    # -- after the tower

    def _leave_frames(self, encoding: Encoding, output: Any) -> None:
        """Write to the encoder's output what became of frames and tokens."""
        run = self._state()
        self.reducer.pop_run()
        if run is None:
            return
        self.leave_tokens(output, [left * run.width for (left,) in run.counts])
        if not run.sizes:
            return
        # On the host from here on: how many tokens stay is what it has to know.
        assert run.received is not None  # see `_leave_mixed`
        received = run.units.expand(run.received).cpu()
        total = feature_total(output)
        placed = trace_tokens(self.adapter, encoding.modality, encoding.on_host, total, [received.unsqueeze(-1)], None)
        size = len(placed.cells) // len(run.sizes)  # videos of one call have as many frames
        groups, pieces = [], zip(run.get_owners(), placed.cells.split(size), placed.scores.split(size), strict=True)
        for number, (rows, cells, scores) in enumerate(pieces):
            found = self._groups_of(rows.tolist(), cells[:, 0], scores[:, 0], run.groups[number])
            groups.append(to_device(found, run.received.device))
        self.leave_groups(output, groups)

    def _groups_of(self, rows: list[int], tile: Tensor, score: Tensor, groups: list[int]) -> Tensor:
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
        keep = self.method.choose_tokens(received, groups, max(1, most - int((~inside).sum())))
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
        if call.has_images and "image" in call.state.segments.modality:
            call.notes.append(f"{self.method.name}: images keep all tokens, because it compares the frames of videos")
