# SPDX-License-Identifier: Apache-2.0
"""Patched processors: refused setups, arguments of a call, and processors patched without a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor

import tokenprune
from basics import METHODS
from families import plain
from processors import COUNTED, LIMITS, asked, demo_model, llava, photo, state, tokenizer, written
from tokenprune import (
    AlreadyPatchedError,
    Budget,
    BudgetError,
    NotPatchedError,
    OptionError,
    UnsupportedSetupError,
    patch_processor,
    unpatch_processor,
)
from zoo import FAMILIES

INFOS = [tokenprune.method_info(name) for name in METHODS]
PIXEL_METHODS = [info.name for info in INFOS if issubclass(info.cls, tokenprune.selection.ResizeMethod)]


@pytest.fixture
def demo() -> Any:
    return demo_model()


FIXED = ["internvl", "gemma3", "idefics3", "smolvlm"]


@pytest.mark.parametrize("method", PIXEL_METHODS)
def test_errors_leave_model_and_processor_unchanged(method: str, demo: Any, build: Any) -> None:
    processor = llava()
    before = state(processor)
    for family in FIXED:
        with pytest.raises(UnsupportedSetupError, match="same number of tokens"):
            tokenprune.patch(build(FAMILIES[family]), method, keep=0.5, processor=processor)
    cases: list[tuple[type[Exception], dict]] = [
        (OptionError, dict(keep=0.5)),
        (OptionError, dict(keep=0.5, processor=tokenizer())),
        (BudgetError, dict(keep=Budget(average_tokens=64), processor=processor)),
        (BudgetError, dict(keep=Budget.from_kv_share(0.5), processor=processor)),
        (OptionError, dict(keep=0.5, processor=processor, layer=2)),
    ]
    for error, arguments in cases:
        with pytest.raises(error):
            tokenprune.patch(demo, method, **arguments)
        assert not tokenprune.is_patched(demo)
    assert state(processor) == before
    with tokenprune.patched(demo, "divprune", processor=processor, guard="off"):  # divprune does not use the processor
        assert state(processor) == before
    with pytest.raises(OptionError, match="does not act on pixels"):
        tokenprune.patch(demo, "divprune", processor=processor.image_processor)  # the guard needs a tokenizer


def test_one_patch_on_a_processor(demo: Any) -> None:
    processor, other = llava(), copy.deepcopy(demo)
    tokenprune.patch(demo, "downsample", keep=0.5, processor=processor)
    with pytest.raises(AlreadyPatchedError, match=r"downsample \(.*0\.5"):
        tokenprune.patch(other, "downsample", keep=0.5, processor=processor)
    with pytest.raises(NotPatchedError, match="together with a model"):
        unpatch_processor(processor)
    tokenprune.patch(demo, "downsample", keep=0.25, processor=processor, replace=True)
    assert asked(processor, photo(90, 90))["pixel_values"].shape[-1] == 112
    tokenprune.unpatch(demo)
    assert asked(processor, photo(90, 90))["pixel_values"].shape[-1] == 224


def test_arguments_of_the_call_take_effect(demo: Any) -> None:
    processor, image = llava(), photo(300, 200)
    with tokenprune.patched(demo, "downsample", keep=0.25, processor=processor):
        for size in (112, {"shortest_edge": 112}):
            output = processor.image_processor(image, size=size, crop_size=112, return_tensors="pt")
            assert output["pixel_values"].shape[-2:] == (56, 56)
        with pytest.raises(UnsupportedSetupError, match="do_resize"):
            processor.image_processor(image, do_resize=False)
    qwen = patch_processor(Qwen2VLImageProcessor(**LIMITS), keep=0.25)
    limits = {"shortest_edge": 64, "longest_edge": 64 * 64}
    assert qwen(photo(160, 160), size=limits)["image_grid_thw"].tolist() == [[1, 8, 8]]
    assert qwen(photo(160, 160), min_pixels=64, max_pixels=64 * 64)["image_grid_thw"].tolist() == [[1, 8, 8]]


def test_placeholders_of_the_whole_processor_match() -> None:
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(**LIMITS), tokenizer(), Qwen2VLVideoProcessor())
    images = [photo(160, 80), photo(64, 64), photo(33, 130)]
    unpatched = written(processor, *images)
    patch_processor(processor, keep=0.25)
    inputs = processor(images=images, text=["<image><image>", "<image>"])
    counts = [t * h * w // 4 for t, h, w in torch.as_tensor(inputs["image_grid_thw"]).tolist()]
    assert written(processor, *images) == sum(counts) == pytest.approx(unpatched / 4, abs=6)
    token = tokenizer().convert_tokens_to_ids("<image>")
    assert [row.count(token) for row in inputs["input_ids"]] == [counts[0] + counts[1], counts[2]]
    unpatch_processor(processor)
    assert written(processor, *images) == unpatched


def test_patch_processor_equals_patch_with_a_model(build: Any) -> None:
    family, image = FAMILIES["qwen2_vl"], photo(70, 90)
    with_model, without_model = (Qwen2VLImageProcessor(patch_size=4) for _ in range(2))
    before = state(without_model)
    with tokenprune.patched(build(family), "downsample", keep=0.3, processor=with_model):
        expected = with_model(image)
    assert patch_processor(without_model, "downsample", keep=0.3) is without_model
    output = without_model(image)
    assert torch.equal(output["pixel_values"], expected["pixel_values"])
    assert torch.equal(output["image_grid_thw"], expected["image_grid_thw"])
    assert copy.deepcopy(without_model)(image)["image_grid_thw"].tolist() == output["image_grid_thw"].tolist()
    assert unpatch_processor(without_model) is without_model
    assert state(without_model) == before


def test_patch_processor_replaces_only_when_asked() -> None:
    processor = patch_processor(Qwen2VLImageProcessor(), keep=0.5)
    with pytest.raises(AlreadyPatchedError, match="downsample"):
        patch_processor(processor, keep=0.25)
    patch_processor(processor, keep=0.25, replace=True)
    assert processor(photo(560, 560))["image_grid_thw"].tolist() == [[1, 20, 20]]
    unpatch_processor(processor)
    with pytest.raises(NotPatchedError, match="patch_processor"):
        unpatch_processor(processor)


def test_patch_processor_errors() -> None:
    qwen, text_tokenizer = Qwen2VLImageProcessor(), tokenizer()
    before = dict(vars(text_tokenizer))
    crops = COUNTED["LlavaNextImageProcessor"].make().image_processor
    needs_pixels = f"a {type(text_tokenizer).__name__} does not make any. Pass the model's full processor"
    for processor, arguments, error, message in (
        (qwen, {"method": "divprune"}, OptionError, "downsample"),
        (llava(), {}, UnsupportedSetupError, r"tokenprune\.patch\(model"),
        (GotOcr2ImageProcessor(crop_to_patches=True), {}, UnsupportedSetupError, "same number of tokens"),
        (crops, {}, OptionError, "Pass the model's processor"),
        (None, {}, OptionError, "Pass the model's processor"),
        (qwen, {"method": "dynres", "keep": 64}, BudgetError, "share"),
        (qwen, {"sharpness": 1}, OptionError, "sharpness"),
        (llava(), {"method": ["dynres", "tome"]}, OptionError, r"one method.*tokenprune\.patch"),
        (
            SiglipImageProcessor(),
            {"method": "dynres"},
            UnsupportedSetupError,
            r"SiglipImageProcessor, whose tokens cannot be counted.*'pool'",
        ),
        (text_tokenizer, {"method": "downsample", "keep": 0.5}, OptionError, needs_pixels),
        (text_tokenizer, {"method": "dynres", "keep": 0.5}, OptionError, needs_pixels),
    ):
        with pytest.raises(error, match=message):
            patch_processor(processor, **arguments)
    assert vars(text_tokenizer) == before
    # With this `size` all images get one size, but the model's token count follows the image.
    with pytest.raises(UnsupportedSetupError, match="resizes every image to one size"):
        tokenprune.patch(plain.FAMILIES["mistral3"].build(), "downsample", keep=0.5, processor=SiglipImageProcessor())
