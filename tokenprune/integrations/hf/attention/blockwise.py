# SPDX-License-Identifier: Apache-2.0
"""Block attention over video frames in the prefill.

Only the attention function of the decoder layers changes, and only in a prefill whose prompt has enough frames. All
other calls use the original function. The cache and, by default, the positions are as in full attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.attention_observer import Tap
from tokenprune.integrations.hf.compat import reruns_layers
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Part, PerCall
from tokenprune.integrations.hf.forward.token_state import Layout
from tokenprune.integrations.hf.sequence.alignment import check_rows
from tokenprune.integrations.hf.sequence.masks import find_sliding_layers
from tokenprune.integrations.hf.sequence.record import align_per_image, get_record
from tokenprune.integrations.hf.sequence.segments import find_segments
from tokenprune.kernels.block_attention import PADDING, SINK, TAIL, Parts, attend_in_blocks
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.frames import Visual
from tokenprune.selection.sites.attention import AttentionPattern

# Attention arguments of some families that block attention does not support.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


@dataclass
class BlockPlan:
    """Blocks of a call.

    Attributes:
        ids: Block id of each token of the uncut sequence (kernels/block_attention.py), long `[B, L]` on the CPU.
    """

    ids: Tensor
    _by_layer: dict[int, tuple[Tensor, dict[Parts, list[int]]]] = field(default_factory=dict)

    def get_parts(self, layout: Layout | None, layer: int) -> tuple[Tensor, dict[Parts, list[int]]]:
        """Return the blocks of the remaining tokens. The result is cached per `layer`.

        Args:
            layout: Layout of the remaining tokens, or None if no token was dropped.
            layer: First decoder layer with this layout.

        Returns:
            The block ids, long `[B, W]`, and the rows of each distinct partition.
        """
        if layer not in self._by_layer:
            ids = self.ids
            if layout is not None:
                layout = layout.to(ids.device)
                ids = ids.gather(1, layout.index)
                ids = ids if layout.valid is None else ids.masked_fill(~layout.valid, PADDING)
            rows: dict[Parts, list[int]] = {}
            for row, row_ids in enumerate(ids):
                rows.setdefault(Parts.from_ids(row_ids), []).append(row)
            self._by_layer[layer] = ids, rows
        return self._by_layer[layer]


class BlockAttention(Part):
    """Replaces the attention of decoder layers by block attention.

    Raises:
        BudgetError: If the budget removes tokens.
        OptionError: If `dense_layers` is out of range or names all layers.
        UnsupportedSetupError: If a layer has a sliding window and is not in `dense_layers`.
    """

    def __init__(self, adapter: Adapter, method: AttentionPattern, budget: Budget) -> None:
        super().__init__()
        self.adapter, self.method = adapter, method
        self._plans: PerCall[BlockPlan] = PerCall()
        name, layers = method.name, len(adapter.decoder.layers)
        if not budget.is_identity():
            raise BudgetError(
                f"{name} does not remove tokens and needs keep=1.0, not {budget}. To remove tokens too, compose it "
                f'with a method that acts earlier: method=["divprune", "{name}"], keep=[0.25, 1.0].'
            )
        if out_of_range := [layer for layer in method.dense_layers if layer >= layers]:
            raise OptionError(
                f"{name}: dense_layers={out_of_range} is out of range. Choose layers from 0 to {layers - 1}."
            )
        self.layers: list[int] = [layer for layer in range(layers) if layer not in method.dense_layers]
        if not self.layers:
            raise OptionError(f"{name}: dense_layers names all {layers} layers. Leave at least one layer out.")
        if sliding := [layer for layer in find_sliding_layers(adapter.text_config) if layer in self.layers]:
            raise UnsupportedSetupError(
                f"{name} does not support decoder layers with a sliding window, here {sliding}. Pass "
                f"dense_layers={sliding}."
            )
        self.taps = [_BlockTap(adapter.get_attention(layer), partial(self._attend, layer)) for layer in self.layers]

    def _attach(self) -> None:
        for tap in self.taps:
            self.attach_part(tap)

    # -- once per forward, at the decoder's entry

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> DecoderInputs | None:
        """Plan the blocks of a prefill. Without blocks, add a note with the reason."""
        embeds = inputs.embeds
        ids = self._plan(call, *embeds.shape[:2])
        if isinstance(ids, str):
            call.notes.append(f"{self.method.name}: full attention, because {ids}")
            return None
        if ids is None:
            return None
        if reruns_layers(self.adapter.decoder):
            raise UnsupportedSetupError(
                f"Gradient checkpointing runs decoder layers a second time, without the blocks of {self.method.name}. "
                "Call model.gradient_checkpointing_disable()."
            )
        self._plans[call] = BlockPlan(ids)
        call.maskless |= frozenset(self.layers)
        if self.method.position_mode == "reuse":
            inputs = replace(inputs, positions=reuse_positions(inputs.positions, ids, embeds.device))
        if len(self.layers) == len(self.adapter.decoder.layers):
            # With a mask of ones, the decoder does not create a dense mask that all layers would ignore.
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
            inputs = replace(inputs, mask=mask)
        return inputs

    def _plan(self, call: Call, batch: int, length: int) -> Tensor | str | None:
        """Return the block ids of a call's tokens, the reason for full attention, or None for a decoding step."""
        if call.past:
            return "the cache holds an earlier part of the conversation" if call.outputs and length > 1 else None
        if not call.has_images:
            return "it contains no video"
        mask = call.arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            return "the attention mask is not a tensor of shape (batch, length)"
        padding = call.prompt.padding
        valid = torch.ones(batch, length, dtype=torch.bool, device="cpu") if padding is None else ~padding
        indices = [row.nonzero().flatten().tolist() for row in valid]
        if any(row_indices and row_indices[-1] - row_indices[0] + 1 != len(row_indices) for row_indices in indices):
            return "the attention mask has gaps"

        rows, reasons = [], []
        for row, visuals in enumerate(self._find_visuals(call, batch)):
            starts: list[int] | str
            if isinstance(visuals, str):
                starts = visuals
            else:
                starts = self.method.block_starts(visuals, indices[row][-1] + 1 if indices[row] else 0)
            reasons += [starts] if isinstance(starts, str) else []
            ids = _build_block_ids([] if isinstance(starts, str) else starts, length)
            rows.append(ids.masked_fill(~valid[row], PADDING))
        if len(reasons) == batch:
            return "; ".join(dict.fromkeys(reasons))
        # Rows without blocks use full attention: their sink covers all tokens.
        call.notes += [f"{self.method.name}: full attention for a prompt, because {reason}" for reason in reasons]
        return torch.stack(rows)

    def _find_visuals(self, call: Call, batch: int) -> list[list[Visual] | str]:
        """Return the images and videos of each row in order, or the reason why they are unknown."""
        outputs = call.outputs if self.adapter.family.features_per_image else {}
        if batch > 1:
            check_rows(call.prompt.placeholders_per_row, outputs)
        segments = find_segments(call.prompt.placeholders, outputs, "image", torch.device("cpu"))
        rows: list[list[Visual] | str] = [[] for _ in range(batch)]
        if segments is None:
            return rows
        encoded = get_record(call.outputs.get("video")).frames
        videos = [row for row, modality in zip(segments.row, segments.modality, strict=True) if modality == "video"]
        frames = iter(align_per_image(encoded or [], videos))
        for row, modality, count, position in zip(
            segments.row, segments.modality, segments.counts, segments.position.tolist(), strict=True
        ):
            # An image has one frame. 0 frames mean that the number of frames is unknown.
            num_frames = 1 if modality == "image" else next(frames) or 0
            visual = Visual.from_positions(modality, position[:count], num_frames)
            if visual is None:
                rows[row] = "the tokens of each video frame are unknown: pass pixels to the patched model"
            elif isinstance(row_visuals := rows[row], list):
                row_visuals.append(visual)
        return rows

    # -- in each layer

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        call = self.current()
        if call is None or (plan := self._plans.get(call)) is None:
            return None
        if unsupported := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
            raise UnsupportedSetupError(
                f"{self.method.name} does not support attention with {', '.join(unsupported)}, which layer {layer} of "
                f"{self.adapter.config.model_type!r} uses. Add {layer} to dense_layers."
            )
        layout, first_layer = call.state.layout if call.active else None, call.groups[-1].first if call.groups else 0
        ids, rows = plan.get_parts(layout, first_layer)
        # A static cache has empty slots after the prompt.
        key, value = key[:, :, : ids.shape[1]], value[:, :, : ids.shape[1]]
        scale, dropout = kwargs["scaling"], kwargs.get("dropout", 0.0)
        if len(rows) == 1:
            output = attend_in_blocks(query, key, value, next(iter(rows)), scale, dropout)
        else:
            outputs = []
            for parts, part_rows in rows.items():
                index = to_device(part_rows, query.device)
                outputs.append(attend_in_blocks(query[index], key[index], value[index], parts, scale, dropout))
            order = to_device([row for part_rows in rows.values() for row in part_rows], query.device).argsort()
            output = torch.cat(outputs)[order]
        self._record_pairs(call, layer, rows, len(ids))
        valid = ids != PADDING
        return output.transpose(1, 2).contiguous(), None if bool(valid.all()) else to_device(valid, query.device)

    def _record_pairs(self, call: Call, layer: int, rows: dict[Parts, list[int]], batch: int) -> None:
        """Record the number of query-key pairs of each row, and in the first layer the number of blocks."""
        pairs = [0] * batch
        for parts, part_rows in rows.items():
            for row in part_rows:
                pairs[row] = parts.pairs
        call.trace.pairs[layer] = pairs
        if layer == self.layers[0]:
            num_blocks = sum(len(parts.blocks) * len(part_rows) for parts, part_rows in rows.items())
            call.trace.stats.attention_blocks = num_blocks


