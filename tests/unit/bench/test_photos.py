# SPDX-License-Identifier: Apache-2.0
"""With a budget, `show` decodes a photograph at the scale of the model and of the drawing, and never completely."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from decoded_sizes import record_decodes
from each import each
from processors import photo
from tests.unit.api.test_cli import call, refused
from tokenprune.errors import TokenPruneError
from tokenprune.settings import Setting
from tokenprune_bench.profiling.media import read_frames
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.profiling.photo import Photo
from tokenprune_bench.show import contact_sheet, layout, side_by_side

QUESTION = "is there a star?"


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_qwen", device="cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A photograph that a phone has turned: 2048 pixels wide in the file, and 1536 wide upright."""
    exif = Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = 6
    photo(1536, 2048).save(tmp_path / "a.jpg", quality=92, exif=exif)
    return tmp_path / "a.jpg"


def settings(keep: float, *names: str, limit: int | None = 64) -> list[Setting]:
    more = {} if limit is None else {"max_visual_tokens": limit}
    return [Setting.from_json({"method": name, "keep": keep} | more) for name in names]


def test_a_photo_is_upright_and_as_large_as_its_drawing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = record_decodes(monkeypatch)
    (image,) = read_frames([file], 8, layout.find_largest)
    assert isinstance(image, Photo) and image.size == (1536, 2048)
    assert image.preview.size == layout.find_largest((1536, 2048)) == (1125, 1500)
    assert decoded == [(2048, 1536)]  # one half is too small
    decoded.clear()
    (small,) = read_frames([file], 8, lambda size: (300, 400))
    assert decoded == [(512, 384)] and small.preview.size == (300, 400)
    complete = ImageOps.exif_transpose(Image.open(file)).convert("RGB").resize((300, 400))
    assert np.abs(np.asarray(small.preview, int) - np.asarray(complete, int)).mean() < 4


