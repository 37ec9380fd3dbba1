# SPDX-License-Identifier: Apache-2.0
"""Positions of what is left of an image: (time, height, width) for models with M-RoPE, and with one axis on request.

Kept tokens keep the positions that they have in the full image, and text stands where it stood. Which tokens are
kept is known only to the model's encoder, so their positions travel with their embeddings, in columns of their own, to
where the runner puts these together: all else is known when the request comes. vLLM's own hook for this asks for
numbers on the host, and waits. Text positions do not depend on the choice, so what a prefix cache holds of an image
never has to be computed again.

A model with one axis is served as one with M-RoPE that reads the first axis alone. There kept tokens are counted from
the start of their item, so images may stand side by side, at the end, or have text within.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.utils import copy_mm_embedding_modality, get_mm_features_in_window

from tokenprune.errors import PlaceholderMismatchError, UnsupportedModelError
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.settings.position_checks import count_positions
from tokenprune.integrations.vllm.worker.position_notes import ItemNotes, create_missing_note_error
from tokenprune.kernels.transfer import to_device

# Numbers in two digits each: every digit is below 256, so it is exact in any 16-bit float.
DIGITS = 2
Rule = Callable[[list[int], list[MultiModalFeatureSpec]], tuple[Tensor, int]]


class ReadTokens(NamedTuple):
    """The tokens of a request that one step reads.

    Attributes:
        row: Row of the request in the known positions.
        features: All items of the request.
        notes: Notes of the request, see `PositionNotes`.
        start: Number of tokens read before.
        num_tokens: Number of tokens read now.
        shift: Index of a token in the known positions, minus its index in the prompt.
    """

    row: int
    features: Sequence[Any]
    notes: ItemNotes
    start: int
    num_tokens: int
    shift: int


def encode_columns(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """long `[axes, n]` below 65536 -> `[n, 2 * axes]`."""
    return torch.stack([positions // 256, positions % 256], dim=-1).permute(1, 0, 2).flatten(1).to(dtype)


def decode_columns(columns: Tensor) -> Tensor:
    """`[n, 2 * axes]` -> long `[axes, n]`."""
    high, low = columns.long().view(len(columns), columns.shape[1] // DIGITS, DIGITS).unbind(-1)
    return torch.add(low, high, alpha=256).T


def compute_item_positions(rule: Rule, plan: Plan, item: Any, modality: str) -> Tensor:
    """long `[3, plan.length]`: positions in the item's text as the model's own `rule` gives them, counted from the
    start of the run of placeholders that the token will be in."""
    positions, _ = rule(plan.tokens, [MultiModalFeatureSpec(item, modality, "", _where(plan, 0))])
    first, end = plan.span
    begins = torch.zeros(plan.length, dtype=torch.bool, device="cpu")
    begins[first] = True
    if plan.per_run:  # then each run of placeholders stands for itself, and so does each token between them
        embeds = plan.is_embed[first:end]
        begins[first + 1 : end] = ~(embeds[1:] & embeds[:-1])
    starts = begins.nonzero().flatten()
    # As `compute_prompt_positions` will do it: one after the token before.
    base = torch.where(starts > 0, positions[:, (starts - 1).clamp(min=0)].amax(0) + 1, 0)
    run = begins.cumsum(0).clamp(min=1) - 1
    run[end:] = 0
    return positions - base[run]


def _where(plan: Plan, offset: int) -> PlaceholderRange:
    """Return the place of an item's full text, for a rule that asks where its placeholders are."""
    return PlaceholderRange(offset, plan.length, None if plan.is_plain else plan.is_embed)


@dataclass(frozen=True)
class UnprunedItem:
    """An item of a prompt. offset: where its text begins in the full prompt. written: places in that text of what is
    written of it, before rows are placed: its text has its own place, and its kept placeholders have those of the first
    ones."""

    feature: MultiModalFeatureSpec
    plan: Plan
    offset: int
    written: Tensor


