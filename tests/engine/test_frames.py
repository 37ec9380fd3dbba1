# SPDX-License-Identifier: Apache-2.0
"""Which frame of a video a visual token is of, and where in it: told to methods, on every family that takes videos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

import tokenprune
from families import FAMILIES as OTHERS
from tokenprune import Budget, Method, Selection, TokenPruneError, VisualTokens
from tokenprune.frames import tokens_per_frame
from tokenprune.kernels.temporal import by_frame, same_place
from zoo import FAMILIES, IMAGE, VIDEO, Family, Inputs

VIDEOS = {name: family for name, family in {**OTHERS, **FAMILIES}.items() if family.video is not None}
# Each of its frames has a number of tokens of its own, and counts as an image.
UNEQUAL = "video_llama_3"
KNOWN = [name for name in VIDEOS if name != UNEQUAL]


@dataclass(frozen=True)
class Watcher(Method):
    """Keeps the first tokens, and what it is told."""

    name: ClassVar[str] = "watcher"
    seen: list[VisualTokens] = field(default_factory=list, hash=False)

    def select(self, tokens: VisualTokens) -> Selection:
        _ = tokens.hidden  # read now: behind the cut it is not there
        self.seen.append(tokens)
        return Selection.top(-torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask).float(), tokens)


def watched(model: Any, inputs: Any, keep: Any = 0.5, before: list | None = None) -> VisualTokens:
    """The tokens of a forward, as a method sees them."""
    watcher = Watcher()
    with torch.no_grad(), tokenprune.patched(model, [*(before or []), watcher], keep=keep):
        model(**inputs)
    return watcher.seen[-1]


def frames_of(family: Family, inputs: Inputs) -> int:
    """How many frames of the one video reach the decoder, by what the processor hands over."""
    if "video_grid_thw" in inputs:
        frames = int(inputs["video_grid_thw"][0, 0])
        return max(1, frames // 2) if family.kind == "ernie4_5_vl_moe" else frames  # its decoder joins two
    return inputs["pixel_values_videos"].shape[1]


@pytest.mark.parametrize("name", KNOWN)
def test_frames_are_counted(name: str, build: Callable[..., Any]) -> None:
    family = VIDEOS[name]
    model, inputs = build(family), family.make_inputs(images=(0,), video=True)
    tokens = watched(model, inputs)
    number, (count,) = frames_of(family, inputs), tokens.counts
    size = count // number
    assert tokens.frames == [[size] * number] and count - size * number == (family.kind == "llava_onevision")
    want = [(f, p) for f in range(number) for p in range(size)] + [(-1, -1)] * (count - size * number)
    assert list(zip(tokens.frame[0].tolist(), tokens.place[0].tolist(), strict=True)) == want


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "llava_next_video"])
def test_a_frame_is_what_its_pixels_change(name: str, build: Callable[..., Any]) -> None:
    """Other pixels in one frame change the tokens of that frame, and no others."""
    family = VIDEOS[name]
    model, inputs = build(family), family.make_inputs(images=(0,), video=5)
    before = watched(model, inputs)
    pixels = inputs["pixel_values_videos"]
    by_patches = pixels.ndim == 2  # Qwen: the patches of all frames on one axis
    per_frame = len(pixels) // 5 if by_patches else 1
    for number in range(5):
        other = pixels.clone()
        of_frame = other[number * per_frame : (number + 1) * per_frame] if by_patches else other[:, number]
        of_frame.mul_(-1)
        after = watched(model, {**inputs, "pixel_values_videos": other})
        changed = (before.hidden != after.hidden).any(-1)
        assert torch.equal(changed, before.frame == number)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_is_one_frame(name: str, build: Callable[..., Any]) -> None:
    family = FAMILIES[name]
    tokens = watched(build(family), family.make_inputs(images=(2, 1)))
    assert tokens.frames == [[count] for count in tokens.counts]
    index = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)
    assert torch.equal(tokens.frame, torch.where(tokens.mask, 0, -1))
    assert torch.equal(tokens.place, torch.where(tokens.mask, index, -1))


# The videos of LLaVA-OneVision are one tensor: all have as many frames.
@pytest.mark.parametrize(("name", "second"), [("qwen2_5_vl", 3), ("qwen3_vl", 3), ("llava_onevision", 5)])
def test_a_ragged_batch_of_videos_and_images(name: str, second: int, build: Callable[..., Any]) -> None:
    """And of beams, whose rows are copies."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(1, 0, 2), video=(5, second, False))
    watcher = Watcher()
    with tokenprune.patched(model, watcher, keep=0.5):
        model.generate(**inputs, max_new_tokens=2, num_beams=2)
    tokens = watcher.seen[0]
    videos = [frames for frames, kind in zip(tokens.frames, tokens.segments.modality, strict=True) if kind == "video"]
    assert videos == [[4] * 5, [4] * 5, [4] * second, [4] * second]
    dense, there = by_frame(tokens.hidden, tokens.frame, tokens.place, 5, max(map(max, tokens.frames)))
    for segment, frames in enumerate(tokens.frames):
        assert there[segment].sum(1).tolist() == frames + [0] * (5 - len(frames))
        assert torch.equal(dense[segment][there[segment]], tokens.hidden[segment, : sum(frames)])
    assert same_place(dense, there).shape == (len(tokens.frames), 4, dense.shape[2])


