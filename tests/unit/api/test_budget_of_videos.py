# SPDX-License-Identifier: Apache-2.0
"""Budgets of videos: `per_second`, `by_frame`, `by_frame_weights`, and `Budget(keep=..., per="frame")`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tokenprune
from basics import METHODS
from each import each
from families import FAMILIES as EVERY_FAMILY
from pruned import check_forward, run_pruned
from session_oracle import recorded
from tokenprune import Budget, BudgetError, Site, UnsupportedSetupError
from tokenprune.budgets.video import spread
from tokenprune.integrations.hf.sequence.segments import VideoTiming
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune_bench.profiling.kept_tokens import count_kept_tokens
from zoo import FAMILIES, IMAGE, VIDEO

VIDEOS = [name for name, family in FAMILIES.items() if family.video is not None]
# An image beside a video, a row without a video, and a shorter row with both. A frame has 4 tokens (see zoo).
BATCH = dict(images=(1, 2, 1), video=(5, False, 5), padding="left")


def naive_spread(total: int, weights: list[float], limits: list[int]) -> list[int]:
    """Apply steps 5 and 6 of the paper's code, one token at a time, and the additions in the docstring of `spread`."""
    count, total_weight = len(weights), sum(weights)
    total = min(total, sum(limits))
    alloc = [total * weight / total_weight for weight in weights]
    kept = [math.floor(round(share, 9)) for share in alloc]
    fractions = [round(share - floor, 9) for share, floor in zip(alloc, kept, strict=True)]
    for _ in range(total - sum(kept)):
        best = max(range(count), key=lambda frame: (fractions[frame], -frame))
        kept[best] += 1
        fractions[best] = -1
    kept = [min(num_kept, limit) for num_kept, limit in zip(kept, limits, strict=True)]
    while sum(kept) < total:
        for frame in sorted(range(count), key=lambda frame: (-weights[frame], frame)):
            if sum(kept) < total and kept[frame] < limits[frame]:
                kept[frame] += 1
    for frame in range(count):
        if kept[frame] == 0:
            kept[frame] = 1
            richest = max(range(count), key=lambda other: (kept[other], -other))
            kept[richest] -= kept[richest] > 1
    return kept


