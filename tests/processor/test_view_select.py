# SPDX-License-Identifier: Apache-2.0
"""view_select: which views a question names, and that the others might as well never have been in the prompt."""

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
from processors import COUNTED, LIMITS, demo_model, llava, photo, special_tokenizer, state, tokenizer
from tokenprune import (
    AlreadyPatchedError,
    Budget,
    BudgetError,
    NotPatchedError,
    OptionError,
    PlaceholderMismatchError,
    patch_processor,
    unpatch_processor,
)
from tokenprune.integrations.hf.processor.prompts import PromptReader
from tokenprune.methods.pixels.view_select import similarity
from tokenprune.profiling.model import load
from tokenprune_bench.suite import Bench, BenchPlan
from zoo import FAMILIES, FIRST_TEXT_ID, IMAGE, START

CAMERAS = ["CAM_FRONT", "CAM_FRONT_LEFT", "CAM_FRONT_RIGHT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT"]
VIEWS = [photo(40 + 8 * number, 64, number) for number in range(6)]
ALL = list(range(6))


def chosen(question: str, count: int = 6, most: int = 6, **options: Any) -> list[int]:
    return tokenprune.method("view_select", **{"views": CAMERAS, **options}).choose(question, count, most)


# -- which views


@pytest.mark.parametrize(
    "question, want",
    [
        ("what is on the front left?", [1]),
        ("Front-Left: a car?", [1]),
        ("what does CAM_FRONT_LEFT show", [1]),
        ("is the left-front car moving", [1]),
        ("what is ahead", [0]),
        ("anything behind us", [3]),
        ("the rear right camera", [5]),
        ("a car in front and a bike in the back left", [0, 4]),
        ("front left and right", [1, 2, 5]),  # more than meant rather than less
        ("image 2 and image #5", [1, 4]),
        ("compare images 1, 3 and 6", [0, 2, 5]),
        ("do the first and the third image agree?", [0, 2]),
        ("the last view", [5]),
        ("what color is the car", ALL),
        ("the left one", ALL),  # no view has this name
        ("image 9", ALL),
        ("image 0", ALL),
        ("the background, the leftmost frontier", ALL),
        ("all cameras in front", ALL),
        ("which camera shows the car of the front view?", ALL),
        ("everything except the back", ALL),
        ("how does the first image differ from the others?", ALL),
        ("", ALL),
    ],
)
def test_what_a_question_names(question: str, want: list[int]) -> None:
    assert chosen(question) == want


def naive(question: str, views: list[str]) -> list[int]:
    """The lexical rule of the specification, for names without synonyms: longest first, each stretch of text once."""
    text, hits = f" {question} ", set()
    for name in sorted(views, key=len, reverse=True):
        while (place := text.find(f" {name} ")) >= 0:
            text = text[:place] + " # " + text[place + len(name) + 2 :]
            hits.add(views.index(name))
    return sorted(hits) or list(range(len(views)))


def test_equals_a_naive_loop() -> None:
    views = ["roof", "roof box", "tail gate", "gate", "box lid"]
    rng = np.random.default_rng(0)
    for _ in range(300):
        question = " ".join(rng.choice(["roof", "box", "tail", "gate", "lid", "the", "a"], size=4))
        if "roof box lid" in question:  # from left to right here, by length there: both are longest first
            continue
        assert chosen(question, 5, 5, views=views) == naive(question, views), question


def test_views_without_names() -> None:
    assert chosen("front left", views=()) == ALL
    assert chosen("the second image", views=()) == [1]
    assert chosen("the 3rd camera", 3, 3, views=()) == [2]
    # Numbers of images and names that are numbers.
    assert chosen("camera 2 sees 1 car", 2, 2, views=["camera 1", "camera 2"]) == [1]


def test_always_keep_and_one_image() -> None:
    assert chosen("back left", always_keep=["CAM_FRONT"]) == [0, 4]
    assert chosen("car?", always_keep=["CAM_FRONT"]) == ALL
    assert chosen("back left", 1, 1) == [0]
    assert chosen("back left", 0, 1) == []
    with pytest.raises(OptionError, match="4 images, and views= names 6"):
        chosen("back left", 4)


