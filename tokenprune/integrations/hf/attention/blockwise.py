# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks of a video's frames, in the prefill of a decoder.

Positions, cache and masks stay those of full attention; only the attention function of the decoder's layers is another
one, and only in a prefill whose prompt holds enough frames. All other calls go to the original function.
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

# What some families' attention functions take that the block attention does not compute.
_FOREIGN = ("softcap", "s_aux", "position_bias", "sliding_window")


@dataclass
class BlockPlan:
    """ids: long `[B, L]` on the CPU, the block of each token of a call's full sequence (kernels/block_attention.py)."""

    ids: Tensor
    _at: dict[int, tuple[Tensor, dict[Parts, list[int]]]] = field(default_factory=dict)

    def at(self, layout: Layout | None, layer: int) -> tuple[Tensor, dict[Parts, list[int]]]:
        """Return the ids of the tokens of `layout` (None: of all), and the rows that have the same parts.

        layer: the first of those that hold these tokens.
        """
        if layer not in self._at:
            ids = self.ids
            if layout is not None:
                layout = layout.to(ids.device)
                ids = ids.gather(1, layout.index)
                ids = ids if layout.valid is None else ids.masked_fill(~layout.valid, PADDING)
            rows: dict[Parts, list[int]] = {}
            for row, of_row in enumerate(ids):
                rows.setdefault(Parts.from_ids(of_row), []).append(row)
            self._at[layer] = ids, rows
        return self._at[layer]


class BlockAttention(Part):
    """Stands at the attention of the decoder's layers.

    Raises BudgetError, OptionError or UnsupportedSetupError for what does not go together with attention in blocks.
    """

    def __init__(self, adapter: Adapter, method: AttentionPattern, budget: Budget) -> None:
        super().__init__()
        self.adapter, self.method = adapter, method
        self._plans: PerCall[BlockPlan] = PerCall()
        name, layers = method.name, len(adapter.decoder.layers)
        if not budget.is_identity():
            raise BudgetError(
                f"{name} removes no tokens: it takes keep=1.0 alone, not {budget}. To remove some too, compose it with "
                f'a method that acts before it, for example method=["divprune", "{name}"], keep=[0.25, 1.0]'
            )
        if wrong := [layer for layer in method.dense_layers if layer >= layers]:
            raise OptionError(f"{name}: dense_layers={wrong} are out of range: this decoder has {layers} layers")
        self.layers: list[int] = [layer for layer in range(layers) if layer not in method.dense_layers]
        if not self.layers:
            raise OptionError(f"{name}: dense_layers names all layers, so nothing would be done; leave some out")
        if sliding := [layer for layer in find_sliding_layers(adapter.text_config) if layer in self.layers]:
            raise UnsupportedSetupError(
                f"{name} cannot act in decoder layers with a sliding window, here {sliding}: keep them as they are "
                f"with dense_layers={sliding}"
            )
        self.taps = [_BlockTap(adapter.get_attention(layer), partial(self._attend, layer)) for layer in self.layers]

    def _attach(self) -> None:
        for tap in self.taps:
            self.attach_part(tap)

    # -- once a forward, at the decoder's entry

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> DecoderInputs | None:
        """Plan the blocks of a call that brings a video, and note why where there are none."""
        embeds = inputs.embeds
        ids = self._plan(call, *embeds.shape[:2])
        if isinstance(ids, str):
            call.notes.append(f"{self.method.name}: full attention, because {ids}")
            return None
        if ids is None:
            return None
        if reruns_layers(self.adapter.decoder):
            raise UnsupportedSetupError(
                f"gradient checkpointing runs decoder layers a second time, without the blocks of {self.method.name}; "
                "call model.gradient_checkpointing_disable()"
            )
        self._plans[call] = BlockPlan(ids)
        call.maskless |= frozenset(self.layers)
        if self.method.position_mode == "reuse":
            inputs = replace(inputs, positions=reuse_positions(inputs.positions, ids, embeds.device))
        if len(self.layers) == len(self.adapter.decoder.layers):
            # So that the decoder makes no dense mask that no layer reads.
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
            inputs = replace(inputs, mask=mask)
        return inputs

    def _plan(self, call: Call, batch: int, length: int) -> Tensor | str | None:
        """Return the block ids of a call's tokens; why there are none, in words; None for a step of decoding."""
        if call.past:
            return "the cache holds an earlier part of the conversation" if call.outputs and length > 1 else None
        if not call.has_images:
            return "it contains no video"
        mask = call.arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            return "the attention mask is one of the caller's own, of more than two axes"
        padding = call.prompt.padding
        real = torch.ones(batch, length, dtype=torch.bool, device="cpu") if padding is None else ~padding
        places = [row.nonzero().flatten().tolist() for row in real]
        if any(of_row and of_row[-1] - of_row[0] + 1 != len(of_row) for of_row in places):
            return "the attention mask has gaps"

        rows, reasons = [], []
        for row, visuals in enumerate(self._visuals(call, batch)):
            starts: list[int] | str
            if isinstance(visuals, str):
                starts = visuals
            else:
                starts = self.method.block_starts(visuals, places[row][-1] + 1 if places[row] else 0)
            reasons += [starts] if isinstance(starts, str) else []
            rows.append(_ids([] if isinstance(starts, str) else starts, length).masked_fill(~real[row], PADDING))
        if len(reasons) == batch:
            return "; ".join(dict.fromkeys(reasons))
        # The other rows attend fully, as a sink of their whole length.
        call.notes += [f"{self.method.name}: full attention for a prompt, because {why}" for why in reasons]
        return torch.stack(rows)

    def _visuals(self, call: Call, batch: int) -> list[list[Visual] | str]:
        """Return the videos and images of each row in order, or why they are not known."""
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
            # An image is one frame; of a video of which nothing is known, 0 make none.
            number = 1 if modality == "image" else next(frames) or 0
            visual = Visual.from_positions(modality, position[:count], number)
            if visual is None:
                rows[row] = "it is not known which tokens of its video are a frame: pass pixels to the patched model"
            elif isinstance(of_row := rows[row], list):
                of_row.append(visual)
        return rows

    # -- in each layer

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        call = self.current()
        if call is None or (plan := self._plans.get(call)) is None:
            return None
        if foreign := [name for name in _FOREIGN if kwargs.get(name) is not None]:
            raise UnsupportedSetupError(
                f"{self.method.name} does not compute attention with {', '.join(foreign)}, which layer {layer} of "
                f"{self.adapter.config.model_type!r} asks for; keep it as it is with dense_layers=[{layer}]"
            )
        ids, rows = plan.at(call.state.layout if call.active else None, call.groups[-1].first if call.groups else 0)
        # A cache of fixed length has room after the prompt.
        key, value = key[:, :, : ids.shape[1]], value[:, :, : ids.shape[1]]
        scale, dropout = kwargs["scaling"], kwargs.get("dropout", 0.0)
        if len(rows) == 1:
            output = attend_in_blocks(query, key, value, next(iter(rows)), scale, dropout)
        else:
            outputs = []
            for parts, same in rows.items():
                own = to_device(same, query.device)
                outputs.append(attend_in_blocks(query[own], key[own], value[own], parts, scale, dropout))
            order = to_device([row for same in rows.values() for row in same], query.device).argsort()
            output = torch.cat(outputs)[order]
        self._note(call, layer, rows, len(ids))
        real = ids != PADDING
        return output.transpose(1, 2).contiguous(), None if bool(real.all()) else to_device(real, query.device)

    def _note(self, call: Call, layer: int, rows: dict[Parts, list[int]], batch: int) -> None:
        pairs = [0] * batch
        for parts, same in rows.items():
            for row in same:
                pairs[row] = parts.pairs
        call.trace.pairs[layer] = pairs
        if layer == self.layers[0]:
            call.trace.stats.attention_blocks = sum(len(parts.blocks) * len(same) for parts, same in rows.items())