@each("seed", range(40))
def test_spread_matches_reference_loop(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 9, (), generator=g))
    weights = torch.rand(count, generator=g).double().tolist()
    if seed % 3 == 0:
        weights = [float(round(4 * weight)) for weight in weights[:-1]] + [1.0]  # ties and zeros
    limits = torch.randint(1, 12, (count,), generator=g).tolist()
    for total in (1, count, sum(limits) // 2, sum(limits) - 1, sum(limits), 2 * sum(limits)):
        if total < 1:
            continue
        kept = spread(total, weights, limits)
        assert kept == naive_spread(total, weights, limits)
        assert sum(kept) == min(sum(limits), max(total, count)) and all(
            1 <= k <= m for k, m in zip(kept, limits, strict=True)
        )


def test_meaning_of_frame_weights() -> None:
    assert spread(8, [1.0] * 4, [4] * 4) == [2, 2, 2, 2] and spread(9, [1.0] * 4, [4] * 4) == [3, 2, 2, 2]
    # the second frame is full, and the other frames share the rest in turn
    assert spread(8, [0, 1.0, 0, 0], [4] * 4) == [2, 4, 1, 1]
    assert spread(5, [0, 1.0, 0, 0], [9] * 4) == [1, 2, 1, 1]
    assert spread(2, [1.0] * 4, [4] * 4) == [1, 1, 1, 1]
    assert spread(10**6, [0.5, 0.25], [4, 4]) == [4, 4]
    for weights in ([0.3, 0.1, 0.6], [0.2, 0.2, 0.1]):
        kept = spread(11, weights, [9] * 3)
        assert all(kept[a] >= kept[b] for a in range(3) for b in range(3) if weights[a] > weights[b])


def count_per_frame(inputs: Any, kept: list[list[int]]) -> list[list[int] | None]:
    """Return the kept tokens of each frame, or None for rows without a video. A newline belongs to the last frame."""
    rows: list[list[int] | None] = []
    for row, indices in zip(inputs["input_ids"], kept, strict=True):
        video = (row == VIDEO).nonzero().flatten().tolist()
        frames = [video[start : start + 4] for start in range(0, 20, 4)]
        frames[-1] = video[16:]
        rows.append([len(set(indices) & set(frame)) for frame in frames] if video else None)
    return rows


def compute_image_shares(inputs: Any, kept: list[list[int]]) -> list[float]:
    """Return the kept share of each row's image tokens."""
    image_indices = [(row == IMAGE).nonzero().flatten().tolist() for row in inputs["input_ids"]]
    return [len(set(indices) & set(image)) / len(image) for image, indices in zip(image_indices, kept, strict=True)]


@pytest.mark.parametrize("method", ["divprune", "fastv"])
@pytest.mark.parametrize("name", VIDEOS)
def test_each_frame_keeps_its_count_or_its_weight(name: str, method: str, build: Any) -> None:
    family, last = FAMILIES[name], 5 if name == "llava_onevision" else 4
    model, inputs = build(family), family.make_inputs(**BATCH)
    budget = Budget.by_frame([2, 0.25, 1.0, 0.5, 100])
    _, stats = run_pruned(model, inputs, method, budget)
    expected = [2, 1, 4, 2, last]
    assert count_per_frame(inputs, stats.cuts[0].kept) == [expected, None, expected]
    assert compute_image_shares(inputs, stats.cuts[0].kept) == [1, 1, 1]
    assert stats.notes == [f"Images keep all tokens, because {budget} is for videos."]

    weights, sizes = [0.5, 0.1, 0.2, 0.1, 0.1], [4, 4, 4, 4, last]
    _, stats = run_pruned(model, inputs, method, Budget.by_frame_weights(0.5, weights))
    expected = naive_spread(round(sum(sizes) / 2), weights, sizes)
    assert count_per_frame(inputs, stats.cuts[0].kept) == [expected, None, expected]
    assert all(0.4 < share < 0.6 for share in compute_image_shares(inputs, stats.cuts[0].kept))
    assert stats.notes == []


def test_each_video_splits_its_own_budget(build: Any) -> None:
    family = FAMILIES["qwen3_vl"]
    inputs = family.make_inputs(images=(1,), video=[[3, 3]], padding=None)
    (kept,) = run_pruned(build(family), inputs, "divprune", Budget.by_frame_weights(6, [1, 1, 4]))[1].cuts[0].kept
    video = (inputs["input_ids"][0] == VIDEO).nonzero().flatten().tolist()
    assert [len(set(kept) & set(video[start : start + 4])) for start in range(0, 24, 4)] == [1, 1, 4] * 2


@pytest.mark.parametrize("name", VIDEOS)
def test_per_second_budget_is_met(name: str, build: Any) -> None:
    """5 frames last 5 * joined / fps seconds, or half a second each if the processor reports durations."""
    model, inputs = FAMILIES[name].prepare(build, **BATCH)
    joined = 1 if name == "llava_onevision" else 2

    def count_kept(tokens: float, **options: Any) -> int:
        _, stats = run_pruned(model, inputs, "divprune", Budget.per_second(tokens, **options))
        assert compute_image_shares(inputs, stats.cuts[0].kept) == [1, 1, 1]
        first, none, second = count_per_frame(inputs, stats.cuts[0].kept)
        assert none is None and sum(first) == sum(second)
        return sum(first)

    assert count_kept(3, fps=2.0) == round(3 * 5 * joined / 2.0)
    assert count_kept(0.1, fps=2.0) == 1
    assert count_kept(3, fps=4.0, per="frame") == 5 * max(1, round(3 * joined / 4.0))
    if name == "qwen2_5_vl":
        assert count_kept(3) == round(3 * 5 * 0.5) and count_kept(2, fps=4.0) == 5
    else:
        with pytest.raises(BudgetError, match=r"requires the duration .* Budget.per_second\(3, fps=2.0\)"):
            count_kept(3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@torch.no_grad()
def test_unknown_duration_is_rejected(seconds: float, build: Any) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, rows=1, video=5)
    with (
        tokenprune.patched(model, "divprune", keep=Budget.per_second(3)),
        pytest.raises(BudgetError, match="requires the duration"),
    ):
        model.model(**inputs | {"second_per_grid_ts": [seconds], "position_ids": torch.arange(
            inputs["input_ids"].shape[1]).expand(3, 1, -1)})  # fmt: skip


@torch.no_grad()
def test_videos_of_one_prompt_have_their_own_duration(build: Any) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, images=(1, 1), video=[[5, 3], [4]])
    inputs["second_per_grid_ts"] = torch.tensor([0.5, 1.0, 0.25])
    expected = [round(2 * 5 * 0.5) + round(2 * 3 * 1.0), round(2 * 4 * 0.25)]
    for beams in (1, 2):
        with tokenprune.patched(model, "divprune", keep=Budget.per_second(2), record=True):
            model.generate(**inputs, max_new_tokens=2, num_beams=beams)
            cut = tokenprune.stats(model).cuts[0].kept
        rows = [row for row in inputs["input_ids"] for _ in range(beams)]
        actual = [
            len(set((row == VIDEO).nonzero().flatten().tolist()) & set(k)) for row, k in zip(rows, cut, strict=True)
        ]
        assert actual == [num_kept for num_kept in expected for _ in range(beams)]
    with (
        tokenprune.patched(model, "divprune", keep=Budget.by_frame([2] * 5)),
        pytest.raises(BudgetError, match="Pass 3"),
    ):
        model(**inputs)