def test_keep_is_an_upper_bound() -> None:
    assert chosen("car?", most=3) == [0, 1, 2]
    assert chosen("back, back left, back right, front", most=3) == [0, 3, 4]
    assert chosen("back left", most=3) == [4]
    assert chosen("back left", most=1, always_keep=["CAM_FRONT", "CAM_BACK"]) == [0, 3]
    assert chosen("car?", most=2, always_keep=["CAM_BACK"]) == [0, 3]


def test_a_scorer_of_ones_own() -> None:
    seen = []

    def scorer(question: str, views: list[str]) -> Any:
        seen.append((question, views))
        return torch.tensor([-1.0, 0.5, -1.0, 0.1, 0.0, 0.9])

    assert chosen("the lorry", scorer=scorer) == [1, 3, 5]
    assert seen == [("the lorry", CAMERAS)]
    assert chosen("the lorry", scorer=scorer, most=2) == [1, 5]
    assert chosen("the lorry in front", scorer=scorer) == [0], "a name outweighs it"
    assert chosen("the lorry in front", scorer=scorer, weight=1.2) == [5]
    assert chosen("the lorry", scorer=lambda question, views: [-3, -2, -1, -4, -5, -6]) == [2], "one stays"
    assert chosen("the lorry", scorer=lambda question, views: [-1] * 6, always_keep=["CAM_BACK"]) == [3]
    for wrong in ([1, 2], [1, 2, 3, 4, 5, float("nan")]):
        with pytest.raises(OptionError, match="scorer gave"):
            chosen("the lorry", scorer=lambda question, views, wrong=wrong: wrong)


def test_similarity_follows_its_formula() -> None:
    table = {"lorry": [1.0, 0.0], "a": [2.0, 0.0], "b": [0.0, 1.0], "c": [1.0, 1.0]}
    scores = similarity(lambda texts: torch.tensor([table[text] for text in texts]))("lorry", ["a", "b", "c"])
    cosines = [1.0, 0.0, 0.5**0.5]
    mean = sum(cosines) / 3
    assert scores == pytest.approx([2 / (1 + np.exp(-8 * (one - mean))) - 1 for one in cosines], abs=1e-6)


def test_wrong_options() -> None:
    for options, message in [
        (dict(views="front"), "views="),
        (dict(views=["front", ""]), "views="),
        (dict(views=["front", "CAM_FRONT"]), "same name"),
        (dict(views=["rear left", "left back"]), "same name"),
        (dict(views=["front"], always_keep=["back"]), "always_keep"),
        (dict(always_keep=["front"]), "always_keep"),
        (dict(scorer=3), "scorer"),
        (dict(weight=-1), "weight"),
        (dict(weight=True), "weight"),
    ]:
        with pytest.raises(OptionError, match=message):
            tokenprune.method("view_select", **options)
    info = tokenprune.method_info("view_select")
    assert info.query_aware and not info.prefix_cache_safe


# -- prompts


@pytest.mark.parametrize(
    "text, kept, want",
    [
        ("sys <image> <image> <image> q", [1], "sys <image> q"),
        ("sys <image> <image> <image> q", [0, 2], "sys <image> <image> q"),
        ("<image>\n<image>\n<image>\nq", [0], "<image>\nq"),
        ("<image>\n<image>\n<image>\nq", [1, 2], "<image>\n<image>\nq"),
        ("<image><image>\nq", [1], "<image>\nq"),
        ("<image><image>\nq", [0], "<image>\nq"),
        ("a: <image>\nb: <image>\nc: <image>\nq", [1], "a: \nb: <image>\nc: \nq"),  # words stay
        ("a: <image>\nb: <image>\nc: <image>\nq", [0, 2], "a: <image>\nb: \nc: <image>\nq"),
        ("<|vision_start|><image><|vision_end|><|vision_start|><image><|vision_end|>q", [1],
         "<|vision_start|><image><|vision_end|>q"),
        ("<|vision_start|><image>q", [0], "<|vision_start|><image>q"),
        ("no image", [], "no image"),
    ],
)  # fmt: skip
def test_what_is_left_of_a_text(text: str, kept: list[int], want: str) -> None:
    reader = PromptReader(llava(), "a test")
    prompt = reader.prompt(text)
    assert prompt.keeping(kept) == want
    assert prompt.keeping(range(len(prompt.marks))) == text


def test_the_question_is_what_stands_behind_the_last_image() -> None:
    reader = PromptReader(llava(), "a test")
    text = "front: <image> back: <image> what <|im_end|> now?<s> " + tokenizer().eos_token
    assert reader.question(reader.prompt(text)) in ("what now?", "what now?<s>")


