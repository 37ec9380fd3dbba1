# SPDX-License-Identifier: Apache-2.0
"""Positions of what is left of an image: (time, height, width) for models with M-RoPE, and with one axis on request.

Kept tokens keep the positions that they have in the full image, and text stands where it stood. Which tokens are
kept is known only to the model's encoder, so their positions travel with their embeddings, in columns of their own, to
the runner's hook `recompute_mrope_positions`. Text positions do not depend on the choice, so what a prefix cache holds
of an image never has to be computed again.

A model with one axis is served as one with M-RoPE that reads the first axis alone. The other two are free, and tell the
hook what it needs (see `of_line`), so images may stand side by side, at the end, or have text within.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tokenprune.errors import PlaceholderMismatchError, UnsupportedModelError
from tokenprune.integrations.vllm.setting.plan import Plan
from tokenprune.integrations.vllm.setting.position_checks import longest
from tokenprune.integrations.vllm.setting.settings import KEY

# Numbers in two digits each: every digit is below 256, so it is exact in any 16-bit float.
DIGITS = 2
COLUMNS = 3 * DIGITS
WHOLE = -1  # in all columns of an item that lost nothing: its places are what the model's own rule says
Rule = Callable[[list[int], list[MultiModalFeatureSpec]], tuple[Tensor, int]]
# By a prompt's positions: the number to add to later places, for which Model Runner V1 asks in each step.
_later: Any = WeakTensorKeyDictionary()


def to_columns(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """long `[axes, n]` below 65536 -> `[n, 2 * axes]`."""
    return torch.stack([positions // 256, positions % 256], dim=-1).permute(1, 0, 2).flatten(1).to(dtype)


def from_columns(columns: Tensor) -> Tensor:
    """`[n, 2 * axes]` -> long `[axes, n]`."""
    high, low = columns.long().view(len(columns), columns.shape[1] // DIGITS, DIGITS).unbind(-1)
    return (256 * high + low).T


def within_item(rule: Rule, plan: Plan, item: Any, modality: str) -> Tensor:
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
    # As `place` will do it: one after the token before.
    base = torch.where(starts > 0, positions[:, (starts - 1).clamp(min=0)].amax(0) + 1, 0)
    run = begins.cumsum(0).clamp(min=1) - 1
    run[end:] = 0
    return positions - base[run]


def _where(plan: Plan, offset: int) -> PlaceholderRange:
    """Return the place of an item's full text, for a rule that asks where its placeholders are."""
    return PlaceholderRange(offset, plan.length, None if plan.is_plain else plan.is_embed)


@dataclass(frozen=True)
class FullItem:
    """An item of a prompt. offset: where its text begins in the full prompt. written: places in that text of what is
    written of it, until `place` runs: its text has its own place, and its kept placeholders have those of the first
    ones."""

    feature: MultiModalFeatureSpec
    plan: Plan
    offset: int
    written: Tensor


@dataclass(frozen=True)
class FullPrompt:
    """The prompt of which a reduced one is what is left. length: of its tokens. index: long `[n]`, where the tokens of
    the reduced prompt stand there, before `place` runs."""

    items: list[FullItem]
    length: int
    index: Tensor

    @classmethod
    def of(cls, count: int, features: Sequence[MultiModalFeatureSpec]) -> FullPrompt:
        """Lay out a reduced prompt of `count` tokens."""
        items, index = list[FullItem](), list[Tensor]()
        done = gone = 0  # tokens of the reduced prompt so far, and those that are left out before them
        for feature in sorted(features, key=lambda one: one.mm_position.offset):
            plan, offset = Plan.of_feature(feature), feature.mm_position.offset
            written = _span(*_written(plan))
            items.append(FullItem(feature, plan, offset + gone, written))
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
    """Return the places of what is written of an item in its full text (see `FullItem`)."""
    if not plan.reduces:
        return [range(plan.length)]
    if plan.per_run:
        keep = iter(plan.keep)
        return [range(one.start, one.start + next(keep)) if embed else one for embed, one in plan.stretches]
    first, end = plan.span
    return [range(first + plan.rows), range(end, plan.length)]


def of_prompt(rule: Rule, tokens: list[int], features: list[MultiModalFeatureSpec]) -> tuple[Tensor, int]:
    """Return the positions `[3, n]` of a reduced prompt, and the number to add to later places. They follow from the
    model's own rule for the full prompt."""
    full = FullPrompt.of(len(tokens), features)
    moved = [dataclasses.replace(one.feature, mm_position=_where(one.plan, one.offset)) for one in full.items]
    whole, _ = rule(full.tokens(tokens), moved)
    positions, later = whole[:, full.index], int(whole.max()) + 1 - len(tokens)
    _later[positions] = later
    return positions, later


