# SPDX-License-Identifier: Apache-2.0
"""view_select: which views a question names, and that the others might as well never have been in the prompt."""

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
VIEWS = [photo(40 + 8 * number, 64, number) for number in range(6)]
ALL = list(range(6))


def chosen(question: str, count: int = 6, most: int = 6, **options: Any) -> list[int]:
    return tokenprune.method("view_select", **{"views": CAMERAS, **options}).choose(question, count, most)


@each(
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
    with pytest.raises(OptionError, match="4 images, but views has 6 names"):
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
        with pytest.raises(OptionError, match="scorer returned"):
            chosen("the lorry", scorer=lambda question, views, wrong=wrong: wrong)


def test_similarity_follows_its_formula() -> None:
    table = {"lorry": [1.0, 0.0], "a": [2.0, 0.0], "b": [0.0, 1.0], "c": [1.0, 1.0]}
    scores = build_similarity_scorer(lambda texts: torch.tensor([table[text] for text in texts]))(
        "lorry", ["a", "b", "c"]
    )
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


@each(
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
    assert prompt.write(kept) == want
    assert prompt.write(range(len(prompt.marks))) == text


def test_the_question_is_what_stands_behind_the_last_image() -> None:
    reader = PromptReader(llava(), "a test")
    text = "front: <image> back: <image> what <|im_end|> now?<s> " + tokenizer().eos_token
    assert reader.question(reader.prompt(text)) in ("what now?", "what now?<s>")