class _BlockTap(Tap):
    """Computes the attention of one layer with the function `compute`."""

    def __init__(self, module: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__(module)
        self._compute = compute

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        return self._compute(query, key, value, attention_mask, **kwargs)


def _build_block_ids(starts: list[int], length: int) -> Tensor:
    """Build block ids, long `[length]`, from the result of `block_starts`. Without starts, all tokens are sink."""
    ids = torch.full((length,), SINK, dtype=torch.long, device="cpu")
    for index, (start, end) in enumerate(pairwise(starts)):
        ids[start:end] = index + 1
    if starts:
        ids[starts[-1] :] = TAIL
    return ids


def reuse_positions(positions: Tensor | None, ids: Tensor, device: torch.device) -> Tensor:
    """Shift the positions of all context blocks to the start of the first block of their row.

    The positions of the sink and the tail do not change.

    Args:
        positions: Position ids, long `[..., B or 1, L]`. None for 0 to L - 1.
        ids: Block ids, long `[B, L]` on the host.
        device: Device of the result.

    Returns:
        The shifted position ids, long `[..., B, L]`.
    """
    if positions is None:
        positions = torch.arange(ids.shape[1], device=device)[None]
    moved = positions.expand(*positions.shape[:-2], *ids.shape).clone()
    # Qwen-VL puts plain text positions before the positions of the three axes. Masks need the plain positions.
    axes = moved[1:] if moved.ndim == 3 and moved.shape[0] == 4 else moved
    for row, row_ids in enumerate(ids):
        for block in range(2, int(row_ids.masked_fill(row_ids == TAIL, 0).max()) + 1):
            # The tokens of a block are contiguous.
            start, count = int((row_ids == block).nonzero()[0]), int((row_ids == block).sum())
            first = int((row_ids == 1).nonzero()[0])
            axes[..., row, start : start + count] += (
                axes[..., row, first : first + 1] - axes[..., row, start : start + 1]
            )
    return moved
