"""Test drawn videos and views: they are reproducible and balanced, evidence boxes are right, and less input does not
suffice for an answer."""

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
    """Draw on black, for speed, in tests that only read the objects of a video."""
    monkeypatch.setattr(
        drawn_videos, "_draw_grounds", lambda rng, ground, size, photos: [Image.new("RGB", size) for _ in range(8)]
    )


@pytest.fixture(scope="module")
def many_views():
    return [draw_views(np.random.default_rng((2, n))) for n in range(60)]


def test_a_video_is_the_same_by_seed_and_another_by_another():
    video, same, other = (draw_video(np.random.default_rng(seed), (160, 112)) for seed in (3, 3, 4))
    assert video.questions == same.questions and video.things == same.things
    assert all(np.array_equal(a, b) for a, b in zip(video.frames, same.frames, strict=True))
    assert video.questions != other.questions
    assert len(video.frames) == FRAMES and {frame.size for frame in video.frames} == {(160, 112)}


def test_every_kind_is_asked_and_all_words_are_listed(videos, many_views):
    kinds = {question.kind for video in videos for question in video.questions}
    assert kinds == set(VIDEO_KINDS) and len(VIDEO_KINDS) == 8
    _check_words([question for video in videos for question in video.questions], get_video_words())
    questions = [question for views in many_views for question in views.questions]
    assert {question.kind for question in questions} == set(VIEW_KINDS)
    _check_words(questions, get_view_words())


def _check_words(questions, words):
    used = {word for question in questions for word in re.findall(r"\w+|[^\w\s]", f"{question.text} {question.answer}")}
    assert used <= set(words)


def test_how_often_a_kind_occurs_does_not_depend_on_its_answer(plain):
    """For each answer, the same seed either has room for the question or does not."""
    for kind in ("text", "events", "when", "order", "change"):
        counts = defaultdict(set)
        for seed in range(12):
            for answer in ANSWERS[kind][:3]:
                video = draw_video(np.random.default_rng(seed), (112, 112), "still", answers={kind: answer})
                counts[seed].add(len(video.of_kind(kind)))
                assert all(question.answer == answer for question in video.of_kind(kind)[:1] if kind != "order")
        assert all(len(seed_counts) == 1 for seed_counts in counts.values()), kind


@each("kind", VIDEO_KINDS)
def test_answers_are_even(videos, kind):
    if kind == "order":
        answers = Counter(_names_first(question) for video in videos for question in video.of_kind(kind))
    else:
        answers = Counter(question.answer for video in videos for question in video.of_kind(kind))
    share = 1 / len(ANSWERS[kind])
    total = sum(answers.values())
    assert set(answers) <= ({True, False} if kind == "order" else set(ANSWERS[kind]))
    assert len(answers) > 0.8 * len(ANSWERS[kind])
    assert total > 20 and max(answers.values()) < total * share + 4.5 * (total * share * (1 - share)) ** 0.5


def _names_first(question):
    return question.text.index(question.answer) < 25


def test_evidence_boxes_contain_the_evidence(videos):
    checked = Counter()
    for video in videos:
        for question in video.questions:
            drawn_object = next(candidate for candidate in video.things if candidate.what == _find_subject(question))
            for frame, (left, top, right, bottom) in question.boxes:
                width, height = video.frames[frame].size
                assert 0 <= left < right <= width and 0 <= top < bottom <= height
                pixels = np.asarray(video.frames[frame]).astype(int)[top:bottom, left:right]
                if question.kind == "text":
                    light = pixels.mean(-1)
                    assert (light > 190).mean() > 0.05 and (light < 65).mean() > 0.05
                elif question.kind in ("still", "rare", "change"):
                    has_color = np.abs(pixels - COLORS[question.answer]).max(-1) < 32
                    assert has_color.mean() > 0.05, (question, frame)
                    checked[question.kind] += 1
            if question.kind == "events":
                assert drawn_object.values.count(None) == int(question.answer) and drawn_object.values[0] is not None
                assert len(question.looks) == FRAMES
    assert min(checked.values()) > 40 and len(checked) == 3


