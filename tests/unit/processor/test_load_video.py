# SPDX-License-Identifier: Apache-2.0
"""`load_video` reads the frames of a complete decode, skips the other frames, and scales them to the budget."""

from __future__ import annotations

import io
import random
import resource
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import CLIPImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from processors import photo
from tokenprune import BudgetError, OptionError, TokenPruneError, UnsupportedSetupError, load_video
from tokenprune.errors import MissingPackageError
from video_files import CONTAINERS, import_av, trim, turn_clockwise, write_sound, write_video

FRAMES, HEIGHT, WIDTH = 40, 128, 192
SETTINGS = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 10**6}}  # 64 pixels per token


def write(path: Path, container: dict[str, str] | None = None, **more: Any) -> Path:
    """A video of moving blobs with a keyframe in every fifth frame."""
    scene = np.asarray(photo(HEIGHT, WIDTH))
    frames = (Image.fromarray(np.roll(scene, 3 * index, axis=1)) for index in range(FRAMES))
    return write_video(path, frames, (WIDTH, HEIGHT), container, **more)


def decode_all(path: Path | io.BytesIO) -> list[Image.Image]:
    with import_av().open(str(path) if isinstance(path, Path) else path) as video:
        return [frame.to_image() for frame in video.decode(video=0)]


class Counter:
    """A container that counts the decoded frames of all passes."""

    def __init__(self, file: Any, counts: list[int]) -> None:
        self.file, self.counts = file, counts

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        for frame in self.file.decode(*args, **kwargs):
            self.counts.append(1)
            yield frame


@pytest.mark.parametrize(("name", "container"), CONTAINERS)
def test_frames_equal_those_of_a_complete_decode(name: str, container: Any, tmp_path: Path) -> None:
    path = write(tmp_path / name, container)
    every = decode_all(path)
    for num_frames, indices in {1: [20], 4: [5, 15, 25, 35], 40: range(40), 99: range(40)}.items():
        for source in (path, str(path), path.read_bytes()):
            frames = load_video(source, num_frames=num_frames)
            assert [frame.tobytes() for frame in frames] == [every[index].tobytes() for index in indices]


def test_only_the_groups_of_the_frames_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, av, counts = write(tmp_path / "a.mp4"), import_av(), []
    opened = av.open
    monkeypatch.setattr(av, "open", lambda *args, **options: Counter(opened(*args, **options), counts))
    load_video(path, num_frames=2)  # frames 10 and 30 are keyframes
    assert len(counts) <= 8
    counts.clear()
    load_video(path, num_frames=40)
    assert len(counts) == 41  # each frame once, and the first frame for its size


@pytest.mark.parametrize("cls", [Qwen2VLVideoProcessor, Qwen3VLVideoProcessor])
def test_the_tokens_are_within_the_budget(cls: Any, tmp_path: Path) -> None:
    path, processor = write(tmp_path / "a.mp4"), cls(**SETTINGS)
    every = decode_all(path)

    def count(frames: list[Image.Image]) -> int:
        grid = processor(videos=[np.stack(frames)], do_sample_frames=False, return_tensors="pt")["video_grid_thw"]
        return int(grid.prod()) // processor.merge_size**2

    for budget in (64, 200, 700):
        frames = load_video(path, num_frames=8, processor=processor, max_visual_tokens=budget)
        assert 0.7 * budget <= count(frames) <= budget and len(frames) == 8
        small = every[2].resize(frames[0].size, Image.Resampling.BOX)
        assert np.abs(np.asarray(frames[0], np.float32) - np.asarray(small, np.float32)).mean() < 4
    frames = load_video(path, num_frames=8, processor=processor, max_visual_tokens=10**6)
    assert [frame.tobytes() for frame in frames] == [every[5 * index + 2].tobytes() for index in range(8)]


