# SPDX-License-Identifier: Apache-2.0
"""Images and videos as users have them: odd modes, turned, damaged, cut off, with sound only."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from each import each
from processors import photo
from tokenprune.errors import BudgetError, TokenPruneError
from tokenprune.settings import Setting
from tokenprune_bench.backend import HfBackend
from tokenprune_bench.data import load_data
from tokenprune_bench.errors import DataError
from tokenprune_bench.profiling import media
from tokenprune_bench.profiling.media import RowError, read_frames, read_image, read_video
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.profiling.patched import patched_by
from video_files import CONTAINERS, FRAGMENTS, import_av, turn_clockwise, write_sound, write_video

RED, BLUE = (250, 10, 10), (10, 10, 250)


def image() -> Image.Image:
    """Red, with a blue corner at the top left."""
    image = Image.new("RGB", (48, 32), RED)
    image.paste(BLUE, (0, 0, 16, 16))
    return image


def source(path: Path, folder: Path | None = None) -> media.Source:
    return media.find_source(str(path), folder or path.parent)


def near(image: Image.Image, place: tuple[int, int], color: tuple[int, int, int]) -> bool:
    return bool(np.abs(np.subtract(image.getpixel(place), color)).max() < 40)


# -- decoding for a budget ---------------------------------------------------------------------------------------


def test_a_setting_with_a_number_of_tokens_decodes_jpeg_files_smaller(tmp_path: Path, monkeypatch: Any) -> None:
    """Without a budget, and with a share, questions and timings get equal bits."""
    photo(600, 800).save(tmp_path / "a.jpg", quality=95)
    photo(600, 800).save(tmp_path / "a.png")
    rows = [{"image": name, "question": "what?", "answer": "cat"} for name in ("a.jpg", "a.png")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    questions = load_data(tmp_path).questions
    subject = load_model("demo_qwen", device="cpu")
    backend = HfBackend(subject)
    sizes: list[tuple[int, int]] = []
    inputs = subject.inputs
    monkeypatch.setattr(
        subject, "inputs", lambda images, *rest: sizes.extend(i.size for (i,) in images) or inputs(images, *rest)
    )
    expected = [inputs([[image] for image in question.images], ["what?"]) for question in questions]

    def read(setting: dict[str, Any] | None) -> list[dict[str, Any]]:
        sizes.clear()
        with patched_by(subject, None if setting is None else Setting.from_json(setting)):
            return [backend._asked([question]) for question in questions]

    for setting in (None, {"method": "divprune", "keep": 0.25}):
        for made, plain in zip(read(setting), expected, strict=True):
            assert all(torch.equal(made[name], plain[name]) for name in plain)
        assert sizes == [(800, 600), (800, 600)]
    read({"method": "downsample", "keep": 0.25})
    assert sizes == [(800, 600), (800, 600)]
    for setting in ({"max_visual_tokens": 64}, {"max_visual_tokens": 64, "method": "divprune", "keep": 0.5}):
        small, full = read(setting)
        assert sizes[0] == (144, 112) and sizes[1] == (800, 600)
        assert torch.equal(small["image_grid_thw"], full["image_grid_thw"]) and subject.visual_tokens(small) == 63
        assert (small["pixel_values"] - full["pixel_values"]).abs().mean() < 0.15
    with pytest.raises(BudgetError):
        read({"max_visual_tokens": 0})
    assert read(None)[0]["pixel_values"].equal(expected[0]["pixel_values"])


# -- images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("p.png", "P"),
        ("rgba.png", "RGBA"),
        ("cmyk.jpg", "CMYK"),
        ("a ä 漢字 🙂.png", "RGB"),
        ("p.gif", "P"),
        ("a.webp", "RGB"),
    ],
)
def test_images_of_any_mode_become_rgb(name: str, mode: str, tmp_path: Path) -> None:
    image().convert(mode).save(tmp_path / name)
    found = read_image(source(tmp_path / name))
    assert (found.mode, found.size) == ("RGB", (48, 32))
    assert near(found, (2, 2), BLUE) and near(found, (40, 28), RED)


def test_a_photo_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    image().save(tmp_path / "a.jpg", exif=exif, quality=95)
    found = read_image(source(tmp_path / "a.jpg"))
    assert found.size == (32, 48)
    assert near(found, (28, 4), BLUE) and near(found, (2, 2), RED)
    (frame,) = read_frames([tmp_path / "a.jpg"], 8)
    assert frame.tobytes() == found.tobytes()


def test_grey_with_sixteen_bits_keeps_its_shades(tmp_path: Path) -> None:
    shades = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(shades).save(tmp_path / "a.png")
    found = np.asarray(read_image(source(tmp_path / "a.png")))
    np.testing.assert_array_equal(found, np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2))
    Image.fromarray(shades.astype(np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(RowError, match=r"cannot read a\.tiff as an image: its pixels have 32 bits"):
        read_image(source(tmp_path / "a.tiff"))


def test_an_animated_image_is_noted_with_its_row(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 6), (40 * index, 0, 0)) for index in range(3)]
    frames[0].save(tmp_path / "moves.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "phone.mpo", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "still.gif")
    names = ("still.gif", "moves.gif", "phone.mpo")
    rows = [{"image": name, "question": "what?", "answer": "red"} for name in names]
    rows.append({"video": "moves.gif", "question": "what?", "answer": "red"})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_data(file).notes == (
        'line 2: an animated image is read as its first frame. Name it "video" to read all frames.',
    )


def test_an_animation_is_its_first_frame_or_a_video(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), (0, 0, 50 * index)) for index in range(5)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    assert read_image(source(tmp_path / "a.png")).getpixel((0, 0)) == (0, 0, 0)
    video = read_video(source(tmp_path / "a.png"), 2)
    assert [frame.getpixel((0, 0))[2] for frame in video] == [50, 150]
    data = (tmp_path / "a.png").read_bytes()
    assert len(read_video(media.find_source({"bytes": data, "path": "x.png"}, tmp_path), 3)) == 3


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")  # of Pillow
@each("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_no_damage_raises_anything_but_a_bad_row(kind: str) -> None:
    made = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8)
    Image.fromarray(noise).save(made, kind)
    whole, rng, refused = made.getvalue(), np.random.default_rng(1), 0
    for number in range(60):
        damaged = bytearray(whole[: rng.integers(len(whole))] if number % 2 else whole)
        for place in rng.integers(0, max(1, len(damaged)), 4):
            damaged[place : place + 1] = bytes([rng.integers(256)])
        for read in (read_image, lambda source: read_video(source, 4)):
            try:
                read(media.find_source({"bytes": bytes(damaged), "path": None}, Path()))
            except RowError as error:
                refused += 1
                assert str(error).startswith("cannot read image as a") and "\n" not in str(error)
    assert refused > 20


# -- folders of frames


def test_a_folder_has_its_frames_in_order_and_nothing_else(tmp_path: Path) -> None:
    """As ffmpeg numbers them, with what systems leave there; suffixes in capitals, rows that Windows wrote."""
    for number in range(12):
        Image.new("RGB", (8, 6), (10 * number, 0, 0)).save(tmp_path / f"frame_{number}.PNG")
    (tmp_path / "._frame_0.PNG").write_bytes(b"of a system")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "slides.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "folder.png").mkdir()
    frames = read_video(source(tmp_path), 20)
    assert [frame.getpixel((0, 0))[0] for frame in frames] == [10 * number for number in range(12)]
    assert [frame.getpixel((0, 0))[0] for frame in read_frames([tmp_path], 2)] == [30, 90]
    rows = tmp_path.with_suffix(".jsonl")
    rows.write_bytes(f'{{"video": "{tmp_path.name}", "question": "q", "answer": "a"}}\r\n'.encode())
    (question,) = load_data(rows, frames=3).questions
    assert question.answers == ("a",) and [frame.getpixel((0, 0))[0] for frame in question.video] == [20, 60, 100]


def test_frames_of_several_sizes_are_a_bad_row(tmp_path: Path) -> None:
    for number, size in enumerate([(8, 6), (8, 6), (6, 8)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    with pytest.raises(RowError, match=r"as a video: its frames have several sizes, such as 8 x 6 and 6 x 8"):
        read_video(source(tmp_path), 8)
    assert len(read_video(source(tmp_path), 1)) == 1
    assert len(read_frames([tmp_path], 8)) == 3  # images of a prompt may


def test_frames_of_several_sizes_are_no_video_for_a_model() -> None:
    from tokenprune_bench.errors import DataError
    from tokenprune_bench.profiling.model import Model

    subject = Model(None, None, "none")
    with pytest.raises(DataError, match=r"Cannot use the video of 'what\?': its frames have several sizes"):
        subject.video_inputs([Image.new("RGB", (8, 6)), Image.new("RGB", (6, 8))], "what?")


# -- videos -----------------------------------------------------------------------------------------------------------


def write(path: Path, frames: int = 20, container: dict[str, str] | None = None) -> Path:
    """A video whose frame i is grey 10 i, with a blue corner at the top left."""
    images = [Image.new("RGB", (48, 32), (10 * index,) * 3) for index in range(frames)]
    for image in images:
        image.paste(BLUE, (0, 0, 16, 16))
    return write_video(path, images, (48, 32), container)


def shades(frames: list[Image.Image]) -> list[int]:
    """The number of each frame, told from its shade."""
    return [round(frame.getpixel((40, 24))[0] / 10) for frame in frames]


@pytest.mark.parametrize(("name", "container"), CONTAINERS)
def test_frames_of_a_video_are_evenly_chosen(name: str, container: Any, tmp_path: Path) -> None:
    path = write(tmp_path / name, container=container)
    video = read_video(source(path), 4)
    assert shades(video) == [2, 7, 12, 17]
    assert video[0].size == (48, 32) and near(video[0], (4, 4), BLUE)
    assert shades(read_video(source(path), 50)) == list(range(20))
    data = media.find_source({"bytes": path.read_bytes(), "path": None}, tmp_path)
    assert shades(read_video(data, 1)) == [10]
    assert shades(read_frames([path], 2)) == [5, 15]


def test_a_video_of_a_phone_is_turned_upright(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4")
    path.write_bytes(turn_clockwise(path.read_bytes()))
    (frame,) = read_video(source(path), 1)
    assert frame.size == (32, 48)
    assert near(frame, (28, 4), BLUE) and not near(frame, (4, 4), BLUE) and not near(frame, (28, 44), BLUE)


def test_more_packets_than_frames_are_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, av = write(tmp_path / "a.mkv"), import_av()
    opened = av.open

    class Video:
        """Counts twice as many packets as there are, as old codecs may."""

        def __init__(self, video: Any) -> None:
            self.video = video

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self.video.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.video, name)

        def demux(self, stream: Any) -> list[Any]:
            return 2 * list(self.video.demux(stream))

    monkeypatch.setattr(av, "open", lambda *given, **options: Video(opened(*given, **options)))
    assert shades(read_video(source(path), 4)) == [2, 7, 12, 17]


def test_videos_that_cannot_be_read_are_bad_rows(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.mp4").read_bytes()
    front = write(tmp_path / "front.mp4", container={"movflags": "faststart"}).read_bytes()
    write(tmp_path / "none.mp4", frames=0, container=FRAGMENTS)
    (tmp_path / "end.mp4").write_bytes(whole[: len(whole) * 2 // 3])  # what says where frames are is at the end
    (tmp_path / "cut.mp4").write_bytes(front[: len(front) * 2 // 3])
    noise = bytearray(whole)
    noise[len(whole) // 4 : len(whole) // 3] = bytes(len(whole) // 3 - len(whole) // 4)
    (tmp_path / "noise.mp4").write_bytes(noise)
    (tmp_path / "empty.mp4").write_bytes(b"")
    write_sound(tmp_path / "sound.mp4")
    messages = {
        "none.mp4": "its video stream is empty",
        "end.mp4": "it lacks a video stream|FFmpeg: ",
        "cut.mp4": r"it is truncated: it has \d+ of 20 frames",
        "noise.mp4": "FFmpeg: ",
        "empty.mp4": "the file is empty",
        "sound.mp4": "it lacks a video stream",
    }
    rows = [f'{{"video": "{name}", "question": "q", "answer": "a"}}\n' for name in ("a.mp4", *messages)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    data = load_data(tmp_path / "rows.jsonl", skip_bad=True, frames=8)
    assert [len(one.video) for one in data.questions] == [8]
    assert len(data.skipped) == len(messages)
    for number, (said, (name, why)) in enumerate(zip(data.skipped, messages.items(), strict=True), 2):
        assert said.startswith(f"line {number}: cannot read {name} as a video: ")
        with pytest.raises(RowError, match=why):
            read_video(source(tmp_path / name), 8)


def test_without_pyav_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(bytes(100))
    (tmp_path / "rows.jsonl").write_text('{"video": "a.mp4", "question": "q", "answer": "a"}\n')
    with pytest.raises(DataError, match=r"line 1: cannot read a\.mp4 as a video: .*pip install av"):
        load_data(tmp_path / "rows.jsonl")
    with pytest.raises(TokenPruneError, match="pip install av"):
        read_frames([tmp_path / "a.mp4"], 8)
