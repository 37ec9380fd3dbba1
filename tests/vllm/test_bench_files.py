# SPDX-License-Identifier: Apache-2.0
"""`tokenprune bench --backend vllm` sends JPEG files as they are, and a limit of tokens decodes them small."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from conftest import stop
from tokenprune.integrations.vllm.frontend import media
from tokenprune.settings import Setting
from tokenprune_bench.data import load_data
from tokenprune_bench.vllm_backend import Chat, VllmBackend
from tokenprune_bench.vllm_offline import OfflineEngine
from tokenprune_demo import MODELS

ARGUMENTS = dict(enforce_eager=True, max_model_len=2048, max_num_seqs=4, block_size=32)
LIMIT = {"max_visual_tokens": 64}
FULL = 1564  # tokens of an image of 1536 x 2048 pixels


@pytest.fixture(scope="module")
def backend() -> Iterator[VllmBackend]:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    stop()
    engine = OfflineEngine(str(MODELS["demo_qwen"]), "float32", ARGUMENTS, images=2)
    yield VllmBackend(engine, "", 4)
    engine.close()
    del engine.llm
    gc.collect()
    cleanup_dist_env_and_memory()


def write_questions(folder: Path, height: int, width: int) -> list[Any]:
    """Two questions about a picture: a JPEG file that a phone has turned, and a PNG file with its pixels."""
    exif = Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = 6
    noise = np.random.default_rng(0).integers(0, 255, (6, 8, 3)).astype(np.uint8)
    picture = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
    picture.save(folder / "a.jpg", quality=92, exif=exif)
    ImageOps.exif_transpose(Image.open(folder / "a.jpg")).save(folder / "a.png")
    rows = [{"image": name, "question": "what is shown?", "answer": "cat"} for name in ("a.jpg", "a.png")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_data(folder / "rows.jsonl").questions


def test_a_jpeg_file_gets_the_answer_of_its_pixels(backend: VllmBackend, tmp_path: Path) -> None:
    questions = write_questions(tmp_path, 192, 256)
    for index, setting in enumerate((None, Setting.from_text("divprune", 0.25))):
        with backend.answering(setting) as answer:
            (jpeg, png), cost = answer(index, questions)
        assert jpeg == png and cost["visual_tokens_in"] == 2 * 12 * 16


def test_a_share_counts_the_complete_image_beside_a_cached_image(backend: VllmBackend, tmp_path: Path) -> None:
    setting, chats = {"method": "downsample", "keep": 0.05}, []
    for height, width in ((1536, 2048), (480, 640)):
        folder = tmp_path / str(width)
        folder.mkdir()
        chats.append([backend._chat(question) for question in write_questions(folder, height, width)])
    (large, large_png), (small, small_png) = chats
    backend.engine.ask([large], setting, 1)
    replies = backend.engine.ask(
        [Chat(large.images + small.images, "?"), Chat(large_png.images + small_png.images, "?")], setting, 1
    )
    assert replies[0] == replies[1] and replies[0].prompt_tokens > 77 + 50


def test_a_limit_decodes_jpeg_files_small(
    backend: VllmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[int] = []
    draft = media.draft
    monkeypatch.setattr(media, "draft", lambda image, scale: (scales.append(scale), draft(image, scale)))
    questions = write_questions(tmp_path, 1536, 2048)
    for index, (setting, kept) in enumerate(((LIMIT, 63), (LIMIT | {"method": "divprune", "keep": 0.5}, 32)), start=2):
        with backend.answering(Setting.from_json(setting)) as answer:
            _, cost = answer(index, questions)
        assert (cost["visual_tokens_in"], cost["visual_tokens_out"]) == (2 * FULL, 2 * kept)
    assert scales == [8, 8]  # the JPEG file of each setting
    with backend.answering(Setting.from_json({"method": "downsample", "keep": 0.05})) as answer:
        _, cost = answer(4, questions)
    # A share of the complete image, although a file is decoded small.
    assert (cost["visual_tokens_in"], cost["visual_tokens_out"]) == (2 * FULL, 2 * 77) and scales == [8] * 3
    timing = backend.timing(Setting.from_json(LIMIT), questions[0], 1)
    assert scales == [8] * 5 and 0 < timing["ttft_ratio"]["p50"] < 10
