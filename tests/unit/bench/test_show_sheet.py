# SPDX-License-Identifier: Apache-2.0
"""Test the sheet that `tokenprune show` writes: its size, its captions and its crop; and the GIF."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFont, ImageSequence

from each import each
from processors import photo
from tests.unit.api.test_cli import call, refused
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.settings import Setting
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.show import animation, draw, layout, side_by_side
from tokenprune_bench.show.layout import Panel

LONG = "divprune+dart:pivot_text=0,layer=3+fastv:layer=5, keep 0.5 each, 12.5 % in all"
PHONE = 800  # width of a sheet on a phone, in pixels
ABOUT = "1534 to 384 visual tokens, 672 on average over the layers", "answer: bottom-right"
COUNTS = (1, 3, 6)


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_vlm", device="cpu")


def build_panels(count: int, ratio: float, frames: int = 1) -> list[Panel]:
    """Return grey panels whose frames have height = `ratio` x width, with long and short titles."""

    def frames_at(width: int) -> list[Image.Image]:
        return [Image.new("RGB", (width, round(width * ratio)), "grey")] * frames

    titles = itertools.cycle(("unpatched", LONG, "dart, keep 0.25"))
    return [
        Panel(frames_at(300)[0], title, ABOUT, frames=frames, ratio=ratio, draw=frames_at)
        for title, _ in zip(titles, range(1 + count), strict=False)
    ]


def split_rows(panels: list[Panel], across: int) -> list[list[Panel]]:
    return [panels[start : start + across] for start in range(0, len(panels), across)]


# -- size


@each("num_methods", COUNTS)
@each("ratio", [0.3, 0.66, 1.0, 2.2, 5.0])
def test_a_sheet_has_the_size_of_a_chat(num_methods: int, ratio: float) -> None:
    drawn_panels = build_panels(num_methods, ratio)
    rows = split_rows(drawn_panels, layout.columns(1 + num_methods, ratio))
    image = layout.sheet(("model", "Q: what is shown?"), rows)
    assert image.width <= 1600 and (image.width >= 1200 or ratio > 2)
    assert image.height <= 3 * image.width
    assert layout.letters(layout.WIDTH) * min(1, PHONE / image.width) >= 12
    assert layout.letters(layout.ANIMATED) * PHONE / layout.ANIMATED >= 12
    grey = (np.asarray(image) == 128).all(-1)
    assert (grey.sum(1) > 100).sum() <= layout.TALLEST * len(rows)


def test_drawings_of_a_sheet_have_one_scale() -> None:
    image = np.asarray(layout.sheet(("m",), split_rows(build_panels(3, 0.66), 2)))
    edges = (image == 0x90).all(-1)  # the outline of each drawing
    widths = {int(line.sum()) for line in edges if line.sum() > 100}
    assert len(widths) == 1 and 2 * 600 < widths.pop() < layout.WIDTH  # two drawings of equal width in every line


def test_a_video_fills_the_sheet_and_goes_on_below() -> None:
    for frames, across in ((2, 2), (4, 4), (7, 7), (8, 8), (20, 7)):
        drawn_panels = build_panels(3, 0.6, frames)
        image = np.asarray(layout.sheet(("m",), [[panel] for panel in drawn_panels]))
        assert image.shape[1] == layout.WIDTH
        grey = (image == 128).all(-1)
        line = grey[np.flatnonzero(grey.any(1))[0]]
        assert int((np.diff(line.astype(int)) == 1).sum()) == across
    few = layout.sheet(("m",), [[panel] for panel in build_panels(1, 0.6, 8)])
    assert few.height > 0.4 * few.width  # a single method has larger frames in two lines


def test_lines_are_even_and_rarely_have_gaps() -> None:
    assert [layout.columns(1 + num_methods, 1.0) for num_methods in (1, 2, 3, 5, 6, 8)] == [2, 3, 2, 3, 4, 3]
    assert layout.columns(4, 2.2) == 4 and layout.columns(4, 0.2) == 1


# -- captions


@each("width", [200, 300, 345, 460, 700])
@each("text", [LONG, *ABOUT, "tome+divprune+fastv:layer=3, keep 0.25", "one", "", "x" * 90])
def test_captions_fit_without_short_last_lines(text: str, width: int) -> None:
    font = ImageFont.load_default(layout.letters(layout.WIDTH))
    lines = layout.wrapped(text, font, width)
    assert max(map(font.getlength, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "") or text == "x" * 90
    if len(lines) > 1 and text != "x" * 90:
        assert font.getlength(lines[-1]) > 0.3 * max(map(font.getlength, lines))


def test_an_answer_that_does_not_end_is_cut() -> None:
    font = ImageFont.load_default(20)
    lines = layout.wrapped("a word and " * 60, font, 300)
    assert len(lines) <= 5 and lines[-1].endswith(" ...") and max(map(font.getlength, lines)) <= 300


def test_an_empty_answer_is_shown_as_nothing(subject: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "generate", lambda self, inputs, **options: self.model(**inputs) and [""])
    shown = side_by_side.show(subject, [photo(64, 64, 0)], "?", [Setting.from_text("uniform", 0.25)])
    assert [panel.lines[-1] for panel in shown.panels] == ["answer: (nothing)"] * 2


# -- crops


def test_the_crop_is_named_and_drawn(subject: Model) -> None:
    wide = Image.new("RGB", (600, 300), (90, 120, 200))
    shown = side_by_side.show(subject, [wide], "what?", [Setting.from_text("uniform", 0.25)])
    assert any(line.startswith(draw.CROPS) for line in shown.caption)
    assert shown.cropped is not None and shown.cropped.size == (280, 140)
    pixels = np.asarray(shown.cropped, int)
    # Pixels outside of the crop are dark.
    assert pixels[70, 140].tolist() == [90, 120, 200] and pixels[70, 20].max() < 120
    outline = np.flatnonzero((pixels[70] == draw._BOX).all(-1))
    assert outline.min() == pytest.approx(70, abs=6) and outline.max() == pytest.approx(210, abs=6)
    orange = (np.asarray(shown.image(), int)[:260] == draw._BOX).all(-1)
    assert orange.any()
    square = side_by_side.show(subject, [wide.resize((300, 300))], "what?", [Setting.from_text("uniform", 0.25)])
    assert square.cropped is None and len(square.caption) == 2


# -- GIF


def build_stills(path: Path) -> list[np.ndarray]:
    with Image.open(path) as image:
        assert image.format == "GIF" and image.info["loop"] == 0
        return [np.asarray(frame.convert("RGB"), int) for frame in ImageSequence.Iterator(image)]


def test_a_gif_over_keep(tmp_path: Path) -> None:
    white, out = tmp_path / "white.png", tmp_path / "keep.gif"
    Image.new("RGB", (224, 224), "white").save(white)
    result = call(
        "show", white, "--methods", "uniform,divprune", "--gif", "keep", "--keep", "1.0,0.5,0.1", "--out", out
    )
    stills = build_stills(out)
    assert len(stills) == 3 and {still.shape[1] for still in stills} == {layout.ANIMATED}
    dark = [int((still.max(-1) < 128).sum()) for still in stills]
    assert dark[0] < dark[1] < dark[2]
    assert "uniform, keep 1 " in result.stdout and "divprune, keep 0.1 " in result.stdout and str(out) in result.stdout
    assert len({still.shape for still in stills}) == 1


def test_a_gif_over_the_frames_of_a_video(tmp_path: Path) -> None:
    colors, out = [(220, 30, 30), (30, 200, 30), (30, 30, 220)], tmp_path / "frames.GIF"
    for index, color in enumerate(colors):
        Image.new("RGB", (64, 64), color).save(tmp_path / f"{index}.png")
    folder = tmp_path / "video"
    folder.mkdir()
    for index in range(3):
        (tmp_path / f"{index}.png").rename(folder / f"{index}.png")
    call("show", folder, "--methods", "uniform", "--gif", "frames", "--out", out)
    stills = build_stills(out)
    assert len(stills) == 3
    for color, image in zip(colors, stills, strict=True):
        counts = [int((np.abs(image - expected_color).sum(-1) < 30).sum()) for expected_color in colors]
        assert int(np.argmax(counts)) == colors.index(color) and sorted(counts)[-2] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--gif", "size"), "Pass keep (an image per keep) or frames"),
        (("--gif", "frames"), "needs a video or several images"),
        (("--gif", "keep", "--keep", "0.5"), "for example --keep 1.0,0.75"),
        (("--gif", "keep", "--keep", "1.5,0.5"), "keep=1.5 is not a valid share"),
        (("--keep", "1.5"), "keep=1.5 is not a valid share"),
        (("--keep", "0.5,0.2"), "is not one number"),
        (("--gif", "keep", "--out", "a.png"), "a name that ends in .gif"),
    ],
)
def test_invalid_options_are_refused_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("tokenprune_bench.cli.show.load_model", never)
    image = tmp_path / "image.png"
    photo(40, 40, 0).save(image)
    assert message in refused("show", image, *arguments)
    assert not list(tmp_path.glob("*.gif"))


def test_frames_at_several_keeps_are_refused() -> None:
    animation.check_kind("frames", [0.5], 2)
    animation.check_kind("keep", [1.0, 0.5], 1)
    with pytest.raises(OptionError, match="needs one keep"):
        animation.check_kind("frames", [0.5, 0.25], 2)


def test_a_video_of_one_frame_does_not_move(subject: Model) -> None:
    shown = side_by_side.show(subject, [photo(64, 64, 0)], "?", [Setting.from_text("uniform", 0.5)])
    for kind in (animation.FRAMES, animation.KEEP):
        with pytest.raises(OptionError, match="Pass more --frames"):
            animation.build_stills(shown, kind, 1)


def test_a_gif_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(TokenPruneError, match="Cannot write"):
        animation.save([Image.new("RGB", (4, 4))] * 2, tmp_path / "none" / "a.gif")
