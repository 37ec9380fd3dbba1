# SPDX-License-Identifier: Apache-2.0
"""The frame of each visual token and its index in the frame, for every family with videos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

import tokenprune
from each import each
from families import FAMILIES as OTHERS
from pruned import run_pruned
from tokenprune import (
    Budget,
    BudgetError,
    OptionError,
    Pruner,
    Selection,
    Site,
    TokenPruneError,
    UnsupportedSetupError,
    VisualTokens,
)
from tokenprune.kernels.temporal import group_by_frame, previous_frame_similarity
from tokenprune.models.families import SUPPORTED
from tokenprune.selection.frames import compute_frame_indices, count_tokens_per_frame
from zoo import FAMILIES, IMAGE, VIDEO, Family, Inputs

VIDEOS = {name: family for name, family in {**OTHERS, **FAMILIES}.items() if family.video is not None}
# Its frames differ in their number of tokens, and count as images.
UNEQUAL = "video_llama_3"
KNOWN = [name for name in VIDEOS if name not in (UNEQUAL, "molmo2")]  # frames of molmo2 are also images


@dataclass(frozen=True)
class FirstTokens(Pruner):
    """Keeps the first tokens, and records its inputs."""

    name: ClassVar[str] = "plain"
    observed: list[VisualTokens] = field(default_factory=list, hash=False)

    def select(self, tokens: VisualTokens) -> Selection:
        self.observed.append(tokens)
        return Selection.top(-torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask).float(), tokens)


@dataclass(frozen=True)
class FrameReader(FirstTokens):
    """FirstTokens, and reads frames."""

    name: ClassVar[str] = "watcher"
    needs: ClassVar[frozenset[str]] = frozenset({"frames"})

    def select(self, tokens: VisualTokens) -> Selection:
        _ = tokens.hidden, tokens.frame  # read before the cut removes them
        return super().select(tokens)


@dataclass(frozen=True)
class DecoderFrameReader(FrameReader):
    """FrameReader inside the decoder."""

    site: ClassVar[Site] = Site.IN_LLM
    layer: int = 2


def observe_tokens(model: Any, inputs: Any, keep: Any = 0.5, method: Any = None) -> VisualTokens:
    """Return the tokens of a forward as a method receives them."""
    watcher = FrameReader() if method is None else method
    with torch.no_grad(), tokenprune.patched(model, watcher, keep=keep):
        model(**inputs)
    return watcher.observed[-1]


def count_frames(family: Family, inputs: Inputs) -> int:
    """Return the number of frames of the only video that reach the decoder, from the processor's outputs."""
    if "video_grid_thw" in inputs:
        frames = int(inputs["video_grid_thw"][0, 0])
        return max(1, frames // 2) if family.kind == "ernie4_5_vl_moe" else frames  # its decoder joins two frames
    return inputs["pixel_values_videos"].shape[1]


@each("name", KNOWN)
def test_frames_are_counted(name: str, build: Callable[..., Any]) -> None:
    family = VIDEOS[name]
    model, inputs = build(family), family.make_inputs(images=(0,), video=True)
    tokens = observe_tokens(model, inputs)
    num_frames, (count,) = count_frames(family, inputs), tokens.counts
    size = count // num_frames
    assert tokens.frames == [[size] * num_frames] and count - size * num_frames == (family.kind == "llava_onevision")
    want = [(f, p) for f in range(num_frames) for p in range(size)] + [(-1, -1)] * (count - size * num_frames)
    assert list(zip(tokens.frame[0].tolist(), tokens.place[0].tolist(), strict=True)) == want


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "llava_next_video"])
def test_a_frame_is_what_its_pixels_change(name: str, build: Callable[..., Any]) -> None:
    model, inputs = VIDEOS[name].prepare(build, images=(0,), video=5)
    before = observe_tokens(model, inputs)
    pixels = inputs["pixel_values_videos"]
    by_patches = pixels.ndim == 2  # Qwen: one axis has the patches of all frames
    per_frame = len(pixels) // 5 if by_patches else 1
    for index in range(5):
        other = pixels.clone()
        frame_pixels = other[index * per_frame : (index + 1) * per_frame] if by_patches else other[:, index]
        frame_pixels.mul_(-1)
        after = observe_tokens(model, {**inputs, "pixel_values_videos": other})
        changed = (before.hidden != after.hidden).any(-1)
        assert torch.equal(changed, before.frame == index)


