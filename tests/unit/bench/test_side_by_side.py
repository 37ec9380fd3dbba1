# SPDX-License-Identifier: Apache-2.0
"""Test the drawing of several methods by `tokenprune show`, and its figure."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import tokenprune
from tokenprune.errors import AlreadyPatchedError, OptionError
from tokenprune.settings import Setting
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.show import draw, layout, side_by_side

QUESTION = "is there a star?"


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_vlm", device="cpu")


def build_settings(keep: float, *names: str) -> list[Setting]:
    return [Setting.from_text(name, keep) for name in names]


def draw_ramp(width: int, height: int) -> Image.Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


def test_methods_and_a_stack_stand_side_by_side_with_what_they_cost(subject: Model) -> None:
    names = ["divprune", "tome", "divprune+fastv:layer=3"]
    steps = []
    methods = build_settings(0.25, *names)
    shown = side_by_side.show(
        subject, [draw_ramp(600, 400)], QUESTION, methods, step=lambda *progress: steps.append(progress)
    )
    titles = [panel.title for panel in shown.panels]
    *keeps, stack = (f"{name}, keep 0.25" for name in names)
    assert titles == ["unpatched", *keeps, f"{stack} each, 6.25 % in all"]
    assert shown.panels[0].lines == ("256 visual tokens", f"answer: {shown.before}")
    assert shown.panels[3].lines[0].startswith("256 to 16 visual tokens, 40 on average")
    assert shown.caption[:2] == ("demo_vlm (shipped)", f"Q: {QUESTION}")
    assert steps[0] == ("unpatched", 0, 4) and steps[-1] == (names[-1], 3, 4)
    assert shown.across == 2 and shown.image().width == layout.WIDTH  # two per line, as large as fits
    assert not tokenprune.is_patched(subject.model)


def test_the_drawing_has_the_pixels_of_the_part_that_the_model_sees(subject: Model) -> None:
    """LLaVA's processor crops the middle of a wide image: a square of 600 image pixels, drawn at that size instead of
    224."""
    image = draw_ramp(1000, 600)
    part = draw.seen_part(subject, image)
    assert part.size == pytest.approx((600, 600), abs=12)
    middle = np.asarray(image.crop((200, 0, 800, 600)), int)
    assert np.abs(np.asarray(part.resize((600, 600)), int) - middle).mean() < 3
    (panel, _) = side_by_side.show(subject, [image], QUESTION, build_settings(0.25, "uniform")).panels
    assert panel.image.size == part.size


def test_dropped_and_kept_patches_differ_on_a_black_image(subject: Model) -> None:
    shown = side_by_side.show(subject, [Image.new("RGB", (512, 512))], QUESTION, build_settings(0.25, "uniform"))
    cells = np.asarray(shown.panels[1].image, int).reshape(16, 32, 16, 32, 3).transpose(0, 2, 1, 3, 4)
    inner = cells[:, :, 3:-3, 3:-3].max((2, 3, 4)).reshape(-1)
    edge = cells[:, :, 0].min((2, 3)).reshape(-1)
    kept = shown.seen[0].kept
    assert (inner[kept] == 0).all() and (inner[~kept] > 40).all()  # hatched
    assert (edge[kept] == 255).all() and (edge[~kept] == 0).all()  # outlined


@pytest.mark.parametrize(("width", "rows"), [(12_000, 7), (3000, 2), (1000, 1)])
def test_a_wide_image_is_cut_into_rows_that_can_be_seen(width: int, rows: int) -> None:
    panel = layout.Panel(draw_ramp(width, 90), "unpatched", ())
    drawn = panel.wrapped(1400, 1)
    assert panel.rows(1400) == rows and drawn.width == 1400
    assert (drawn.height + layout.FRAME_GAP) / rows - layout.FRAME_GAP >= 60
    uncut = np.asarray(panel.drawn(1400 * rows)[0])
    assert (np.asarray(drawn)[-1, -1] == uncut[-1, -1]).all()  # the last row ends with the end of the image


def test_merged_patches_have_their_mean_colour() -> None:
    image = Image.new("RGB", (64, 32))
    image.paste((200, 0, 0), (0, 0, 16, 32))
    image.paste((0, 100, 0), (16, 0, 32, 32))
    groups = np.array([[0, 0, 2, 3], [-1, -1, 2, 7]])
    kept = np.array([[True, False, True, True], [False, False, False, True]])
    drawn = np.asarray(draw.draw(image, kept, groups, size=(256, 128)), int)
    assert drawn[20, 100].tolist() == [100, 50, 0]  # the mean of both halves of group 0
    assert drawn[20, 220].tolist() == [0, 0, 0]  # a single patch keeps its color
    assert tuple(drawn[20, 0]) == draw.color_of(0) and tuple(drawn[20, 255]) == (255, 255, 255)


def test_scores_are_mapped_where_a_method_ranks_by_one(subject: Model) -> None:
    shown = side_by_side.show(
        subject, [draw_ramp(224, 224)], QUESTION, build_settings(0.25, "fastv", "divprune"), scores=True
    )
    assert [panel.title for panel in shown.panels][2] == "fastv: scores" and len(shown.panels) == 4
    assert shown.notes == ("divprune does not rank tokens by a score, so it has no map",)
    fastv = shown.seen[0]
    assert fastv.scores[fastv.kept].min() >= fastv.scores[~fastv.kept].max()  # fastv keeps the highest scores
    stack_settings = build_settings(0.5, "divprune+fastv:layer=3")
    stack = side_by_side.show(subject, [draw_ramp(224, 224)], QUESTION, stack_settings, scores=True).seen[0]
    assert np.isfinite(stack.scores).sum() == 128 and np.isfinite(stack.scores[stack.kept]).all()


def test_a_map_of_scores_goes_from_dark_to_yellow() -> None:
    grey = Image.new("RGB", (10, 10), (100, 100, 100))
    drawn = np.asarray(draw.heat(grey, np.array([[0.1, np.nan], [5.0, 0.2]]), (10, 10)), int)
    low, unscored, high, middle = drawn[0, 0], drawn[0, 9], drawn[9, 0], drawn[9, 9]
    assert unscored.tolist() == [100, 100, 100]
    assert low.sum() < middle.sum() < high.sum() and high[0] > 150 and high[2] < high[0]


def test_plot_returns_a_figure_and_leaves_the_model_alone(subject: Model) -> None:
    figure = tokenprune.plot(
        subject.model, subject.processor, draw_ramp(300, 200), QUESTION, "dart:pivot_text=0,uniform"
    )
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 3 and titles[1].startswith("dart:pivot_text=0, keep 0.25\n256 to 64 visual tokens")
    assert QUESTION in figure._suptitle.get_text() and not tokenprune.is_patched(subject.model)
    with tokenprune.patched(subject.model, "dart"), pytest.raises(AlreadyPatchedError, match="unpatch"):
        tokenprune.plot(subject.model, subject.processor, draw_ramp(300, 200), QUESTION)
    with pytest.raises(OptionError, match="at least one method"):
        tokenprune.plot(subject.model, subject.processor, draw_ramp(300, 200), QUESTION, "")
