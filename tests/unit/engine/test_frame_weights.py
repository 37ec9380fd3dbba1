# SPDX-License-Identifier: Apache-2.0
"""frame_weights against the attention of an eager model, and a budget that goes by it."""

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
def naive(model: Any, inputs: Any, layers: Any) -> list[list[float]]:
    """One video a row at most, of 4 tokens a frame."""
    maps = model(**inputs, output_attentions=True).attentions
    found = []
    for row, ids in enumerate(inputs["input_ids"]):
        places = (ids == VIDEO).nonzero().flatten().tolist()
        places = places[: len(places) // 4 * 4]  # without the newline
        if not places:
            continue
        last = int(inputs["attention_mask"][row].nonzero().max())
        of_layers = []
        for layer in layers:
            seen = maps[layer][row, :, last][:, places].double()
            share = (seen / seen.sum(1, keepdim=True)).mean(0)
            of_layers.append([float(share[4 * f : 4 * f + 4].mean()) for f in range(len(places) // 4)])
        mean = [sum(one) / len(of_layers) for one in zip(*of_layers, strict=True)]
        found.append([one / sum(mean) for one in mean])
    return found


def untouched(model: Any) -> dict[str, Any]:
    """All that a patch may touch; the model's own forward notes its `rope_deltas`."""
    return {name: one for name, one in snapshot(model).items() if "rope_deltas" not in name}


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("layers", [None, [1], [3, 1]])
@pytest.mark.parametrize("name", VIDEOS)
def test_equals_the_attention_of_an_eager_model(name: str, layers: Any, padding: str, build: Any) -> None:
    family = FAMILIES[name]
    inputs = family.make_inputs(**BATCH, padding=padding)
    want = naive(build(family, "eager"), inputs, (2, 3) if layers is None else layers)
    model = build(family)
    before = untouched(model)
    got = frame_weights(model, layers=layers, **inputs)
    assert untouched(model) == before
    assert len(got) == len(want) == 2 and all(len(one) == 5 for one in got)
    for one, other in zip(got, want, strict=True):
        assert sum(one) == pytest.approx(1) and list(one) == pytest.approx(other, rel=1e-4)
        assert len({round(part, 6) for part in one}) > 1


@torch.no_grad()
def test_another_model_goes_by_them(build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    inputs = family.make_inputs(images=(1,), video=5, padding=None)
    (weights,) = frame_weights(build(FAMILIES["qwen2_vl"]), **{
        name: value for name, value in inputs.items() if name != "second_per_grid_ts"
    })  # fmt: skip
    model = build(family)
    (kept,) = run_pruned(model, inputs, "divprune", Budget.by_frame_weights(0.5, weights))[1].cuts[0].kept
    places = (inputs["input_ids"][0] == VIDEO).nonzero().flatten().tolist()
    counts = [len(set(kept) & set(places[start : start + 4])) for start in range(0, 20, 4)]
    assert sum(counts) == 10
    assert all(counts[a] >= counts[b] for a in range(5) for b in range(5) if weights[a] > weights[b])


@torch.no_grad()
def test_several_videos_of_a_prompt_are_each_for_themselves(build: Any) -> None:
    family = FAMILIES["qwen3_vl"]
    inputs = family.make_inputs(images=(1,), video=[[3, 2]], padding=None)
    both = frame_weights(build(family), **inputs)
    assert [len(one) for one in both] == [3, 2] and all(sum(one) == pytest.approx(1) for one in both)


def test_what_cannot_be_weighed_is_refused(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
