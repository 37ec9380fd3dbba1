"""Drawn videos and views: the same by seed, evenly answered, with evidence where it is said to be, and not to be
answered from less than they need."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from PIL import Image

from each import each
from tokenprune.methods.pixels.view_select import find_named_views
from tokenprune_demo import drawn_videos, drawn_views
from tokenprune_demo.drawn_videos import ANSWERS, FRAMES, GROUNDS, VIDEO_KINDS, draw_video, get_video_words
from tokenprune_demo.drawn_views import CAMERAS, VIEW_KINDS, draw_views, get_view_answers, get_view_words
from tokenprune_demo.scenes import COLORS

SIZES = ((112, 112), (224, 128), (144, 208), (224, 224))


@pytest.fixture(scope="module")
def videos():
    return [draw_video(np.random.default_rng((1, n)), SIZES[n % 4], GROUNDS[n // 4 % 4]) for n in range(64)]


@pytest.fixture
def plain(monkeypatch):
    """Draw on black, fast, where only what a video holds is looked at."""
    monkeypatch.setattr(
        drawn_videos, "_grounds", lambda rng, ground, size, photos: [Image.new("RGB", size) for _ in range(8)]
    )


@pytest.fixture(scope="module")
def many_views():
    return [draw_views(np.random.default_rng((2, n))) for n in range(60)]


def test_a_video_is_the_same_by_seed_and_another_by_another():
    one, same, other = (draw_video(np.random.default_rng(seed), (160, 112)) for seed in (3, 3, 4))
    assert one.questions == same.questions and one.things == same.things
    assert all(np.array_equal(a, b) for a, b in zip(one.frames, same.frames, strict=True))
    assert one.questions != other.questions
    assert len(one.frames) == FRAMES and {frame.size for frame in one.frames} == {(160, 112)}


def test_every_kind_is_asked_and_all_words_are_listed(videos, many_views):
    asked = {question.kind for video in videos for question in video.questions}
    assert asked == set(VIDEO_KINDS) and len(VIDEO_KINDS) == 8
    _all_words_listed([question for video in videos for question in video.questions], get_video_words())
    questions = [question for one in many_views for question in one.questions]
    assert {question.kind for question in questions} == set(VIEW_KINDS)
    _all_words_listed(questions, get_view_words())


def _all_words_listed(questions, words):
    said = {word for one in questions for word in re.findall(r"\w+|[^\w\s]", f"{one.text} {one.answer}")}
    assert said <= set(words)


def test_a_kind_comes_up_as_often_whatever_its_answer(plain):
    """Drawn with one answer or another, the same seed has room for the question or has none."""
    for kind in ("text", "events", "when", "order", "change"):
        there = defaultdict(set)
        for seed in range(12):
            for answer in ANSWERS[kind][:3]:
                video = draw_video(np.random.default_rng(seed), (112, 112), "still", answers={kind: answer})
                there[seed].add(len(video.of_kind(kind)))
                assert all(question.answer == answer for question in video.of_kind(kind)[:1] if kind != "order")
        assert all(len(found) == 1 for found in there.values()), kind


@each("kind", VIDEO_KINDS)
def test_answers_are_even(videos, kind):
    if kind == "order":
        given = Counter(_says_first(question) for video in videos for question in video.of_kind(kind))
    else:
        given = Counter(question.answer for video in videos for question in video.of_kind(kind))
    share = 1 / len(ANSWERS[kind])
    total = sum(given.values())
    assert set(given) <= ({True, False} if kind == "order" else set(ANSWERS[kind]))
    assert len(given) > 0.8 * len(ANSWERS[kind])
    assert total > 20 and max(given.values()) < total * share + 4.5 * (total * share * (1 - share)) ** 0.5


def _says_first(question):
    return question.text.index(question.answer) < 25


def test_evidence_is_where_it_is_said_to_be(videos):
    checked = Counter()
    for video in videos:
        for question in video.questions:
            thing = next(one for one in video.things if one.what == _asked_about(question))
            for frame, (left, top, right, bottom) in question.boxes:
                width, height = video.frames[frame].size
                assert 0 <= left < right <= width and 0 <= top < bottom <= height
                pixels = np.asarray(video.frames[frame]).astype(int)[top:bottom, left:right]
                if question.kind == "text":
                    light = pixels.mean(-1)
                    assert (light > 190).mean() > 0.05 and (light < 65).mean() > 0.05
                elif question.kind in ("still", "rare", "change"):
                    near = np.abs(pixels - COLORS[question.answer]).max(-1) < 32
                    assert near.mean() > 0.05, (question, frame)
                    checked[question.kind] += 1
            if question.kind == "events":
                assert thing.values.count(None) == int(question.answer) and thing.values[0] is not None
                assert len(question.looks) == FRAMES
    assert min(checked.values()) > 40 and len(checked) == 3


def _asked_about(question):
    found = [word for word in re.findall(r"\w+", question.text) if word in (*drawn_videos.LARGE, *drawn_videos.TINY)]
    return question.answer if question.kind == "order" else found[0] if found else "sign"


def test_a_thing_is_seen_only_where_it_is(videos):
    video = draw_video(np.random.default_rng(5), (224, 224), "still", kinds=("events", "rare"), answers={"events": "3"})
    thing = next(one for one in video.things if one.values.count(None) == 3)
    shown = [np.asarray(frame)[_area(thing.boxes[0][0])] for frame in video.frames]
    on, off = (next(n for n, value in enumerate(thing.values) if (value is None) is gone) for gone in (False, True))
    for number, value in enumerate(thing.values):
        assert np.array_equal(shown[number], shown[off if value is None else on])
    assert not np.array_equal(shown[on], shown[off])


def _area(box):
    return slice(box[1], box[3]), slice(box[0], box[2])


def test_the_first_frame_answers_nothing_but_still(videos):
    """What the first frame shows is there, and has a place and a colour, whatever the answer is."""
    for video in videos:
        for question in video.questions:
            first = {_asked_about(question)} | {word for word in question.text.split() if question.kind == "order"}
            here = [one for one in video.things if one.what in first and one.values[0] is not None]
            if question.kind in ("order", "rare", "text", "when"):
                assert not here
            elif question.kind != "still":
                assert here
    # What is there in the first frame is drawn before the answer is: its colour, and for moves the whole image.
    # Up and down have other places than left and right.
    for kind, answers in (("direction", ("left", "right")), ("events", ANSWERS["events"]), ("change", ("red", "blue"))):
        assert set(answers) <= set(ANSWERS[kind])
        for seed in range(5):
            options = [dict(kinds=(kind,), answers={kind: answer}) for answer in answers]
            frames = [draw_video(np.random.default_rng(seed), (144, 112), "still", **one).frames[0] for one in options]
            assert all(np.array_equal(frames[0], frame) for frame in frames[1:]), (kind, seed)


def test_frames_in_another_order_answer_nothing_about_time(plain):
    """The frames of one answer, in another order, are as likely those of another answer."""
    for kind in drawn_videos.TIMED:
        sets = defaultdict(Counter)
        for seed in range(400):
            video = draw_video(np.random.default_rng(seed), (112, 112), "still", kinds=(kind,))
            (question,) = video.of_kind(kind)
            # All that is left of a thing without order: how many frames show it, and the places where it was.
            seen = tuple(sorted(sum(value is not None for value in one.values) for one in video.things))
            where = "" if kind != "direction" else len({boxes[0][0] for boxes in video.things[0].boxes}) == 1
            answer = _says_first(question) if kind == "order" else question.answer
            sets[seen, where][answer] += 1
        for counts in sets.values():
            assert max(counts.values()) < 2.5 * min(counts.values()), (kind, counts)


def test_a_move_has_no_place_of_its_own(plain):
    """Where a thing is, in any frame, tells nothing about its direction: each place is as likely for all, those across
    an edge too."""
    videos = defaultdict(list)
    for seed in range(480):
        video = draw_video(np.random.default_rng(seed), (112, 112), "still", kinds=("direction",))
        videos[video.questions[0].answer].append(video.things[0])
    for frame in (0, 5):
        for name, holds in AREAS.items():
            shares = [np.mean([holds(thing.boxes[frame]) for thing in things]) for things in videos.values()]
            assert len(shares) == 4 and max(shares) - min(shares) < 0.2, (frame, name, shares)
            assert min(shares) > 0.08


AREAS = {
    "right half": lambda boxes: boxes[0][0] > 40,
    "lower half": lambda boxes: boxes[0][1] > 40,
    "across the sides": lambda boxes: {0, 112} <= {edge for left, _, right, _ in boxes for edge in (left, right)},
    "across the top": lambda boxes: {0, 112} <= {edge for _, top, _, bottom in boxes for edge in (top, bottom)},
}


@pytest.mark.parametrize("ground", GROUNDS)
def test_grounds_are_what_they_are_called(ground):
    frames = np.stack([
        np.asarray(frame).astype(int)
        for frame in draw_video(np.random.default_rng(8), (144, 144), ground, kinds=("still",)).frames
    ])  # fmt: skip
    steps = np.abs(np.diff(frames, axis=0)).mean((1, 2, 3))
    if ground == "still":
        assert (steps == 0).all()
    elif ground == "noisy":
        assert ((steps > 2) & (steps < 9)).all()  # two draws of a deviation of 5.1: 5.8 on average
    elif ground == "cut":
        assert (steps > 0).sum() == 1
    else:
        assert (steps > 0).all()


@pytest.mark.parametrize(
    "wrong", [{"size": (100, 112)}, {"size": (112, 256)}, {"ground": "plain"}, {"kinds": ("who",)}]
)
def test_what_cannot_be_drawn_is_said(wrong):
    with pytest.raises(ValueError, match=r"pixels|grounds are"):
        draw_video(np.random.default_rng(0), **wrong)


def test_views_are_the_same_by_seed(many_views):
    again = draw_views(np.random.default_rng((2, 0)))
    assert again.questions == many_views[0].questions and again.cameras == many_views[0].cameras
    assert all(np.array_equal(a, b) for a, b in zip(again.images, many_views[0].images, strict=True))
    assert Counter(len(one.images) for one in many_views).keys() == {2, 3, 4, 5, 6}
    with pytest.raises(ValueError, match="2 to 6 images"):
        draw_views(np.random.default_rng(0), views=7)


def test_views_hold_what_is_asked_and_name_it_as_view_select_reads_it(many_views):
    for one in many_views:
        assert len(one.labels) in (0, len(one.images))
        for question in one.questions:
            names = list(one.cameras) or [f"image {n + 1}" for n in range(len(one.images))]
            found = find_named_views(question.text, names, match_names=bool(one.cameras))
            views = {view for view, _ in question.boxes}
            assert found == (views if question.kind in ("named", "numbered") else set()), question.text
            if question.kind in ("named", "numbered"):
                ((view, (left, top, right, bottom)),) = question.boxes
                pixels = np.asarray(one.images[view]).astype(int)[top:bottom, left:right]
                assert (np.abs(pixels - COLORS[question.answer]).max(-1) < 20).mean() > 0.05
            elif question.kind == "which":
                assert question.answer == drawn_views.ORDINALS[question.boxes[0][0]]
            else:
                assert question.answer == str(len(views))


def test_answers_about_views_are_those_asked_for_and_even(monkeypatch):
    monkeypatch.setattr(drawn_views, "draw_background", lambda rng, kind, photos: Image.new("RGB", (224, 224)))
    for number in (2, 6):
        given = defaultdict(Counter)
        for seed in range(60):
            one = draw_views(np.random.default_rng(seed), number, named=True)
            for question in one.questions:
                given[question.kind][question.answer] += 1
        for kind, answers in get_view_answers(number).items():
            assert set(given[kind]) == set(answers)
            assert max(given[kind].values()) < 2.2 * sum(given[kind].values()) / len(answers), (kind, given[kind])
    wanted = {"which": "third", "named": "pink", "numbered": "cyan", "across": "0"}
    one = draw_views(np.random.default_rng(0), 6, named=True, answers=wanted)
    assert {kind: one.of_kind(kind)[0].answer for kind in VIEW_KINDS} == wanted and one.cameras == CAMERAS
