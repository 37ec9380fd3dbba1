# SPDX-License-Identifier: Apache-2.0
"""Video methods in models select the same tokens as a loop over the unpatched model's embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from basics import pieces
from naive_video import NAIVE, THINNING, spread
from tests.unit.methods.test_methods import naive_uniform
from tests.unit.methods.test_methods_in_models import list_kept, look_inside
from zoo import FAMILIES, IMAGE, VIDEO

# Several videos per prompt (of different lengths if the family supports it), images, and a row without videos.
BATCHES: dict[str, dict[str, Any]] = {
    "qwen2_vl": dict(images=(1, 0, 1), video=([5, 3], 1, False)),
    "qwen2_5_vl": dict(images=(0, 2), video=(2, [3, 8]), padding="right"),
    "qwen3_vl": dict(images=(1, 0, 1), video=([5, 3], 1, False)),
    "llava_onevision": dict(images=(1, 0, 2), video=(5, [5, 5], False)),
}


@pytest.mark.parametrize("name", BATCHES)
@torch.no_grad()
def test_models_match_loop(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(**BATCHES[name])
    embeds, _ = look_inside(family, model, inputs, 0)
    ids = inputs["input_ids"]
    # Frames of the Qwen families are grids of 2 x 2.
    thin = spread if name == "llava_onevision" else lambda size, num_kept: naive_uniform(num_kept, (1, 2, 2))
    for method, naive in NAIVE.items():
        kept, chosen = list_kept(model, inputs, method, 0.4), {"thin": thin} if method in THINNING else {}
        for row, row_pieces in enumerate(pieces(family, inputs)):
            for piece in row_pieces:
                if ids[row, piece[0]] == IMAGE:
                    assert kept[row] >= set(piece)
                    continue
                newline = len(piece) % 4  # LLaVA-OneVision has a newline after a video
                frames = embeds[row, piece[: len(piece) - newline]].unflatten(0, (-1, 4))
                keep = max(1, round(0.4 * len(piece)))
                want = [4 * t + p for t, p in naive(frames.double(), max(1, keep - newline), **chosen)]
                want += [len(piece) - 1] if keep > len(want) else []
                assert kept[row] & set(piece) == {piece[i] for i in want}, method


@torch.no_grad()
def test_notes_appear_in_statistics(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(1, 0), video=(1, 3))
    with tokenprune.patched(model, "evs", keep=0.5):
        model(**inputs)
        assert tokenprune.stats(model).notes == [
            "evs: images keep all tokens, because it compares the frames of videos",
            "evs: the budget is below one frame, so the first frame is thinned uniformly",
        ]
        model(**family.make_inputs(images=(0,), video=8))
        assert tokenprune.stats(model).notes == []
    assert int((inputs["input_ids"] == VIDEO).sum()) == 16
