# SPDX-License-Identifier: Apache-2.0
"""Positions of a pruned prompt: (time, height, width) for models with M-RoPE, and one axis on request.

Kept tokens and text keep the positions that they have in the unpruned prompt. Only the model's encoder knows the kept
tokens. Their positions therefore travel as extra columns of their embeddings to the runner, which writes them into its
table of positions. All other positions are known when the request arrives. vLLM's own hook for this reads values on the
host and so waits for the device. Text positions do not depend on the selection, so the prefix cache of a prompt
with an image stays valid.

A model with one axis is served as a model with M-RoPE that reads only the first axis (worker/rope.py). The positions of
its kept tokens are relative to the start of their item, so items may be adjacent, at the end, or contain text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.utils import copy_mm_embedding_modality, get_mm_features_in_window

from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.worker.position_notes import ItemNotes, create_missing_note_error
from tokenprune.kernels.transfer import to_device

# A position is two digits in base 256, which are exact in every 16-bit float.
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
    """Encode positions below 65536 as digits, int64 (axes, n) -> (n, 2 * axes)."""
    return torch.stack([positions // 256, positions % 256], dim=-1).permute(1, 0, 2).flatten(1).to(dtype)


def decode_columns(columns: Tensor) -> Tensor:
    """Decode the result of `encode_columns`, (n, 2 * axes) -> int64 (axes, n)."""
    high, low = columns.long().view(len(columns), columns.shape[1] // DIGITS, DIGITS).unbind(-1)
    return torch.add(low, high, alpha=256).T


def compute_item_positions(rule: Rule, plan: Plan, item: Any, modality: str) -> Tensor:
    """Return the positions of an item's unpruned text, relative to the start of the run of placeholders of each token.

    Args:
        rule: The model's function that computes the positions of a prompt.

    Returns:
        Positions, shape (3, plan.length), int64.
    """
    positions, _ = rule(plan.tokens, [MultiModalFeatureSpec(item, modality, "", _get_range(plan, 0))])
    first, end = plan.span
    is_start = torch.zeros(plan.length, dtype=torch.bool, device="cpu")
    is_start[first] = True
    if plan.per_run:  # each run of placeholders, and each token between runs, is a separate run
        embeds = plan.is_embed[first:end]
        is_start[first + 1 : end] = ~(embeds[1:] & embeds[:-1])
    starts = is_start.nonzero().flatten()
    # `compute_prompt_positions` uses the same rule: one after the token before.
    base = torch.where(starts > 0, positions[:, (starts - 1).clamp(min=0)].amax(0) + 1, 0)
    run = is_start.cumsum(0).clamp(min=1) - 1
    run[end:] = 0
    return positions - base[run]


def _get_range(plan: Plan, offset: int) -> PlaceholderRange:
    """Return the range of an item's unpruned text in the prompt, for the model's rule."""
    return PlaceholderRange(offset, plan.length, None if plan.is_plain else plan.is_embed)


@dataclass(frozen=True)
class UnprunedItem:
    """An item of an unpruned prompt.

    Attributes:
        feature: vLLM's feature of the item in the pruned prompt.
        offset: Start of the item's text in the unpruned prompt.
        written: For each token of the item in the pruned prompt, its index in the item's unpruned text. The kept
            placeholders are not known yet, so they have the indices of the first placeholders.
    """

    feature: MultiModalFeatureSpec
    plan: Plan
    offset: int
    written: Tensor


@dataclass(frozen=True)
class UnprunedPrompt:
    """The unpruned prompt that belongs to a pruned prompt.

    Attributes:
        length: Number of tokens of the unpruned prompt.
        index: Index of each token of the pruned prompt in the unpruned prompt, shape (n,), int64, before positions
            are known.
    """

    items: list[UnprunedItem]
    length: int
    index: Tensor

    @classmethod
    def from_reduced(cls, count: int, features: Sequence[MultiModalFeatureSpec]) -> UnprunedPrompt:
        """Reconstruct the layout of the unpruned prompt from a pruned prompt of `count` tokens."""
        items, index = list[UnprunedItem](), list[Tensor]()
        done = num_dropped = 0  # tokens of the pruned prompt so far, and tokens dropped before them
        for feature in sorted(features, key=lambda feature: feature.mm_position.offset):
            plan, offset = Plan.from_feature(feature), feature.mm_position.offset
            written = _to_indices(*_find_written(plan))
            items.append(UnprunedItem(feature, plan, offset + num_dropped, written))
            index += [_to_indices(range(done + num_dropped, offset + num_dropped)), offset + num_dropped + written]
            done = offset + feature.mm_position.length
            num_dropped += plan.length - feature.mm_position.length
        index.append(_to_indices(range(done + num_dropped, count + num_dropped)))
        return cls(items, count + num_dropped, torch.cat(index))

    def build_ids(self, pruned: list[int]) -> list[int]:
        """Return the ids of the unpruned prompt, given the ids of the pruned prompt."""
        ids, done = list[int](), 0
        for item in self.items:
            span = item.feature.mm_position
            ids += pruned[done : span.offset]
            ids += item.plan.tokens
            done = span.offset + span.length
        return ids + pruned[done:]


def _to_indices(*ranges: range) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop, device="cpu") for span in ranges])


def _find_written(plan: Plan) -> list[range]:
    """Return the ranges of an item's unpruned text that its pruned text consists of; see `UnprunedItem.written`."""
    if not plan.reduces:
        return [range(plan.length)]
    if plan.per_run:
        keep = iter(plan.keep)
        return [range(span.start, span.start + next(keep)) if embed else span for embed, span in plan.stretches]
    first, end = plan.span
    return [range(first + plan.rows), range(end, plan.length)]


