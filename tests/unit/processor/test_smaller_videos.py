# SPDX-License-Identifier: Apache-2.0
"""`downsample` on videos: each frame keeps its share where tokens follow the size of a frame; else it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlavaOnevisionVideoProcessor, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen3VLVideoProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

import tokenprune
from each import each
from processors import LIMITS, special_tokenizer, state
from tokenprune import UnsupportedSetupError, patch_processor, unpatch_processor

LIMITED = dict(size={"shortest_edge": 16 * 28**2, "longest_edge": 8 * 64 * 28**2}, do_sample_frames=False)
FOLLOWING = [Qwen2VLVideoProcessor, Qwen3VLVideoProcessor, Glm4vVideoProcessor]


def processor(cls: type = Qwen2VLVideoProcessor, **options: Any) -> Any:
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**LIMITS), special_tokenizer(video_token="<v>"), cls(**(LIMITED | options))
    )


def video(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8)


def grids(one: Any, *videos: torch.Tensor) -> list[list[int]]:
    return one.video_processor(list(videos), return_tensors="pt")["video_grid_thw"].tolist()


@each("cls", FOLLOWING)
@each("keep", [0.75, 0.5, 0.25, 0.1])
def test_every_frame_keeps_its_share(cls: type, keep: float) -> None:
    """Of videos in one call that differ in size and length, one enlarged by the lower limit; a frame is never lost."""
    one = processor(cls)
    shapes = [(8, 168, 224), (4, 224, 112), (6, 60, 60), (5, 600, 400)]
    before, full = state(one), grids(one, *(video(*shape) for shape in shapes))
    patch_processor(one, "downsample", keep=keep)
    small = grids(one, *(video(*shape) for shape in shapes))
    alone = [grids(one, video(*shape))[0] for shape in shapes]
    unpatch_processor(one)
    assert state(one) == before and small == alone
    for (t, h, w), (frames, height, width) in zip(small, full, strict=True):
        tokens, whole = h * w // 4, height * width // 4
        assert t == frames and abs(tokens - keep * whole) <= max(h, w) / 2  # off by half a row of tokens at most


@pytest.mark.parametrize("capped", [False, True])
def test_the_share_is_of_capped_frames(capped: bool) -> None:
    """transformers 5.22 can cap a frame's pixels as the reference does; a video of few frames has fewer tokens then."""
    if "cap_pixels_per_frame" not in Qwen3VLVideoProcessor.valid_kwargs.__annotations__:
        pytest.skip("this version of transformers has no cap_pixels_per_frame")
    size = {"shortest_edge": 4 * 32**2, "longest_edge": 1024 * 32**2}
    own = dict(size=size, cap_pixels_per_frame=capped, max_video_tokens=16)
    one, clip = processor(Qwen3VLVideoProcessor, **own), video(4, 320, 320)
    ((frames, high, wide),) = grids(one, clip)
    assert (frames, high * wide // 4) == (2, 16 if capped else 100)
    assert one.video_processor.get_num_of_video_patches(4, 320, 320) == frames * high * wide
    patch_processor(one, "downsample", keep=0.25)
    ((after, low, narrow),) = grids(one, clip)
    assert after == frames and abs(low * narrow - high * wide / 4) <= 2 * max(low, narrow)
    inputs = one(videos=[clip], text=["<v> what moves?"], return_tensors="pt")
    assert int((inputs["input_ids"] == one.video_token_id).sum()) == after * low * narrow // 4


def test_the_prompt_has_as_many_placeholders() -> None:
    one, text = processor(), "<v> what moves?"
    inputs = dict(videos=[video(4, 168, 224)], text=[text], return_tensors="pt")
    full = (one(**inputs)["input_ids"] == one.video_token_id).sum()
    patch_processor(one, "downsample", keep=0.25)
    made = one(**inputs)
    assert int((made["input_ids"] == one.video_token_id).sum()) * 4 == full
    assert len(made["pixel_values_videos"]) == made["video_grid_thw"].prod()
    unpatch_processor(one)


def test_what_does_not_follow_is_refused_by_name() -> None:
    one = processor(LlavaOnevisionVideoProcessor, size={"height": 56, "width": 56})
    patch_processor(one, "downsample", keep=0.25)
    with pytest.raises(UnsupportedSetupError, match="LlavaOnevisionVideoProcessor makes as many tokens"):
        one.video_processor([video(4, 60, 60)], return_tensors="pt")
    unpatch_processor(one)
    one = processor(do_resize=False)
    patch_processor(one, "downsample", keep=0.25)
    with pytest.raises(UnsupportedSetupError, match="do_resize=False"):
        one.video_processor([video(4, 56, 56)], return_tensors="pt")


@pytest.mark.parametrize("method", [tokenprune.method("downsample", videos=False), "dynres"])
def test_videos_can_be_left_as_they_are(method: Any) -> None:
    one, clip = processor(), video(4, 168, 224)
    full = one.video_processor([clip], return_tensors="pt")
    patch_processor(one, method, keep=0.25)
    left = one.video_processor([clip], return_tensors="pt")
    assert torch.equal(left["pixel_values_videos"], full["pixel_values_videos"])
