# SPDX-License-Identifier: Apache-2.0
"""Test users' files: encodings, tables, invalid file names, and questions that a model misreads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from each import each
from processors import llava, special_tokenizer
from tests.unit.bench.test_bench_data import GOOD, write
from tokenprune.errors import OptionError
from tokenprune_bench.data import Data, check_questions, drop_questions, find_misfits, load_data
from tokenprune_bench.errors import DataError
from tokenprune_bench.profiling.model import Model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (8, 6), (40, 90, 20)).save(tmp_path / "a.png")
    return tmp_path


def list_questions(data: Data) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(question.where, question.question, question.answers) for question in data.questions]


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_line_ends_and_a_mark_at_the_start_do_not_matter(end: str, start: str, folder: Path) -> None:
    path, line = folder / "rows.jsonl", json.dumps({**GOOD, "question": "wäs?"}, ensure_ascii=False)
    path.write_bytes(end.join([start + line, "", "  ", line]).encode())
    assert list_questions(load_data(path)) == [("line 1", "wäs?", ("cat",)), ("line 4", "wäs?", ("cat",))]
    path.write_text(line, encoding="utf-16")
    with pytest.raises(DataError, match="it is not UTF-8 text"):
        load_data(path)
    with pytest.raises(DataError, match="it is not UTF-8 text"):
        load_data(folder / "a.png")


def test_a_list_in_json_is_read(folder: Path) -> None:
    path = folder / "rows.json"
    path.write_text(json.dumps([GOOD, {**GOOD, "answer": 3}], indent=1))
    assert list_questions(load_data(path)) == [("row 0", "what?", ("cat",)), ("row 1", "what?", ("3",))]
    path.write_text(json.dumps([GOOD, "x"]))
    with pytest.raises(DataError, match="row 1: not a JSON object"):
        load_data(path)
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD))  # JSON lines with another suffix
    assert [question.where for question in load_data(path).questions] == ["line 1", "line 2"]
    path.write_text("[" + json.dumps(GOOD))
    with pytest.raises(DataError, match=r"Cannot read .*rows\.json: not valid JSON"):
        load_data(path)


def test_tables_are_read_as_texts(folder: Path) -> None:
    path = folder / "rows.csv"
    path.write_text(
        '\ufeff,image,question,answer,answers,kind\n0,a.png,"what,\nthen?",007,,x\n\n'
        '1,a.png,so?,NA,,\n2,a.png,or?,,"[""a"", 2]",y\n',
        encoding="utf-8",
    )
    data = load_data(path, columns={"": ""})
    assert list_questions(data) == [
        ("line 2", "what,\nthen?", ("007",)),
        ("line 5", "so?", ("NA",)),
        ("line 6", "or?", ("a", "2")),
    ]
    assert [question.kind for question in data.questions] == ["x", "all", "y"]
    (folder / "rows.tsv").write_text("image\tquestion\tanswer\na.png\thow, then?\tso\n")
    assert list_questions(load_data(folder / "rows.tsv")) == [("line 2", "how, then?", ("so",))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.png,q", "line 2: has 2 cells, but the first line has 3"),
        ("a.png,q,", "line 2: needs either answer or answers"),
        ('a.png,"q,a', r"Cannot read line 2 of .*rows\.csv: unexpected end of data"),
        (f"a.png,q,{'x' * 200000}", r"Cannot read line 2 of .*rows\.csv: field larger than"),
    ],
)
def test_damaged_tables_are_named_by_line(text: str, message: str, folder: Path) -> None:
    (folder / "rows.csv").write_text(f"image,question,answer\n{text}\n")
    with pytest.raises(DataError, match=message):
        load_data(folder / "rows.csv")


def test_parquet_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the datasets library")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    dataset = datasets.Dataset.from_dict({"image": ["a.png"] * 2, "question": ["q", "r"], "answer": [1.0, None]})
    (folder / "data").mkdir()
    dataset.to_parquet(folder / "rows.parquet")
    data = load_data(folder / "rows.parquet", skip_bad=True)  # file names are relative to the file's folder
    assert list_questions(data) == [("row 0", "q", ("1",))]
    assert data.skipped == ["row 1: needs either answer or answers"]
    embedded = dataset.map(lambda row: {"image": str(folder / row["image"]), "answer": 2}).cast_column(
        "image", datasets.Image()
    )
    for split in ("train", "test"):
        embedded.to_parquet(folder / f"data/{split}-00000-of-00001.parquet")
    (folder / "rows.parquet").unlink()
    with pytest.raises(DataError, match=r"splits train, test\. Select one"):
        load_data(folder)
    split_data = load_data(folder, split="test")
    assert list_questions(split_data) == [("row 0", "q", ("2",)), ("row 1", "r", ("2",))]
    assert [question.images[0].size for question in split_data.questions] == [(8, 6)] * 2
    (folder / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"Cannot read .*rows\.parquet as a dataset"):
        load_data(folder / "rows.parquet")


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("https://example.org/a.png", r"https://example\.org/a\.png is a URL; download the file first"),
        ("FILE:///a.png", "is a URL"),
        ("data:image/png;base64," + "A" * 9000, r"is a URL"),
        ("sub\\a.png", r'No such file .*use "/" instead of "\\"'),
        ("a\0b.png", r"cannot read '.*a\\x00b\.png': embedded null byte"),
        ("x" * 9000, r"\.\.\. \(90\d\d letters\): File name too long"),
        ("", "'' is not a file name"),
        ("inside", "cannot read inside as an image: it is a folder"),
        ("dead.png", r"cannot read .*dead\.png: No such file"),
        ("\x1b[31m.png", r"cannot read '.*\\x1b\[31m\.png': No such file"),
    ],
)
def test_names_that_are_no_images(name: str, message: str, folder: Path) -> None:
    (folder / "inside").mkdir()
    (folder / "dead.png").symlink_to("nowhere.png")
    with pytest.raises(DataError, match=f"line 1: .*{message}") as error:
        load_data(write(folder, {**GOOD, "image": name}))
    assert len(str(error.value)) < 600 and str(error.value).isprintable()


def test_names_of_all_sorts_are_found(folder: Path) -> None:
    (folder / "link.png").symlink_to("a.png")
    (folder / "sub").mkdir()
    strange = folder / "sub/ä 漢字 🙂.png"
    strange.write_bytes((folder / "a.png").read_bytes())
    names = ["link.png", str(folder / "a.png"), "./sub/../a.png", f"sub/{strange.name}"]
    data = load_data(write(folder, *({**GOOD, "image": name} for name in names)))
    assert [question.images[0].size for question in data.questions] == [(8, 6)] * 4
    twice = load_data(write(folder, GOOD, GOOD), limit=9)  # rows are not repeated
    assert len(twice.questions) == 2


@each(
    ("row", "answers"),
    [
        ({"answer": 2}, ("2",)),
        ({"answer": 2.0}, ("2",)),
        ({"answer": -0.5}, ("-0.5",)),
        ({"answer": 10**30}, (str(10**30),)),
        ({"answers": ["", "a"]}, ("", "a")),
        ({"answer": ""}, "has an empty answer"),
        ({"answers": [" ", ""]}, "has an empty answer"),
        ({"answer": float("nan")}, r"answers must be strings or numbers, not \[nan\]"),
        ({"answer": float("inf")}, "answers must be"),
        ({"answers": [{"answer": "x" * 900}]}, r"answers must be .*\(\d+ letters\)"),
        ({"answers": "a"}, "answers must be"),
        ({"answer": "\ud83d"}, "contains an unpaired surrogate"),
        ({"answer": "a", "question": "\ud83d?"}, "contains an unpaired surrogate"),
        ({"answer": "a", "kind": "\ud83d?"}, "contains an unpaired surrogate"),
    ],
)
def test_answers_are_texts(row: dict[str, Any], answers: tuple[str, ...] | str, folder: Path) -> None:
    path = write(folder, {"image": "a.png", "question": "q", **row})
    if isinstance(answers, tuple):
        assert load_data(path).questions[0].answers == answers
        return
    with pytest.raises(DataError, match=f"line 1: {answers}"):
        load_data(path)


def test_json_too_deep_is_a_bad_row(folder: Path) -> None:
    with pytest.raises(DataError, match="line 2: not valid JSON: maximum recursion"):
        load_data(write(folder, GOOD, "[" * 100_000))


# -- against the model -----------------------------------------------------------------------------------------------


def test_placeholders_in_questions_are_refused(folder: Path) -> None:
    data = load_data(write(folder, GOOD, {**GOOD, "question": "<image>\nwhat?"}, {**GOOD, "question": "is <b> it?"}))
    with pytest.raises(DataError, match=r"1 of 3 questions .*line 2: .* the placeholder '<image>'; remove it"):
        check_questions(data.questions, llava())
    check_questions([data.questions[0], data.questions[2]], llava())
    # Some processors name their placeholders only by ids.
    tokenizer = special_tokenizer(image_token="<b>")
    numbered = SimpleNamespace(image_token_id=tokenizer.convert_tokens_to_ids("<b>"), tokenizer=tokenizer)
    with pytest.raises(DataError, match="line 3: its question contains the placeholder '<b>'"):
        check_questions(data.questions, numbered)
    with pytest.raises(DataError, match="line 3: its question contains the placeholder '<b>'"):
        check_questions(data.questions, SimpleNamespace(image_token="<b>"))
    check_questions(data.questions, SimpleNamespace())


def test_questions_that_do_not_fit_the_model_are_left_out_in_their_order(folder: Path) -> None:
    (folder / "video").mkdir()
    Image.new("RGB", (8, 6)).save(folder / "video/0.png")
    video = {"video": "video", "question": "what?", "answer": "cat"}
    rows = [GOOD, {**GOOD, "question": "<image> what?"}, "{", video, {**GOOD, "question": "and?"}]
    data = load_data(write(folder, *rows), skip_bad=True)
    fit = drop_questions(data, find_misfits(data.questions, llava()))
    assert [question.where for question in fit.questions] == ["line 1", "line 5"]
    assert [line.partition(":")[0] for line in fit.skipped] == ["line 2", "line 3", "line 4"]
    assert "contains the placeholder '<image>'" in fit.skipped[0]
    assert fit.skipped[2] == "line 4: is about a video, but this model does not support videos"
    assert fit.about()["digest"] == load_data(write(folder, rows[0], rows[4])).about()["digest"]
    assert drop_questions(data, []) == data
    with pytest.raises(DataError, match=r"rows\.jsonl has no questions: all 5 rows are bad, line 1: why"):
        drop_questions(data, [(index, "why") for index in range(4)])


def test_a_image_that_the_processor_refuses_is_named() -> None:
    class Picky:
        """A processor like Qwen2-VL's, with a limit on the aspect ratio."""

        def __init__(self, error: type[Exception]) -> None:
            self.error = error

        def apply_chat_template(self, rows: list[Any], **settings: Any) -> dict[str, Any]:
            if any(part.get("image") == "wide" for [row] in rows for part in row["content"]):
                raise self.error("aspect ratio must be smaller than 200")
            return {}

    subject = Model(SimpleNamespace(dtype=None), Picky(ValueError), "picky")
    assert subject.inputs(["a"], ["good?"]) == {}
    with pytest.raises(DataError, match=r"The processor of picky rejects the image of 'wide\?': aspect ratio must be"):
        subject.inputs(["a", "wide", "b"], ["good?", "wide?", "also?"])
    subject.processor = Picky(OptionError)  # the message of a method is not changed
    with pytest.raises(OptionError, match=r"^aspect"):
        subject.inputs(["a", "wide"], ["good?", "wide?"])