@each("name", FAMILIES)
def test_an_image_is_one_frame(name: str, build: Callable[..., Any]) -> None:
    family = FAMILIES[name]
    tokens = observe_tokens(build(family), family.make_inputs(images=(2, 1)), method=FirstTokens())
    assert tokens.segments.frames == [[count] for count in tokens.counts]
    frame, slot = compute_frame_indices(tokens.segments.frames, tokens.mask.shape[1], tokens.mask.device)
    index = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)
    assert torch.equal(frame, torch.where(tokens.mask, 0, -1)) and torch.equal(
        slot, torch.where(tokens.mask, index, -1)
    )


# The videos of LLaVA-OneVision are one tensor, with equal numbers of frames.
@pytest.mark.parametrize(("name", "second"), [("qwen2_5_vl", 3), ("qwen3_vl", 3), ("llava_onevision", 5)])
def test_a_ragged_batch_of_videos_and_images(name: str, second: int, build: Callable[..., Any]) -> None:
    model, inputs = FAMILIES[name].prepare(build, images=(1, 0, 2), video=(5, second, False))
    watcher = FrameReader()
    with tokenprune.patched(model, watcher, keep=0.5):
        model.generate(**inputs, max_new_tokens=2, num_beams=2)
    tokens = watcher.observed[0]
    videos = [frames for frames, kind in zip(tokens.frames, tokens.segments.modality, strict=True) if kind == "video"]
    assert videos == [[4] * 5, [4] * 5, [4] * second, [4] * second]
    dense, valid = group_by_frame(tokens.hidden, tokens.frame, tokens.place, 5, max(map(max, tokens.frames)))
    for segment, frames in enumerate(tokens.frames):
        assert valid[segment].sum(1).tolist() == frames + [0] * (5 - len(frames))
        assert torch.equal(dense[segment][valid[segment]], tokens.hidden[segment, : sum(frames)])
    assert previous_frame_similarity(dense, valid).shape == (len(tokens.frames), 4, dense.shape[2])


def test_frames_are_unknown_after_a_cut(build: Callable[..., Any]) -> None:
    """The tokens left of an image stay one frame. A method that reads frames is refused after a cut."""
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, images=(1,), video=5)

    @dataclass(frozen=True)
    class Later(FirstTokens):
        site: ClassVar[Site] = Site.IN_LLM
        layer: int = 2

    later = Later()
    with torch.no_grad(), tokenprune.patched(model, ["uniform", later], keep=[0.5, 0.5]):
        model(**inputs)
    (tokens,) = later.observed
    assert tokens.segments.frames == [None, [tokens.counts[1]]]
    for first in ("uniform", "tome"):
        with pytest.raises(OptionError, match=f"{first} drops some of the tokens before"):
            tokenprune.patch(model, [first, DecoderFrameReader()], keep=0.5)
    assert not tokenprune.is_patched(model)
    with tokenprune.patched(model, ["uniform", DecoderFrameReader()], keep=[1.0, 0.5]):
        model(**inputs)  # keep=1.0 drops no tokens


@torch.no_grad()
def test_images_keep_all_tokens(build: Callable[..., Any]) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model = build(family)
    for method in (FrameReader(), DecoderFrameReader()):
        for images, video in (((1, 2), (5, False)), ((2, 1), False)):
            inputs = family.make_inputs(images=images, video=video)
            plain = model(**inputs).logits
            output, stats = run_pruned(model, inputs, method, 0.5)
            logits = output.logits
            assert stats.notes == ["watcher: images keep all tokens, because it compares the frames of videos"]
            if not video:
                assert torch.equal(logits, plain) and stats.cuts == []
                continue
            kept = set(stats.cuts[0].kept[0])
            indices = {
                token: (inputs["input_ids"][0] == token).nonzero().flatten().tolist() for token in (IMAGE, VIDEO)
            }
            assert set(indices[IMAGE]) <= kept and len(kept & set(indices[VIDEO])) == 10
    inputs = family.make_inputs(images=(0,), video=5)
    assert run_pruned(model, inputs, FrameReader(), 0.5)[1].notes == []


@pytest.mark.parametrize("per", ["frame", "prompt"])
def test_other_scopes(per: str, build: Callable[..., Any]) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, budget = build(family), Budget(keep=0.5, per=per)
    tokens = observe_tokens(model, family.make_inputs(images=(1,), video=5), budget, FirstTokens())
    assert tokens.segments.frames == ([[4]] * 5 + [[tokens.counts[5]]] if per == "frame" else [None])
    with pytest.raises(BudgetError, match=f"per=\"image\" instead of per='{per}'"):
        tokenprune.patch(model, FrameReader(), keep=budget)


