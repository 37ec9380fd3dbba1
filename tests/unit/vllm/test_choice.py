# SPDX-License-Identifier: Apache-2.0
"""A choice among rows in their order, which copies none of them, and among those of several items that are alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from each import each
from served_settings import served_methods
from tokenprune.integrations.shared.checks import reads_tower
from tokenprune.integrations.vllm.selection import before_llm
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, find_runs
from tokenprune.integrations.vllm.worker.rows import AwaitedRows
from tokenprune.methods import registry
from tokenprune.selection.method import Pruner
from tokenprune.selection.observable_registry import compares_frames

NAMES = [name for name in served_methods() if isinstance(registry.build(name, {}), Pruner)]


@each("name", NAMES)
@each("counts", [[36], [18, 18]])
def test_it_keeps_what_it_keeps_of_copies(name: str, counts: list[int]) -> None:
    method: Any = registry.build(name, {})
    rows = torch.randn(36, 10, generator=torch.Generator().manual_seed(3))
    frames: list[list[int] | None] = [[count // 2] * 2 for count in counts]
    modality = "video" if compares_frames(method) else "image"
    found = []
    for in_order in (True, False):
        given = rows.clone()
        segments = before_llm.build_segments(counts, None, modality, rows.device, frames=frames)
        with pytest.MonkeyPatch.context() as patch:
            if not in_order:
                patch.setattr(before_llm, "_is_contiguous", lambda segments: False)
            encoded = before_llm._draw_values(method, counts)
            keep = [min(count, method.resolve_count(count, 12)) for count in counts]
            kept, merged = before_llm.choose(method, given, 8, segments, keep, encoded=encoded)
        assert torch.equal(given, rows)  # they go on to the language model
        found.append((kept, merged))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@each("name", [name for name in NAMES if not reads_tower(registry.build(name, {}))])
@each("counts", [[20], [8, 12]])
def test_items_at_once_keep_what_each_keeps_alone(name: str, counts: list[int]) -> None:
    method: Any = registry.build(name, {})
    items = [torch.randn(20, 10, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    frames: list[list[int] | None] = [[count // 2] * 2 for count in counts]
    modality = "video" if compares_frames(method) else "image"
    keep = [min(count, method.resolve_count(count, count // 2)) for count in counts]

    def chosen(rows: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        segments = before_llm.build_segments(counts, None, modality, rows.device, frames=frames, items=number)
        return before_llm.choose(method, rows, 8, segments, keep * number)

    alone = [chosen(one, 1) for one in items]
    together, merged = chosen(torch.cat(items), 3)
    assert torch.equal(together, torch.cat([kept for kept, _ in alone]))
    torch.testing.assert_close(merged, torch.cat([rows for _, rows in alone]))


@each("pieces", ["########", "s####b####e", "###b#####"])
@each("per_run", [False, True])
def test_rows_of_items_at_once_are_those_of_each(pieces: str, per_run: bool) -> None:
    text = find_runs([9 if piece == "#" else ord(piece) for piece in pieces], [piece == "#" for piece in pieces])
    plan = Plan.build(parse_setting({"method": "uniform", "keep": 0.5}), text, per_run)
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    kept = torch.cat([_drawn(plan, seed) for seed in range(2)])
    together = AwaitedRows.from_kept(plan, rows, kept)
    assert together.rows.shape == (2, plan.rows, 4)
    for number in range(2):
        own = slice(8 * number, 8 * (number + 1))
        alone = AwaitedRows.from_kept(plan, rows[own], kept[own])
        assert torch.equal(together.rows[number], alone.rows[0])
        assert torch.equal(together.indices[number], alone.indices[0])
        if alone.is_text is not None and together.is_text is not None:
            assert torch.equal(together.is_text[number], alone.is_text[0])
            continue
        found, places = rows[own][kept[own]], plan.places[kept[own]]
        assert torch.equal(alone.rows[0], found) and torch.equal(alone.indices[0], places)


def _drawn(plan: Plan, seed: int) -> torch.Tensor:
    """bool `[n]`: as many of each run as stay there, anywhere."""
    kept, generator = [], torch.Generator().manual_seed(seed)
    for count, number in zip(plan.counts, plan.keep, strict=True):
        kept.append(torch.randperm(count, generator=generator) < number)
    return torch.cat(kept)
