# SPDX-License-Identifier: Apache-2.0
"""Test evidence recall: small examples, a naive count, and methods in models that do or do not join frames."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import tokenprune
from tokenprune.selection.method import Site
from tokenprune.settings import Setting
from tokenprune.statistics import Cut
from tokenprune_bench.backend import EVIDENCE, HfBackend
from tokenprune_bench.evidence import compute_recall, find_evidence_tokens, trace_tokens
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.drawn_sets import draw_set, freeze_first_frame, shuffle_frames
from tokenprune_demo.heldout import load_heldout

POSITIONS = [3, 4, 5, 6, 9, 10, 11, 12]  # eight visual tokens in a prompt with text


def make_cut(kept: list[int], sources=None, weights=None, step: int = 0) -> Cut:
    source_list = None if sources is None else [sources]
    return Cut(Site.PRE_LLM, 0, "x", [[0, 1, *kept, 20]], source_list, step, None if weights is None else [weights])


def make_look(*tokens: int) -> np.ndarray:
    return np.isin(np.arange(8), tokens)


def test_dropping_keeps_looks_of_which_a_token_is_left() -> None:
    traced = trace_tokens([make_cut([3, 5, 12])], POSITIONS)
    assert np.array_equal(traced.toarray(), np.diag([1.0, 0, 1, 0, 0, 0, 0, 1]))
    assert compute_recall([make_look(0), make_look(1), make_look(1, 7), make_look(3, 4)], traced) == 0.5
    assert compute_recall([make_look(0, 1)], trace_tokens([], POSITIONS)) == 1.0
    # A drop after prefill does not count.
    assert compute_recall([make_look(0)], trace_tokens([make_cut([], step=1)], POSITIONS)) == 1.0
    assert compute_recall([make_look(0)], trace_tokens([make_cut([])], POSITIONS)) == 0.0


def test_a_merged_token_counts_where_half_of_its_weight_is() -> None:
    groups = {3: [3, 4, 5], 9: [6, 9], 12: [12]}
    traced = trace_tokens([make_cut([3, 9, 12], groups)], POSITIONS)
    mix = traced.toarray()
    assert mix.sum(1) == pytest.approx([1, 0, 0, 0, 1, 0, 0, 1])
    assert mix[0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0, 0, 0, 0]) and mix[4, [3, 4]].tolist() == [0.5, 0.5]
    assert compute_recall([make_look(0)], traced) == 0.0
    assert compute_recall([make_look(0, 1)], traced) == 1.0  # two of three tokens in one look
    assert compute_recall([make_look(3)], traced) == 1.0  # exactly half
    assert compute_recall([make_look(5)], traced) == 0.0
    heavy = trace_tokens([make_cut([3, 9, 12], groups, {3: [0.6, 0.2, 0.2], 9: [0.1, 0.9], 12: [1.0]})], POSITIONS)
    assert compute_recall([make_look(0)], heavy) == 1.0 and compute_recall([make_look(1, 2)], heavy) == 0.0
    assert compute_recall([make_look(3)], heavy) == 0.0


def test_merges_of_merges_and_a_drop_behind_them() -> None:
    first = make_cut([3, 9, 12], {3: [3, 4], 9: [9, 10, 11], 12: [12]})
    second = make_cut([9], {9: [3, 9]})
    traced = trace_tokens([first, second], POSITIONS)
    assert traced.toarray()[4] == pytest.approx([0.25, 0.25, 0, 0, 1 / 6, 1 / 6, 1 / 6, 0])
    assert compute_recall([make_look(0, 1), make_look(4, 5), make_look(0, 4, 5)], traced) == pytest.approx(2 / 3)
    assert compute_recall([make_look(0, 1)], trace_tokens([first, make_cut([12])], POSITIONS)) == 0.0


def test_a_token_may_be_in_several_means() -> None:
    both = make_cut([3, 9], {3: [3, 5], 9: [5, 9]})
    traced = trace_tokens([both], POSITIONS)
    assert compute_recall([make_look(2), make_look(0), make_look(4)], traced) == 1.0
    assert compute_recall([make_look(2)], trace_tokens([both, make_cut([9])], POSITIONS)) == 1.0
    assert compute_recall([make_look(0)], trace_tokens([both, make_cut([9])], POSITIONS)) == 0.0


def test_tokens_lie_in_boxes_that_hold_their_middle() -> None:
    # Four frames of 40 x 20 pixels in two grids of 2 x 4 tokens of 10 pixels; 18 tokens with two after the grids.
    sizes, grids = [(40, 20)] * 4, [(2, 4)] * 2
    looks = [[(0, (0, 0, 20, 10))], [(1, (0, 0, 20, 10))], [(2, (22, 11, 24, 13))]]
    looks.append([(3, (0, 0, 6, 6)), (0, (34, 4, 40, 20))])
    token_indices = [np.flatnonzero(mask).tolist() for mask in find_evidence_tokens(looks, sizes, grids, 18)]
    assert token_indices[0] == token_indices[1] == [0, 1]  # in both frames of a pair
    assert token_indices[2] == [8 + 4 + 2]  # no center is inside this small box, so the token around it counts
    assert token_indices[3] == [3, 7, 8]


def test_a_naive_count_agrees() -> None:
    """A token belongs to a box if the pixel at its center does."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        height, width = rng.integers(1, 7, 2)
        left, top = rng.integers(0, 40, 2)
        right, bottom = left + rng.integers(16, 40), top + rng.integers(16, 40)
        size = (int(width) * 16, int(height) * 16)
        box = (int(left), int(top), min(int(right), size[0]), min(int(bottom), size[1]))
        if box[2] - box[0] < 16 or box[3] - box[1] < 16:
            continue
        (mask,) = find_evidence_tokens([[(0, box)]], [size], [(int(height), int(width))], int(height * width))
        for index in range(height * width):
            x, y = 16 * (index % width) + 8, 16 * (index // width) + 8
            assert mask[index] == (box[0] <= x <= box[2] and box[1] <= y <= box[3])


# -- in models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    from tiny_video_model import write_tiny_video_model

    return load_model(str(write_tiny_video_model(tmp_path_factory.mktemp("tiny"))), device="cpu", suffix="")


@pytest.fixture(scope="module")
def videos() -> list:
    return draw_set("videos", 2).questions


def measure_recall(subject: Model, questions: list, setting: dict | None) -> list:
    backend = HfBackend(subject)
    backend.begin(questions, evidence=True)
    subject.max_new_tokens = 1
    with backend.answering(None if setting is None else Setting.from_json(setting)) as answer:
        return [answer(index, [question])[1].get(EVIDENCE) for index, question in enumerate(questions)]


def test_methods_that_keep_all_keep_all_evidence(tiny: Model, videos: list) -> None:
    assert measure_recall(tiny, videos[:3], {"method": "uniform", "keep": 1.0}) == [[1.0]] * 3
    assert measure_recall(tiny, videos[:1], None) == [None]
    assert measure_recall(tiny, videos[:1], {"method": "downsample", "keep": 0.5}) == [None]  # it selects no tokens


def test_recall_is_one_only_where_tokens_are_kept(tiny: Model, videos: list, monkeypatch) -> None:
    """Keep the tokens of one position only: the evidence there is kept in both frames of a pair, and other evidence is
    lost."""
    question = next(candidate for candidate in videos if candidate.kind == "rare")
    (((frame, box),),) = question.looks
    inputs = tiny.video_inputs(question.video, question.question)
    times, rows, columns = inputs["video_grid_thw"][0].tolist()
    rows, columns = rows // 2, columns // 2
    width, height = question.frames[0].size
    middle = (frame // 2, int((box[1] + box[3]) / 2 / height * rows), int((box[0] + box[2]) / 2 / width * columns))

    def keep_token(token_index: int):
        def select(self, tokens):
            keep = torch.zeros_like(tokens.mask)
            keep[:, token_index] = True
            return tokenprune.Selection(keep, counts=[1])

        return select

    evidence_index = (middle[0] * rows + middle[1]) * columns + middle[2]
    other_index = ((times - 1 - middle[0]) * rows + middle[1]) * columns + middle[2]
    assert other_index != evidence_index
    from tokenprune.methods.pre_llm.uniform import Uniform

    for token_index, recall in ((evidence_index, 1.0), (other_index, 0.0)):
        monkeypatch.setattr(Uniform, "select", keep_token(token_index))
        assert measure_recall(tiny, [question], {"method": "uniform", "keep": {"tokens": 1}}) == [[recall]]


def test_images_of_the_held_out_set_have_evidence() -> None:
    from processors import demo_model, llava

    subject = Model(demo_model(), llava(), "shipped", max_new_tokens=1)
    questions = load_heldout(limit=1)
    backend = HfBackend(subject)
    backend.begin(questions, evidence=True)
    with backend.answering(Setting.from_text("divprune", 0.25)) as answer:
        batched = answer(0, questions)[1][EVIDENCE]
        separate = [answer(100 + index, [question])[1][EVIDENCE][0] for index, question in enumerate(questions)]
    assert batched == separate and len(batched) == 8
    assert [recall is None for recall in batched] == [not question.boxes for question in questions]
    assert 0.3 < np.mean([recall for recall in batched if recall is not None]) < 1.0
    backend.begin(questions)  # without a request for evidence
    with backend.answering(Setting.from_text("divprune", 0.25)) as answer:
        assert EVIDENCE not in answer(0, questions[:1])[1]


def test_an_image_that_is_cropped_has_no_known_evidence(tiny: Model) -> None:
    from processors import demo_model, llava

    subject = Model(demo_model(), llava(), "shipped", max_new_tokens=1)
    looks, images = ((((0, (0, 0, 50, 50))),),), (Image.new("RGB", (300, 200)),)
    wide = SimpleNamespace(looks=looks, is_video=False, question="is there a star?", images=images)
    assert measure_recall(subject, [wide], {"method": "uniform", "keep": 0.5}) == [[None]]
    # The image is resized without a crop.
    assert measure_recall(tiny, [wide], {"method": "uniform", "keep": 1.0}) == [[1.0]]


# -- the sets


@pytest.mark.parametrize(("name", "sides"), [("videos", {160, 192, 224}), ("small-videos", {144})])
def test_sets_are_even_and_controls_show_less(name: str, sides: set[int], videos: list) -> None:
    drawn = draw_set(name, 16)
    assert len(drawn.questions) == 16 * 8 and len(set(drawn.groups)) == 4
    assert {side for question in drawn.questions for side in question.frames[0].size} == sides
    answers = [question.answer for question in drawn.questions if question.kind == "direction"]
    assert {answers.count(answer) for answer in ("left", "right", "up", "down")} == {4}
    assert draw_set(name, 2).about() == draw_set(name, 2).about() != drawn.about()
    same = [question.question for question in drawn.questions[:16]] == [question.question for question in videos]
    assert same == (name == "videos")
    first, mixed = drawn.controls
    assert set(first.chance) == set(drawn.kinds) - {"still"} and set(mixed.chance) == {"direction", "order", "when"}
    question = videos[0]
    assert all(frame is question.frames[0] for frame in freeze_first_frame(question).frames)
    order = [question.frames.index(frame) for frame in shuffle_frames(question).frames]
    assert sorted(order) == list(range(8)) != order
    assert shuffle_frames(question).frames == shuffle_frames(videos[1]).frames  # from the same video


def test_no_held_out_drawing_is_one_of_training() -> None:
    """Training seeds are (run, stage, batch), and none starts with this seed."""
    from tokenprune_demo import drawn_sets

    assert drawn_sets.SEED == 20260102
    views = draw_set("views", 8)
    assert len(views.questions) == 32 and {len(question.images) for question in views.questions} == {6}
    assert views.options["view_select"]["views"] == [label.rstrip(":") for label in views.questions[0].labels]
    assert {question.answer for question in views.questions if question.kind == "across"} > {"0", "6"}