def _find_subject(question):
    names = [word for word in re.findall(r"\w+", question.text) if word in (*drawn_videos.LARGE, *drawn_videos.TINY)]
    return question.answer if question.kind == "order" else names[0] if names else "sign"


def test_an_object_is_visible_only_in_its_frames(videos):
    video = draw_video(np.random.default_rng(5), (224, 224), "still", kinds=("events", "rare"), answers={"events": "3"})
    drawn_object = next(candidate for candidate in video.things if candidate.values.count(None) == 3)
    shown = [np.asarray(frame)[_get_area(drawn_object.boxes[0][0])] for frame in video.frames]
    on, off = (
        next(n for n, value in enumerate(drawn_object.values) if (value is None) is hidden) for hidden in (False, True)
    )
    for index, value in enumerate(drawn_object.values):
        assert np.array_equal(shown[index], shown[off if value is None else on])
    assert not np.array_equal(shown[on], shown[off])


def _get_area(box):
    return slice(box[1], box[3]), slice(box[0], box[2])


def test_the_first_frame_answers_only_the_kind_still(videos):
    """Objects of the first frame, their positions and colors do not depend on the answer."""
    for video in videos:
        for question in video.questions:
            subjects = {_find_subject(question)} | {word for word in question.text.split() if question.kind == "order"}
            visible = [
                drawn_object
                for drawn_object in video.things
                if drawn_object.what in subjects and drawn_object.values[0] is not None
            ]
            if question.kind in ("order", "rare", "text", "when"):
                assert not visible
            elif question.kind != "still":
                assert visible
    # Objects of the first frame are drawn before the answer is chosen: their colors and, for moves, the image. Up and
    # down start from other positions than left and right.
    for kind, answers in (("direction", ("left", "right")), ("events", ANSWERS["events"]), ("change", ("red", "blue"))):
        assert set(answers) <= set(ANSWERS[kind])
        for seed in range(5):
            options = [dict(kinds=(kind,), answers={kind: answer}) for answer in answers]
            frames = [
                draw_video(np.random.default_rng(seed), (144, 112), "still", **option).frames[0] for option in options
            ]
            assert all(np.array_equal(frames[0], frame) for frame in frames[1:]), (kind, seed)


def test_shuffled_frames_do_not_answer_questions_about_time(plain):
    """Shuffled frames of one answer are as likely for another answer."""
    for kind in drawn_videos.TIMED:
        sets = defaultdict(Counter)
        for seed in range(400):
            video = draw_video(np.random.default_rng(seed), (112, 112), "still", kinds=(kind,))
            (question,) = video.of_kind(kind)
            # Without the order, an object has only a count of frames that show it, and a set of positions.
            frame_counts = tuple(
                sorted(sum(value is not None for value in drawn_object.values) for drawn_object in video.things)
            )
            is_vertical = (
                "" if kind != "direction" else len({drawn_boxes[0][0] for drawn_boxes in video.things[0].boxes}) == 1
            )
            answer = _names_first(question) if kind == "order" else question.answer
            sets[frame_counts, is_vertical][answer] += 1
        for counts in sets.values():
            assert max(counts.values()) < 2.5 * min(counts.values()), (kind, counts)


def test_positions_do_not_depend_on_the_direction(plain):
    """The position in any frame is independent of the direction: each position is as likely for all directions,
    including positions across an edge."""
    videos = defaultdict(list)
    for seed in range(480):
        video = draw_video(np.random.default_rng(seed), (112, 112), "still", kinds=("direction",))
        videos[video.questions[0].answer].append(video.things[0])
    for frame in (0, 5):
        for name, holds in AREAS.items():
            shares = [
                np.mean([holds(drawn_object.boxes[frame]) for drawn_object in moved_objects])
                for moved_objects in videos.values()
            ]
            assert len(shares) == 4 and max(shares) - min(shares) < 0.2, (frame, name, shares)
            assert min(shares) > 0.08


