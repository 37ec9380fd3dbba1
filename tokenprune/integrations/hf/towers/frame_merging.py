# SPDX-License-Identifier: Apache-2.0
"""Merge video frames inside towers with one frame per row (CLIP and SigLIP in LLaVA-OneVision and LLaVA-NeXT-Video).

Frames merge after selected blocks, and later blocks run on fewer rows. At the end of the tower, each frame gets the
features of its merged frame, so that the model receives the expected number of rows. At the decoder's entry, only the
tokens of the first frame of each merged frame can stay, and the method chooses among them.
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
from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Encode, Encoding
from tokenprune.integrations.hf.sequence.record import open_record
from tokenprune.integrations.hf.sequence.segments import count_features
from tokenprune.integrations.hf.towers.base import TowerPart
from tokenprune.integrations.hf.towers.blocks import check_layer, find_blocks, get_attention
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

# Supported classes of blocks, and the number of class tokens before the patches.
_CLASS_TOKENS = {"CLIPEncoderLayer": 1, "SiglipEncoderLayer": 0}


@dataclass
class FramesRun(TowerRun):
    """Tower state of one encoding. A unit is a frame, and `sizes` has the frames per video ([] for images).

    Attributes:
        width: Tokens per frame.
        num_frames: Frames of each video after the merges so far.
        groups: Groups of frames of each video, see `FrameMerger.groups`.
        received: Attention received in the last block that merges, float32 `[rows, patches]`.
    """

    width: int = 0
    num_frames: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    received: Tensor | None = None

    def mix(self, mixes: list[FrameMix], x: Tensor) -> Tensor:
        """Merge rows `[R, ...]` of all videos, with one mix per video."""
        pairs = zip(mixes, x.split(self.num_frames), strict=True)
        return torch.cat([mix.apply(rows) for mix, rows in pairs])

    def follow(self, mixes: list[FrameMix]) -> None:
        """Update the owners of rows and the frame counts after the merges of a block."""
        rows: list[int] = []  # merged row of each row
        num_frames = [len(mix.first) for mix in mixes]
        for index, (mix, num_before) in enumerate(zip(mixes, self.num_frames, strict=True)):
            rows += [sum(num_frames[:index]) + owner for owner in mix.find_owners(num_before)]
        owners = to_device(rows, self.units.owner.device)[self.units.owner]
        self.units = replace(self.units, owner=owners, num_units=[sum(num_frames)])
        self.num_frames = num_frames


class FrameLayout(TowerLayout):
    """Tower layout with one frame per row. `frames` returns the number of frames of each video of a forward."""

    starts_at_first_block = True

    def __init__(self, method: FrameMerger, blocks: Sequence[Block], frames: Callable[[], list[int]]) -> None:
        self.method, self.blocks, self.frames = method, blocks, frames

    def begin(self, hidden: Tensor) -> TowerRun:
        frames, (rows, width) = self.frames(), hidden.shape[:2]
        units, plan = Units.from_packed(rows, 1, torch.device("cpu")), [None] * len(self.blocks)
        return FramesRun(units, plan, sizes=frames, width=width, num_frames=frames)


class FrameMerging(TowerPart):
    """Merges frames of videos in the vision tower, and records the groups of merged tokens.

    Raises:
        UnsupportedSetupError: If the rows of the tower are not frames.
        BudgetError: If the budget depends on the prompt.
        OptionError: If the method names a block that does not exist.
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
        supported = f"{method.name} supports the vision towers CLIP and SigLIP"
        self.tower, self.encoder, self.layers = find_blocks(adapter, _CLASS_TOKENS, supported)
        self.protected = _CLASS_TOKENS[type(self.layers[0]).__name__]
        self.layer = getattr(adapter.config, "vision_feature_layer", -1)
        depth = self.layer if self.layer >= 0 else len(self.layers) + 1 + self.layer
        layout = FrameLayout(method, [Block(layer, layer, layer) for layer in self.layers], self._take_frames)
        self.reducer = TowerReducer(layout, Host())
        self.mixed = method.blocks(depth)
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.observer = Observer(get_attention(self.layers[self.mixed[-1]]), self._observe)

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
        self.reducer.pop_run()  # discard the state of a failed call
        frames = self.adapter.video_frames(encoding.on_host) if encoding.modality == "video" else []
        if frames is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: the number of frames per video is unknown. Pass the arguments that the "
                "processor returns."
            )
        check_layer(self.method.name, self.layer, encoding.on_host)
        get_thread_states()[self] = frames  # read by `_take_frames` at the first block
        try:
            output = encode(encoding)
        finally:
            get_thread_states().pop(self, None)
        self._record_frames(encoding, output)
        return output

    def _take_frames(self) -> list[int]:
        """Return the number of frames of each video, and forget it. [] for images and outside of `around_encode`."""
        return get_thread_states().pop(self, None) or []

    def _enter_mixed(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        run = self._state()
        if run is not None and run.sizes:
            check_checkpointing(module, get_hidden_states(args, kwargs))

    def _observe(self, observation: Observation) -> None:
        run = self._state()
        if run is not None and run.sizes:
            with torch.no_grad():
                scores = get_block_observable(self.method.reads).compute_per_patch(observation, self.protected)
            run.received = scores.float().mean(1)

    def _leave_mixed(self, index: int, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self._state()
        if run is None or not run.sizes:
            return None  # images, or gradient checkpointing runs the block again
        hidden = output[0] if isinstance(output, tuple) else output
        with torch.no_grad():
            mixes = [self.method.mix(rows[:, self.protected :]) for rows in hidden.split(run.num_frames)]
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
                run.groups = [self.method.groups(rows[:, self.protected :]) for rows in mixed.split(run.num_frames)]
        return change_output(lambda _: mixed, output)

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self._state()
        return None if run is None else change_output(run.units.expand, output)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        open_record(output)  # raises if the output cannot have a record
        run = self._state()
        if run is not None:
            run.restore_states(output)
        return output

    # -- after the tower

    def _record_frames(self, encoding: Encoding, output: Any) -> None:
        """Record the token counts and the groups of merged tokens in the encoder's output."""
        run = self._state()
        self.reducer.pop_run()
        if run is None:
            return
        self.record_tokens(output, [num_rows * run.width for (num_rows,) in run.counts])
        if not run.sizes:
            return
        # The host needs the number of kept tokens, so the rest is computed on the CPU.
        assert run.received is not None  # checked in `_leave_mixed`
        received = run.units.expand(run.received).cpu()
        total = count_features(output)
        traced = trace_tokens(self.adapter, encoding.modality, encoding.on_host, total, [received.unsqueeze(-1)], None)
        size = len(traced.cells) // len(run.sizes)  # all videos of a call have the same number of frames
        pieces = zip(run.get_owners(), traced.cells.split(size), traced.scores.split(size), run.groups, strict=True)
        groups = []
        for rows, cells, scores, frame_groups in pieces:
            token_groups = self._find_token_groups(rows.tolist(), cells[:, 0], scores[:, 0], frame_groups)
            groups.append(to_device(token_groups, run.received.device))
        self.record_groups(output, groups)

    def _find_token_groups(self, rows: list[int], tile: Tensor, score: Tensor, groups: list[int]) -> Tensor:
        """Return the index of the kept token that represents each token of a video, -1 if dropped, long `[tokens]`.

        Args:
            rows: Merged row of each frame.
            tile: Frame index of each token, -1 for tokens outside of frames, which are all kept. Long `[tokens]`.
            score: Score of each token, float32 `[tokens]`.
            groups: Groups of the merged frames, see `FrameMerger.groups`.
        """
        num_frames = len(rows)
        in_frame = tile >= 0
        position = in_frame.nonzero().view(num_frames, -1)  # [F, P]
        merged_frame = torch.tensor(rows, device="cpu") - rows[0]
        first = torch.tensor([rows.index(row) for row in dict.fromkeys(rows)], device="cpu")
        (max_tokens,) = self.budget.resolve([len(tile)], layer=0, shape=self.shape, text_tokens=0)
        received = score[position[first]]
        keep = self.method.choose_tokens(received, groups, max(1, max_tokens - int((~in_frame).sum())))
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != received.shape:
            raise TokenPruneError(
                f"{self.method.name}.choose_tokens() must return a bool tensor {list(received.shape)}"
            )
        token_groups = torch.arange(len(tile), device="cpu")
        kept_tokens = torch.where(keep, position[first], -1)
        token_groups[position] = kept_tokens[merged_frame]
        return token_groups

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        super().before_decoder(call, inputs)
        if call.has_images and "image" in call.state.segments.modality:
            call.notes.append(f"{self.method.name}: images keep all tokens, because it compares the frames of videos")
