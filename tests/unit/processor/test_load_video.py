# SPDX-License-Identifier: Apache-2.0
"""`load_video` reads the frames of a complete decode, skips the other frames, and scales them to the budget."""

from __future__ import annotations

import io
import random
import struct
import sys
import time
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

FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}  # such a file does not store its number of frames
FRAMES, HEIGHT, WIDTH = 40, 128, 192
SETTINGS = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 10**6}}  # 64 pixels per token


@pytest.fixture
def av() -> Any:
    return pytest.importorskip("av", reason="needs PyAV")


def write_video(av: Any, path: Path, options: dict[str, str] | None = None) -> Path:
    """A video of moving blobs with a keyframe in every fifth frame."""
    scene = np.asarray(photo(HEIGHT, WIDTH))
    with av.open(str(path), "w", options=options or {}) as video:
        stream = video.add_stream({".avi": "mpeg4", ".m1v": "mpeg1video"}.get(path.suffix, "libx264"), rate=25)
        stream.width, stream.height, stream.pix_fmt, stream.options = WIDTH, HEIGHT, "yuv420p", {"g": "5", "crf": "10"}
        for index in range(FRAMES):
            video.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(scene, 3 * index, axis=1), format="rgb24")))
        video.mux(stream.encode())
    return path


def decode_all(av: Any, path: Path) -> list[Image.Image]:
    with av.open(str(path)) as video:
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


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.mp4", None), ("cut.mp4", FRAGMENTS), ("a.mkv", None), ("a.ts", None), ("a.avi", None), ("a.m1v", None)],
)
def test_frames_equal_those_of_a_complete_decode(av: Any, name: str, options: Any, tmp_path: Path) -> None:
    path = write_video(av, tmp_path / name, options)
    every = decode_all(av, path)
    for num_frames, indices in {1: [20], 4: [5, 15, 25, 35], 40: range(40), 99: range(40)}.items():
        for source in (path, str(path), path.read_bytes()):
            frames = load_video(source, num_frames=num_frames)
            assert [frame.tobytes() for frame in frames] == [every[index].tobytes() for index in indices]


def test_only_the_groups_of_the_frames_are_decoded(av: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened, counts = write_video(av, tmp_path / "a.mp4"), av.open, []
    monkeypatch.setattr(av, "open", lambda *args: Counter(opened(*args), counts))
    load_video(path, num_frames=2)  # frames 10 and 30 are keyframes
    assert len(counts) <= 8
    counts.clear()
    load_video(path, num_frames=40)
    assert len(counts) == 41  # each frame once, and the first frame for its size


@pytest.mark.parametrize("cls", [Qwen2VLVideoProcessor, Qwen3VLVideoProcessor])
def test_the_tokens_are_within_the_budget(av: Any, cls: Any, tmp_path: Path) -> None:
    path, processor = write_video(av, tmp_path / "a.mp4"), cls(**SETTINGS)
    every = decode_all(av, path)

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


def test_fewer_frames_are_used_where_small_frames_exceed_the_budget(av: Any, tmp_path: Path) -> None:
    path = write_video(av, tmp_path / "a.mp4")
    processor = Qwen2VLVideoProcessor(patch_size=4, size={"shortest_edge": 20 * 64, "longest_edge": 10**6})
    assert len(load_video(path, num_frames=8, processor=processor, max_visual_tokens=60)) == 4
    with pytest.raises(BudgetError, match="max_visual_tokens=5 is too small for a frame"):
        load_video(path, num_frames=8, processor=processor, max_visual_tokens=5)


def test_a_video_of_a_phone_is_turned_upright(av: Any, tmp_path: Path) -> None:
    path = write_video(av, tmp_path / "a.mp4")
    every = decode_all(av, path)
    data, (scale, unit) = bytearray(path.read_bytes()), (1 << 16, 1 << 30)
    start = data.index(struct.pack(">9i", scale, 0, 0, 0, scale, 0, 0, 0, unit), data.index(b"tkhd"))
    data[start : start + 36] = struct.pack(">9i", 0, scale, 0, -scale, 0, 0, 0, 0, unit)
    (frame,) = load_video(bytes(data), num_frames=1)
    assert frame.tobytes() == every[20].rotate(-90, expand=True).tobytes()
    (small,) = load_video(bytes(data), num_frames=1, processor=Qwen2VLVideoProcessor(**SETTINGS), max_visual_tokens=96)
    assert small.width < small.height < frame.height
    reference = frame.resize(small.size, Image.Resampling.BOX)
    assert np.abs(np.asarray(small, np.float32) - np.asarray(reference, np.float32)).mean() < 4


def test_damaged_files_give_an_error_and_never_hang(av: Any, tmp_path: Path) -> None:
    file = write_video(av, tmp_path / "a.mp4").read_bytes()
    front = write_video(av, tmp_path / "front.mp4", {"movflags": "faststart"}).read_bytes()
    for broken in (b"", b"no video", file[:300], file[: len(file) * 2 // 3]):
        with pytest.raises(OptionError, match="cannot read these bytes as a video"):
            load_video(broken)
    with pytest.raises(OptionError, match="it is truncated: it has"):
        load_video(front[: len(front) * 2 // 3])
    with pytest.raises(OptionError, match=r"cannot read .*missing\.mp4"):
        load_video(tmp_path / "missing.mp4")
    with av.open(str(tmp_path / "sound.mp4"), "w") as video:
        stream = video.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        video.mux(stream.encode(sound))
        video.mux(stream.encode())
    with pytest.raises(OptionError, match="it lacks a video stream"):
        load_video(tmp_path / "sound.mp4")
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


def test_wrong_arguments_are_refused_before_the_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_frames in (0, -1, 2.0, True):
        with pytest.raises(OptionError, match="num_frames="):
            load_video("missing.mp4", num_frames=num_frames)
    with pytest.raises(OptionError, match="Pass processor="):
        load_video("missing.mp4", max_visual_tokens=64)
    with pytest.raises(BudgetError, match="must be a number of tokens"):
        load_video("missing.mp4", processor=Qwen2VLVideoProcessor(), max_visual_tokens=0)
    with pytest.raises(UnsupportedSetupError, match="Pass a smaller num_frames"):
        load_video("missing.mp4", processor=CLIPImageProcessor(), max_visual_tokens=64)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingPackageError, match="pip install av"):
        load_video(io.BytesIO().getvalue())