@pytest.mark.parametrize("budget", [Budget.by_frame([2, 0.25, 1.0, 0.5, 3]), Budget.per_second(2)])
def test_dropping_equals_the_masked_model(budget: Budget, build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    check_forward(family, build(family), family.make_inputs(**BATCH), "divprune", budget)


@torch.no_grad()
def test_budgets_of_all_tokens_equal_the_unpatched_model(build: Any) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, **BATCH)
    unpruned = model(**inputs).logits
    for budget in (Budget.by_frame([1.0] * 5), Budget.by_frame_weights(1.0, [1, 2, 3, 4, 5]), Budget.per_second(999)):
        with tokenprune.patched(model, "divprune", keep=budget):
            assert torch.equal(model(**inputs).logits, unpruned)


def test_wrong_number_of_frames_is_rejected(build: Any) -> None:
    model, inputs = FAMILIES["qwen2_vl"].prepare(build, rows=1, video=3)
    with (
        tokenprune.patched(model, "divprune", keep=Budget.by_frame_weights(0.5, [1] * 6)),
        pytest.raises(BudgetError, match=r"frame_weights= lists 6 frames, but the decoder sees 3 .*\(2 sampled"),
    ):
        model(**inputs)


@each("budget", [Budget.per_second(2, fps=1.0), Budget.by_frame([4, 4]), Budget.by_frame_weights(0.5, [1])])
@each(
    ("name", "method", "message"),
    [("qwen2_vl", "pyramiddrop", "cuts more than once"), ("qwen2_vl", "vscan", "cuts more than once|by itself"),
     ("qwen2_vl", "dyrate", "cuts more than once"), ("qwen2_vl", "tome", "in the vision tower"),
     ("qwen2_vl", "downsample", "on pixels"), ("internvl", "divprune", "not known for 'internvl'"),
     ("llava", "fastv", "not known for 'llava'")],
)  # fmt: skip
def test_unsupported_frame_budgets_are_rejected(
    name: str, method: str, message: str, budget: Budget, build: Any
) -> None:
    model = build(FAMILIES[name])
    with pytest.raises(BudgetError, match=message):
        tokenprune.patch(model, method, keep=budget)
    with pytest.raises(tokenprune.NotPatchedError):
        tokenprune.unpatch(model)


def test_frame_comparing_method_spends_one_budget(build: Any) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, rows=1, video=5)
    for budget in (Budget.by_frame([4] * 5), Budget.by_frame_weights(0.5, [1] * 5)):
        with pytest.raises(BudgetError, match=r"Use either keep= or Budget.per_second\(...\)"):
            tokenprune.patch(model, "evs", keep=budget)
    (kept,) = run_pruned(model, inputs, "evs", Budget.per_second(4))[1].cuts[0].kept
    assert len(set((inputs["input_ids"][0] == VIDEO).nonzero().flatten().tolist()) & set(kept)) == 10


def test_session_rejects_frame_lists(build: Any) -> None:
    model = build(FAMILIES["qwen2_5_vl"])
    with (
        tokenprune.patched(model, "divprune", keep=Budget.by_frame([4] * 5)),
        pytest.raises(
            UnsupportedSetupError, match=r"by_frame\(.*\) is a budget per video, and a session processes blocks"
        ),
    ):
        tokenprune.sessions.session(model, memory=64)


def test_session_meets_per_second_budget(build: Any) -> None:
    """Clips of 4 frames, half a second each, keep 2 * 4 * 0.5 tokens, and two ids frame each clip."""
    family, g = FAMILIES["qwen2_5_vl"], torch.Generator().manual_seed(5)
    with tokenprune.patched(build(family), "divprune", keep=Budget.per_second(2)) as model:
        recording = recorded(family, model, memory=10**6)
        recording.session.say([1, 20])
        for _ in range(3):
            recording.see([family.video(g, 4)])
        assert recording.session.stats.visual == 3 * (4 + 2)


