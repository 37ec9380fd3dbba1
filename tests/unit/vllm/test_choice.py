# SPDX-License-Identifier: Apache-2.0
"""A choice among all rows of an item in their order, which copies none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from each import each
from tokenprune import registry
from tokenprune.base import Pruner
from tokenprune.integrations.vllm.selection import before_llm
from tokenprune.integrations.vllm.setting.servable import servable
from tokenprune.view.registry import compares_frames

NAMES = [name for name in servable() if isinstance(registry.build(name, {}), Pruner)]


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
        segments = before_llm.segments_of(counts, None, modality, rows.device, frames=frames)
        with pytest.MonkeyPatch.context() as patch:
            if not in_order:
                patch.setattr(before_llm, "_all_in_order", lambda segments: False)
            encoded = before_llm._made_up(method, counts)
            keep = [min(count, method.budget(count, 12)) for count in counts]
            kept, merged = before_llm.choose(method, given, 8, segments, keep, encoded=encoded)
        assert torch.equal(given, rows)  # they go on to the language model
        found.append((kept, merged))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