def test_other_files_are_read_as_before(file: Path, tmp_path: Path) -> None:
    photo(60, 80).save(tmp_path / "a.png")
    frames = [photo(60, 80, seed=seed) for seed in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100)
    assert [type(image) for image in read_frames([tmp_path / "a.png", file], 8, layout.find_largest)] == [
        Image.Image, Photo,
    ]  # fmt: skip
    assert len(read_frames([tmp_path / "a.gif"], 8, layout.find_largest)) == 3
    (plain,) = read_frames([file], 8)
    assert plain.tobytes() == ImageOps.exif_transpose(Image.open(file)).convert("RGB").tobytes()
    data = file.read_bytes()
    for name, content in {"cut.jpg": data[: len(data) // 2], "empty.jpg": b"", "text.jpg": b"text"}.items():
        (tmp_path / name).write_bytes(content)
        for paths in ([tmp_path / name], [file, tmp_path / name]):
            with pytest.raises(TokenPruneError, match=f"cannot read .*{name} as an image"):
                read_frames(paths, 8, layout.find_largest)
    frames[0].save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=frames[1:2])
    for find_largest in (None, layout.find_largest):
        assert len(read_frames([tmp_path / "phone.jpg"], 8, find_largest)) == 1  # the second is a preview


@each("size", [(4000, 3000), (3000, 4000), (1000, 9000), (9000, 1000), (30_000, 600), (1500, 1500)])
def test_a_picture_has_the_pixels_of_the_largest_drawing(size: tuple[int, int]) -> None:
    drawn: list[tuple[int, int]] = []

    def draw_at(width: int) -> list[Image.Image]:
        drawn.append((width, round(width * size[1] / size[0])))
        return [Image.new("RGB", drawn[-1])]

    ratio = size[1] / size[0]
    panel = layout.Panel(Image.new("RGB", (10, 10)), "unpatched", (), ratio=ratio, draw=draw_at)
    layout.sheet(("model",), [[panel]])
    largest = layout.find_largest(size)
    assert all(side <= 1.01 * limit + 1 for side, limit in zip(drawn[-1], largest, strict=True))
    assert drawn[-1][0] > 0.95 * min(largest[0], size[0]) or drawn[-1][1] > 0.95 * min(largest[1], size[1])


def test_show_never_decodes_completely(subject: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = record_decodes(monkeypatch)
    photo(3000, 4000).save(tmp_path / "a.jpg", quality=92)
    images = read_frames([tmp_path / "a.jpg"], 8, layout.find_largest)
    shown = side_by_side.show(subject, images, QUESTION, settings(0.25, "divprune", "fastv"))
    assert decoded[0] == (2000, 1500)  # for the drawing
    assert {(1000, 750), (500, 375)} == set(decoded[1:])  # for the unpatched model, and for the budget
    decoded.clear()
    complete = [Image.open(tmp_path / "a.jpg").convert("RGB")]
    expected = side_by_side.show(subject, complete, QUESTION, settings(0.25, "divprune", "fastv"))
    assert shown.tokens == expected.tokens and shown.caption == expected.caption
    assert shown.caption[-1] == "max_visual_tokens=64: the methods get at most 64 tokens of an image"
    for view, other in zip(shown.seen, expected.seen, strict=True):
        assert view.grids == other.grids == [(7, 9)] and view.kept.sum() == other.kept.sum() == 16
        assert (view.kept == other.kept).mean() > 0.7  # the pixels differ slightly
    for panel, other in zip(shown.panels, expected.panels, strict=True):
        assert panel.title == other.title and panel.image.size == other.image.size
    difference = np.abs(np.asarray(shown.panels[0].image, int) - np.asarray(expected.panels[0].image, int))
    assert difference.mean() < 4


def test_without_a_budget_nothing_changes(subject: Model, file: Path) -> None:
    (image,) = read_frames([file], 8)
    plain = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    views = [
        contact_sheet.view_prompt(subject, [picture], QUESTION, settings(0.25, "divprune", limit=None)[0], False)
        for picture in (image, plain)
    ]
    assert (views[0].kept == views[1].kept).all() and views[0].answer == views[1].answer
    inputs = [contact_sheet.build_inputs(subject, [picture], QUESTION, False) for picture in (image, plain)]
    assert all(torch.equal(inputs[0][name], inputs[1][name]) for name in inputs[1])


def test_a_crop_is_described_in_pixels_of_the_file(tmp_path: Path) -> None:
    llava = load_model("demo_vlm", device="cpu")
    photo(1200, 4800).save(tmp_path / "wide.jpg")
    shown = [
        side_by_side.show(llava, read_frames([tmp_path / "wide.jpg"], 8, find), QUESTION, settings(0.25, "divprune"))
        for find in (layout.find_largest, None)
    ]
    notes = [[int(word) for word in result.notes[0].replace(":", "").split() if word.isdigit()] for result in shown]
    assert len(notes[0]) >= 4 and np.abs(np.subtract(*notes)).max() < 60
    assert notes[0][-2:] == [4800, 1200]


def test_the_command_takes_a_budget(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = record_decodes(monkeypatch)
    monkeypatch.setattr(layout, "find_largest", lambda size: (300, 400))
    options = ("--device", "cpu", "--model", "demo_qwen", "--out", tmp_path / "kept.png")
    result = call("show", file, "--max-visual-tokens", 64, *options)
    assert "→ 16" in result.stdout and "at most 64 tokens of an image" in result.stdout
    assert max(map(max, decoded)) <= 1024
    decoded.clear()
    call("show", file, "--methods", "downsample", "--keep", 64, *options)
    assert max(map(max, decoded)) <= 1024  # the same budget
    decoded.clear()
    call("show", file, "--methods", "downsample,divprune", "--keep", 64, *options)
    assert max(map(max, decoded)) == 2048  # divprune reads the complete image
    assert "resizes images" in refused("show", file, "--methods", "dynres", "--max-visual-tokens", 64, *options)