@pytest.mark.parametrize(
    ("name", "message"), [("llava", "which 'llava' does not support"), (UNEQUAL, f"not known for '{UNEQUAL}'")]
)
def test_families_without_frames(name: str, message: str, build: Callable[..., Any]) -> None:
    """Refused when the model is patched; other methods get no frames."""
    family = {**OTHERS, **FAMILIES}[name]
    model = build(family)
    with pytest.raises(UnsupportedSetupError, match=message):
        tokenprune.patch(model, FrameReader(), keep=0.5)
    tokenprune.unpatch(tokenprune.patch(model, FrameReader(), keep=1.0))  # a method with keep=1.0 needs no frames
    if name == UNEQUAL:
        tokens = observe_tokens(model, family.make_inputs(images=(0,), video=True), method=FirstTokens())
        assert set(tokens.segments.modality) == {"video"} and tokens.segments.frames == [None] * len(tokens.counts)


def test_table_lists_the_tested_families() -> None:
    assert {VIDEOS[name].kind for name in KNOWN} == {name for name, row in SUPPORTED.items() if row.videos == "frames"}


@torch.no_grad()
def test_a_video_that_was_encoded_elsewhere_is_refused(build: Callable[..., Any]) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, images=(0,), video=5)
    pixels = {name: inputs.pop(name) for name in ("pixel_values_videos", "video_grid_thw")}
    encoded = model.model.get_video_features(**pixels, return_dict=True)
    with (
        tokenprune.patched(model, FrameReader(), keep=0.5),
        pytest.raises(UnsupportedSetupError, match="frames of a 'qwen2_5_vl' video with 20 tokens"),
    ):
        model(**inputs, video_grid_thw=pixels["video_grid_thw"], mm_encoder_outputs={"video": encoded})


@torch.no_grad()
def test_frames_that_do_not_split_the_tokens_are_refused(build: Callable[..., Any], monkeypatch: Any) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, images=(0,), video=5)
    for frames in ([3], [21]):
        monkeypatch.setattr(
            "tokenprune.integrations.hf.families.Adapter.video_frames", lambda *_, frames=frames: frames
        )
        with (
            tokenprune.patched(model, FrameReader(), keep=0.5),
            pytest.raises(UnsupportedSetupError, match="tokens are unknown"),
        ):
            model(**inputs)
    model(**inputs)  # supported again


@torch.no_grad()
def test_a_video_of_no_frames_is_refused(build: Callable[..., Any]) -> None:
    for name, pixels in (("llava_onevision", torch.zeros(1, 0, 3, 16, 16)), ("qwen2_5_vl", torch.zeros(0, 96))):
        model, inputs = FAMILIES[name].prepare(build, images=(0,), video=1)
        inputs["pixel_values_videos"] = pixels
        if "video_grid_thw" in inputs:
            inputs["video_grid_thw"][0, 0] = 0
        for method in (FrameReader(), "divprune"):
            with (
                tokenprune.patched(model, method, keep=0.5),
                pytest.raises(UnsupportedSetupError, match="A video of this call has 0 frames"),
            ):
                model(**inputs)


def test_undeclared_frames_are_refused(build: Callable[..., Any]) -> None:
    family = FAMILIES["qwen2_5_vl"]

    @dataclass(frozen=True)
    class Silent(FirstTokens):
        def select(self, tokens: VisualTokens) -> Selection:
            _ = tokens.frame
            return super().select(tokens)

    with torch.no_grad(), tokenprune.patched(build(family), Silent(), keep=0.5), pytest.raises(TokenPruneError):
        build(family)(**family.make_inputs(images=(0,), video=5))


@each(
    ("tokens", "frames", "num_trailing", "want"),
    [
        (12, 3, 0, [4, 4, 4]), (13, 3, 1, [4, 4, 4]), (5, 1, 1, [4]), (6, 5, 1, [1] * 5), (13, 3, 0, None),
        (12, 0, 0, None), (2, 3, 0, None), (1, 1, 1, None), (12, -1, 0, None),
    ],
)  # fmt: skip
def test_count_tokens_per_frame(tokens: int, frames: int, num_trailing: int, want: list[int] | None) -> None:
    assert count_tokens_per_frame(tokens, frames, num_trailing) == want


def test_frames_equal_runs_of_placeholders(build: Callable[..., Any]) -> None:
    """Qwen3-VL writes the time before each frame, so runs of placeholders are frames."""
    family = FAMILIES["qwen3_vl"]
    inputs = family.make_inputs(images=(1,), video=3)
    tokens = observe_tokens(build(family), inputs)
    (row,) = inputs["input_ids"].tolist()
    runs, last = [], None
    for index, token in enumerate(row):
        if token == VIDEO and row[index - 1] != VIDEO:
            runs.append(0)
        runs = [*runs[:-1], runs[-1] + 1] if token == VIDEO else runs
        last = token if token in (IMAGE, VIDEO) else last
    assert tokens.frames[0] == runs
