# SPDX-License-Identifier: Apache-2.0
"""view_select with processors of several families, and in models."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

import tokenprune
from each import each
from processors import COUNTED, LIMITS, build_for, demo_model, llava, photo, special_tokenizer, state, tokenizer
from tests.unit.processor.test_view_select import CAMERAS, VIEWS
from tokenprune import (
    AlreadyPatchedError,
    Budget,
    BudgetError,
    NotPatchedError,
    OptionError,
    patch_processor,
    unpatch_processor,
)
from tokenprune.errors import PlaceholderMismatchError
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.suite import Bench, BenchPlan
from zoo import FAMILIES, FIRST_TEXT_ID, START


def build_qwen() -> Any:
    frame = dict(start="<|vision_start|>", end="<|vision_end|>")
    special = special_tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>", **frame)
    return Qwen2VLProcessor(Qwen2VLImageProcessor(**LIMITS), special, Qwen2VLVideoProcessor())


def build_gemma() -> Any:
    """Gemma 3 marks an image by its begin token."""
    special = special_tokenizer(boi_token="<b>", eoi_token="<e>", image_token="<soft>")
    return Gemma3Processor(Gemma3ImageProcessor(size={"height": 32, "width": 32}), special, image_seq_length=4)


def build_onevision() -> Any:
    processor = COUNTED["LlavaOnevisionImageProcessor"].make()
    processor.video_token_id = None  # the shipped tokenizer lacks a video token and maps unknown words to its id
    return processor


PROCESSORS = {
    "llava": llava,
    "qwen2_vl": build_qwen,
    "gemma3": build_gemma,
    "llava_next": COUNTED["LlavaNextImageProcessor"].make,
    "llava_onevision": build_onevision,
    "lfm2_vl": COUNTED["Lfm2VlImageProcessor"].make,
}


def are_equal(a: Any, b: Any) -> bool:
    assert set(a) == set(b)
    return all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)


@each("name", PROCESSORS)
def test_a_call_equals_a_call_with_the_kept_views(name: str) -> None:
    processor = PROCESSORS[name]()
    question, mark = "what is on the front left and behind?", processor.image_token
    if name == "qwen2_vl":
        mark = f"<|vision_start|>{mark}<|vision_end|>"

    def call(views: list[Any], batch: bool = False) -> Any:
        text = f"see {mark * len(views)} {question}"
        images: Any = [views] if name in ("gemma3", "lfm2_vl") or batch else views
        return processor(images=images, text=[text] if batch else text, return_tensors="pt")

    before, unpatched = state(processor), call(VIEWS)
    expected_calls = [call([VIEWS[1], VIEWS[3]], batch) for batch in (False, True)]
    assert patch_processor(processor, "view_select", views=CAMERAS) is processor
    assert state(processor)[1:] == before[1:] and processor.image_processor.to_json_string() == before[2]
    for batch, expected in zip((False, True), expected_calls, strict=True):
        assert are_equal(call(VIEWS, batch), expected)
        assert expected["input_ids"].shape[1] < unpatched["input_ids"].shape[1]
    question = "what color is it?"
    assert call(VIEWS)["pixel_values"].shape == unpatched["pixel_values"].shape
    unpatch_processor(processor)
    assert state(processor) == before


def test_batches_of_prompts() -> None:
    processor = patch_processor(llava(), "view_select", views=["front", "front left"])
    plain = llava()
    texts = ["<image><image> is the front left red?", "what?", "<image> front?", "<image><image> is it red?"]
    rows = [VIEWS[:2], [], VIEWS[2:3], VIEWS[3:5]]
    expected = plain(
        images=[VIEWS[1], *VIEWS[2:5]],
        text=["<image> is the front left red?", *texts[1:]],
        padding=True,
        return_tensors="pt",
    )
    for images in (rows, [image for row in rows for image in row]):
        assert are_equal(processor(images=images, text=texts, padding=True, return_tensors="pt"), expected)
    stack = torch.stack([torch.as_tensor(np.array(VIEWS[0])).permute(2, 0, 1)] * 2)
    for images in (VIEWS[:2], [VIEWS[:2]], tuple(VIEWS[:2]), stack):
        output = processor(images, "<image><image> back? no, the front", return_tensors="pt")
        assert len(output["pixel_values"]) == 1
    assert processor(text="what?")["input_ids"] == plain(text="what?")["input_ids"]
    assert are_equal(processor(images=VIEWS[:2], return_tensors="pt"), plain(images=VIEWS[:2], return_tensors="pt"))
    for images in (VIEWS[:3], VIEWS[:1], [VIEWS[:1]]):
        with pytest.raises(PlaceholderMismatchError, match=r"\[2\] placeholders '<image>'"):
            processor(images=images, text=["<image><image> front?"])
    with pytest.raises(OptionError, match="views has 2 names"):
        processor(images=VIEWS[:3], text=["<image><image><image> front?"])


def test_a_patched_processor_copies_and_saves(tmp_path: Any) -> None:
    processor = llava()
    processor.save_pretrained(tmp_path / "before")
    patch_processor(processor, "view_select", views=["front", "back"])
    processor.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes()
    output = copy.deepcopy(processor)(images=VIEWS[:2], text="<image><image> back?", return_tensors="pt")
    assert len(output["pixel_values"]) == 1


@each("keep, count", [(0.5, 3), (0.49, 2), (2 / 3, 4), (0.01, 1), (2, 2), (9, 6), (1.0, 6)])
def test_keep_is_a_share_or_a_number_of_images(keep: float, count: int) -> None:
    processor = patch_processor(llava(), "view_select", keep=keep)
    assert len(processor(images=VIEWS, text="<image>" * 6 + "what?", return_tensors="pt")["pixel_values"]) == count


@torch.no_grad()
def test_generate_equals_a_prompt_with_the_kept_views() -> None:
    """A shipped model with a chat template answers as if the prompt contained only the kept views."""
    model = demo_model()
    processor = llava()
    processor.tokenizer.padding_side = "left"

    def generate(views: list[list[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        questions = ["what color is the back left circle?", "is there a star?"]
        contents = [
            [*({"type": "image", "image": view} for view in row), {"type": "text", "text": question}]
            for row, question in zip(views, questions, strict=True)
        ]
        chats = [[{"role": "user", "content": content}] for content in contents]
        inputs = processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            processor_kwargs={"padding": True, "return_tensors": "pt"},
        )
        output = model.generate(
            **inputs, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return output.sequences, torch.stack(output.logits)

    expected = generate([[VIEWS[0], VIEWS[4]], VIEWS])
    options = dict(views=CAMERAS, always_keep=["CAM_FRONT"], processor=processor)
    with tokenprune.patched(model, "view_select", **options):
        actual = generate([VIEWS, VIEWS])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not torch.equal(generate([VIEWS, VIEWS])[1][0, 0], expected[1][0, 0])
    with tokenprune.patched(model, ["view_select", "divprune"], keep=[1.0, 0.25], processor=processor):
        generate([VIEWS, VIEWS])
        assert tokenprune.stats(model).visual_tokens_out == 12 * 64
    with tokenprune.patched(model, "view_select", **options):
        generate([VIEWS, VIEWS])
        stats = tokenprune.stats(model)
    assert (stats.visual_tokens_in, stats.visual_tokens_full) == (8 * 256, 12 * 256)


@torch.no_grad()
def test_positions_are_contiguous_in_qwen() -> None:
    """M-RoPE positions with dropped views equal the positions of a prompt without these views."""
    processor = build_qwen()
    model = build_for(FAMILIES["qwen2_vl"], processor)
    grids = [[8, 8], [4, 12], [12, 8]]
    views = [photo(4 * height, 4 * width, height) for height, width in grids]
    mark = f"<|vision_start|>{processor.image_token}<|vision_end|>"

    def compute_logits(views: list[Any]) -> torch.Tensor:
        inputs = processor(images=views, text=[f"{mark * len(views)} what is in image 3?"], return_tensors="pt")
        image = inputs["input_ids"] == processor.image_token_id
        start = inputs["input_ids"] == processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
        inputs["input_ids"] = inputs["input_ids"] % 100 + FIRST_TEXT_ID
        inputs["input_ids"][image], inputs["input_ids"][start] = processor.image_token_id, START
        return model(**inputs).logits

    expected = compute_logits(views[2:])
    with tokenprune.patched(model, "view_select", processor=processor):
        assert torch.equal(compute_logits(views), expected)
    assert compute_logits(views).shape != expected.shape


def test_unsupported_arguments_are_refused() -> None:
    processor = build_qwen()
    model = build_for(FAMILIES["qwen2_vl"], processor)
    before = state(processor)
    for arguments, error in [
        (dict(), OptionError),
        (dict(processor=processor.image_processor), OptionError),
        (dict(processor=tokenizer()), OptionError),
        (dict(processor=processor, keep=0.0), BudgetError),
        (dict(processor=processor, keep=Budget.from_kv_share(0.5)), BudgetError),
        (dict(processor=processor, keep=Budget(keep=0.5, per="prompt")), BudgetError),
        (dict(processor=processor, always_keep=["front"]), OptionError),
    ]:
        with pytest.raises(error):
            tokenprune.patch(model, "view_select", **arguments)
        assert not tokenprune.is_patched(model) and state(processor) == before
    with pytest.raises(OptionError, match="both act at"):
        tokenprune.patch(model, ["view_select", "downsample"], processor=processor)
    with pytest.raises(OptionError, match="full processor"):
        patch_processor(Qwen2VLImageProcessor(), "view_select")


def test_one_patch_on_a_processor() -> None:
    processor = patch_processor(PROCESSORS["llava_next"](), "view_select", keep=2)
    for method in ("view_select", "downsample"):
        with pytest.raises(AlreadyPatchedError, match="view_select"):
            patch_processor(processor, method)
    patch_processor(processor, "downsample", replace=True)
    with pytest.raises(AlreadyPatchedError, match="downsample"):
        patch_processor(processor, "view_select")
    unpatch_processor(processor)
    with pytest.raises(NotPatchedError):
        unpatch_processor(processor)


def test_the_benchmark_leaves_it_out() -> None:
    plan = BenchPlan(("view_select",), keeps=(0.5,), images=1, repeats=0)
    records = {
        record.get("method"): record for record in Bench(load_model(device="cpu"), plan).records() if "method" in record
    }
    assert "these questions have one image each" in records["view_select"]["reason"]
