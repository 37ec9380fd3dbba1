# SPDX-License-Identifier: Apache-2.0
"""Budgets for every frame of a video: `Budget(keep=..., per="frame")`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from basics import METHODS
from tokenprune import Budget, BudgetError, Site, UnsupportedSetupError
from zoo import FAMILIES, IMAGE, VIDEO

VIDEOS = [name for name, family in FAMILIES.items() if family.video is not None]
# 4 tokens a frame (see zoo.Family.make_inputs), in rows of different length.
BATCH = dict(images=(1, 0, 2), video=(5, 5, False), padding="left")
PRE_LLM = [
    name
    for name in METHODS
    if (info := tokenprune.method_info(name)).site is Site.PRE_LLM and not info.observables and not info.query_aware
]


def frames_of(inputs: Any) -> list[list[list[int]]]:
    """For each row the places of each frame; a newline behind a video belongs to its last frame."""
    rows = []
    for row, video in zip(inputs["input_ids"], BATCH["video"], strict=True):
        places = (row == VIDEO).nonzero().flatten().tolist()
        cuts = [places[4 * number : 4 * number + 4] for number in range(int(video))]
        if cuts:
            cuts[-1] = places[4 * (len(cuts) - 1) :]
        rows.append(cuts)
    return rows


@pytest.mark.parametrize("method", PRE_LLM)
@pytest.mark.parametrize("name", VIDEOS)
@torch.no_grad()
def test_each_frame_keeps_its_share(name: str, method: str, build: Any) -> None:
    family = FAMILIES[name]
    model = build(family)
    inputs = family.make_inputs(**BATCH)
    with tokenprune.patched(model, method, keep=Budget(keep=0.5, per="frame"), record=True):
        model(**inputs)
        stats = tokenprune.stats(model)
    (cut,) = stats.cuts
    for row, frames in enumerate(frames_of(inputs)):
        kept = set(cut.kept[row])
        assert [len(kept & set(frame)) for frame in frames] == [round(0.5 * len(frame)) for frame in frames]
        images = set((inputs["input_ids"][row] == IMAGE).nonzero().flatten().tolist())
        assert not images or 0 < len(kept & images) < len(images)


@pytest.mark.parametrize("name", VIDEOS)
@torch.no_grad()
def test_frame_selection_equals_image_selection(name: str, build: Any) -> None:
    """Uniform over each frame is another choice than uniform over the video; of one frame, both are the same."""
    family = FAMILIES[name]
    model = build(family)

    def kept(per: str, frames: int) -> list[list[int]]:
        with tokenprune.patched(model, "uniform", keep=Budget(keep=0.3, per=per), record=True):
            model(**family.make_inputs(images=(1,), video=frames))
            return tokenprune.stats(model).cuts[0].kept

    assert kept("frame", 5) != kept("image", 5)
    assert kept("frame", 1) == kept("image", 1)


@torch.no_grad()
def test_unknown_frames_are_rejected(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["qwen2_vl"]
    model = build(family)
    monkeypatch.setattr("tokenprune.integrations.hf.families.Adapter.video_frames", lambda self, arguments: None)
    with (
        tokenprune.patched(model, "uniform", keep=Budget(keep=0.5, per="frame")),
        pytest.raises(UnsupportedSetupError, match='per="image"'),
    ):
        model(**family.make_inputs(images=(1,), video=5))


def test_the_scope_is_checked() -> None:
    assert repr(Budget(keep=0.5, per="frame")) == "Budget(keep=0.5, per='frame')"
    with pytest.raises(BudgetError, match="'frame'"):
        Budget(keep=0.5, per="tile")
