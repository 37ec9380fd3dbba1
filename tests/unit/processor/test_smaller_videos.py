# SPDX-License-Identifier: Apache-2.0
"""`downsample` on videos: each frame keeps its share if the token count follows the frame size. Others are refused."""

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


def build_processor(cls: type = Qwen2VLVideoProcessor, **options: Any) -> Any:
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**LIMITS), special_tokenizer(video_token="<v>"), cls(**(LIMITED | options))
    )


def draw_video(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8)


def read_grids(processor: Any, *videos: torch.Tensor) -> list[list[int]]:
    return processor.video_processor(list(videos), return_tensors="pt")["video_grid_thw"].tolist()


@each("cls", FOLLOWING)
@each("keep", [0.75, 0.5, 0.25, 0.1])
def test_every_frame_keeps_its_share(cls: type, keep: float) -> None:
    """Videos of one call differ in size and length. Frames are never dropped."""
    processor = build_processor(cls)
    shapes = [(8, 168, 224), (4, 224, 112), (6, 60, 60), (5, 600, 400)]
    before, unpatched = state(processor), read_grids(processor, *(draw_video(*shape) for shape in shapes))
    patch_processor(processor, "downsample", keep=keep)
    patched = read_grids(processor, *(draw_video(*shape) for shape in shapes))
    separate = [read_grids(processor, draw_video(*shape))[0] for shape in shapes]
    unpatch_processor(processor)
    assert state(processor) == before and patched == separate
    for (t, h, w), (frames, height, width) in zip(patched, unpatched, strict=True):
        tokens, num_unpatched = h * w // 4, height * width // 4
        # off by at most half a row of tokens
        assert t == frames and abs(tokens - keep * num_unpatched) <= max(h, w) / 2


@pytest.mark.parametrize("capped", [False, True])
def test_shares_apply_to_capped_frames(capped: bool) -> None:
    """transformers 5.22 can cap the pixels of each frame, which reduces the tokens of short videos."""
    if "cap_pixels_per_frame" not in Qwen3VLVideoProcessor.valid_kwargs.__annotations__:
        pytest.skip("this version of transformers has no cap_pixels_per_frame")
    size = {"shortest_edge": 4 * 32**2, "longest_edge": 1024 * 32**2}
    options = dict(size=size, cap_pixels_per_frame=capped, max_video_tokens=16)
    processor, clip = build_processor(Qwen3VLVideoProcessor, **options), draw_video(4, 320, 320)
    ((frames, high, wide),) = read_grids(processor, clip)
    assert (frames, high * wide // 4) == (2, 16 if capped else 100)
    assert processor.video_processor.get_num_of_video_patches(4, 320, 320) == frames * high * wide
    patch_processor(processor, "downsample", keep=0.25)
    ((after, low, narrow),) = read_grids(processor, clip)
    assert after == frames and abs(low * narrow - high * wide / 4) <= 2 * max(low, narrow)
    inputs = processor(videos=[clip], text=["<v> what moves?"], return_tensors="pt")
    assert int((inputs["input_ids"] == processor.video_token_id).sum()) == after * low * narrow // 4


def test_placeholders_match_the_smaller_video() -> None:
    processor, text = build_processor(), "<v> what moves?"
    inputs = dict(videos=[draw_video(4, 168, 224)], text=[text], return_tensors="pt")
    unpatched = (processor(**inputs)["input_ids"] == processor.video_token_id).sum()
    patch_processor(processor, "downsample", keep=0.25)
    patched = processor(**inputs)
    assert int((patched["input_ids"] == processor.video_token_id).sum()) * 4 == unpatched
    assert len(patched["pixel_values_videos"]) == patched["video_grid_thw"].prod()
    unpatch_processor(processor)


def test_video_processors_with_fixed_counts_are_refused() -> None:
    processor = build_processor(LlavaOnevisionVideoProcessor, size={"height": 56, "width": 56})
    patch_processor(processor, "downsample", keep=0.25)
    with pytest.raises(UnsupportedSetupError, match="LlavaOnevisionVideoProcessor makes as many tokens"):
        processor.video_processor([draw_video(4, 60, 60)], return_tensors="pt")
    unpatch_processor(processor)
    processor = build_processor(do_resize=False)
    patch_processor(processor, "downsample", keep=0.25)
    with pytest.raises(UnsupportedSetupError, match="do_resize=False"):
        processor.video_processor([draw_video(4, 56, 56)], return_tensors="pt")


@pytest.mark.parametrize("method", [tokenprune.method("downsample", videos=False), "dynres"])
def test_videos_can_be_excluded(method: Any) -> None:
    processor, clip = build_processor(), draw_video(4, 168, 224)
    unpatched = processor.video_processor([clip], return_tensors="pt")
    patch_processor(processor, method, keep=0.25)
    patched = processor.video_processor([clip], return_tensors="pt")
    assert torch.equal(patched["pixel_values_videos"], unpatched["pixel_values_videos"])
