# SPDX-License-Identifier: Apache-2.0
"""The held-out set of the third demo model: balanced, of photographs never trained on, drawn again by its script."""

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
PILLOW = "13.0.0"  # that drew the set: other versions set letters and resize a little differently


@pytest.fixture
def script(monkeypatch):
    for folder in ("qwen", "smol"):
        monkeypatch.syspath_prepend(TRAINING / folder)
    return importlib.import_module("make_heldout_smol")


def test_the_set_is_balanced_and_every_answer_is_one_of_its_kind(script):
    assert get_heldout_folder("demo_smol") == SMOL
    asked: dict[str, Counter] = defaultdict(Counter)
    for example in load_heldout(folder=SMOL):
        asked[example.kind][example.answer] += 1
        assert all(0 <= a < c <= 336 and 0 <= b < d <= 336 for a, b, c, d in example.boxes)
    assert asked == script.WANTED
    assert all(counts.total() >= 60 for counts in asked.values())
    assert sum(counts.total() for counts in asked.values()) >= 600


def test_no_question_is_asked_twice_of_an_image():
    asked = Counter((example.index, example.question) for example in load_heldout(folder=SMOL))
    assert set(asked.values()) == {1}


def test_a_sample_asks_about_every_kind_and_the_first_images_where_each_has_all():
    sample = load_sample(12, SMOL)
    counts = Counter(one.kind for one in sample)
    assert len({one.index for one in sample}) == 12 and min(counts.values()) >= 2 and len(counts) == 10
    assert sample == [one for one in load_heldout(folder=SMOL) if one.index in {other.index for other in sample}]
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
    assert [file.stem for file in images] == [f"{number:03d}" for number in range(len(images))]
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
    for number, (scene, chosen) in enumerate(itertools.islice(script.scenes(), 3)):
        wanted = [(one.kind, one.question, one.answer, one.boxes) for one in examples if one.index == number]
        assert [(one.kind, one.text, one.answer, one.boxes) for one in chosen] == wanted
        assert script.encoded(scene) == (SMOL / f"images/{number:03d}.jpg").read_bytes()


def test_the_demo_takes_a_sentence_that_ends_with_the_answer() -> None:
    example = SimpleNamespace(question="which digit is written?", answer="9")
    pruned = SimpleNamespace(answer="the digit is 8.")
    shown = SimpleNamespace(before="the digit is 9", seen=[pruned], pair=lambda index: None)
    assert build_answer(example, shown).is_right == (True, False)