@dataclass(frozen=True)
class UnprunedPrompt:
    """The prompt of which a reduced one is what is left. length: of its tokens. index: long `[n]`, where the tokens of
    the reduced prompt stand there, before rows are placed."""

    items: list[UnprunedItem]
    length: int
    index: Tensor

    @classmethod
    def from_reduced(cls, count: int, features: Sequence[MultiModalFeatureSpec]) -> UnprunedPrompt:
        """Lay out a reduced prompt of `count` tokens."""
        items, index = list[UnprunedItem](), list[Tensor]()
        done = gone = 0  # tokens of the reduced prompt so far, and those that are left out before them
        for feature in sorted(features, key=lambda one: one.mm_position.offset):
            plan, offset = Plan.from_feature(feature), feature.mm_position.offset
            written = _span(*_written(plan))
            items.append(UnprunedItem(feature, plan, offset + gone, written))
            index += [_span(range(done + gone, offset + gone)), offset + gone + written]
            done = offset + feature.mm_position.length
            gone += plan.length - feature.mm_position.length
        return cls(items, count + gone, torch.cat([*index, _span(range(done + gone, count + gone))]))

    def tokens(self, reduced: list[int]) -> list[int]:
        """Return the ids of the full prompt, from those of the reduced one."""
        full, done = list[int](), 0
        for item in self.items:
            place = item.feature.mm_position
            full += reduced[done : place.offset]
            full += item.plan.tokens
            done = place.offset + place.length
        return full + reduced[done:]


def _span(*ranges: range) -> Tensor:
    return torch.cat([torch.arange(one.start, one.stop, device="cpu") for one in ranges])


def _written(plan: Plan) -> list[range]:
    """Return the places of what is written of an item in its full text (see `UnprunedItem`)."""
    if not plan.reduces:
        return [range(plan.length)]
    if plan.per_run:
        keep = iter(plan.keep)
        return [range(one.start, one.start + next(keep)) if embed else one for embed, one in plan.stretches]
    first, end = plan.span
    return [range(first + plan.rows), range(end, plan.length)]


def compute_prompt_positions(
    rule: Rule, tokens: list[int], features: list[MultiModalFeatureSpec]
) -> tuple[Tensor, int, ItemNotes]:
    """Return the positions `[3, n]` of a reduced prompt, the delta of later tokens, and the notes of its items.

    All follow from the model's own rule for the full prompt.
    """
    if not any(Plan.from_feature(feature).reduces for feature in features):
        return *rule(tokens, features), {feature.mm_position.offset: None for feature in features}
    full = UnprunedPrompt.from_reduced(len(tokens), features)
    moved = [dataclasses.replace(item.feature, mm_position=_where(item.plan, item.offset)) for item in full.items]
    unpruned, _ = rule(full.tokens(tokens), moved)
    positions = unpruned[:, full.index]

    def base_of(item: UnprunedItem) -> Tensor:
        before = item.plan.written[1] + item.feature.mm_position.offset
        return torch.where(before < 0, 0, positions[:, before.clamp(min=0)].amax(0) + 1)

    return positions, int(unpruned.max()) + 1 - len(tokens), _notes(full, base_of)


def compute_line_positions(tokens: list[int], features: list[MultiModalFeatureSpec]) -> tuple[Tensor, int, ItemNotes]:
    """Return the same as `compute_prompt_positions` for a model with one axis, whose language model reads the first row
    of the positions."""
    full = UnprunedPrompt.from_reduced(len(tokens), features)
    notes = _notes(full, lambda item: torch.tensor(item.offset, device="cpu"))
    return full.index.expand(3, -1), full.length - len(tokens), notes


def _notes(full: UnprunedPrompt, base_of: Callable[[UnprunedItem], Tensor]) -> ItemNotes:
    """Return the notes of a prompt. base_of: gives the positions from which the columns of an item's rows count."""
    notes = dict[int, Tensor | None]()
    for item in full.items:
        offset = item.feature.mm_position.offset
        notes[offset] = None
        if item.plan.reduces:
            slots = item.plan.written[0] + offset
            notes[offset] = torch.stack([slots, base_of(item).expand(len(slots))])
    return notes


# -- on the device, for all requests of a step at once


def wrap_gather_v1(original: Any) -> Any:
    """Wrap the runner's `_gather_mm_embeddings` so that it places rows."""

    def gather(self: Any, step: Any, shift_computed_tokens: int = 0) -> Any:
        rows, is_row = original(self, step, shift_computed_tokens)
        model = self.get_model()
        axes = getattr(model, "tokenprune_axes", 0)
        if not axes or not rows:
            return rows, is_row
        if shift_computed_tokens:  # a drafter's positions were placed before
            return _without_columns(rows, axes), is_row
        parts, begin = list[ReadTokens](), 0
        for name in self.input_batch.req_ids:
            request, num_tokens = self.requests[name], step.num_scheduled_tokens[name]
            start, notes = request.num_computed_tokens, model.tokenprune_notes.get(name)
            parts.append(ReadTokens(0, request.mm_features, notes, start, num_tokens, begin - start))
            begin += num_tokens
        return write_positions(rows, parts, self.mrope_positions.gpu[None], axes), is_row

    return gather