# -- processors of several families


def qwen() -> Any:
    frame = dict(start="<|vision_start|>", end="<|vision_end|>")
    special = special_tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>", **frame)
    return Qwen2VLProcessor(Qwen2VLImageProcessor(**LIMITS), special, Qwen2VLVideoProcessor())


def gemma() -> Any:
    """Gemma 3 marks an image by the token that begins it."""
    special = special_tokenizer(boi_token="<b>", eoi_token="<e>", image_token="<soft>")
    return Gemma3Processor(Gemma3ImageProcessor(size={"height": 32, "width": 32}), special, image_seq_length=4)


def onevision() -> Any:
    processor = COUNTED["LlavaOnevisionImageProcessor"].make()
    processor.video_token_id = None  # the shipped tokenizer has none, and takes every unknown word for it
    return processor


PROCESSORS = {
    "llava": llava,
    "qwen2_vl": qwen,
    "gemma3": gemma,
    "llava_next": COUNTED["LlavaNextImageProcessor"].make,
    "llava_onevision": onevision,
    "lfm2_vl": COUNTED["Lfm2VlImageProcessor"].make,
}


def same(a: Any, b: Any) -> bool:
    assert set(a) == set(b)
    return all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_call_is_that_with_the_kept_views(name: str) -> None:
    processor = PROCESSORS[name]()
    question, mark = "what is on the front left and behind?", processor.image_token
    if name == "qwen2_vl":
        mark = f"<|vision_start|>{mark}<|vision_end|>"

    def call(views: list[Any], batch: bool = False) -> Any:
        text = f"see {mark * len(views)} {question}"
        images: Any = [views] if name in ("gemma3", "lfm2_vl") or batch else views
        return processor(images=images, text=[text] if batch else text, return_tensors="pt")

    before, full = state(processor), call(VIEWS)
    wants = [call([VIEWS[1], VIEWS[3]], batch) for batch in (False, True)]
    assert patch_processor(processor, "view_select", views=CAMERAS) is processor
    assert state(processor)[1:] == before[1:] and processor.image_processor.to_json_string() == before[2]
    for batch, want in zip((False, True), wants, strict=True):
        assert same(call(VIEWS, batch), want)
        assert want["input_ids"].shape[1] < full["input_ids"].shape[1]
    question = "what color is it?"
    assert call(VIEWS)["pixel_values"].shape == full["pixel_values"].shape
    unpatch_processor(processor)
    assert state(processor) == before


def test_batches_of_prompts() -> None:
    """Rows with different views kept, one image, and none; flat and nested lists; one text or a list of one."""
    processor = patch_processor(llava(), "view_select", views=["front", "front left"])
    plain = llava()
    texts = ["<image><image> is the front left red?", "what?", "<image> front?", "<image><image> is it red?"]
    rows = [VIEWS[:2], [], VIEWS[2:3], VIEWS[3:5]]
    want = plain(
        images=[VIEWS[1], *VIEWS[2:5]],
        text=["<image> is the front left red?", *texts[1:]],
        padding=True,
        return_tensors="pt",
    )
    for images in (rows, [one for row in rows for one in row]):
        assert same(processor(images=images, text=texts, padding=True, return_tensors="pt"), want)
    stack = torch.stack([torch.as_tensor(np.array(VIEWS[0])).permute(2, 0, 1)] * 2)
    for images in (VIEWS[:2], [VIEWS[:2]], tuple(VIEWS[:2]), stack):
        made = processor(images, "<image><image> back? no, the front", return_tensors="pt")
        assert len(made["pixel_values"]) == 1
    assert processor(text="what?")["input_ids"] == plain(text="what?")["input_ids"]
    assert same(processor(images=VIEWS[:2], return_tensors="pt"), plain(images=VIEWS[:2], return_tensors="pt"))
    for images in (VIEWS[:3], VIEWS[:1], [VIEWS[:1]]):
        with pytest.raises(PlaceholderMismatchError, match=r"\[2\] placeholders '<image>'"):
            processor(images=images, text=["<image><image> front?"])
    with pytest.raises(OptionError, match="names 2"):
        processor(images=VIEWS[:3], text=["<image><image><image> front?"])


