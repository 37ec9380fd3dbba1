# SPDX-License-Identifier: Apache-2.0
"""Token counts equal the output of real processors, for random sizes and extreme shapes."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.models.llava_next.image_processing_llava_next import LlavaNextImageProcessor
from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor, smart_resize

from each import each
from processors import COUNTED, llava, tokenizer, written
from tokenprune import OptionError, UnsupportedSetupError, count_visual_tokens
from tokenprune.models.token_counts import list_countable_processors

NUM_SIZES = 50
# published settings of Qwen3-VL, which uses the same class with patches of 16 and higher limits
QWEN3 = dict(patch_size=16, size={"shortest_edge": 65_536, "longest_edge": 16_777_216})


def draw_sizes(num_sizes: int, longest: int, seed: int = 0) -> list[tuple[int, int]]:
    """Draw (height, width) pairs: random shapes, near-squares, and long strips in both orientations."""
    rng = random.Random(seed)
    pairs = [(1, 1), (1, 150), (150, 1), (longest, longest)]
    while len(pairs) < num_sizes:
        height = rng.randint(1, longest)
        width = [rng.randint(1, longest), min(longest, height + rng.randint(0, 2)), 1 + height // 40][len(pairs) % 3]
        pairs.append((height, width) if rng.random() < 0.5 else (width, height))
    return pairs


def build_image(height: int, width: int) -> torch.Tensor:
    return torch.zeros(3, height, width, dtype=torch.uint8)


@each("name", COUNTED)
def test_equal_to_the_real_processor(name: str) -> None:
    """Small tiles and limits reach all branches with small images."""
    case, counts = COUNTED[name], set()
    for seed, variant in enumerate(case.variants):
        processor = case.make(**variant)
        for height, width in draw_sizes(max(20, NUM_SIZES // len(case.variants)), case.longest, seed=seed):
            expected = case.real(processor, build_image(height, width))
            assert count_visual_tokens(processor, height, width) == expected, (height, width, variant)
            counts.add(expected)
    assert len(counts) >= case.different, "these sizes do not show how the count follows the size"


def test_every_rule_is_tested() -> None:
    assert set(list_countable_processors()) == {*COUNTED, "CLIPImageProcessor", "LlavaImageProcessor"}


def test_llava_makes_one_size() -> None:
    processor = llava()
    for height, width in draw_sizes(8, 300):
        assert count_visual_tokens(processor, height, width) == written(processor, build_image(height, width)) == 256
    small = {"size": {"shortest_edge": 112}, "crop_size": {"height": 112, "width": 112}}
    assert count_visual_tokens(processor, 300, 200, **small) == written(processor, build_image(300, 200), **small) == 64


@pytest.mark.parametrize(
    "settings, height, width, tokens",
    [({}, 1080, 1920, None), ({}, 28, 28, 4), ({}, 4000, 30, None), (QWEN3, 1080, 1920, 2040), (QWEN3, 40, 40, 64)],
)
def test_published_settings_of_qwen(settings: dict, height: int, width: int, tokens: int | None) -> None:
    processor = Qwen2VLImageProcessor(**settings)
    grids = processor(build_image(height, width))["image_grid_thw"]
    counted = count_visual_tokens(processor, height, width)
    assert counted == int(grids.prod()) // 4
    assert tokens in (None, counted)


def test_published_settings_of_anyres() -> None:
    """LLaVA-1.6 makes at most 2880 tokens and newlines, OneVision about nine tiles and a base image."""
    case = COUNTED["LlavaNextImageProcessor"].make()
    case.image_processor, case.patch_size = LlavaNextImageProcessor(size={"shortest_edge": 336}), 14
    assert count_visual_tokens(case, 672, 672) == 576 + 48 * 49
    text = case.replace_image_token({"image_sizes": [[500, 900]], "pixel_values": [[build_image(336, 336)]]}, 0)
    assert count_visual_tokens(case, 500, 900) == text.count("<image>")
    onevision = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(), tokenizer(), LlavaOnevisionVideoProcessor(), num_image_tokens=729
    )
    onevision.vision_feature_select_strategy = "full"
    for size in draw_sizes(20, 3000, seed=3):
        fake = {"image_sizes": [size], "pixel_values": [[build_image(384, 384)]], "batch_num_images": [1]}
        text = onevision.replace_image_token(fake, 0)
        assert count_visual_tokens(onevision, *size) == text.count("<image>"), size


def test_settings_of_the_call() -> None:
    case = COUNTED["Qwen2VLImageProcessor"]
    processor = case.make(**case.variants[0])
    size = {"shortest_edge": 16 * 64, "longest_edge": 32 * 64}
    expected = int(processor(build_image(150, 150), size=size)["image_grid_thw"].prod()) // 4
    assert count_visual_tokens(processor, 150, 150, size=size) == expected < count_visual_tokens(processor, 150, 150)
    assert count_visual_tokens(processor, 150, 150, max_pixels=32 * 64) == expected


def test_onevision_does_not_cut_several_images() -> None:
    processor = COUNTED["LlavaOnevisionImageProcessor"].make()
    both = written(processor, build_image(64, 96), build_image(90, 30))
    assert both == 2 * 65
    assert count_visual_tokens(processor, 64, 96, images=2) == count_visual_tokens(processor, 90, 30, images=2) == 65


@pytest.mark.parametrize("max_tokens", [16, 64, 256])
def test_smart_resize_stays_within_its_limits(max_tokens: int) -> None:
    """The limits hold unless a side has the minimum length. Rounding can make a token less under a larger limit."""
    processor = COUNTED["Qwen2VLImageProcessor"].make(size={"shortest_edge": 4 * 64, "longest_edge": max_tokens * 64})
    for height, width in draw_sizes(NUM_SIZES, 300, seed=2):
        high, wide = smart_resize(height, width, 8, 4 * 64, max_tokens * 64)
        assert high % 8 == wide % 8 == 0
        if min(high, wide) > 8:
            assert 4 * 64 <= high * wide <= max_tokens * 64
            assert smart_resize(high, wide, 8, 4 * 64, max_tokens * 64) == (high, wide)
        assert count_visual_tokens(processor, height, width) == high * wide // 64


def test_errors_say_what_to_do() -> None:
    case = COUNTED["LlavaNextImageProcessor"].make()
    with pytest.raises(OptionError, match="Pass the model's processor"):
        count_visual_tokens(case.image_processor, 10, 10)
    with pytest.raises(OptionError, match="0 x 10"):
        count_visual_tokens(case, 0, 10)
    with pytest.raises(UnsupportedSetupError, match="Qwen2VLImageProcessor"):
        count_visual_tokens(object(), 10, 10)
