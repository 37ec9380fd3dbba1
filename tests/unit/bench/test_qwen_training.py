# SPDX-License-Identifier: Apache-2.0
"""Test the training of demo_qwen and demo_video: several questions in one sequence, and the targets of visual
tokens."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.heldout import NATIVE, Example, load_heldout

TRAINING = Path(__file__).parents[3] / "benchmarks/experiments/training" / "qwen"


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_qwen", device="cpu")


@pytest.fixture(scope="module")
def small() -> list[Example]:
    """Return the questions about the three smallest held-out images."""
    examples = load_heldout(folder=NATIVE)
    area = {example.index: example.image.width * example.image.height for example in examples}
    chosen = sorted(area, key=area.__getitem__)[:3]
    return [example for example in examples if example.index in chosen]


@pytest.fixture
def packed(monkeypatch) -> object:
    """Return the module for training with several questions in one sequence."""
    monkeypatch.syspath_prepend(TRAINING)
    return importlib.import_module("evaluate_qwen")


def test_packed_questions_are_answered_like_single_questions(subject, small, packed):
    image_index = small[0].index
    examples = [example for example in small if example.index == image_index]
    answers, tokens = packed.answers(subject.model, subject.processor, examples[0].image, examples)
    assert tokens == subject.visual_tokens(subject.inputs([examples[0].image], [examples[0].question]))
    for example, answer in zip(examples, answers, strict=True):
        separate = subject.generate(subject.inputs([example.image], [example.question]))[0]
        assert separate.split()[0] == answer.split()[0] and (len(separate.split()) == 1) == (" " not in answer)


def test_packed_logits_equal_those_of_single_prompts(subject, packed, monkeypatch):
    import fast
    import train_questions as training
    from packing import Asked, Shown

    monkeypatch.setattr(fast, "HALF", False)
    rng = np.random.default_rng(7)
    pixels = rng.integers(0, 256, (1, 2, 1, 112, 128, 3), dtype=np.uint8)
    video = rng.integers(0, 256, (1, 4, 2, 112, 128, 3), dtype=np.uint8)
    rows = [[Asked("colour", "what color is the star?", "red"), Asked("word", "what does the sign say?", "cat")]]
    views = [{"type": "text", "text": "front left:"}, {"type": "image", "image": Image.fromarray(pixels[0, 0, 0])}]
    views += [{"type": "text", "text": "back:"}, {"type": "image", "image": Image.fromarray(pixels[0, 1, 0])}]
    frames = {"type": "video", "video": video.reshape(8, 112, 128, 3)}
    cases = (
        (pixels, (Shown((1, 7, 8), label="front left:"), Shown((1, 7, 8), label="back:")), views, {}),
        (video, (Shown((4, 7, 8), video=True, interval=2),), [frames], {"do_sample_frames": False}),
    )
    for visual_pixels, layout, content, settings in cases:
        prepared = training.prepared(layout, rows)
        with torch.no_grad():
            tokens = training.see(subject.model, visual_pixels, False)
            packed_logits = training.answer(subject.model, tokens, prepared)[
                prepared["kind"][prepared["label"] != -100] >= 0
            ]
        for question, logits in zip(rows[0], packed_logits, strict=True):
            inputs = subject.processor.apply_chat_template(
                [[{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]], tokenize=True,
                add_generation_prompt=True, return_dict=True, processor_kwargs={"return_tensors": "pt", **settings},
            )  # fmt: skip
            with torch.no_grad():
                separate = subject.model(**inputs).logits[0, -1]
            torch.testing.assert_close(logits, separate, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_token_targets_name_the_moves_times_and_words_of_their_pixels(packed, seed):
    """Compare with a count of pixels."""
    from moments import SAID, said_by
    from tokenprune_demo.drawn_videos import ANSWERS, draw_video

    kinds, rows, columns = ("direction", "when", "text", "order"), 8, 9
    video = draw_video(np.random.default_rng(seed), (columns * 16, rows * 16), kinds=kinds)
    expected = {}
    for question in video.questions:
        begins = [min(frame for frame, _ in look) for look in question.looks]
        for look, begin in zip(question.looks, begins, strict=True):
            labels = {question.kind: question.answer}
            # The first or second of two successive things, and their time if it is unambiguous.
            if question.kind == "order":
                labels = {"order": "first" if begin == min(begins) else "second"}
                if begin in (1, 3, 5, 6):
                    labels["when"] = {1: "start", 3: "middle"}.get(begin, "end")
            for frame, (left, top, right, bottom) in look:
                for row, column in np.ndindex(rows, columns):
                    num_pixels = sum(
                        left <= x < right and top <= y < bottom
                        for y in range(16 * row, 16 * row + 16)
                        for x in range(16 * column, 16 * column + 16)
                    )
                    for kind, answer in labels.items() if num_pixels >= 0.35 * 256 else ():
                        cell = (frame // 2) * rows * columns + row * columns + column
                        expected[SAID.index(kind), cell] = ANSWERS[kind].index(answer)
    targets = said_by(video, rows, columns)
    assert {question.kind for question in video.questions} == set(kinds)
    assert {
        (kind, cell): int(targets[kind, cell]) for kind, cell in zip(*np.nonzero(targets >= 0), strict=True)
    } == expected


def test_a_tower_that_separates_frames_embeds_images_as_before(subject, packed):
    import fast

    image = np.random.default_rng(3).integers(0, 256, (1, 112, 128, 3), dtype=np.uint8)
    patches = fast.to_patches(torch.from_numpy(np.stack([image, image], 1)))
    weight = subject.model.model.visual.patch_embed.proj.weight.detach()
    before = torch.nn.functional.linear(patches, weight.flatten(1))
    part = torch.randn(weight[:, :, 0].shape, generator=torch.Generator().manual_seed(0))
    separate = torch.stack([weight[:, :, 0] + part, weight[:, :, 1] - part], 2)
    torch.testing.assert_close(torch.nn.functional.linear(patches, separate.flatten(1)), before, atol=2e-3, rtol=0)
