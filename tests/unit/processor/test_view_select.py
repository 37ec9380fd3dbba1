# SPDX-License-Identifier: Apache-2.0
"""view_select: views that a question names, and the prompt without the other views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tokenprune
from each import each
from processors import llava, photo, tokenizer
from tokenprune import OptionError
from tokenprune.integrations.hf.pixels.prompts import PromptReader
from tokenprune.methods.pixels.view_select import build_similarity_scorer

CAMERAS = ["CAM_FRONT", "CAM_FRONT_LEFT", "CAM_FRONT_RIGHT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT"]
VIEWS = [photo(40 + 8 * index, 64, index) for index in range(6)]
ALL = list(range(6))


def choose(question: str, count: int = 6, max_count: int = 6, **options: Any) -> list[int]:
    return tokenprune.method("view_select", **{"views": CAMERAS, **options}).choose(question, count, max_count)


@each(
    "question, expected",
    [
        ("what is on the front left?", [1]),
        ("Front-Left: a car?", [1]),
        ("what does CAM_FRONT_LEFT show", [1]),
        ("is the left-front car moving", [1]),
        ("what is ahead", [0]),
        ("anything behind us", [3]),
        ("the rear right camera", [5]),
        ("a car in front and a bike in the back left", [0, 4]),
        ("front left and right", [1, 2, 5]),  # ambiguous, so more views are kept
        ("image 2 and image #5", [1, 4]),
        ("compare images 1, 3 and 6", [0, 2, 5]),
        ("do the first and the third image agree?", [0, 2]),
        ("the last view", [5]),
        ("what color is the car", ALL),
        ("the left one", ALL),  # not the name of a view
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
def test_views_named_by_a_question(question: str, expected: list[int]) -> None:
    assert choose(question) == expected


def choose_naive(question: str, views: list[str]) -> list[int]:
    """Match names without synonyms, longest first. Each part of the text is used once."""
    text, hits = f" {question} ", set()
    for name in sorted(views, key=len, reverse=True):
        while (offset := text.find(f" {name} ")) >= 0:
            text = text[:offset] + " # " + text[offset + len(name) + 2 :]
            hits.add(views.index(name))
    return sorted(hits) or list(range(len(views)))


def test_equals_a_naive_loop() -> None:
    views = ["roof", "roof box", "tail gate", "gate", "box lid"]
    rng = np.random.default_rng(0)
    for _ in range(300):
        question = " ".join(rng.choice(["roof", "box", "tail", "gate", "lid", "the", "a"], size=4))
        # The method matches longest spans from left to right. In this text that differs from the naive loop.
        if "roof box lid" in question:
            continue
        assert choose(question, 5, 5, views=views) == choose_naive(question, views), question


def test_views_without_names() -> None:
    assert choose("front left", views=()) == ALL
    assert choose("the second image", views=()) == [1]
    assert choose("the 3rd camera", 3, 3, views=()) == [2]
    # Names can contain numbers.
    assert choose("camera 2 sees 1 car", 2, 2, views=["camera 1", "camera 2"]) == [1]


def test_always_keep_and_one_image() -> None:
    assert choose("back left", always_keep=["CAM_FRONT"]) == [0, 4]
    assert choose("car?", always_keep=["CAM_FRONT"]) == ALL
    assert choose("back left", 1, 1) == [0]
    assert choose("back left", 0, 1) == []
    with pytest.raises(OptionError, match="4 images, but views has 6 names"):
        choose("back left", 4)


def test_keep_is_an_upper_bound() -> None:
    assert choose("car?", max_count=3) == [0, 1, 2]
    assert choose("back, back left, back right, front", max_count=3) == [0, 3, 4]
    assert choose("back left", max_count=3) == [4]
    assert choose("back left", max_count=1, always_keep=["CAM_FRONT", "CAM_BACK"]) == [0, 3]
    assert choose("car?", max_count=2, always_keep=["CAM_BACK"]) == [0, 3]


def test_custom_scorers() -> None:
    calls = []

    def scorer(question: str, views: list[str]) -> Any:
        calls.append((question, views))
        return torch.tensor([-1.0, 0.5, -1.0, 0.1, 0.0, 0.9])

    assert choose("the lorry", scorer=scorer) == [1, 3, 5]
    assert calls == [("the lorry", CAMERAS)]
    assert choose("the lorry", scorer=scorer, max_count=2) == [1, 5]
    assert choose("the lorry in front", scorer=scorer) == [0], "a name outweighs it"
    assert choose("the lorry in front", scorer=scorer, weight=1.2) == [5]
    assert choose("the lorry", scorer=lambda question, views: [-3, -2, -1, -4, -5, -6]) == [2], "one stays"
    assert choose("the lorry", scorer=lambda question, views: [-1] * 6, always_keep=["CAM_BACK"]) == [3]
    for scores in ([1, 2], [1, 2, 3, 4, 5, float("nan")]):
        with pytest.raises(OptionError, match="scorer returned"):
            choose("the lorry", scorer=lambda question, views, scores=scores: scores)


def test_similarity_scores() -> None:
    table = {"lorry": [1.0, 0.0], "a": [2.0, 0.0], "b": [0.0, 1.0], "c": [1.0, 1.0]}
    scores = build_similarity_scorer(lambda texts: torch.tensor([table[text] for text in texts]))(
        "lorry", ["a", "b", "c"]
    )
    cosines = [1.0, 0.0, 0.5**0.5]
    mean = sum(cosines) / 3
    assert scores == pytest.approx([2 / (1 + np.exp(-8 * (cosine - mean))) - 1 for cosine in cosines], abs=1e-6)


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


@each(
    "text, kept, expected",
    [
        ("sys <image> <image> <image> q", [1], "sys <image> q"),
        ("sys <image> <image> <image> q", [0, 2], "sys <image> <image> q"),
        ("<image>\n<image>\n<image>\nq", [0], "<image>\nq"),
        ("<image>\n<image>\n<image>\nq", [1, 2], "<image>\n<image>\nq"),
        ("<image><image>\nq", [1], "<image>\nq"),
        ("<image><image>\nq", [0], "<image>\nq"),
        ("a: <image>\nb: <image>\nc: <image>\nq", [1], "a: \nb: <image>\nc: \nq"),  # other words are kept
        ("a: <image>\nb: <image>\nc: <image>\nq", [0, 2], "a: <image>\nb: \nc: <image>\nq"),
        ("<|vision_start|><image><|vision_end|><|vision_start|><image><|vision_end|>q", [1],
         "<|vision_start|><image><|vision_end|>q"),
        ("<|vision_start|><image>q", [0], "<|vision_start|><image>q"),
        ("no image", [], "no image"),
    ],
)  # fmt: skip
def test_write_removes_dropped_images(text: str, kept: list[int], expected: str) -> None:
    reader = PromptReader(llava(), "a test")
    prompt = reader.prompt(text)
    assert prompt.write(kept) == expected
    assert prompt.write(range(len(prompt.marks))) == text


def test_the_question_follows_the_last_image() -> None:
    reader = PromptReader(llava(), "a test")
    text = "front: <image> back: <image> what <|im_end|> now?<s> " + tokenizer().eos_token
    assert reader.question(reader.prompt(text)) in ("what now?", "what now?<s>")
