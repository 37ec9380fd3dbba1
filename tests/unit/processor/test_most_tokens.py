# SPDX-License-Identifier: Apache-2.0
"""`downsample` with a number of tokens: no image makes more, and one that makes fewer is left as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import tokenprune
from each import each
from processors import COUNTED, LIMITS, asked, demo_model, llava, photo, written
from tokenprune import BudgetError, UnsupportedSetupError, count_visual_tokens, patch_processor, unpatch_processor

SIZES = [(190, 190), (64, 150), (150, 33), (30, 20), (400, 330)]


@each("most", [2, 7, 24, 100, 577])
@each("size", SIZES)
def test_qwen_images_make_at_most_so_many(size: tuple[int, int], most: int) -> None:
    processor = Qwen2VLImageProcessor(**LIMITS)
    whole = processor(photo(*size))
    full = int(whole["image_grid_thw"].prod()) // 4
    patch_processor(processor, "downsample", keep=most)
    made = processor(photo(*size))
    tokens = int(made["image_grid_thw"].prod()) // 4
    assert tokens <= most
    if full <= most:
        assert torch.equal(made["pixel_values"], whole["pixel_values"])
    else:
        rows = int(made["image_grid_thw"][0, 1:].min()) // 2
        assert tokens > most - 2 * rows - 2, "a row and a column more would still fit"


@pytest.mark.parametrize("name", ["LlavaNextImageProcessor", "Lfm2VlImageProcessor", "PixtralImageProcessor"])
def test_other_processors_make_at_most_so_many(name: str) -> None:
    processor = COUNTED[name].make()
    for size in SIZES[:4]:
        full = count_visual_tokens(processor, *size)
        least = count_visual_tokens(processor, 1, 1)
        for most in (least, (least + full) // 2, full, full + 1):
            patch_processor(processor, keep=max(2, most))
            made = written(processor, photo(*size))
            unpatch_processor(processor)
            assert made <= max(2, most) and (made == full or full > most)


def test_what_no_size_can_give_is_refused() -> None:
    processor = COUNTED["LlavaNextImageProcessor"].make()
    least = count_visual_tokens(processor, 1, 1)
    patch_processor(processor, keep=2)
    with pytest.raises(
        BudgetError, match=f"keep=2 is too small for an image of 64 x 150 pixels. It has at least {least}"
    ):
        processor(photo(64, 150))
    unpatch_processor(processor)


@pytest.mark.parametrize(("most", "side"), [(64, 8), (80, 8), (255, 15), (256, 16), (5000, 16)])
@torch.no_grad()
def test_a_fixed_size_shrinks_to_a_square_that_fits(most: int, side: int) -> None:
    model, processor = demo_model(), llava()
    with tokenprune.patched(model, "downsample", keep=most, processor=processor):
        inputs = asked(processor, photo(300, 200))
        assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == side**2
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_out == side**2
    foreign = asked(llava(), photo(300, 200))
    with tokenprune.patched(model, "downsample", keep=most, processor=processor):
        if side == 16:
            model(**foreign)
        else:
            with pytest.raises(UnsupportedSetupError, match="were not resized"):
                model(**foreign)


def test_what_means_nothing_is_refused(build: Any) -> None:
    with pytest.raises(BudgetError, match="dynres does not support"):
        patch_processor(Qwen2VLImageProcessor(**LIMITS), "dynres", keep=64)
