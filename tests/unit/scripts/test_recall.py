# SPDX-License-Identifier: Apache-2.0
"""Test experiments/studies/recall.py and its drawn streams: events shown once, counts, and a tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tokenprune.integrations.hf import sessions
from tokenprune.integrations.hf.sessions.results import HeldEntries
from tokenprune_bench.profiling.model import load_model
from tokenprune_demo.drawn_streams import EVENT_KINDS, SEED, STREAM_CHANCE, draw_stream
from tokenprune_demo.drawn_videos import ANSWERS, FRAMES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def recall(script: Any) -> Any:
    return script("recall")


@pytest.fixture(scope="module")
def report(script: Any) -> Any:
    return script("recall_figure")


@pytest.fixture(scope="module")
def subject() -> Any:
    return load_model("demo_video", device="cpu")


@pytest.fixture(scope="module")
def streams() -> list[Any]:
    return [draw_stream(index, 3) for index in range(12)]


def test_the_event_is_shown_once_and_answers_all_questions(streams: list[Any]) -> None:
    for stream in streams:
        assert [question.kind for question in stream.questions] == list(EVENT_KINDS)
        assert stream.video(3) is stream.event
        for question in stream.questions:
            name = "sign" if question.kind == "text" else question.text[:-1].split()[-1]
            (thing,) = (candidate for candidate in stream.event.things if candidate.what == name)
            times = FRAMES if question.kind == "still" else 1
            assert question.answer in ANSWERS[question.kind]
            assert [value for value in thing.values if value is not None] == [question.answer] * times
        others = {thing.what for clip in (0, 1, 2, 4, 5, 90) for thing in stream.video(clip).things}
        assert others and "sign" in stream.shapes and not others & stream.shapes


def test_streams_are_the_same_by_number_and_differ_from_another(streams: list[Any]) -> None:
    again = draw_stream(5, 3)
    for clip in (0, 3, 7):
        assert again.clip(clip).shape == (FRAMES, 112, 112, 3) and again.clip(clip).dtype == np.uint8
        assert (again.clip(clip) == streams[5].clip(clip)).all()
        assert (again.clip(clip) != streams[6].clip(clip)).any()
    assert len({stream.clip(0).tobytes() for stream in streams}) == len(streams)


def test_streams_are_none_of_those_that_training_draws(streams: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed: drawn.append(seed) or np.random.Generator(np.random.PCG64(seed))
    )
    stream = draw_stream(2, 1)
    stream.clip(0), stream.clip(4)
    assert len(drawn) >= 3 and all(seed[:2] == (SEED, 2) for seed in drawn)
    source = " ".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks/experiments/training").rglob("*.py")
    )
    assert str(SEED) not in source and "drawn_streams" not in source


def test_no_answer_of_the_event_is_likelier(streams: list[Any]) -> None:
    all_questions = [draw_stream(index, 1).questions for index in range(60)]
    for question_index, kind in enumerate(EVENT_KINDS):
        assert len({questions[question_index].answer for questions in all_questions}) >= 0.75 * len(ANSWERS[kind])
        assert STREAM_CHANCE[kind] == 1 / len(ANSWERS[kind])


def draw_entries(generator: torch.Generator, heads: int) -> HeldEntries:
    """Return entries of four frames of nine tokens, a text token, and a wrapping token per frame, after some are
    dropped."""
    rows = [[-1, -1], *([frame, cell] for frame in range(4) for cell in range(-1, 9))]
    kept = [torch.randperm(len(rows), generator=generator)[:20].sort().values for _ in range(heads)]
    table = torch.stack([torch.tensor(rows)[head_indices] for head_indices in kept])
    return HeldEntries(0, torch.stack(kept), table[..., 0], table[..., 1], torch.stack(kept)[None])


def test_the_share_equals_a_loop(recall: Any) -> None:
    generator, cells = torch.Generator().manual_seed(0), [(1, 0), (1, 8), (2, 3), (3, 1), (0, 0)]
    layers = [draw_entries(generator, heads) for heads in (1, 2, 2)]
    layer_shares = []
    for layer in layers:
        head_shares = []
        for head in range(len(layer.frame)):
            entries = [*zip(layer.frame[head].tolist(), layer.cell[head].tolist(), strict=True)]
            head_shares.append(sum(cell in entries for cell in cells) / len(cells))
        layer_shares.append(sum(head_shares) / len(head_shares))
    assert 0.1 < (expected := sum(layer_shares) / len(layer_shares)) < 0.9
    assert recall.share(layers, cells) == pytest.approx(expected)


def test_the_tokens_of_the_event_show_it(recall: Any, streams: list[Any]) -> None:
    for stream in streams:
        for question, cells in zip(stream.questions, recall.places_of(stream, 12), strict=True):
            assert len(cells) == len({*cells}) and all(0 <= cell < 49 for _, cell in cells)
            boxes = {(12 + frame // 2, box) for frame, box in question.boxes}
            assert {frame for frame, _ in cells} == {frame for frame, _ in boxes}
            for frame, cell in cells:  # each token overlaps the event
                x, y = cell % 7 * 16, cell // 7 * 16
                frame_boxes = [box for box_frame, box in boxes if box_frame == frame]
                assert any(x < box[2] and box[0] < x + 16 and y < box[3] and box[1] < y + 16 for box in frame_boxes)


def test_an_answer_is_the_first_word_that_ask_gives_and_the_tower_runs_once(recall: Any, subject: Any) -> None:
    stream = draw_stream(1, 1)
    first, second = (sessions.session(subject.model, subject.processor, memory=400, block=8) for _ in range(2))
    tower_runs = []
    handle = subject.model.model.visual.register_forward_hook(lambda *_: tower_runs.append(1))
    for clip in range(3):
        first.see(stream.clip(clip))
    second.see(stream.clip(0))
    tower_runs.clear()
    with recall.encoded_once(subject.model):
        third = second.fork()
        for clip in (1, 2):
            frames = [Image.fromarray(frame) for frame in stream.clip(clip)]
            inputs = second._prompt_writer.prepare_clip(frames, clip * FRAMES, None)
            second.see(**inputs)
            third.see(**inputs)
    handle.remove()
    assert len(tower_runs) == 2 and "get_video_features" not in vars(subject.model.model)
    expected = [first.ask(question.text, max_new_tokens=1) for question in stream.questions]
    assert recall.answers(second, stream) == recall.answers(third, stream) == expected
    assert second.ask("which word was shown?", max_new_tokens=1, return_dict=True).logits.equal(
        first.ask("which word was shown?", max_new_tokens=1, return_dict=True).logits
    )


def test_closing_gaps_leaves_no_position_between_frames(recall: Any, subject: Any) -> None:
    stream = draw_stream(1, 1)
    session = sessions.session(subject.model, subject.processor, memory=250, block=8, policy=recall.Event(((4, 3),)))
    for clip in range(5):
        session.see(stream.clip(clip))
    closed = recall.closed(session)
    spans = [int(candidate.held[0].position.max()) + 1 for candidate in (session, closed)]
    assert closed.stats.next_position < session.stats.next_position and spans[1] < spans[0] - 9
    assert (4, 3) in [*zip(closed.held[0].frame[0].tolist(), closed.held[0].cell[0].tolist(), strict=True)]
    assert closed.stats.visual == session.stats.visual


def test_a_run_writes_rows_and_draws_them(
    recall: Any, report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "BEFORE", 2)
    monkeypatch.setattr(recall, "COUNTED", 3)
    out, figure = tmp_path / "recall.jsonl", tmp_path / "recall.png"
    arguments = f"--streams 2 --most 8 --memories 200,400 --resume --allow-load --out {out}".split()
    recall.main(arguments)
    report.main(["--rows", str(out), "--figure", str(figure)])
    first, *rows = (json.loads(line) for line in out.read_text().splitlines())
    assert first["model"] == "demo_video" and figure.read_bytes()[:4] == b"\x89PNG"
    stream_rows = [row for row in rows if row["record"] == "stream"]
    assert {row["stream"] for row in stream_rows} == {0, 1}
    assert {row["policy"] for row in stream_rows} == {*recall.POLICIES, "event", "without", "all", "guess"}
    for row in stream_rows:
        if row["policy"] in ("event", "all"):
            assert row["ages"] == [0, 8] and all(share == 1 for shares in row["share"] for share in shares)
        if row["policy"] == "without" and row["memory"] == 200:
            assert not any(map(any, row["share"]))
        if row["policy"] == "guess":
            assert row["right"] == [[int(a == b) for a, b in zip(row["said"][0], row["gold"], strict=True)]]
    # A window of 150 of 198 tokens has lost the event after the next clip.
    assert all(
        row["share"][1:] in ([], [[0, 0, 0]])
        for row in stream_rows
        if (row["policy"], row["memory"]) == ("window", 200)
    )
    before = out.read_text()
    recall.main(arguments)
    assert out.read_text() == before  # all rows exist already
    cells = report.cells(rows)
    assert cells["event", 200, 8]["share"] == (1, 1, 1) and cells["event", 200, 8]["streams"] == 2


def test_an_aborted_stream_counts_as_lost_and_a_missing_stream_does_not_count(report: Any) -> None:
    def row(stream: int, most: int, ages: list[int], share: float) -> dict[str, Any]:
        shares = [[share] * 3] * len(ages)
        return {"record": "stream", "policy": "random", "memory": 200, "stream": stream, "most": most, "ages": ages,
                "share": shares, "right": [[1, 1, 0]] * len(ages), "closed": [[1, 0, 0]] * len(ages)}  # fmt: skip

    rows = [row(0, 304, [0, 304], 0.8), row(0, 1000, [0, 304, 1000], 0.8), row(1, 1000, [0], 0.2)]
    rows.append(row(2, 304, [0, 304], 0.5))
    cells = report.cells(rows)
    assert cells["random", 200, 0]["streams"] == 3 and cells["random", 200, 0]["share"][0] == pytest.approx(0.5)
    assert cells["random", 200, 304]["share"][0] == pytest.approx((0.8 + 0.5) / 3)
    twice = [{"policy": "guess", "stream": stream, "right": [[0, 0, stream]]} for stream in (0, 0, 1)]
    assert report.guessed(twice)[0] == pytest.approx(1 / 6)
    last = cells["random", 200, 1000]
    assert (last["streams"], last["asked"]) == (2, 1) and last["share"][0] == pytest.approx(0.4)
    assert last["right"] == pytest.approx((2 / 3,) * 3) and last["closed"] == pytest.approx((1 / 3,) * 3)
