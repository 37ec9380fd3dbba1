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
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.vllm.setting.plan import Plan

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
    """long `[3, len(plan.tokens)]`: positions in the item's text as the model's own `rule` gives them, counted from the
    start of the run of placeholders that the token will be in."""
    spec = MultiModalFeatureSpec(item, modality, "", _where(plan, 0))
    positions, _ = rule(list(plan.tokens), [spec])
    first, end = plan.span
    begins = torch.zeros(len(plan.tokens), dtype=torch.bool, device="cpu")
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


def _plan(feature: MultiModalFeatureSpec) -> Plan:
    plan = Plan.of_item(feature.data, feature.modality)
    if plan is None:
        raise PlaceholderMismatchError(f"an item ({feature.modality}) came without a plan")
    return plan


def _where(plan: Plan, offset: int) -> PlaceholderRange:
    """Return the place of an item's full text, for a rule that asks where its placeholders are."""
    embeds = None if all(plan.embeds) else plan.is_embed
    return PlaceholderRange(offset, len(plan.tokens), embeds)


def of_prompt(rule: Rule, tokens: list[int], features: list[MultiModalFeatureSpec]) -> tuple[Tensor, int]:
    """Return the positions `[3, n]` of a reduced prompt, and the number to add to later places.

    They follow from the model's own rule for the full prompt. Until `place` runs, kept tokens have the positions of
    their item's first tokens.
    """
    full: list[int] = []
    moved: list[MultiModalFeatureSpec] = []
    index: list[int] = []
    done = 0
    for feature in sorted(features, key=lambda one: one.mm_position.offset):
        plan = _plan(feature)
        offset, length = feature.mm_position.offset, feature.mm_position.length
        index += range(len(full), len(full) + offset - done)
        full += tokens[done:offset]
        moved.append(dataclasses.replace(feature, mm_position=_where(plan, len(full))))
        index += [len(full) + place for place in _written(plan)]
        full += plan.tokens
        done = offset + length
    index += range(len(full), len(full) + len(tokens) - done)
    full += tokens[done:]
    whole, _ = rule(full, moved)
    positions, later = whole[:, index], int(whole.max()) + 1 - len(tokens)
    _later[positions] = later
    return positions, later


def _written(plan: Plan) -> list[int]:
    """Return the places, in an item's full text, of the tokens written for it until `place` runs: text has its own
    place, and the kept placeholders have those of the first ones."""
    if not plan.reduces:
        return list(range(len(plan.tokens)))
    if plan.per_run:
        return _first_of_each_run(plan)
    first, end = plan.span
    kept = [min(first + row, end - 1) for row in range(plan.rows)]
    return [*range(first), *kept, *range(end, len(plan.tokens))]


def _first_of_each_run(plan: Plan) -> list[int]:
    """Return the places of its text and of each run's first placeholders, as many as stay, in an item's full text."""
    places: list[int] = []
    start, keep = 0, iter(plan.keep)
    for embed, group in itertools.groupby(plan.embeds):
        length = len(list(group))
        places += range(start, start + (next(keep) if embed else length))
        start += length
    return places


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
    positions: list[int] = []
    begins: list[int | None] = []
    full, done = 0, 0
    for feature in sorted(features, key=lambda one: one.mm_position.offset):
        plan = _plan(feature)
        text = feature.mm_position.offset - done
        positions += range(full, full + text)
        begins += [None] * text
        full += text
        within = _written(plan)
        # Text within a span that shares its budget is written as placeholders, too.
        first, end = plan.span if plan.reduces and not plan.per_run else (0, 0)
        positions += [full + place for place in within]
        begins += [full if plan.embeds[place] or first <= place < end else None for place in within]
        full += len(plan.tokens)
        done = feature.mm_position.offset + feature.mm_position.length
    text = len(tokens) - done
    positions += range(full, full + text)
    full += text
    starts = [full if start is None else start for start in [*begins, *[None] * text]]
    return torch.tensor([positions, starts, [full] * len(tokens)], device="cpu"), full - len(tokens)


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