def wrap_recompute_v2(original: Any) -> Any:
    """Wrap `MultiModalPruner.recompute` so that it places rows."""

    def recompute(self: Any, mm_embeds: list[Tensor], input_batch: Any, req_states: Any) -> list[Tensor]:
        axes = getattr(self.model, "tokenprune_axes", 0)
        if not axes:
            cleaned: list[Tensor] = original(self, mm_embeds, input_batch, req_states)
            return cleaned
        items, notes = self.encoder_cache.mm_features, self.model.tokenprune_notes
        numbers = (
            input_batch.idx_mapping_np, input_batch.num_computed_prefill_tokens_np, input_batch.num_scheduled_tokens
        )  # fmt: skip
        batch = zip(input_batch.req_ids, *(array.tolist() for array in numbers), strict=False)
        parts = [ReadTokens(row, items[name], notes.get(row), start, count, 0) for name, row, start, count in batch]
        known = self.rope_state.prefill_positions.gpu.unflatten(0, (-1, self.rope_state.num_dims))
        return write_positions(mm_embeds, parts, known, axes)

    return recompute


def write_positions(rows: Sequence[Tensor], parts: Iterable[ReadTokens], known: Tensor, axes: int) -> list[Tensor]:
    """Write the positions in the columns of embeddings into `known`, and return the embeddings without the columns.

    Args:
        rows: Embeddings of each item that is read now, in the order of the requests.
        parts: What is read of each request.
        known: Integers `[requests, axes or more, tokens]`.
        axes: Number of axes of a position.

    Raises:
        PlaceholderMismatchError: If an item has another number of rows than placeholders.
        UnsupportedSetupError: If a request has no note of an item.
    """
    columns, targets, remaining = list[Tensor](), list[Tensor](), iter(rows)
    for row, features, notes, start, num_tokens, shift in parts:
        end = start + num_tokens
        low, high = get_mm_features_in_window(features, start=start, end=end)
        for feature in features[low:high]:
            span = feature.mm_position
            inside = max(start - span.offset, 0), min(end - span.offset, span.length)
            first, last = span.get_embeds_indices_in_range(*inside)
            if first == last:
                continue
            if span.offset not in notes:
                raise create_missing_note_error(span.offset)
            item_rows, note = next(remaining), notes[span.offset]
            if len(item_rows) != last - first:
                raise PlaceholderMismatchError(f"{len(item_rows)} rows for {last - first} placeholders of an item")
            if note is not None:
                columns.append(item_rows[:, -DIGITS * axes :])
                slots, base = note[:, first:last]
                targets.append(torch.stack([torch.full_like(slots, row), slots + shift, base]))
    if columns:
        request_of, slot, base = to_device(torch.cat(targets, dim=1), known.device)
        known[request_of, :axes, slot] = (decode_columns(torch.cat(columns)) + base).T.to(known.dtype)
    return _without_columns(rows, axes)


def _without_columns(rows: Sequence[Tensor], axes: int) -> list[Tensor]:
    return [copy_mm_embedding_modality(one, one[:, : -DIGITS * axes]) for one in rows]


# -- one axis: a decoder with rope, made to read the first of three


def prepare_decoder(decoder: nn.Module, model_config: Any) -> None:
    """Check that every rope of a decoder reads the first axis alone, and have torch.compile take the last dimension of
    positions `[3, n]` for the one that changes. Raises UnsupportedModelError."""
    if isinstance(decoder, StageMissingLayer):
        return  # a server that encodes alone
    ropes = [module for module in decoder.modules() if isinstance(module, RotaryEmbeddingBase)]
    if not ropes or not all(_reads_first_axis(rope, count_positions(model_config)) for rope in ropes):
        raise UnsupportedModelError(
            f'{KEY}: "positions": "original" does not go with {type(decoder).__name__}, whose rope does not take '
            "positions of several axes: leave positions out, and kept tokens are counted anew"
        )
    for module in decoder.modules():
        # vLLM marks these when it compiles. Of Llama and others it names the first dimension, which is the last one too
        # where positions are [n].
        dims = getattr(module, "_dynamic_arg_dims", None) or {}
        if (marked := dims.get("positions")) is not None:
            dims["positions"] = {-1: next(iter(marked.values()))} if isinstance(marked, dict) else -1


def _reads_first_axis(rope: RotaryEmbeddingBase, longest: int) -> bool:
    if not isinstance(rope, MRotaryEmbedding) or rope.mrope_interleaved:
        return False
    return list(rope.mrope_section or ()) == [rope.rotary_dim // 2, 0, 0] and len(rope.cos_sin_cache) >= longest
