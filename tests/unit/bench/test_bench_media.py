# SPDX-License-Identifier: Apache-2.0
"""Images and videos from users: unusual modes, rotated, damaged, truncated, or with only sound."""

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


def build_image() -> Image.Image:
    """Return a red image with a blue square at the top left."""
    image = Image.new("RGB", (48, 32), RED)
    image.paste(BLUE, (0, 0, 16, 16))
    return image


def find_source(path: Path, folder: Path | None = None) -> media.Source:
    return media.find_source(str(path), folder or path.parent)


def is_close(image: Image.Image, pixel: tuple[int, int], color: tuple[int, int, int]) -> bool:
    return bool(np.abs(np.subtract(image.getpixel(pixel), color)).max() < 40)


# -- decoding for a budget ---------------------------------------------------------------------------------------


def test_a_token_budget_decodes_jpeg_files_smaller(tmp_path: Path, monkeypatch: Any) -> None:
    """Without a token budget, the inputs are bit-equal to the inputs of the full image."""
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

    def process(setting: dict[str, Any] | None) -> list[dict[str, Any]]:
        sizes.clear()
        with patched_by(subject, None if setting is None else Setting.from_json(setting)):
            return [backend._asked([question]) for question in questions]

    for setting in (None, {"method": "divprune", "keep": 0.25}):
        for actual, full_inputs in zip(process(setting), expected, strict=True):
            assert all(torch.equal(actual[name], full_inputs[name]) for name in full_inputs)
        assert sizes == [(800, 600), (800, 600)]
    process({"method": "downsample", "keep": 0.25})
    assert sizes == [(800, 600), (800, 600)]
    for setting in ({"max_visual_tokens": 64}, {"max_visual_tokens": 64, "method": "divprune", "keep": 0.5}):
        small, full = process(setting)
        assert sizes[0] == (144, 112) and sizes[1] == (800, 600)
        assert torch.equal(small["image_grid_thw"], full["image_grid_thw"]) and subject.visual_tokens(small) == 63
        assert (small["pixel_values"] - full["pixel_values"]).abs().mean() < 0.15
    with pytest.raises(BudgetError):
        process({"max_visual_tokens": 0})
    assert process(None)[0]["pixel_values"].equal(expected[0]["pixel_values"])


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
    build_image().convert(mode).save(tmp_path / name)
    decoded = read_image(find_source(tmp_path / name))
    assert (decoded.mode, decoded.size) == ("RGB", (48, 32))
    assert is_close(decoded, (2, 2), BLUE) and is_close(decoded, (40, 28), RED)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotate clockwise
    build_image().save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = read_image(find_source(tmp_path / "a.jpg"))
    assert upright.size == (32, 48)
    assert is_close(upright, (28, 4), BLUE) and is_close(upright, (2, 2), RED)
    (frame,) = read_frames([tmp_path / "a.jpg"], 8)
    assert frame.tobytes() == upright.tobytes()