def place(
    tokens: Any, embeddings: Sequence[Tensor], positions: Tensor, computed: int, placeholders: list[int]
) -> tuple[list[Tensor], Tensor, int]:
    """Remove the columns of `embeddings` and write the positions that they hold. The embeddings belong to the first
    placeholders from place `computed` on. Return embeddings, positions and the number to add to later places."""
    delta = _later.get(positions)
    if not embeddings and delta is not None:
        return [], positions, delta
    known = positions.cpu()
    if delta is None:
        delta = int(known.max()) + 1 - known.shape[1]
    if not embeddings:
        return [], positions, delta
    cut = [one[:, :-COLUMNS] for one in embeddings]
    within = from_columns(torch.cat([one[:, -COLUMNS:] for one in embeddings]).cpu())
    moves = within[0] >= 0
    if not moves.any():
        return cut, positions, delta
    is_placeholder = torch.isin(torch.as_tensor(tokens, device="cpu"), torch.tensor(placeholders, device="cpu"))
    begins = is_placeholder & ~is_placeholder.roll(1)
    begins[0] = is_placeholder[0]
    places = torch.arange(len(is_placeholder), device="cpu")
    start = torch.where(begins, places, 0).cummax(0).values
    slots = places[is_placeholder & (places >= computed)][: within.shape[1]]
    _check_rows(within.shape[1], len(slots), computed)
    slots, within = slots[moves], within[:, moves]
    start = start[slots]
    base = torch.where(start > 0, known[:, (start - 1).clamp(min=0)].amax(0) + 1, 0)
    positions = positions.clone()
    positions[:, slots.to(positions.device)] = (base + within).to(positions)
    return cut, positions, delta


def of_line(tokens: list[int], features: list[MultiModalFeatureSpec]) -> tuple[Tensor, int]:
    """Return long `[3, n]` of a reduced prompt for a model with one axis, and what to add to later places.

    The first row is what the language model reads: places in the full prompt, those of kept tokens for the time being.
    The others are for `place_line`: where the item of a placeholder begins in the full prompt, and the length of that
    prompt, which stands for text in both. All are below that length or equal to it, so rope has an angle for each.
    """
    full = FullPrompt.of(len(tokens), features)
    begins = torch.full((len(tokens),), full.length, device="cpu")
    for item in full.items:
        plan, place = item.plan, item.feature.mm_position
        becomes_row = plan.is_embed.clone()
        if (
            plan.reduces and not plan.per_run
        ):  # text within a span that shares its budget is written as placeholders, too
            becomes_row[slice(*plan.span)] = True
        begins[place.offset : place.offset + place.length][becomes_row[item.written]] = item.offset
    return torch.stack([full.index, begins, torch.full_like(begins, full.length)]), full.length - len(tokens)


def place_line(embeddings: Sequence[Tensor], positions: Tensor, computed: int) -> tuple[list[Tensor], Tensor, int]:
    """`place` for a model with one axis; positions: as `of_line` made them."""
    known = positions.cpu()
    delta = int(known[2, 0]) - known.shape[1]
    if not embeddings:
        return [], positions, delta
    within = from_columns(torch.cat([one[:, -DIGITS:] for one in embeddings]).cpu())[0]
    places = torch.arange(known.shape[1], device="cpu")
    slots = places[(known[1] < known[2]) & (places >= computed)][: len(within)]
    _check_rows(len(within), len(slots), computed)
    positions = positions.clone()
    positions[0, slots.to(positions.device)] = (known[1, slots] + within).to(positions)
    return [one[:, :-DIGITS] for one in embeddings], positions, delta


def _check_rows(rows: int, slots: int, computed: int) -> None:
    if rows != slots:
        raise PlaceholderMismatchError(f"{rows} rows for {slots} placeholders after place {computed}")


# -- one axis: a decoder with rope, made to read the first of three


def prepare_decoder(decoder: nn.Module, model_config: Any) -> None:
    """Check that every rope of a decoder reads the first axis alone, and have torch.compile take the last dimension of
    positions `[3, n]` for the one that changes. Raises UnsupportedModelError."""
    if isinstance(decoder, StageMissingLayer):
        return  # a server that encodes alone
    ropes = [module for module in decoder.modules() if isinstance(module, RotaryEmbeddingBase)]
    if not ropes or not all(_reads_first_axis(rope, longest(model_config)) for rope in ropes):
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