class _BlockTap(Tap):
    """Computes the attention of one layer."""

    def __init__(self, module: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__(module)
        self._compute = compute

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        return self._compute(query, key, value, attention_mask, **kwargs)


def _ids(starts: list[int], length: int) -> Tensor:
    """long `[length]`: block ids from what `AttentionPattern.block_starts` returns; all of it sink without any."""
    ids = torch.full((length,), SINK, dtype=torch.long, device="cpu")
    for number, (start, end) in enumerate(pairwise(starts)):
        ids[start:end] = number + 1
    if starts:
        ids[starts[-1] :] = TAIL
    return ids


def reuse_positions(positions: Tensor | None, ids: Tensor, device: torch.device) -> Tensor:
    """Return positions (`[..., B or 1, L]`; None: counted) with which every context block starts where its row's first
    one does; sink and tail keep theirs. ids: long `[B, L]`."""
    if positions is None:
        positions = torch.arange(ids.shape[1], device=device)[None]
    moved = positions.expand(*positions.shape[:-2], *ids.shape).clone()
    # Qwen-VL hands over the plain positions of the text before those of the three axes; masks are made of them.
    axes = moved[1:] if moved.ndim == 3 and moved.shape[0] == 4 else moved
    for row, of_row in enumerate(ids):
        for block in range(2, int(of_row.masked_fill(of_row == TAIL, 0).max()) + 1):
            # A block's tokens stand side by side. The ids are on the host.
            start, count = int((of_row == block).nonzero()[0]), int((of_row == block).sum())
            first = int((of_row == 1).nonzero()[0])
            axes[..., row, start : start + count] += (
                axes[..., row, first : first + 1] - axes[..., row, start : start + 1]
            )
    return moved