def test_a_patched_processor_copies_and_saves(tmp_path: Any) -> None:
    processor = llava()
    processor.save_pretrained(tmp_path / "before")
    patch_processor(processor, "view_select", views=["front", "back"])
    processor.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes()
    made = copy.deepcopy(processor)(images=VIEWS[:2], text="<image><image> back?", return_tensors="pt")
    assert len(made["pixel_values"]) == 1


# -- models


@pytest.mark.parametrize("keep, count", [(0.5, 3), (0.49, 2), (2 / 3, 4), (0.01, 1), (2, 2), (9, 6), (1.0, 6)])
def test_keep_is_a_share_or_a_number_of_images(keep: float, count: int) -> None:
    processor = patch_processor(llava(), "view_select", keep=keep)
    assert len(processor(images=VIEWS, text="<image>" * 6 + "what?", return_tensors="pt")["pixel_values"]) == count


@torch.no_grad()
def test_generate_equals_a_prompt_with_the_kept_views() -> None:
    """Through the chat template, on the shipped model: the same words as if only those views had been taken."""
    model = demo_model()
    processor = llava()
    processor.tokenizer.padding_side = "left"

    def answers(views: list[list[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
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
        made = model.generate(
            **inputs, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return made.sequences, torch.stack(made.logits)

    want = answers([[VIEWS[0], VIEWS[4]], VIEWS])
    options = dict(views=CAMERAS, always_keep=["CAM_FRONT"], processor=processor)
    with tokenprune.patched(model, "view_select", **options):
        got = answers([VIEWS, VIEWS])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not torch.equal(answers([VIEWS, VIEWS])[1][0, 0], want[1][0, 0])
    with tokenprune.patched(model, ["view_select", "divprune"], keep=[1.0, 0.25], processor=processor):
        answers([VIEWS, VIEWS])
        assert tokenprune.stats(model).visual_tokens_out == 12 * 64
    with tokenprune.patched(model, "view_select", **options):
        answers([VIEWS, VIEWS])
        stats = tokenprune.stats(model)
    assert (stats.visual_tokens_in, stats.visual_tokens_full) == (8 * 256, 12 * 256)


@torch.no_grad()
def test_positions_are_contiguous_in_qwen(build: Any) -> None:
    """M-RoPE ids of a prompt with fewer views are those of a prompt that never had the others."""
    family = FAMILIES["qwen2_vl"]
    model, processor = build(family), qwen()
    grids = [[8, 8], [4, 12], [12, 8]]
    views = [photo(4 * height, 4 * width, height) for height, width in grids]
    mark = f"<|vision_start|>{processor.image_token}<|vision_end|>"

    def logits(views: list[Any]) -> torch.Tensor:
        made = processor(images=views, text=[f"{mark * len(views)} what is in image 3?"], return_tensors="pt")
        image = made["input_ids"] == processor.image_token_id
        start = made["input_ids"] == processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
        made["input_ids"] = made["input_ids"] % 100 + FIRST_TEXT_ID
        made["input_ids"][image], made["input_ids"][start] = IMAGE, START
        return model(**made).logits

    want = logits(views[2:])
    with tokenprune.patched(model, "view_select", processor=processor):
        assert torch.equal(logits(views), want)
    assert logits(views).shape != want.shape


# -- errors


def test_what_is_refused(build: Any) -> None:
    model, processor = build(FAMILIES["qwen2_vl"]), llava()
    before = state(processor)
    for arguments, error in [
        (dict(), OptionError),
        (dict(processor=processor.image_processor), OptionError),
        (dict(processor=tokenizer()), OptionError),
        (dict(processor=processor, keep=0.0), BudgetError),
        (dict(processor=processor, keep=Budget(kv_share=0.5)), BudgetError),
        (dict(processor=processor, keep=Budget(keep=0.5, per="prompt")), BudgetError),
        (dict(processor=processor, always_keep=["front"]), OptionError),
    ]:
        with pytest.raises(error):
            tokenprune.patch(model, "view_select", **arguments)
        assert not tokenprune.is_patched(model) and state(processor) == before
    with pytest.raises(OptionError, match="same place"):
        tokenprune.patch(model, ["view_select", "downsample"], processor=processor)
    with pytest.raises(OptionError, match="whole of it"):
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
    records = {one.get("method"): one for one in Bench(load(device="cpu"), plan).records() if "method" in one}
    assert "one each" in records["view_select"]["reason"]