AREAS = {
    "right half": lambda boxes: boxes[0][0] > 40,
    "lower half": lambda boxes: boxes[0][1] > 40,
    "across the sides": lambda boxes: {0, 112} <= {edge for left, _, right, _ in boxes for edge in (left, right)},
    "across the top": lambda boxes: {0, 112} <= {edge for _, top, _, bottom in boxes for edge in (top, bottom)},
}


@pytest.mark.parametrize("ground", GROUNDS)
def test_grounds_change_between_frames_as_named(ground):
    frames = np.stack([
        np.asarray(frame).astype(int)
        for frame in draw_video(np.random.default_rng(8), (144, 144), ground, kinds=("still",)).frames
    ])  # fmt: skip
    steps = np.abs(np.diff(frames, axis=0)).mean((1, 2, 3))
    if ground == "still":
        assert (steps == 0).all()
    elif ground == "noisy":
        assert ((steps > 2) & (steps < 9)).all()  # two draws with a deviation of 5.1 differ by 5.8 on average
    elif ground == "cut":
        assert (steps > 0).sum() == 1
    else:
        assert (steps > 0).all()


@pytest.mark.parametrize(
    "wrong", [{"size": (100, 112)}, {"size": (112, 256)}, {"ground": "plain"}, {"kinds": ("who",)}]
)
def test_invalid_drawings_raise(wrong):
    with pytest.raises(ValueError, match=r"pixels|grounds are"):
        draw_video(np.random.default_rng(0), **wrong)


def test_views_are_the_same_by_seed(many_views):
    again = draw_views(np.random.default_rng((2, 0)))
    assert again.questions == many_views[0].questions and again.cameras == many_views[0].cameras
    assert all(np.array_equal(a, b) for a, b in zip(again.images, many_views[0].images, strict=True))
    assert Counter(len(views.images) for views in many_views).keys() == {2, 3, 4, 5, 6}
    with pytest.raises(ValueError, match="2 to 6 images"):
        draw_views(np.random.default_rng(0), views=7)


def test_views_contain_the_answers_and_name_views_for_view_select(many_views):
    for item in many_views:
        assert len(item.labels) in (0, len(item.images))
        for question in item.questions:
            names = list(item.cameras) or [f"image {n + 1}" for n in range(len(item.images))]
            named_views = find_named_views(question.text, names, match_names=bool(item.cameras))
            views = {view for view, _ in question.boxes}
            assert named_views == (views if question.kind in ("named", "numbered") else set()), question.text
            if question.kind in ("named", "numbered"):
                ((view, (left, top, right, bottom)),) = question.boxes
                pixels = np.asarray(item.images[view]).astype(int)[top:bottom, left:right]
                assert (np.abs(pixels - COLORS[question.answer]).max(-1) < 20).mean() > 0.05
            elif question.kind == "which":
                assert question.answer == drawn_views.ORDINALS[question.boxes[0][0]]
            else:
                assert question.answer == str(len(views))


def test_answers_about_views_are_balanced_and_can_be_requested(monkeypatch):
    monkeypatch.setattr(drawn_views, "draw_background", lambda rng, kind, photos: Image.new("RGB", (224, 224)))
    for num_views in (2, 6):
        drawn = defaultdict(Counter)
        for seed in range(60):
            views = draw_views(np.random.default_rng(seed), num_views, named=True)
            for question in views.questions:
                drawn[question.kind][question.answer] += 1
        for kind, answers in get_view_answers(num_views).items():
            assert set(drawn[kind]) == set(answers)
            assert max(drawn[kind].values()) < 2.2 * sum(drawn[kind].values()) / len(answers), (kind, drawn[kind])
    expected = {"which": "third", "named": "pink", "numbered": "cyan", "across": "0"}
    views = draw_views(np.random.default_rng(0), 6, named=True, answers=expected)
    assert {kind: views.of_kind(kind)[0].answer for kind in VIEW_KINDS} == expected and views.cameras == CAMERAS
