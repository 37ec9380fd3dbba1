# SPDX-License-Identifier: Apache-2.0
"""frame_weights equals the attention of an eager model, and sets a budget per frame."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from basics import snapshot
from pruned import run_pruned
from tokenprune import Budget, OptionError, UnsupportedSetupError
from tokenprune_bench.frame_weights import frame_weights
from zoo import FAMILIES, VIDEO

VIDEOS = [name for name, family in FAMILIES.items() if family.video is not None]
BATCH = dict(images=(1, 2, 0), video=(5, False, 5))


@torch.no_grad()
def compute_weights(model: Any, inputs: Any, layers: Any) -> list[list[float]]:
    """Compute frame weights for rows with at most one video and 4 tokens per frame."""
    maps = model(**inputs, output_attentions=True).attentions
    weights = []
    for row, ids in enumerate(inputs["input_ids"]):
        indices = (ids == VIDEO).nonzero().flatten().tolist()
        indices = indices[: len(indices) // 4 * 4]  # without the newline
        if not indices:
            continue
        last = int(inputs["attention_mask"][row].nonzero().max())
        per_layer = []
        for layer in layers:
            attention = maps[layer][row, :, last][:, indices].double()
            share = (attention / attention.sum(1, keepdim=True)).mean(0)
            per_layer.append([float(share[4 * f : 4 * f + 4].mean()) for f in range(len(indices) // 4)])
        mean = [sum(layer_weights) / len(per_layer) for layer_weights in zip(*per_layer, strict=True)]
        weights.append([layer_weights / sum(mean) for layer_weights in mean])
    return weights


def take_snapshot(model: Any) -> dict[str, Any]:
    """Snapshot a model without `rope_deltas`, which its forward writes."""
    return {name: value for name, value in snapshot(model).items() if "rope_deltas" not in name}


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("layers", [None, [1], [3, 1]])
@pytest.mark.parametrize("name", VIDEOS)
def test_equals_the_attention_of_an_eager_model(name: str, layers: Any, padding: str, build: Any) -> None:
    family = FAMILIES[name]
    inputs = family.make_inputs(**BATCH, padding=padding)
    want = compute_weights(build(family, "eager"), inputs, (2, 3) if layers is None else layers)
    model = build(family)
    before = take_snapshot(model)
    got = frame_weights(model, layers=layers, **inputs)
    assert take_snapshot(model) == before
    assert len(got) == len(want) == 2 and all(len(actual) == 5 for actual in got)
    for actual, expected in zip(got, want, strict=True):
        assert sum(actual) == pytest.approx(1) and list(actual) == pytest.approx(expected, rel=1e-4)
        assert len({round(weight, 6) for weight in actual}) > 1


@torch.no_grad()
def test_weights_set_the_budget_of_another_model(build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    inputs = family.make_inputs(images=(1,), video=5, padding=None)
    (weights,) = frame_weights(build(FAMILIES["qwen2_vl"]), **{
        name: value for name, value in inputs.items() if name != "second_per_grid_ts"
    })  # fmt: skip
    model = build(family)
    (kept,) = run_pruned(model, inputs, "divprune", Budget.by_frame_weights(0.5, weights))[1].cuts[0].kept
    indices = (inputs["input_ids"][0] == VIDEO).nonzero().flatten().tolist()
    counts = [len(set(kept) & set(indices[start : start + 4])) for start in range(0, 20, 4)]
    assert sum(counts) == 10
    assert all(counts[a] >= counts[b] for a in range(5) for b in range(5) if weights[a] > weights[b])


@torch.no_grad()
def test_videos_of_a_prompt_have_separate_weights(build: Any) -> None:
    family = FAMILIES["qwen3_vl"]
    inputs = family.make_inputs(images=(1,), video=[[3, 2]], padding=None)
    both = frame_weights(build(family), **inputs)
    assert [len(weights) for weights in both] == [3, 2] and all(sum(weights) == pytest.approx(1) for weights in both)


def test_unsupported_prompts_are_refused(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["qwen2_vl"]
    model = build(family)
    video = family.make_inputs(rows=1, video=5)
    with pytest.raises(OptionError, match="needs a prompt with a video"):
        frame_weights(model, **family.make_inputs(rows=1))
    for layers in ([0], [4], [], ["1"], [1.5]):
        with pytest.raises(OptionError, match="layers="):
            frame_weights(model, layers=layers, **video)
    with tokenprune.patched(model, "divprune"), pytest.raises(tokenprune.AlreadyPatchedError):
        frame_weights(model, **video)
    monkeypatch.setattr("tokenprune.integrations.hf.families.Adapter.video_frames", lambda self, arguments: None)
    with pytest.raises(UnsupportedSetupError, match="your own weights"):
        frame_weights(model, **video)
    assert not tokenprune.is_patched(model)
