# SPDX-License-Identifier: Apache-2.0
"""`tokenprune show` for several frames: frame selection, tokens per frame, and drawings of merged groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

import tokenprune
from processors import LIMITS, demo_model, llava, photo, special_tokenizer
from tests.unit.api.test_cli import call, refused
from tokenprune import OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.settings import Setting
from tokenprune_bench.profiling.media import read_frames
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.show import contact_sheet, draw, layout, side_by_side
from tokenprune_bench.show.contact_sheet import _GAP
from tokenprune_bench.show.grids import get_grids
from zoo import FAMILIES

CELL = 16  # pixels of a patch in the drawings
COLORS = [(200, 100, 0), (0, 120, 200), (40, 160, 80), (120, 0, 140), (90, 90, 90), (10, 90, 60)]


@pytest.fixture
def subject() -> Model:
    return Model(demo_model(), llava(), "shipped")


def flat(index: int, size: int = 64) -> Image.Image:
    return Image.new("RGB", (size, size), COLORS[index])


# -- reading


def test_frames_come_from_files_folders_and_animations(tmp_path: Path) -> None:
    for index in range(5):
        flat(index).save(tmp_path / f"{index}.png")
    (tmp_path / "notes.txt").write_text("no image")
    videos = tmp_path / "videos"
    videos.mkdir()
    flat(0).save(videos / "video.gif", save_all=True, append_images=[flat(1), flat(2), flat(3), flat(4)])

    def read_colors(*paths: Path, max_frames: int = 8) -> list[int]:
        pixels = [np.asarray(frame, int)[32, 32] for frame in read_frames(paths, max_frames)]
        return [int(np.abs(np.array(COLORS) - pixel).sum(1).argmin()) for pixel in pixels]

    assert read_colors(tmp_path) == read_colors(videos / "video.gif") == [0, 1, 2, 3, 4]
    assert read_colors(tmp_path, max_frames=2) == read_colors(videos / "video.gif", max_frames=2) == [1, 3]
    assert read_colors(tmp_path / "3.png", tmp_path / "0.png") == [3, 0]
    assert read_colors(tmp_path / "3.png") == [3]
    assert read_colors(tmp_path, max_frames=1) == [2]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenPruneError, match="has no images"):
        read_frames([tmp_path / "empty"], 8)
    with pytest.raises(TokenPruneError, match="as an image"):
        read_frames([tmp_path / "notes.txt"], 8)


# -- the shipped model: the frames are images of a prompt


def cells(image: Image.Image, grids: list[tuple[int, int]], cell: int = CELL) -> list[np.ndarray]:
    """Return the center pixel of each patch of adjacent drawings, `[height, width, 3]` for each drawing."""
    pixels, x_offset, centers = np.asarray(image, int), 0, []
    for height, width in grids:
        drawing = pixels[: height * cell, x_offset : x_offset + width * cell]
        centers.append(drawing[cell // 2 :: cell, cell // 2 :: cell])
        x_offset += width * cell + _GAP
    return centers


@pytest.mark.parametrize("method, kept", [("divprune", 0.25), ("fastv", 16), ("pool", 0.25), ("downsample", 0.25)])
def test_a_strip_of_images(subject: Model, method: str, kept: float) -> None:
    frames = [photo(90, 120, seed).point(lambda value: 80 + 6 * value // 10) for seed in range(3)]
    setting = Setting.from_text(method, kept)
    image, num_tokens = contact_sheet.look(subject, frames, "is there a star?", setting, False, 16 * CELL)
    num_kept = kept if isinstance(kept, int) else round(256 * kept)
    side = 8 if method == "downsample" else 16
    assert num_tokens == 3 * num_kept and image.size == (3 * 16 * CELL + 2 * _GAP, 16 * CELL)
    for colors in cells(image, [(side, side)] * 3, 16 * CELL // side):
        num_light = int((colors.max(-1) > 255 * draw._DARK + 2).sum())
        assert num_light == (num_kept if method in ("divprune", "fastv") else side * side)


def test_each_frame_gets_its_own_tokens() -> None:
    grids, rng = [(2, 3), (4, 4), (1, 5)], np.random.default_rng(0)
    kept = rng.random(27) < 0.5
    groups = np.where(kept, np.arange(27), -1)
    kept[[1, 8]], groups[[1, 8]] = [True, False], 1
    frames = [flat(index, 16 * index + 16) for index in range(3)]
    image = contact_sheet.row(contact_sheet.PromptView(frames, grids, kept, groups).drawings(CELL))
    assert image.size == ((3 + 4 + 5) * CELL + 2 * _GAP, 4 * CELL)
    start = 0
    for index, ((height, width), colors) in enumerate(zip(grids, cells(image, grids), strict=True)):
        frame_slice = slice(start, start := start + height * width)
        is_shown, is_merged = (
            (groups[frame_slice] >= 0).reshape(height, width),
            (groups[frame_slice] == 1).reshape(height, width),
        )
        np.testing.assert_array_equal((colors == COLORS[index]).all(-1), is_shown & ~is_merged)
        tinted = colors[is_merged & ~kept[frame_slice].reshape(height, width)]
        # Merged patches show their mean color in both frames.
        expected = (np.array(COLORS[0]) + np.array(COLORS[1])) / 2
        assert np.abs(tinted - expected).max(initial=0) <= 1
        # The kept patch shows the dot of its group.
        assert ((colors[is_merged & kept[frame_slice].reshape(height, width)]) == draw.color_of(1)).all()
    assert len({draw.color_of(group) for group in range(20)}) == 20


def test_a_long_strip_goes_on_below_and_each_frame_is_counted() -> None:
    grids, kept = [(1, 2)] * 11, np.arange(22) % 3 == 0
    view = contact_sheet.PromptView(
        [flat(n % 6, 16) for n in range(11)], grids, kept, np.where(kept, np.arange(22), -1)
    )
    strip = side_by_side._strip(view.drawings(CELL))
    shown = side_by_side.Shown((), [side_by_side.Panel(strip, "", ())] * 2, [view], "", 22)
    assert strip.size == (8 * 2 * CELL + 7 * _GAP, 2 * CELL + _GAP)
    # A kept patch of the tenth frame.
    assert strip.getpixel((2 * CELL + _GAP + CELL // 2, CELL + _GAP + CELL // 2)) == COLORS[9 % 6]
    assert shown.pair(0).size == (strip.width, 2 * strip.height + _GAP)  # two strips in a column
    assert view.count_kept() == [(int(kept[2 * n : 2 * n + 2].sum()), 2) for n in range(11)]


def test_frames_of_squares_with_a_newline_behind_them_are_drawn(build: Any) -> None:
    """LLaVA-OneVision inputs have no grid sizes, and a newline token follows the last frame."""
    family = FAMILIES["llava_onevision"]
    subject = Model(build(family), SimpleNamespace(image_processor=None), "tiny")
    inputs = dict(family.make_inputs(images=[0], video=3))
    assert get_grids(subject, inputs, 3, True) == [(2, 2)] * 3
    assert subject.visual_tokens(inputs) == 13


def test_what_cannot_be_drawn(subject: Model) -> None:
    frames = [photo(90, 120, seed) for seed in range(2)]
    with pytest.raises(OptionError, match="cannot be drawn"):
        side_by_side.show(subject, frames, "image 2?", [Setting.from_text("view_select", 1.0)])
    with pytest.raises(OptionError, match="cannot be drawn"):
        contact_sheet.look(subject, frames[:1], "image 2?", Setting.from_text("view_select", 1.0), False, 64)
    inputs = subject.inputs([frames], ["is there a star?"])
    assert get_grids(subject, inputs, 2, False) == [(16, 16)] * 2
    tiles = inputs["pixel_values"].repeat(2, 1, 1, 1)
    for pixels in (tiles, tiles[None]):
        with pytest.raises(UnsupportedSetupError, match="tiles"):
            get_grids(subject, inputs | {"pixel_values": pixels}, 2, False)
    with pytest.raises(UnsupportedSetupError, match="do not form a grid"):
        get_grids(subject, inputs | {"input_ids": inputs["input_ids"][:, 9:]}, 2, False)
    with pytest.raises(UnsupportedSetupError, match="do not form a grid"):
        get_grids(subject, inputs, 2, True)


# -- a model that takes videos


class Video(Model):
    """Model with synthetic video inputs, because the tiny vocabulary is too small for a tokenizer."""

    def video_inputs(self, frames: Any, question: str) -> dict[str, Any]:
        self.seen = len(frames)
        return dict(FAMILIES["qwen2_vl"].make_inputs(images=[0], video=True))


@pytest.mark.parametrize("method", ["divprune", "pool"])
def test_a_video_is_drawn_by_its_own_grid(method: str, build: Any) -> None:
    model = build(FAMILIES["qwen2_vl"])
    processor = SimpleNamespace(
        video_processor=object(), batch_decode=lambda ids, **options: ["?"] * len(ids), tokenizer=None
    )
    subject = Video(model, processor, "tiny")
    num_steps, height, width = subject.video_inputs([], "")["video_grid_thw"][0].tolist()
    grids = [(height // 2, width // 2)] * num_steps
    setting = Setting.from_text(method, 0.5)
    shown = side_by_side.show(subject, [flat(index) for index in range(2 * num_steps)], "?", [setting])
    (view,) = shown.seen
    assert subject.seen == 2 * num_steps
    num_tokens = num_steps * height * width // 4
    assert (shown.tokens, int(view.kept.sum())) == (num_tokens, round(num_tokens / 2))
    drawings = cells(contact_sheet.row(view.drawings(CELL)), grids)
    if method == "divprune":
        num_colored = sum(int((colors == COLORS[2 * index]).all(-1).sum()) for index, colors in enumerate(drawings))
        assert num_colored == round(num_tokens / 2), "every kept patch shows the first of its two frames"
    counts = view.count_kept()
    assert sum(kept for kept, _ in counts) == view.kept.sum() and len(counts) == num_steps
    assert not tokenprune.is_patched(model)


def test_frames_become_a_video_of_a_real_processor() -> None:
    special = special_tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    template = "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'video' %}<|video_pad|>{% else %}"
    template += "{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    limits = dict(size={"shortest_edge": 64, "longest_edge": 10**6}, patch_size=4)
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**LIMITS), special, Qwen2VLVideoProcessor(**limits), chat_template=template
    )
    subject = Model(SimpleNamespace(dtype=torch.float32, device="cpu"), processor, "half")
    inputs = subject.video_inputs([photo(16, 32, seed) for seed in range(4)], "what color?")
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 8]]
    assert int((inputs["input_ids"] == processor.video_token_id).sum()) == 2 * 4 * 8 // 4


# -- the command


def test_show_takes_frames(tmp_path: Path) -> None:
    for index in range(3):
        photo(64, 64, index).save(tmp_path / f"{index}.png")
    out = tmp_path / "strip.png"
    result = call("show", tmp_path, "--method", "uniform", "--frames", 2, "--details", "--device", "cpu", "--out", out)
    assert "512 → 128" in result.output and "of each frame as the model has it: 64/256 64/256" in result.output
    assert Image.open(out).width == layout.WIDTH
    (tmp_path / "none").mkdir()
    assert "no images" in refused("show", tmp_path / "none")


@pytest.fixture
def video(tmp_path: Path) -> Path:
    """A GIF of 20 frames. Eight frames exceed the context of the shipped model."""
    first, *rest = (photo(64, 64, index) for index in range(20))
    first.save(tmp_path / "video.gif", save_all=True, append_images=rest)
    return tmp_path / "video.gif"


@pytest.mark.parametrize("method", ["dart", "downsample"])
def test_show_takes_as_many_frames_as_the_context_holds(
    video: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, generate = [], Model.generate

    def spy(self: Model, inputs: dict[str, Any], **options: Any) -> list[str]:
        lengths.append(inputs["input_ids"].shape[1] + self.max_new_tokens)
        return generate(self, inputs, **options)

    monkeypatch.setattr(Model, "generate", spy)
    out = tmp_path / "strip.png"
    output = call("show", video, "--method", method, "--device", "cpu", "--out", out).output
    assert "7 of 8 frames are used: all frames and the question have" in output and "context is 2048" in output
    assert "1792 → 448" in output and max(lengths) <= 2048
    assert Image.open(out).width == layout.WIDTH
    output = call("show", video, "--method", method, "--frames", 7, "--device", "cpu", "--out", out).output
    assert "1792 → 448" in output and "are used" not in output


def test_frames_that_fit_are_chosen_evenly_from_the_whole_video(subject: Model, video: Path) -> None:
    frames, note = contact_sheet.fit_frames(
        subject, lambda max_frames: read_frames([video], max_frames), 20, "?", Setting.from_text("dart")
    )
    assert "7 of 20 frames" in note
    for frame, expected in zip(frames, read_frames([video], 7), strict=True):
        np.testing.assert_array_equal(np.asarray(frame), np.asarray(expected))
    frames, note = contact_sheet.fit_frames(
        subject, lambda max_frames: read_frames([video], max_frames), 3, "?", Setting.from_text("dart")
    )
    assert len(frames) == 3 and note is None


def test_a_question_that_fills_the_context_is_refused(video: Path, tmp_path: Path) -> None:
    flat(0).save(tmp_path / "one.png")
    for path in (video, tmp_path / "one.png"):
        output = refused("show", path, "--question", "a " * 2000, "--device", "cpu")
        assert "context is 2048" in output and "shorter question" in output