def compute_prompt_positions(
    rule: Rule, tokens: list[int], features: list[MultiModalFeatureSpec]
) -> tuple[Tensor, int, ItemNotes]:
    """Return the positions of a pruned prompt, computed by the model's rule for the unpruned prompt.

    Args:
        rule: The model's function that computes the positions of a prompt.

    Returns:
        The positions, shape (3, n), int64; the delta of later tokens; and the notes of the items.
    """
    if not any(Plan.from_feature(feature).reduces for feature in features):
        return *rule(tokens, features), {feature.mm_position.offset: None for feature in features}
    prompt = UnprunedPrompt.from_reduced(len(tokens), features)
    moved = [dataclasses.replace(item.feature, mm_position=_get_range(item.plan, item.offset)) for item in prompt.items]
    unpruned, _ = rule(prompt.build_ids(tokens), moved)
    positions = unpruned[:, prompt.index]

    def find_base(item: UnprunedItem) -> Tensor:
        before = item.plan.written[1] + item.feature.mm_position.offset
        return torch.where(before < 0, 0, positions[:, before.clamp(min=0)].amax(0) + 1)

    return positions, int(unpruned.max()) + 1 - len(tokens), _build_notes(prompt, find_base)


def compute_line_positions(tokens: list[int], features: list[MultiModalFeatureSpec]) -> tuple[Tensor, int, ItemNotes]:
    """Return the results of `compute_prompt_positions` for a model that reads only the first row of positions."""
    prompt = UnprunedPrompt.from_reduced(len(tokens), features)
    notes = _build_notes(prompt, lambda item: torch.tensor(item.offset, device="cpu"))
    return prompt.index.expand(3, -1), prompt.length - len(tokens), notes


def _build_notes(prompt: UnprunedPrompt, find_base: Callable[[UnprunedItem], Tensor]) -> ItemNotes:
    """Return the notes of a prompt.

    Args:
        find_base: Returns the positions that the columns of an item's rows are relative to.
    """
    notes = dict[int, Tensor | None]()
    for item in prompt.items:
        offset = item.feature.mm_position.offset
        notes[offset] = None
        if item.plan.reduces:
            slots = item.plan.written[0] + offset
            notes[offset] = torch.stack([slots, find_base(item).expand(len(slots))])
    return notes


# -- on the device, for all requests of a step at once


def wrap_gather_v1(original: Any) -> Any:
    """Wrap `_gather_mm_embeddings` of Model Runner V1 so that it writes the positions of rows."""

    def gather(self: Any, step: Any, shift_computed_tokens: int = 0) -> Any:
        rows, is_row = original(self, step, shift_computed_tokens)
        model = self.get_model()
        axes = getattr(model, "tokenprune_axes", 0)
        if not axes or not rows:
            return rows, is_row
        if shift_computed_tokens:  # the positions of a drafter were written before
            return _remove_columns(rows, axes), is_row
        parts, begin = list[ReadTokens](), 0
        for name in self.input_batch.req_ids:
            request, num_tokens = self.requests[name], step.num_scheduled_tokens[name]
            start, notes = request.num_computed_tokens, model.tokenprune_notes.get(name)
            parts.append(ReadTokens(0, request.mm_features, notes, start, num_tokens, begin - start))
            begin += num_tokens
        return write_positions(rows, parts, self.mrope_positions.gpu[None], axes), is_row

    return gather


def wrap_recompute_v2(original: Any) -> Any:
    """Wrap `MultiModalPruner.recompute` of Model Runner V2 so that it writes the positions of rows."""

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
        parts: Tokens that are read of each request.
        known: Table of positions, shape (requests, axes or more, tokens), an integer dtype.
        axes: Number of axes of a position.

    Raises:
        PlaceholderMismatchError: If the number of an item's rows differs from its number of placeholders.
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
                raise PlaceholderMismatchError(f"An item has {len(item_rows)} rows for {last - first} placeholders.")
            if note is not None:
                columns.append(item_rows[:, -DIGITS * axes :])
                slots, base = note[:, first:last]
                targets.append(torch.stack([torch.full_like(slots, row), slots + shift, base]))
    if columns:
        request_of, slot, base = to_device(torch.cat(targets, dim=1), known.device)
        known[request_of, :axes, slot] = (decode_columns(torch.cat(columns)) + base).T.to(known.dtype)
    return _remove_columns(rows, axes)


def _remove_columns(rows: Sequence[Tensor], axes: int) -> list[Tensor]:
    return [copy_mm_embedding_modality(item_rows, item_rows[:, : -DIGITS * axes]) for item_rows in rows]
