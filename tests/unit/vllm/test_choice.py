# SPDX-License-Identifier: Apache-2.0
"""Selection from contiguous rows without a copy, and from a batch of items of equal shape."""

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
def test_contiguous_rows_are_selected_without_a_copy(name: str, counts: list[int]) -> None:
    method: Any = registry.build(name, {})
    rows = torch.randn(36, 10, generator=torch.Generator().manual_seed(3))
    frames: list[list[int] | None] = [[count // 2] * 2 for count in counts]
    modality = "video" if compares_frames(method) else "image"
    results = []
    for in_order in (True, False):
        copied = rows.clone()
        segments = before_llm.build_segments(counts, None, modality, rows.device, frames=frames)
        with pytest.MonkeyPatch.context() as patch:
            if not in_order:
                patch.setattr(before_llm, "_is_contiguous", lambda segments: False)
            encoded = before_llm._draw_values(method, counts)
            keep = [min(count, method.resolve_count(count, 12)) for count in counts]
            kept, merged = before_llm.choose(method, copied, 8, segments, keep, encoded=encoded)
        assert torch.equal(copied, rows)  # The language model reads these rows next.
        results.append((kept, merged))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@each("name", [name for name in NAMES if not reads_tower(registry.build(name, {}))])
@each("counts", [[20], [8, 12]])
def test_a_batch_of_items_keeps_the_tokens_of_each_item(name: str, counts: list[int]) -> None:
    method: Any = registry.build(name, {})
    items = [torch.randn(20, 10, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    frames: list[list[int] | None] = [[count // 2] * 2 for count in counts]
    modality = "video" if compares_frames(method) else "image"
    keep = [min(count, method.resolve_count(count, count // 2)) for count in counts]

    def chosen(rows: torch.Tensor, num_items: int) -> tuple[torch.Tensor, torch.Tensor]:
        segments = before_llm.build_segments(counts, None, modality, rows.device, frames=frames, items=num_items)
        return before_llm.choose(method, rows, 8, segments, keep * num_items)

    separate = [chosen(rows, 1) for rows in items]
    together, merged = chosen(torch.cat(items), 3)
    assert torch.equal(together, torch.cat([kept for kept, _ in separate]))
    torch.testing.assert_close(merged, torch.cat([rows for _, rows in separate]))


@each("pieces", ["########", "s####b####e", "###b#####"])
@each("per_run", [False, True])
def test_the_rows_of_a_batch_equal_the_rows_of_each_item(pieces: str, per_run: bool) -> None:
    text = find_runs([9 if piece == "#" else ord(piece) for piece in pieces], [piece == "#" for piece in pieces])
    plan = Plan.build(parse_setting({"method": "uniform", "keep": 0.5}), text, per_run)
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    kept = torch.cat([draw_kept(plan, seed) for seed in range(2)])
    batched = AwaitedRows.from_kept(plan, rows, kept)
    assert batched.rows.shape == (2, plan.rows, 4)
    for item in range(2):
        item_rows = slice(8 * item, 8 * (item + 1))
        separate = AwaitedRows.from_kept(plan, rows[item_rows], kept[item_rows])
        assert torch.equal(batched.rows[item], separate.rows[0])
        assert torch.equal(batched.indices[item], separate.indices[0])
        if separate.is_text is not None and batched.is_text is not None:
            assert torch.equal(batched.is_text[item], separate.is_text[0])
            continue
        kept_rows, indices = rows[item_rows][kept[item_rows]], plan.places[kept[item_rows]]
        assert torch.equal(separate.rows[0], kept_rows) and torch.equal(separate.indices[0], indices)


def draw_kept(plan: Plan, seed: int) -> torch.Tensor:
    """Draw a random bool mask `[n]` with the kept count of each run."""
    kept, generator = [], torch.Generator().manual_seed(seed)
    for count, num_kept in zip(plan.counts, plan.keep, strict=True):
        kept.append(torch.randperm(count, generator=generator) < num_kept)
    return torch.cat(kept)
