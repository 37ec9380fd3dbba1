# SPDX-License-Identifier: Apache-2.0
"""Positions (time, height, width) of what is left of an image, for models with M-RoPE.

Kept tokens keep the positions that they have in the full image, and text stands where it stood. Which tokens are
kept is known only to the model's encoder, so their positions travel with their embeddings, in columns of their own, to
the runner's hook `recompute_mrope_positions`. Text positions do not depend on the choice, so what a prefix cache holds
of an image never has to be computed again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.vllm.setting.plan import Plan

# Three numbers in two digits each: every digit is below 256, so it is exact in any 16-bit float.
COLUMNS = 6
Rule = Callable[[list[int], list[MultiModalFeatureSpec]], tuple[Tensor, int]]


def to_columns(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """long `[3, n]` below 65536 -> `[n, 6]`."""
    return torch.stack([positions // 256, positions % 256], dim=-1).permute(1, 0, 2).flatten(1).to(dtype)


def from_columns(columns: Tensor) -> Tensor:
    """`[n, 6]` -> long `[3, n]`."""
    high, low = columns.long().view(-1, 3, 2).unbind(-1)
    return (256 * high + low).T


def within_item(rule: Rule, plan: Plan, item: Any, modality: str) -> Tensor:
    """long `[3, len(plan.tokens)]`: positions in the item's text as the model's own `rule` gives them, counted from the
    start of the run of placeholders that the token will be in."""
    spec = MultiModalFeatureSpec(item, modality, "", PlaceholderRange(0, len(plan.tokens)))
    positions, _ = rule(list(plan.tokens), [spec])
    first, end = plan.span
    starts = torch.tensor([first] * len(plan.tokens))
    if not plan.reduces or plan.per_run:  # then each run of placeholders stands for itself
        for place in range(first, end):
            same = place > first and plan.embeds[place] and plan.embeds[place - 1]
            starts[place] = starts[place - 1] if same else place
    # As `place` will do it: one behind the token before.
    base = torch.where(starts > 0, positions[:, (starts - 1).clamp(min=0)].amax(0) + 1, 0)
    return positions - base


def of_prompt(rule: Rule, tokens: list[int], features: list[MultiModalFeatureSpec]) -> tuple[Tensor, int]:
    """Return the positions `[3, n]` of a reduced prompt and what to add to later places: the model's own rule is asked
    about the prompt as it would be in full. Kept tokens hold those of their item's first ones for the time being."""
    full: list[int] = []
    moved, index = [], []
    done = 0
    for feature in sorted(features, key=lambda one: one.mm_position.offset):
        plan = Plan.of_item(feature.data, feature.modality)
        offset, length = feature.mm_position.offset, feature.mm_position.length
        index += range(len(full), len(full) + offset - done)
        full += tokens[done:offset]
        where = PlaceholderRange(len(full), len(plan.tokens))
        moved.append(dataclasses.replace(feature, mm_position=where))
        if plan.reduces and plan.per_run:
            index += [len(full) + place for place in _first_of_each_run(plan)]
        elif plan.reduces:
            first, end = plan.span
            index += range(len(full), len(full) + first)
            index += [min(len(full) + first + row, len(full) + end - 1) for row in range(plan.rows)]
            index += range(len(full) + end, len(full) + len(plan.tokens))
        else:
            index += range(len(full), len(full) + length)
        full += plan.tokens
        done = offset + length
    index += range(len(full), len(full) + len(tokens) - done)
    full += tokens[done:]
    positions, _ = rule(full, moved)
    return positions[:, index], int(positions.max()) + 1 - len(tokens)


def _first_of_each_run(plan: Plan) -> list[int]:
    """Places in the item's full text: of its text, and of as many placeholders of each run as stay of it."""
    places, start, keep = [], 0, iter(plan.keep)
    for embed, group in itertools.groupby(plan.embeds):
        length = len(list(group))
        places += range(start, start + (next(keep) if embed else length))
        start += length
    return places


def place(
    tokens: Any, embeddings: Sequence[Tensor], positions: Tensor, computed: int, placeholders: list[int]
) -> tuple[list[Tensor], Tensor, int]:
    """Take the columns off `embeddings`, which belong to the first placeholders at or behind place `computed`, and
    write the positions that they hold. Returns embeddings, positions and what to add to later places."""
    delta = int(positions.max()) + 1 - positions.shape[1]
    if not embeddings:
        return [], positions, delta
    within = from_columns(torch.cat([one[:, -COLUMNS:] for one in embeddings]).cpu())
    is_placeholder = torch.isin(torch.as_tensor(tokens).cpu(), torch.tensor(placeholders))
    begins = is_placeholder & ~is_placeholder.roll(1)
    begins[0] = is_placeholder[0]
    places = torch.arange(len(is_placeholder))
    start = torch.where(begins, places, 0).cummax(0).values
    slots = places[is_placeholder & (places >= computed)][: within.shape[1]]
    if len(slots) != within.shape[1]:
        raise PlaceholderMismatchError(f"{within.shape[1]} rows for {len(slots)} placeholders behind place {computed}")
    known = positions.cpu()
    start = start[slots]
    base = torch.where(start > 0, known[:, (start - 1).clamp(min=0)].amax(0) + 1, 0)
    positions = positions.clone()
    positions[:, slots.to(positions.device)] = (base + within).to(positions)
    return [one[:, :-COLUMNS] for one in embeddings], positions, delta
