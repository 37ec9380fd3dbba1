# SPDX-License-Identifier: Apache-2.0
"""Test the held-out set of demo_smol: balanced, with photographs outside of the training set, and reproducible by its
script."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import PIL
import pytest

from tokenprune_bench.demo import build_answer
from tokenprune_bench.demo_package import get_default_images
from tokenprune_bench.plan import DEFAULT_IMAGES
from tokenprune_demo.backgrounds import PHOTOS
from tokenprune_demo.heldout import FOLDER, SMOL, get_heldout_folder, load_heldout, load_sample

TRAINING = Path(__file__).parents[3] / "benchmarks/experiments/training"
PILLOW = "13.0.0"  # the version that drew the set: other versions set letters and resize slightly differently


@pytest.fixture
def script(monkeypatch):
    for folder in ("qwen", "smol"):
        monkeypatch.syspath_prepend(TRAINING / folder)
    return importlib.import_module("make_heldout_smol")


def test_the_set_is_balanced_and_every_answer_is_one_of_its_kind(script):
    assert get_heldout_folder("demo_smol") == SMOL
    counts: dict[str, Counter] = defaultdict(Counter)
    for example in load_heldout(folder=SMOL):
        counts[example.kind][example.answer] += 1
        assert all(0 <= a < c <= 336 and 0 <= b < d <= 336 for a, b, c, d in example.boxes)
    assert counts == script.WANTED
    assert all(kind_counts.total() >= 60 for kind_counts in counts.values())
    assert sum(kind_counts.total() for kind_counts in counts.values()) >= 600


def test_no_question_is_asked_twice_of_an_image():
    counts = Counter((example.index, example.question) for example in load_heldout(folder=SMOL))
    assert set(counts.values()) == {1}


def test_a_sample_asks_about_every_kind_and_the_first_images_where_each_has_all():
    sample = load_sample(12, SMOL)
    counts = Counter(example.kind for example in sample)
    assert len({example.index for example in sample}) == 12 and min(counts.values()) >= 2 and len(counts) == 10
    assert sample == [
        example for example in load_heldout(folder=SMOL) if example.index in {other.index for other in sample}
    ]
    assert load_sample(0, SMOL) == load_sample(10**6, SMOL) == load_heldout(folder=SMOL)
    assert load_sample(5, FOLDER) == load_heldout(limit=5)


def test_a_slow_model_is_asked_about_fewer_images_by_default():
    assert (
        get_default_images("demo_smol")
        < get_default_images("demo_vlm")
        == get_default_images(None)
        == get_default_images("mine")
        == DEFAULT_IMAGES
    )


def test_the_images_are_small_enough_to_ship():
    images = sorted((SMOL / "images").iterdir())
    assert [file.stem for file in images] == [f"{index:03d}" for index in range(len(images))]
    assert len(images) == 1 + max(example.index for example in load_heldout(folder=SMOL))
    assert sum(file.stat().st_size for file in SMOL.rglob("*.*")) < 2**23
    assert {example.image.size for example in load_heldout(folder=SMOL, limit=20)} == {(336, 336)}


def test_no_held_out_photograph_is_trained_on(script):
    tables = importlib.import_module("smol_scenes").SMOL_PHOTOS
    trained = {Path(name).name for name in (*PHOTOS["train"], *tables["train"])}
    held = {Path(name).name for name in (*PHOTOS["heldout"], *tables["heldout"])}
    assert len(tables["train"]) >= 12 and len(tables["heldout"]) >= 6
    assert not trained & held
    readme = (SMOL / "README.md").read_text(encoding="utf-8")
    assert [name for name in held if f"`{name}`" not in readme] == []


def test_the_first_images_are_drawn_again(script):
    scenes = importlib.import_module("smol_scenes")
    native = importlib.import_module("native_scenes")
    if not native.EMOJI.exists():
        pytest.skip(
            f"no drawings of things: {native.EMOJI} (experiments/training/qwen/emoji.py makes it; TOKENPRUNE_EMOJI)"
        )
    if len(scenes.photographs("heldout")) != len(scenes.SMOL_PHOTOS["heldout"]):
        pytest.skip("not all held-out photographs are installed (TOKENPRUNE_PHOTOS)")
    if PIL.__version__ != PILLOW:
        pytest.skip(f"the set was drawn with Pillow {PILLOW}, this is {PIL.__version__}")
    examples = load_heldout(folder=SMOL, limit=3)
    for index, (scene, chosen) in enumerate(itertools.islice(script.scenes(), 3)):
        expected = [
            (example.kind, example.question, example.answer, example.boxes)
            for example in examples
            if example.index == index
        ]
        assert [(question.kind, question.text, question.answer, question.boxes) for question in chosen] == expected
        assert script.encoded(scene) == (SMOL / f"images/{index:03d}.jpg").read_bytes()


def test_the_demo_takes_a_sentence_that_ends_with_the_answer() -> None:
    example = SimpleNamespace(question="which digit is written?", answer="9")
    pruned = SimpleNamespace(answer="the digit is 8.")
    shown = SimpleNamespace(before="the digit is 9", seen=[pruned], pair=lambda index: None)
    assert build_answer(example, shown).is_right == (True, False)
