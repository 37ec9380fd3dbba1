# SPDX-License-Identifier: Apache-2.0
"""Test user questions: valid and invalid rows, and the scores of answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from each import each
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune_bench import metrics
from tokenprune_bench.data import check_questions, load_data, read_columns
from tokenprune_bench.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, name in enumerate(("a.png", "b.png")):
        Image.new("RGB", (8, 6), (40 * index, 90, 20)).save(tmp_path / name)
    (tmp_path / "broken.jpg").write_bytes((tmp_path / "a.png").read_bytes()[:45])
    return tmp_path


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


GOOD = {"image": "a.png", "question": "what?", "answer": "cat"}


# -- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_read_relative_to_their_file(folder: Path) -> None:
    several = {"images": ["a.png", "b.png"], "question": "same?", "answers": ["no", 2, 0.5], "kind": "pair"}
    data = load_data(write(folder, GOOD, "", several))
    row, other = data.questions
    assert (row.where, row.question, row.answers, row.kind, row.is_video) == ("line 1", "what?", ("cat",), "all", False)
    assert [image.size for image in row.images] == [(8, 6)]
    assert (other.where, other.answers, other.kind) == ("line 3", ("no", "2", "0.5"), "pair")
    assert [image.getpixel((0, 0)) for image in other.images] == [(0, 90, 20), (40, 90, 20)]
    assert data.name == "rows.jsonl" and not data.skipped
    assert load_data(folder).questions[0].question == "what?"  # the only such file of the folder
    assert len(load_data(folder / "rows.jsonl", limit=1).questions) == 1


def test_a_video_is_an_animation_or_a_folder_of_frames(folder: Path) -> None:
    frames = [Image.new("RGB", (8, 8), (0, 0, 60 * index)) for index in range(4)]
    frames[0].save(folder / "video.gif", save_all=True, append_images=frames[1:])
    (folder / "video").mkdir()
    for index, frame in enumerate(frames):
        frame.save(folder / f"video/{index}.png")
    rows = [{"video": name, "question": "what?", "answer": "cat"} for name in ("video.gif", "video")]
    video, files = load_data(write(folder, *rows), frames=2).questions
    assert video.is_video and video.images == ()
    assert len(video.video) == 2
    assert [frame.getpixel((0, 0)) for frame in files.video] == [(0, 0, 60), (0, 0, 180)]
    with pytest.raises(DataError, match="line 1: is about a video, but this model does not support videos"):
        check_questions([video], object())


@each(
    ("row", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ({**GOOD, "imgae": 1}, "unknown column 'imgae': did you mean 'image'"),
        ({**GOOD, "xyz": 1}, "unknown column 'xyz': known columns are image, images"),
        ({**GOOD, "video": "a.gif"}, "needs one of image, images and video, has image and video"),
        ({"question": "q", "answer": "a"}, "has none"),
        ({**GOOD, "question": " "}, "has no question"),
        ({**GOOD, "answers": ["x"]}, "either answer or answers"),
        ({"image": "a.png", "question": "q", "answers": []}, "answers must be"),
        ({**GOOD, "answer": True}, "answers must be"),
        ({**GOOD, "kind": 3}, "kind must be a string"),
        ({**GOOD, "image": 5}, "5 is not a file name"),
        ({**GOOD, "image": "none.png"}, "cannot read .*none.png: No such file"),
        ({**GOOD, "image": "broken.jpg"}, "cannot read broken.jpg as an image"),
        ({"images": "a.png", "question": "q", "answer": "a"}, "images must be a list"),
        ({"images": [], "question": "q", "answer": "a"}, "images must be a list"),
        ({"images": "a.png", "question": "q", "answer": "a"}, 'use "image" for one image'),
        ({"image": ["a.png"], "question": "q", "answer": "a"}, 'image is a list; use "images" for several'),
        ({"video": ["a.png"], "question": "q", "answer": "a"}, "video is a list; use .* a folder of frames"),
        ({"video": "rows.jsonl", "question": "q", "answer": "a"}, "pip install av|as a video"),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_skipped_on_request_only(folder: Path, row: Any, message: str) -> None:
    path = write(folder, GOOD, row)
    with pytest.raises(DataError, match=f"has 1 bad row .*: line 2: .*{message}") as error:
        load_data(path)
    assert "\n" not in str(error.value)
    data = load_data(path, skip_bad=True)
    assert len(data.questions) == 1
    (skipped,) = data.skipped
    assert skipped.startswith("line 2: ")


def test_many_bad_rows_are_counted(folder: Path) -> None:
    with pytest.raises(DataError, match=r"12 bad rows .*line 9, line 10 and 2 more: not a JSON object$"):
        load_data(write(folder, *["[]"] * 12))
    with pytest.raises(DataError, match="has no questions: all 12 rows are bad, line 1: not a JSON object"):
        load_data(folder / "rows.jsonl", skip_bad=True)


def test_sources_without_questions_raise(folder: Path) -> None:
    with pytest.raises(DataError, match=r"none does not exist"):
        load_data(folder / "none")
    with pytest.raises(DataError, match="has no file with JSON lines"):
        load_data(folder)
    with pytest.raises(DataError, match=r"has no questions$"):
        load_data(write(folder))
    (folder / "more.jsonl").write_text("")
    with pytest.raises(DataError, match=r"has 2 files with JSON lines"):
        load_data(folder)
    (folder / "rows.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="Cannot read"):
        load_data(folder / "rows.jsonl")


def test_a_deleted_image_raises_a_data_error(folder: Path) -> None:
    (question,) = load_data(write(folder, GOOD)).questions
    (folder / "a.png").unlink()
    with pytest.raises(DataError, match=r"line 1: cannot read a\.png"):
        _ = question.images


def test_columns_are_renamed_and_dropped(folder: Path) -> None:
    path = write(folder, {"image": "a.png", "query": "what?", "label": "cat", "id": 7})
    with pytest.raises(DataError, match="unknown column"):
        load_data(path)
    (question,) = load_data(path, columns=read_columns("query=question, label=answer,id=")).questions
    assert (question.question, question.answers) == ("what?", ("cat",))
    for text in ("query", "query=quest"):
        with pytest.raises(DataError, match="THEIRS=OURS"):
            read_columns(text)


def test_other_questions_have_another_digest(folder: Path) -> None:
    first = load_data(write(folder, GOOD)).about()
    assert load_data(write(folder, GOOD)).about() == first
    changed = load_data(write(folder, {**GOOD, "answer": "dog"})).about()
    assert {name for name in first if first[name] != changed[name]} == {"digest"}


# -- folders of the datasets library ---------------------------------------------------------------------------------


def test_saved_datasets_are_read(folder: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the datasets library")
    images = datasets.Features(
        image=datasets.Image(), question=datasets.Value("string"), answers=datasets.List(datasets.Value("string"))
    )
    files = [str(folder / "a.png"), str(folder / "broken.jpg")]
    rows = {"image": files, "question": ["q", "r"], "answers": [["x"]] * 2}
    dataset = datasets.Dataset.from_dict(rows, features=images)
    dataset.save_to_disk(folder / "one")
    data = load_data(folder / "one", skip_bad=True)
    assert [(question.question, question.answers, question.images[0].size) for question in data.questions] == [
        ("q", ("x",), (8, 6))
    ]
    assert data.skipped[0].startswith("row 1: cannot read broken.jpg as an image")

    datasets.DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(folder / "two")
    with pytest.raises(DataError, match=r"splits train, test\. Select one with --split"):
        load_data(folder / "two")
    assert len(load_data(folder / "two", split="test").questions) == 1


def test_a_folder_of_images_with_metadata_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the datasets library")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    (folder / "images").mkdir()
    (folder / "a.png").rename(folder / "images/a.png")
    row = {"file_name": "a.png", "question": "what?", "answer": "cat"}
    (folder / "images/metadata.jsonl").write_text(json.dumps(row) + "\n")
    (question,) = load_data(folder / "images").questions
    assert (question.question, question.answers, question.images[0].size) == ("what?", ("cat",), (8, 6))


# -- metrics ---------------------------------------------------------------------------------------------------------


@each(
    ("name", "prediction", "answers", "score"),
    [
        ("exact", " Cat. ", ["dog", "cat"], 1),
        ("exact", "cats", ["cat"], 0),
        # Leaving out one of the three answers "2" scores 2/3, leaving out another answer scores 1.
        ("vqa", "The two", ["2"] * 3 + ["3"] * 7, 0.9),
        ("vqa", "2", ["2"] + ["3"] * 9, 0.3),
        ("vqa", "don't", ["dont"] * 4, 1),
        ("vqa", "1,000.5!", ["1000.5"], 1),
        ("vqa", "red", ["blue", "Red"], 1),
        ("vqa", "U.S.", ["us"], 1),
        ("vqa", "blue/green, (left)", ["Blue green left"], 1),
        ("vqa", "50", ["50%"], 0),
        ("vqa", "10:30", ["10 30"], 0),
        ("vqa", "2.5", ["25"], 0),
        ("anls", "kitten", ["sitten"], 5 / 6),
        ("anls", " Two\n words", ["two words "], 1),
        ("anls", "kitten", ["sitting", "dog"], 1 - 3 / 7),
        ("anls", "ab", ["ac"], 0),  # half of the answer is wrong
        ("anls", "abcde", ["abcxy"], 0.6),
        ("anls", "", ["a"], 0),
        ("relaxed", "105", ["100"], 1),
        ("relaxed", "105.1", ["100"], 0),
        ("relaxed", "95", ["100"], 1),
        ("relaxed", "1.05", ["1"], 1),  # 1.05 - 1 is 0.050000000000000044
        ("relaxed", "0.105", ["0.1"], 1),
        ("relaxed", "1.0501", ["1"], 0),
        ("relaxed", "-95", ["-100"], 1),
        ("relaxed", "7", ["inf"], 0),  # infinity is compared as text
        ("relaxed", "inf", ["inf"], 1),
        ("relaxed", "50%", ["0.5"], 1),
        ("relaxed", "$1,040", ["1000"], 1),
        ("relaxed", "0.01", ["0"], 0),
        ("relaxed", "Yes", ["yes"], 1),
        ("f1", "the black cat", ["a black, dog"], 0.5),
        ("f1", "cat cat", ["cat"], 2 / 3),
        ("f1", "the", ["cat"], 0),
    ],
)
def test_metrics_by_hand(name: str, prediction: str, answers: list[str], score: float) -> None:
    assert metrics.get_metric(name).score([prediction], [answers]) == [pytest.approx(score)]


def test_anls_equals_a_naive_edit_distance() -> None:
    def naive(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(naive(a[1:], b) + 1, naive(a, b[1:]) + 1, naive(a[1:], b[1:]) + (a[0] != b[0]))

    rng, scores = np.random.default_rng(0), set()
    for _ in range(60):
        first, second = ("".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(2))
        share = naive(first, second) / max(len(first), len(second))
        assert metrics.anls(first, second) == pytest.approx(1 - share if share < 0.5 else 0)
        scores.add(metrics.anls(first, second))
    assert len(scores) > 3


def test_f1_equals_transformers() -> None:
    reason = "transformers 5.24 lacks metrics"
    compute_f1 = pytest.importorskip("transformers.data.metrics.squad_metrics", reason=reason).compute_f1

    rng, words = np.random.default_rng(0), "the a An cat Cat, dogs 2 2.5 it's ! (left) - ä".split()
    for _ in range(300):
        prediction, answer = (" ".join(rng.choice(words, rng.integers(6))) for _ in range(2))
        assert metrics.f1(prediction, answer) == pytest.approx(compute_f1(answer, prediction))


def test_unknown_metrics_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"Metric 'bleu' is not known\. Use one of exact, ending, vqa"):
        metrics.get_metric("bleu")
    monkeypatch.setitem(sys.modules, "pycocoevalcap.cider.cider", None)
    with pytest.raises(TokenPruneError, match="pip install pycocoevalcap"):
        metrics.get_metric("cider")
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    with pytest.raises(TokenPruneError, match=r"anls needs rapidfuzz: pip install tokenprune-bench"):
        metrics.get_metric("anls")


def test_cider_equals_pycocoevalcap() -> None:
    pytest.importorskip("pycocoevalcap", reason="needs pycocoevalcap")
    gold = [["A black cat sits."], ["Two dogs run in the snow."], ["A red bus."]]
    same, other = metrics.cider([captions[0] for captions in gold], gold), metrics.cider(["x y z"] * 3, gold)
    assert same[1] == pytest.approx(10)
    assert other == [0, 0, 0]
