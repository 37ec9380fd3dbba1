# SPDX-License-Identifier: Apache-2.0
"""Test samples of a run: the choice of questions, their drawings, continued runs, and damaged folders."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from each import each
from report_runs import result
from tests.unit.api.test_cli import call, refused
from tests.unit.bench.test_contact_sheet import Video, flat
from tests.unit.bench.test_report_warnings import write_run
from tokenprune.errors import OptionError
from tokenprune_bench.errors import RunError
from tokenprune_bench.report import drawing
from tokenprune_bench.report.drawing import SampleRequest, choose_questions, draw_samples
from tokenprune_bench.report.page import make_page
from tokenprune_bench.report.runs import read_runs
from tokenprune_bench.report.samples import FILE, FOLDER, read_samples
from zoo import FAMILIES

# -- choice of questions


def build_record(method: str, keep: float | int, *right: str, out: int = 10, **more: Any) -> dict[str, Any]:
    return dict(record="result", method=method, keep=keep, right=list(right), stats=dict(visual_tokens_out=out), **more)


def test_samples_are_questions_with_the_most_disagreement_of_each_kind() -> None:
    records = [
        dict(record="header", kind_of_question="000112"),
        build_record("unpatched", 1.0, "111111", out=100),
        build_record("a", 0.5, "111100", out=50),
        build_record("a", 0.25, "110010", out=25),
        build_record("b", 0.25, "010100", out=25),
        build_record("c", 0.25, "010000", "010110", out=25),
        build_record("a", 8, "000000", out=8),
        dict(record="skipped", method="d", keep=0.25, reason="no"),
    ]
    # At 0.25, the middle keep, c is right half the time on questions 3 and 4. Scores of question 0: 1 0 0; 3: 0 1 ½; 4:
    # 1 0 ½. Each kind gives one question; 3 and 4 tie, and the earlier question wins.
    assert choose_questions(records, SampleRequest(2)) == (0.25, [0, 3])
    other = [records[0] | dict(kind_of_question="000011"), *records[1:]]
    assert choose_questions(other, SampleRequest(2)) == (0.25, [0, 4])  # question 3 has the kind of question 0
    assert choose_questions(records, SampleRequest(3)) == (0.25, [0, 3, 4])
    assert choose_questions(records, SampleRequest(9)) == (0.25, [0, 3, 4, 1, 2, 5])
    assert choose_questions(records, SampleRequest(2, (5, 1))) == (0.25, [5, 1])
    # An image is repeated only if no other image has a disagreement.
    assert choose_questions(records, SampleRequest(2), "abcada") == (0.25, [0, 4])
    assert choose_questions(records, SampleRequest(3), "aaaaab") == (0.25, [0, 3, 4])
    assert choose_questions(records, SampleRequest(0)) == (None, [])
    assert choose_questions(records[:2], SampleRequest(2)) == (None, [])
    # The lower of two keeps wins, in any order.
    assert choose_questions([*records[:2], records[3], records[2]], SampleRequest(1))[0] == 0.25
    graded = build_record("g", 0.5) | dict(scores=[[0.2, 0.9, 0.5, 0.5, 0.5, 0.5]])
    assert choose_questions([*records[:2], graded, build_record("a", 0.5, "100000")], SampleRequest(1)) == (0.5, [1])


def test_conflicting_sample_options_are_refused(tmp_path: Path) -> None:
    assert SampleRequest.from_options(None, "", None).count == 0
    assert SampleRequest.from_options(None, "", tmp_path).count == 4
    assert SampleRequest.from_options(None, "3, 17,3", tmp_path) == SampleRequest(2, (3, 17))
    assert SampleRequest.from_options(0, "", tmp_path).count == 0
    for count, indices, run, message in (
        (2, "", None, "Pass --run"),
        (None, "3", None, "Pass --run"),
        (2, "3", tmp_path, "Pass only one"),
        (None, "a", tmp_path, "such as 3,17"),
    ):
        with pytest.raises(OptionError, match=message):
            SampleRequest.from_options(count, indices, run)
    for index in (-1, 3):
        with pytest.raises(OptionError, match="from 0 to 2"):
            SampleRequest(1, (index,)).check(3)
    line = refused("bench", "--images", 1, "--run", tmp_path / "run", "--sample", 8, "--device", "cpu")
    assert "--sample 8 is out of range. Pass indices from 0 to 7." in line


# -- a run of the shipped model

RUN = "bench --images 1 --methods pool --keep 0.25 --repeats 0 --device cpu".split()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("drawn") / "run"
    call(*RUN, "--run", run, "--samples", 2, "--html", run.parent / "page.html")
    return run


@pytest.fixture
def run(drawn: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(drawn, tmp_path / "run"))


def test_drawings_match_the_counts_of_the_run(drawn: Path) -> None:
    data = json.loads((drawn / FOLDER / FILE).read_text())
    lines = [json.loads(line) for line in (drawn / "predictions.jsonl").read_text().splitlines()]
    assert (data["keep"], data["how"], len(data["samples"])) == (
        0.25,
        "with the largest disagreement between methods",
        2,
    )
    for sample in data["samples"]:
        assert sample["tokens"] == 256
        assert [(item["method"], item["seed"]) for item in sample["methods"]] == [
            ("random", 0), ("downsample", None), ("pool", None),
        ]  # fmt: skip
        for item in (sample, *sample["methods"]):
            (line,) = (
                line
                for line in lines
                if (line["method"], line["seed"], line["question"])
                == (item["method"], item["seed"], sample["question"])
            )
            assert (item["prediction"], item["score"], item["note"]) == (line["prediction"], line["score"], "")
        kept = {item["method"]: item["kept"] for item in sample["methods"]}
        assert (kept["random"], kept["downsample"], kept["pool"]) == (64, 64, 64)
        # random shows a quarter of the patches undimmed. downsample shows all of its 8 x 8 patches undimmed.
        for item, side, clear in zip(sample["methods"], (16, 8), (64, 64), strict=False):
            with Image.open(drawn / FOLDER / item["image"]) as image:
                pixels = np.asarray(image, int)
            cell = 448 // side
            patches = pixels.reshape(side, cell, side, cell, 3).transpose(0, 2, 1, 3, 4).reshape(-1, cell, cell, 3)
            frames = np.concatenate([patches[:, 0], patches[:, -1], patches[:, :, 0], patches[:, :, -1]], axis=1)
            # Dark patches are outlined in white. Light patches are outlined in blue, which WebP blurs, but dropped
            # patches are dark inside.
            white = np.median(frames.min(-1), 1) > 140
            inside = patches[:, cell // 4 : -cell // 4, cell // 4 : -cell // 4].max(-1).reshape(len(patches), -1)
            outlined = (white | (np.median(inside, 1) > 100)).sum()
            assert outlined == pytest.approx(clear, abs=6)  # tolerance for WebP's compression
    assert sum(file.stat().st_size for file in (drawn / FOLDER).iterdir()) < 300_000
    page = make_page(read_runs([drawn]))
    assert page == (drawn.parent / "page.html").read_text()  # `bench --html` and `report --html` write the same page
    assert page.count("data:image/webp;base64,") == 8
    assert (
        "What pool keeps of the image" in page
        and "Questions with the largest disagreement between methods, at keep 0.25" in page
    )


def test_a_finished_run_draws_nothing_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in (run / FOLDER).iterdir()}

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(drawing, "_draw", never)
    call(*RUN, "--run", run, "--samples", 2)
    call(*RUN, "--run", run, "--samples", 0)  # draws no more samples, and deletes none
    assert before == {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in (run / FOLDER).iterdir()}


def test_missing_drawings_are_added_and_unused_drawings_deleted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_questions = []

    def counted(folder: Path, subject: Any, question: Any, entry: Any, *rest: Any) -> None:
        drawn_questions.append(entry.get("question"))
        entry |= dict(tokens=1, kept=1, image=rest[-1], note="")
        (folder / rest[-1]).touch()

    monkeypatch.setattr(drawing, "_draw", counted)
    first, second = (sample["question"] for sample in json.loads((run / FOLDER / FILE).read_text())["samples"])
    (run / FOLDER / f"{second}-2.webp").unlink()
    call(*RUN, "--run", run, "--samples", 2)
    assert [question for question in drawn_questions if question is not None] == [second] and len(drawn_questions) == 4
    other = next(index for index in range(8) if index not in (first, second))
    drawn_questions.clear()
    call(*RUN, "--run", run, "--sample", f"{other},{first}")
    assert [question for question in drawn_questions if question is not None] == [other]
    data = json.loads((run / FOLDER / FILE).read_text())
    assert [drawn["question"] for drawn in data["samples"]] == [other, first] and data["how"] == "chosen with --sample"
    assert {file.name.split("-")[0] for file in (run / FOLDER).glob("*.webp")} == {str(other), str(first)}
    for damage in ("{", "[]", '{"schema": 0}', '{"schema": 1, "keep": 0.25, "samples": [3, {"methods": [1]}]}'):
        drawn_questions.clear()
        (run / FOLDER / FILE).write_text(damage)
        call(*RUN, "--run", run, "--sample", first)
        assert len(drawn_questions) == 4


def test_a_folder_that_cannot_be_written_is_named(run: Path) -> None:
    shutil.rmtree(run / FOLDER)
    (run / FOLDER).write_text("in the way")
    assert "Cannot write" in refused(*RUN, "--run", run)


# -- videos, several images, and methods without a drawing


def draw_question(tmp_path: Path, subject: Any, question: Any, *methods: str) -> list[dict[str, Any]]:
    """Draw one question, and return the entries of the unpatched model and the methods."""
    records = [dict(record="header", kind_of_question="0")]
    records += [build_record(name, 0.5, "1", seeds=None) for name in ("unpatched", *methods)]
    lines = [
        dict(method=record["method"], keep=0.5, seed=None, question=0, prediction="p", score=1)
        for record in records[1:]
    ]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_samples(tmp_path, subject, [question], records, SampleRequest(1))
    (sample,) = json.loads((tmp_path / FOLDER / FILE).read_text())["samples"]
    return [sample, *sample["methods"]]


def build_question(**more: Any) -> SimpleNamespace:
    plain = dict(kind="all", question="?", answers=("a",), is_video=False, images=(), video=[])
    return SimpleNamespace(**plain | more)


def test_a_video_is_drawn_frame_by_frame_and_pixels_are_not(tmp_path: Path, build: Any) -> None:
    processor = SimpleNamespace(
        video_processor=object(), batch_decode=lambda ids, **more: ["?"] * len(ids), tokenizer=None
    )
    subject = Video(build(FAMILIES["qwen2_vl"]), processor, "tiny")
    times, height, width = subject.video_inputs([], "")["video_grid_thw"][0].tolist()
    total = times * height * width // 4
    question = build_question(is_video=True, video=[flat(index) for index in range(2 * times)])
    unpruned, divprune, pixels, chooser = draw_question(
        tmp_path, subject, question, "divprune", "downsample", "view_select"
    )
    assert (unpruned["tokens"], divprune["kept"]) == (total, round(total / 2))
    # The model joins two frames, and the drawing of the unpatched model has its grid.
    for item in (unpruned, divprune):
        with Image.open(tmp_path / FOLDER / item["image"]) as image:
            assert image.size == (times * drawing.FRAME_SIDE + 6 * (times - 1), drawing.FRAME_SIDE)
    assert pixels["image"] is None and "pixels of the video" in pixels["note"]
    assert chooser["image"] is None and "selects between images, so it cannot be drawn" in chooser["note"]


def test_every_drawing_of_a_question_has_the_same_size(tmp_path: Path) -> None:
    """Also if a method changes the grid: 5 x 3 tokens and the kept tokens."""
    from processors import photo
    from tokenprune_bench.profiling.model import load_model

    question = build_question(images=(photo(280, 170, 0),), question="is there a star?")
    methods = ("downsample", "divprune", "pool")
    entries = draw_question(tmp_path, load_model("demo_qwen", device="cpu"), question, *methods)
    sizes = []
    for item in entries:
        with Image.open(tmp_path / FOLDER / item["image"]) as image:
            sizes.append(image.size)
    assert sizes == [(drawing.SIDE * 17 // 28, drawing.SIDE)] * 4
    assert len({entries[0]["tokens"], *(item["kept"] for item in entries[1:])}) > 1


def test_several_images_are_drawn_side_by_side(tmp_path: Path) -> None:
    from processors import demo_model, llava, photo
    from tokenprune_bench.profiling.model import Model

    images = (photo(90, 120, 0), photo(90, 120, 1))
    question = build_question(images=images, question="is there a star?")
    unpruned, pool = draw_question(tmp_path, Model(demo_model(), llava(), "shipped"), question, "pool")
    assert (unpruned["tokens"], pool["kept"]) == (512, 256)
    with Image.open(tmp_path / FOLDER / pool["image"]) as image:
        assert image.size == (2 * drawing.FRAME_SIDE + 6, drawing.FRAME_SIDE)
    assert images[0].size == (120, 90)  # the images of the run are not changed


def test_a_full_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from processors import demo_model, llava, photo
    from tokenprune_bench.profiling.model import Model

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(RunError, match="No space left on device"):
        draw_question(
            tmp_path, Model(demo_model(), llava(), "shipped"), build_question(images=(photo(64, 64, 0),)), "pool"
        )


# -- damaged and foreign folders


def entry(**more: Any) -> dict[str, Any]:
    return dict(method="m", prediction="p", score=1.0, kept=3, image="0-1.webp", note="") | more


def folder(tmp_path: Path, *methods: dict[str, Any], **changes: Any) -> Path:
    (tmp_path / FOLDER).mkdir(exist_ok=True)
    flat(0).save(tmp_path / FOLDER / "0-1.webp")
    sample = entry(question=0, kind="k", text="t?", answers=["a"], tokens=9, methods=list(methods))
    data = dict(schema=1, keep=0.25, how="h", samples=[sample]) | changes
    (tmp_path / FOLDER / FILE).write_text(json.dumps(data))
    return tmp_path


def test_images_are_embedded_as_they_are(tmp_path: Path) -> None:
    (sample,) = read_samples(folder(tmp_path, entry())).items
    assert sample.image.uri.startswith("data:image/webp;base64,") and sample.image.width == 64
    data = base64.b64decode(sample.drawn[0].image.uri.partition(",")[2])
    assert data == (tmp_path / FOLDER / "0-1.webp").read_bytes()


@each(
    "name",
    ["../secret.webp", "/etc/passwd", "none.webp", "text.webp", "0-1.png", "", ".webp", 7, "large.webp", "a\0.webp"],
)
def test_no_other_file_gets_into_the_page(name: Any, tmp_path: Path) -> None:
    folder(tmp_path)
    flat(0).save(tmp_path / "secret.webp")
    flat(0).save(tmp_path / FOLDER / "0-1.png")
    (tmp_path / FOLDER / "text.webp").write_text("<script>")
    (tmp_path / FOLDER / "large.webp").write_bytes(bytes(2**22 + 1))
    (sample,) = read_samples(folder(tmp_path, entry(image=name))).items
    assert sample.image is not None
    assert sample.drawn[0].image is None and sample.drawn[0].note.startswith("this image ")
    assert ("too large" in sample.drawn[0].note) == (name == "large.webp")


def test_a_png_by_the_name_of_a_webp_is_not_embedded(tmp_path: Path) -> None:
    folder(tmp_path, entry())
    buffer = io.BytesIO()
    flat(0).save(buffer, format="png")
    (tmp_path / FOLDER / "0-1.webp").write_bytes(buffer.getvalue())
    assert read_samples(tmp_path).items[0].image is None


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(schema=2), "schema 2"),
        (dict(samples=[]), "No question"),
        (dict(samples=[3]), "damaged"),
        (dict(samples=7), "damaged"),
        (dict(keep="x"), "damaged"),
        (dict(samples=[dict(entry(), question=1)]), "damaged"),
    ],
)
def test_damaged_samples_are_reported_on_the_page(changes: dict, message: str, tmp_path: Path) -> None:
    folder(tmp_path, **changes)
    write_run(tmp_path / "results.jsonl")
    assert message in read_samples(tmp_path).missing
    assert message in make_page(read_runs([tmp_path])) and "--samples 4" in read_samples(tmp_path).missing


def test_without_samples_the_page_says_how_to_get_them(tmp_path: Path) -> None:
    write_run(tmp_path / "results.jsonl", *[result("random", 0.25, 60, 60)])
    page = make_page(read_runs([tmp_path]))
    assert "This run has no drawn samples." in page and "<code>--samples 4</code> to draw some" in page
