# SPDX-License-Identifier: Apache-2.0
"""The shipped model of videos: demo_qwen, trained on until it knew directions and times."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

import tokenprune
from tokenprune.cli import app
from tokenprune_bench.demo_package import get_default_set
from tokenprune_bench.metrics import exact
from tokenprune_bench.profiling.model import load_model
from tokenprune_demo import MODELS
from tokenprune_demo.drawn_sets import draw_set

FOLDER = MODELS["demo_video"]
KNOWN = ("direction", "order", "rare", "text", "when", "still", "change")  # `events` it never learned


@pytest.fixture(scope="module")
def subject():
    return load_model("demo_video", device="cpu")


@pytest.fixture(scope="module")
def asked():
    """Return what is asked about the first four videos."""
    return [one for one in draw_set("small-videos", 4).questions if one.kind in KNOWN]


def test_it_is_small_and_loads_in_float32():
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert "auto_map" not in config and config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 10_500_000  # its numbers are bfloat16
    for dtype in (None, "auto"):
        model = AutoModelForImageTextToText.from_pretrained(FOLDER, **({} if dtype is None else {"dtype": dtype}))
        assert model.dtype == torch.float32


def test_it_answers_questions_about_videos(subject, asked):
    right = [exact(*subject.generate(subject.video_inputs(one.frames, one.question)), one.answer) for one in asked]
    # bench_videos.jsonl has all numbers; a model that guesses gets one of four.
    assert sum(right) >= 0.75 * len(right)


def test_keeping_all_changes_nothing(subject, asked):
    inputs = subject.video_inputs(asked[0].frames, asked[0].question)
    with torch.no_grad():
        before = subject.model(**inputs).logits
        with tokenprune.patched(subject.model, "vidcom2", keep=1.0):
            after = subject.model(**inputs).logits
    assert torch.equal(before, after)


def test_a_benchmark_asks_it_about_videos_unless_told_otherwise(tmp_path):
    assert get_default_set("demo_video") == "small-videos"
    assert get_default_set(None) == get_default_set("demo_qwen") == get_default_set("a/folder") == "images"
    command = ["bench", "--model", "demo_video", "--methods", "uniform", "--keep", "0.25", "--images", "1"]
    for more, kind in (([], "direction"), (["--set", "images"], "grounding")):
        file = tmp_path / f"{kind}.jsonl"
        result = CliRunner().invoke(app, [*command, "--repeats", "0", "--json", str(file), *more])
        assert result.exit_code == 0, result.output
        assert kind in json.loads(file.read_text(encoding="utf-8").splitlines()[0])["kinds"]