def test_fewer_frames_are_used_where_small_frames_exceed_the_budget(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4")
    processor = Qwen2VLVideoProcessor(patch_size=4, size={"shortest_edge": 20 * 64, "longest_edge": 10**6})
    assert len(load_video(path, num_frames=8, processor=processor, max_visual_tokens=60)) == 4
    with pytest.raises(BudgetError, match="max_visual_tokens=5 is too small for a frame"):
        load_video(path, num_frames=8, processor=processor, max_visual_tokens=5)


def test_a_video_of_a_phone_is_turned_upright(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4")
    every, data = decode_all(path), turn_clockwise(path.read_bytes())
    (frame,) = load_video(data, num_frames=1)
    assert frame.tobytes() == every[20].rotate(-90, expand=True).tobytes()
    (small,) = load_video(data, num_frames=1, processor=Qwen2VLVideoProcessor(**SETTINGS), max_visual_tokens=96)
    assert small.width < small.height < frame.height
    reference = frame.resize(small.size, Image.Resampling.BOX)
    assert np.abs(np.asarray(small, np.float32) - np.asarray(reference, np.float32)).mean() < 4


def test_damaged_files_give_an_error_and_never_hang(tmp_path: Path) -> None:
    file = write(tmp_path / "a.mp4").read_bytes()
    front = write(tmp_path / "front.mp4", {"movflags": "faststart"}).read_bytes()
    for broken in (b"", b"no video", file[:300], file[: len(file) * 2 // 3]):
        with pytest.raises(OptionError, match="cannot read these bytes as a video"):
            load_video(broken)
    with pytest.raises(OptionError, match="it is truncated: it has"):
        load_video(front[: len(front) * 2 // 3])
    with pytest.raises(OptionError, match=r"cannot read .*missing\.mp4"):
        load_video(tmp_path / "missing.mp4")
    with pytest.raises(OptionError, match="it lacks a video stream"):
        load_video(write_sound(tmp_path / "sound.mp4"))
    rng, start, outcomes = random.Random(0), time.monotonic(), {"read": 0, "refused": 0}
    for _ in range(60):
        damaged = bytearray(front)
        for _ in range(rng.randint(1, 30)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            load_video(bytes(damaged), num_frames=4)
            outcomes["read"] += 1
        except TokenPruneError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 3, outcomes
    assert time.monotonic() - start < 300, "a file hangs"


@pytest.mark.parametrize("bframes", ["0", "2"])
def test_a_trimmed_video_shows_the_frames_of_its_edit_list(bframes: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", {"movflags": "faststart"}, bf=bframes)
    trimmed = trim(path.read_bytes(), 10, 20)
    shown = decode_all(io.BytesIO(trimmed))
    assert 18 <= len(shown) <= 20
    frames = load_video(trimmed, num_frames=2)
    assert [frame.tobytes() for frame in frames] == [
        shown[len(shown) // 4].tobytes(),
        shown[3 * len(shown) // 4].tobytes(),
    ]
    with pytest.raises(OptionError, match="it is truncated: it has"):
        load_video(trimmed[: len(trimmed) * 2 // 3])


def test_frames_without_durations_are_evenly_spaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", bf="0")
    every, data = decode_all(path), bytearray(path.read_bytes())
    start = data.index(b"stts") + 12
    assert struct.unpack(">I", data[start : start + 4]) == (FRAMES,)  # an entry for all frames
    data[start + 4 : start + 8] = bytes(4)
    frames = load_video(bytes(data), num_frames=4)
    assert [frame.tobytes() for frame in frames] == [every[index].tobytes() for index in (5, 15, 25, 35)]


def test_an_avi_file_may_repeat_frames(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avi", times=[index + 7 * (index > 3) + 9 * (index > 20) for index in range(FRAMES)])
    every, data = decode_all(path), path.read_bytes()
    assert len(every) == FRAMES
    frames = load_video(path, num_frames=4)
    assert [frame.tobytes() for frame in frames] == [every[index].tobytes() for index in (5, 15, 25, 35)]
    with pytest.raises(OptionError, match="it is truncated: it has"):
        load_video(data[: len(data) * 2 // 3])


# -- GIF files


def noise(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(count)
    return [Image.fromarray(rng.integers(0, 255, (48, 64, 3)).astype(np.uint8)) for _ in range(count)]


def write_gif(frames: list[Image.Image], **options: Any) -> bytes:
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], **options)
    return file.getvalue()


@pytest.mark.parametrize("options", [{}, {"duration": 0}, {"duration": 100}, {"loop": 0}, {"disposal": 2}])
def test_a_gif_is_read_with_and_without_durations(
    options: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for count in (1, 2, 21):
        data = write_gif(noise(count), **options)
        with Image.open(io.BytesIO(data)) as file:
            assert getattr(file, "n_frames", 1) == count
            every = []
            for index in range(count):
                file.seek(index)
                every.append(file.convert("RGB"))
        indices = sorted({(2 * index + 1) * count // 8 for index in range(4)}) if count > 4 else range(count)
        path = tmp_path / "a.gif"
        path.write_bytes(data)
        for source in (data, path, data[:-1]):  # some writers leave out the last byte
            frames = load_video(source, num_frames=4)
            assert [frame.tobytes() for frame in frames] == [every[index].tobytes() for index in indices]


def test_a_gif_is_scaled_to_the_budget() -> None:
    processor = Qwen2VLVideoProcessor(**SETTINGS)
    frames = load_video(write_gif(noise(8)), num_frames=8, processor=processor, max_visual_tokens=64)
    grid = processor(videos=[np.stack(frames)], do_sample_frames=False, return_tensors="pt")["video_grid_thw"]
    assert 40 <= int(grid.prod()) // 4 <= 64 and len(frames) == 8


def test_a_truncated_gif_is_refused_at_every_byte() -> None:
    """Only an end between two blocks cannot be told from a file without the last byte."""
    data = write_gif(noise(4), duration=100, loop=0)
    read = 0
    for length in range(1, len(data) - 1, 7):
        try:
            read += len(load_video(data[:length])) < 4
        except OptionError as error:
            assert str(error).startswith("cannot read these bytes as a video")
    assert read <= 2
    with pytest.raises(OptionError, match="it is truncated after"):
        load_video(data[:-40])


def test_damaged_gif_files_give_an_error_and_never_hang() -> None:
    data, rng, start = write_gif(noise(4), duration=100), random.Random(0), time.monotonic()
    outcomes = {"read": 0, "refused": 0}
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 5)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            with warnings.catch_warnings(action="ignore"):
                load_video(bytes(damaged), num_frames=4)
            outcomes["read"] += 1
        except TokenPruneError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10, outcomes
    assert time.monotonic() - start < 300, "a file hangs"


# -- limit of pixels


def claim_size(data: bytes, side: int) -> bytes:
    """A GIF or raw AVI file whose header names this size."""
    changed = bytearray(data)
    if data.startswith(b"GIF"):
        changed[6:10] = struct.pack("<HH", side, side)
        return bytes(changed)
    start = data.index(b"strf") + 12
    changed[start : start + 8] = struct.pack("<ii", side, side)
    return bytes(changed)


@pytest.mark.parametrize("kind", ["gif", "avi"])
def test_a_header_with_too_many_pixels_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_small() -> bytes:
        if kind == "gif":
            return write_gif(noise(2))
        return write_video(tmp_path / "a.avi", noise(2), (64, 48), codec="rawvideo").read_bytes()

    data, before = write_small(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for side in (14_000, 30_000):
        with pytest.raises(OptionError, match="178956970 pixels"):
            load_video(claim_size(data, side))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB
    assert len(load_video(data)) == 2
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 48 // 2 - 1)
    with pytest.raises(OptionError, match="3070 pixels"):
        load_video(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert len(load_video(data)) == 2


def test_a_frame_that_is_larger_than_the_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder has the limit too: streams may change their size."""
    parts = [
        write_video(tmp_path / f"{width}.m1v", [Image.new("RGB", (width, 64))] * 6, (width, 64)).read_bytes()
        for width in (64, 640)
    ]
    joined = b"".join(parts)
    assert {frame.width for frame in load_video(joined, num_frames=12)} == {64, 640}
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 320 * 64 // 2)
    with pytest.raises(OptionError, match="cannot read these bytes as a video"):
        load_video(joined, num_frames=12)


def test_wrong_arguments_are_refused_before_the_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_frames in (0, -1, 2.0, True):
        with pytest.raises(OptionError, match="num_frames="):
            load_video("missing.mp4", num_frames=num_frames)
    with pytest.raises(OptionError, match="Pass processor="):
        load_video("missing.mp4", max_visual_tokens=64)
    with pytest.raises(BudgetError, match="must be a number of tokens"):
        load_video("missing.mp4", processor=Qwen2VLVideoProcessor(), max_visual_tokens=0)
    for processor in (CLIPImageProcessor(), Qwen2VLVideoProcessor):
        with pytest.raises(UnsupportedSetupError, match="Pass a smaller num_frames"):
            load_video("missing.mp4", processor=processor, max_visual_tokens=64)
    for source in (5, None, io.BytesIO(b""), ["a.mp4"]):
        with pytest.raises(OptionError, match=f"source must be a path or bytes, not {type(source).__name__}"):
            load_video(source)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingPackageError, match="pip install av"):
        load_video(io.BytesIO().getvalue())