def test_16_bit_grey_is_scaled_to_8_bits(tmp_path: Path) -> None:
    shades = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(shades).save(tmp_path / "a.png")
    pixels = np.asarray(read_image(find_source(tmp_path / "a.png")))
    np.testing.assert_array_equal(pixels, np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2))
    Image.fromarray(shades.astype(np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(RowError, match=r"cannot read a\.tiff as an image: its pixels have 32 bits"):
        read_image(find_source(tmp_path / "a.tiff"))


def test_a_note_names_the_row_of_an_animated_image(tmp_path: Path) -> None:
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


def test_animations_are_read_as_the_first_frame_or_as_a_video(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), (0, 0, 50 * index)) for index in range(5)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    assert read_image(find_source(tmp_path / "a.png")).getpixel((0, 0)) == (0, 0, 0)
    video = read_video(find_source(tmp_path / "a.png"), 2)
    assert [frame.getpixel((0, 0))[2] for frame in video] == [50, 150]
    data = (tmp_path / "a.png").read_bytes()
    assert len(read_video(media.find_source({"bytes": data, "path": "x.png"}, tmp_path), 3)) == 3


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")  # of Pillow
@each("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_damaged_images_raise_only_row_errors(kind: str) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8)
    Image.fromarray(noise).save(buffer, kind)
    content, rng, num_errors = buffer.getvalue(), np.random.default_rng(1), 0
    for trial in range(60):
        damaged = bytearray(content[: rng.integers(len(content))] if trial % 2 else content)
        for offset in rng.integers(0, max(1, len(damaged)), 4):
            damaged[offset : offset + 1] = bytes([rng.integers(256)])
        for read in (read_image, lambda source: read_video(source, 4)):
            try:
                read(media.find_source({"bytes": bytes(damaged), "path": None}, Path()))
            except RowError as error:
                num_errors += 1
                assert str(error).startswith("cannot read image as a") and "\n" not in str(error)
    assert num_errors > 20


# -- folders of frames


def test_a_folder_of_frames_is_read_in_numeric_order(tmp_path: Path) -> None:
    """File names are numbered like ffmpeg output. Other files are ignored, and rows may have Windows line ends."""
    for index in range(12):
        Image.new("RGB", (8, 6), (10 * index, 0, 0)).save(tmp_path / f"frame_{index}.PNG")
    (tmp_path / "._frame_0.PNG").write_bytes(b"of a system")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "slides.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "folder.png").mkdir()
    frames = read_video(find_source(tmp_path), 20)
    assert [frame.getpixel((0, 0))[0] for frame in frames] == [10 * index for index in range(12)]
    assert [frame.getpixel((0, 0))[0] for frame in read_frames([tmp_path], 2)] == [30, 90]
    rows = tmp_path.with_suffix(".jsonl")
    rows.write_bytes(f'{{"video": "{tmp_path.name}", "question": "q", "answer": "a"}}\r\n'.encode())
    (question,) = load_data(rows, frames=3).questions
    assert question.answers == ("a",) and [frame.getpixel((0, 0))[0] for frame in question.video] == [20, 60, 100]


def test_video_frames_of_several_sizes_are_rejected(tmp_path: Path) -> None:
    for index, size in enumerate([(8, 6), (8, 6), (6, 8)]):
        Image.new("RGB", size).save(tmp_path / f"{index}.png")
    with pytest.raises(RowError, match=r"as a video: its frames have several sizes, such as 8 x 6 and 6 x 8"):
        read_video(find_source(tmp_path), 8)
    assert len(read_video(find_source(tmp_path), 1)) == 1
    assert len(read_frames([tmp_path], 8)) == 3  # the images of a prompt may have several sizes


def test_a_model_rejects_video_frames_of_several_sizes() -> None:
    from tokenprune_bench.errors import DataError
    from tokenprune_bench.profiling.model import Model

    subject = Model(None, None, "none")
    with pytest.raises(DataError, match=r"Cannot use the video of 'what\?': its frames have several sizes"):
        subject.video_inputs([Image.new("RGB", (8, 6)), Image.new("RGB", (6, 8))], "what?")


# -- videos -----------------------------------------------------------------------------------------------------------


def write_numbered_video(path: Path, frames: int = 20, container: dict[str, str] | None = None) -> Path:
    """Write a video. Frame i has the grey value 10 i and a blue square at the top left."""
    images = [Image.new("RGB", (48, 32), (10 * index,) * 3) for index in range(frames)]
    for image in images:
        image.paste(BLUE, (0, 0, 16, 16))
    return write_video(path, images, (48, 32), container)


def read_indices(frames: list[Image.Image]) -> list[int]:
    """Return the index of each frame, computed from its grey value."""
    return [round(frame.getpixel((40, 24))[0] / 10) for frame in frames]


@pytest.mark.parametrize(("name", "container"), CONTAINERS)
def test_frames_of_a_video_are_evenly_spaced(name: str, container: Any, tmp_path: Path) -> None:
    path = write_numbered_video(tmp_path / name, container=container)
    video = read_video(find_source(path), 4)
    assert read_indices(video) == [2, 7, 12, 17]
    assert video[0].size == (48, 32) and is_close(video[0], (4, 4), BLUE)
    assert read_indices(read_video(find_source(path), 50)) == list(range(20))
    data = media.find_source({"bytes": path.read_bytes(), "path": None}, tmp_path)
    assert read_indices(read_video(data, 1)) == [10]
    assert read_indices(read_frames([path], 2)) == [5, 15]


def test_video_rotation_is_applied(tmp_path: Path) -> None:
    path = write_numbered_video(tmp_path / "a.mp4")
    path.write_bytes(turn_clockwise(path.read_bytes()))
    (frame,) = read_video(find_source(path), 1)
    assert frame.size == (32, 48)
    assert is_close(frame, (28, 4), BLUE) and not is_close(frame, (4, 4), BLUE) and not is_close(frame, (28, 44), BLUE)


def test_packet_counts_above_the_frame_count_are_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, av = write_numbered_video(tmp_path / "a.mkv"), import_av()
    open_video = av.open

    class Video:
        """Returns each packet twice, because old codecs can have more packets than frames."""

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

    monkeypatch.setattr(av, "open", lambda *args, **options: Video(open_video(*args, **options)))
    assert read_indices(read_video(find_source(path), 4)) == [2, 7, 12, 17]


def test_unreadable_videos_raise_row_errors(tmp_path: Path) -> None:
    content = write_numbered_video(tmp_path / "a.mp4").read_bytes()
    faststart = write_numbered_video(tmp_path / "front.mp4", container={"movflags": "faststart"}).read_bytes()
    write_numbered_video(tmp_path / "none.mp4", frames=0, container=FRAGMENTS)
    (tmp_path / "end.mp4").write_bytes(content[: len(content) * 2 // 3])  # the index of the frames is at the end
    (tmp_path / "cut.mp4").write_bytes(faststart[: len(faststart) * 2 // 3])
    noise = bytearray(content)
    noise[len(content) // 4 : len(content) // 3] = bytes(len(content) // 3 - len(content) // 4)
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
    assert [len(question.video) for question in data.questions] == [8]
    assert len(data.skipped) == len(messages)
    for line, (message, (name, reason)) in enumerate(zip(data.skipped, messages.items(), strict=True), 2):
        assert message.startswith(f"line {line}: cannot read {name} as a video: ")
        with pytest.raises(RowError, match=reason):
            read_video(find_source(tmp_path / name), 8)


def test_without_pyav_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(bytes(100))
    (tmp_path / "rows.jsonl").write_text('{"video": "a.mp4", "question": "q", "answer": "a"}\n')
    with pytest.raises(DataError, match=r"line 1: cannot read a\.mp4 as a video: .*pip install av"):
        load_data(tmp_path / "rows.jsonl")
    with pytest.raises(TokenPruneError, match="pip install av"):
        read_frames([tmp_path / "a.mp4"], 8)