@torch.no_grad()
def test_omni_seconds_argument_is_read(build: Any) -> None:
    model, inputs = EVERY_FAMILY["qwen2_5_omni_thinker"].prepare(build, images=(0,), video=5)
    assert "video_second_per_grid" in inputs
    assert run_pruned(model, inputs, "divprune", Budget.per_second(3))[1].visual_tokens_out == round(3 * 5 * 0.5)


@pytest.mark.parametrize(
    "keep", [{"per_second": 20, "fps": 2.0}, {"frames": [4, 4]}, {"keep": 0.5, "frame_weights": [1]}]
)
def test_vllm_rejects_video_budgets(keep: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match="keep must be a number"):
        parse_setting({"method": "divprune", "keep": keep})


def test_joined_frames_are_counted_once(build: Any) -> None:
    joined = {name: VideoTiming.from_arguments({}, build(FAMILIES[name]).config).joined for name in VIDEOS}
    assert joined == {"llava_onevision": 1, "qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2}


@each(
    ("fields", "message"),
    [
        ({"per_second": 0}, "per_second=0 must be a positive number"),
        ({"per_second": math.inf}, "per_second=inf must be"),
        ({"per_second": 3, "fps": -1.0}, "fps=-1.0 must be"),
        ({"per_second": True}, "per_second=True must be"),
        ({"keep": 0.5, "fps": 2.0}, "requires per_second="),
        ({"per_second": 3, "keep": 0.5}, "exactly one of"),
        ({"per_second": 3, "per": "prompt"}, 'Leave out per="prompt"'),
        ({"frames": []}, r"frames=\[\] must be a list"),
        ({"frames": 64}, "frames=64 must be a list"),
        ({"frames": [64, 1]}, r"frames\[1\]=1 must be an int >= 2"),
        ({"frames": [64, 0.0]}, r"frames\[1\]=0.0 must be"),
        ({"frames": [math.nan]}, r"frames\[0\]=nan must be"),
        ({"frames": ["a"]}, r"frames\[0\]='a' must be"),
        ({"keep": 0.5, "frame_weights": [1, -1]}, r"frame_weights\[1\]=-1 must be"),
        ({"keep": 0.5, "frame_weights": [0, 0]}, "frame_weights are all 0"),
        ({"kv_share": 0.5, "frame_weights": [1]}, "requires keep= or tokens="),
        ({"frame_weights": [1]}, "exactly one of"),
        ({"keep": 0.5, "frame_weights": [1], "age": ((0, 1.0), (1, 0.5))}, "excludes age=|per="),
        ({"frames": [4], "age": ((0, 1.0), (1, 0.5))}, "age= requires keep="),
    ],
)
def test_invalid_video_budgets_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Budget.from_json({name: value for name, value in fields.items() if name != "per"}, fields.get("per", "image"))


def test_video_budget_without_video_is_rejected() -> None:
    with pytest.raises(BudgetError, match="videos of this prompt are unknown"):
        Budget.per_second(3, fps=1.0).resolve([36], layer=0, shape=DecoderShape(2, 8, 8, 1, 1, 8), text_tokens=4)
    assert count_kept_tokens([Budget.per_second(3)], 36) == [36]  # an image keeps all tokens


PRE_LLM = [
    name
    for name in METHODS
    if (info := tokenprune.method_info(name)).site is Site.PRE_LLM and not info.observables and not info.query_aware
]


@pytest.mark.parametrize("method", PRE_LLM)
@pytest.mark.parametrize("name", VIDEOS)
def test_each_frame_keeps_its_share(name: str, method: str, build: Any) -> None:
    model, inputs = FAMILIES[name].prepare(build, **BATCH)
    (cut,) = run_pruned(model, inputs, method, Budget(keep=0.5, per="frame"))[1].cuts
    assert count_per_frame(inputs, cut.kept) == [[2] * 5, None, [2] * 5]
    assert all(0 < share < 1 for share in compute_image_shares(inputs, cut.kept))


@pytest.mark.parametrize("name", VIDEOS)
@torch.no_grad()
def test_frame_selection_equals_image_selection(name: str, build: Any) -> None:
    family = FAMILIES[name]
    model = build(family)

    def list_kept(per: str, frames: int) -> list[list[int]]:
        with tokenprune.patched(model, "uniform", keep=Budget(keep=0.3, per=per), record=True):
            model(**family.make_inputs(images=(1,), video=frames))
            return tokenprune.stats(model).cuts[0].kept

    assert list_kept("frame", 5) != list_kept("image", 5)
    assert list_kept("frame", 1) == list_kept("image", 1)


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