def test_frames_are_not_known_where_tokens_are_gone(build: Callable[..., Any]) -> None:
    """Of an image it stays known: what is left of it is one frame."""
    family = FAMILIES["qwen2_5_vl"]
    inputs = family.make_inputs(images=(1,), video=5)

    @dataclass(frozen=True)
    class Later(Watcher):
        site: ClassVar[str] = tokenprune.Site.IN_LLM
        layer: int = 2

    later = Later()
    with torch.no_grad(), tokenprune.patched(build(family), ["uniform", later], keep=[0.5, 0.5]):
        build(family)(**inputs)
    (tokens,) = later.seen
    video, image = tokens.segments.frames
    assert video is None and image == [tokens.counts[1]]
    with pytest.raises(TokenPruneError, match="not known"):
        _ = tokens.frame


@pytest.mark.parametrize("per", ["frame", "prompt"])
def test_other_scopes(per: str, build: Callable[..., Any]) -> None:
    family = FAMILIES["qwen2_5_vl"]
    tokens = watched(build(family), family.make_inputs(images=(1,), video=5), Budget(keep=0.5, per=per))
    assert tokens.segments.frames == ([[4]] * 5 + [[tokens.counts[5]]] if per == "frame" else [None])


def test_frames_that_nothing_tells(build: Callable[..., Any]) -> None:
    family = VIDEOS[UNEQUAL]
    tokens = watched(build(family), family.make_inputs(images=(0,), video=True))
    assert set(tokens.segments.modality) == {"video"} and tokens.segments.frames == [None] * len(tokens.counts)


@pytest.mark.parametrize(
    ("tokens", "frames", "behind", "want"),
    [
        (12, 3, 0, [4, 4, 4]), (13, 3, 1, [4, 4, 4]), (5, 1, 1, [4]), (6, 5, 1, [1] * 5), (13, 3, 0, None),
        (12, 0, 0, None), (2, 3, 0, None), (1, 1, 1, None), (12, -1, 0, None),
    ],
)  # fmt: skip
def test_tokens_per_frame(tokens: int, frames: int, behind: int, want: list[int] | None) -> None:
    assert tokens_per_frame(tokens, frames, behind) == want


def test_ids_agree(build: Callable[..., Any]) -> None:
    """Qwen3-VL writes the time before each frame: its runs of placeholders are the frames."""
    family = FAMILIES["qwen3_vl"]
    inputs = family.make_inputs(images=(1,), video=3)
    tokens = watched(build(family), inputs)
    (row,) = inputs["input_ids"].tolist()
    runs, last = [], None
    for place, token in enumerate(row):
        if token == VIDEO and row[place - 1] != VIDEO:
            runs.append(0)
        runs = [*runs[:-1], runs[-1] + 1] if token == VIDEO else runs
        last = token if token in (IMAGE, VIDEO) else last
    assert tokens.frames[0] == runs
