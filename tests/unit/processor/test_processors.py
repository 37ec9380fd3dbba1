# SPDX-License-Identifier: Apache-2.0
"""Patches on processors: what is refused and why, what a call may say, and processors patched without a model."""

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
def test_errors_leave_the_model_alone(method: str, demo: Any, build: Any) -> None:
    processor = llava()
    before = state(processor)
    for family in FIXED:
        with pytest.raises(UnsupportedSetupError, match="same number of tokens"):
            tokenprune.patch(build(FAMILIES[family]), method, keep=0.5, processor=processor)
    wrong: list[tuple[type[Exception], dict]] = [
        (OptionError, dict(keep=0.5)),
        (OptionError, dict(keep=0.5, processor=tokenizer())),
        (BudgetError, dict(keep=Budget(average_tokens=64), processor=processor)),
        (BudgetError, dict(keep=Budget.from_kv_share(0.5), processor=processor)),
        (OptionError, dict(keep=0.5, processor=processor, layer=2)),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            tokenprune.patch(demo, method, **arguments)
        assert not tokenprune.is_patched(demo)
    assert state(processor) == before
    with tokenprune.patched(demo, "divprune", processor=processor, guard="off"):  # nothing to do for it
        assert state(processor) == before
    with pytest.raises(OptionError, match="does not act on pixels"):
        tokenprune.patch(demo, "divprune", processor=processor.image_processor)  # the guard has nothing to read with


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


def test_settings_of_the_call_are_heard(demo: Any) -> None:
    processor, image = llava(), photo(300, 200)
    with tokenprune.patched(demo, "downsample", keep=0.25, processor=processor):
        for size in (112, {"shortest_edge": 112}):
            made = processor.image_processor(image, size=size, crop_size=112, return_tensors="pt")
            assert made["pixel_values"].shape[-2:] == (56, 56)
        with pytest.raises(UnsupportedSetupError, match="do_resize"):
            processor.image_processor(image, do_resize=False)
    qwen = patch_processor(Qwen2VLImageProcessor(**LIMITS), keep=0.25)
    most = {"shortest_edge": 64, "longest_edge": 64 * 64}
    assert qwen(photo(160, 160), size=most)["image_grid_thw"].tolist() == [[1, 8, 8]]
    assert qwen(photo(160, 160), min_pixels=64, max_pixels=64 * 64)["image_grid_thw"].tolist() == [[1, 8, 8]]


def test_placeholders_of_the_whole_processor_match() -> None:
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(**LIMITS), tokenizer(), Qwen2VLVideoProcessor())
    images = [photo(160, 80), photo(64, 64), photo(33, 130)]
    full = written(processor, *images)
    patch_processor(processor, keep=0.25)
    inputs = processor(images=images, text=["<image><image>", "<image>"])
    made = [t * h * w // 4 for t, h, w in torch.as_tensor(inputs["image_grid_thw"]).tolist()]
    assert written(processor, *images) == sum(made) == pytest.approx(full / 4, abs=6)
    token = tokenizer().convert_tokens_to_ids("<image>")
    assert [row.count(token) for row in inputs["input_ids"]] == [made[0] + made[1], made[2]]
    unpatch_processor(processor)
    assert written(processor, *images) == full


def test_patch_processor_is_the_same_as_with_a_model(build: Any) -> None:
    family, image = FAMILIES["qwen2_vl"], photo(70, 90)
    with_model, alone = (Qwen2VLImageProcessor(patch_size=4) for _ in range(2))
    before = state(alone)
    with tokenprune.patched(build(family), "downsample", keep=0.3, processor=with_model):
        want = with_model(image)
    assert patch_processor(alone, "downsample", keep=0.3) is alone
    made = alone(image)
    assert torch.equal(made["pixel_values"], want["pixel_values"])
    assert torch.equal(made["image_grid_thw"], want["image_grid_thw"])
    assert copy.deepcopy(alone)(image)["image_grid_thw"].tolist() == made["image_grid_thw"].tolist()
    assert unpatch_processor(alone) is alone
    assert state(alone) == before


def test_patch_processor_replaces_only_when_asked() -> None:
    processor = patch_processor(Qwen2VLImageProcessor(), keep=0.5)
    with pytest.raises(AlreadyPatchedError, match="downsample"):
        patch_processor(processor, keep=0.25)
    patch_processor(processor, keep=0.25, replace=True)
    assert processor(photo(560, 560))["image_grid_thw"].tolist() == [[1, 20, 20]]
    unpatch_processor(processor)
    with pytest.raises(NotPatchedError, match="patch_processor"):
        unpatch_processor(processor)


def test_patch_processor_says_what_it_cannot_do() -> None:
    qwen, words = Qwen2VLImageProcessor(), tokenizer()
    was = dict(vars(words))
    crops = COUNTED["LlavaNextImageProcessor"].make().image_processor
    needs_pixels = f"a {type(words).__name__} does not make any. Pass the model's full processor"
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
        (words, {"method": "downsample", "keep": 0.5}, OptionError, needs_pixels),
        (words, {"method": "dynres", "keep": 0.5}, OptionError, needs_pixels),
    ):
        with pytest.raises(error, match=message):
            patch_processor(processor, **arguments)
    assert vars(words) == was
    # Its `size` says that all images get the same size, but the model's tokens follow the image.
    with pytest.raises(UnsupportedSetupError, match="resizes every image to one size"):
        tokenprune.patch(plain.FAMILIES["mistral3"].build(), "downsample", keep=0.5, processor=SiglipImageProcessor())
