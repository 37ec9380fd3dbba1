# SPDX-License-Identifier: Apache-2.0
"""Test benchmarks/experiments/studies/flat.py on a few frames: its lines and slopes, without comparing times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenprune

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def flat(script: Any) -> Any:
    return script("flat")


def run(flat: Any, out: Path, *more: str) -> tuple[dict, list[dict], dict]:
    arguments = "--frames 87 --block 4 --memory 160 --horizon 300 --every 2 --device cpu --allow-load".split()
    flat.main([*arguments, "--out", str(out), *more])
    first, *rows, last = (json.loads(line) for line in out.read_text().splitlines())
    return first, rows, last


def test_bytes_match_full_memories_and_all_frames_are_processed(flat: Any, tmp_path: Path) -> None:
    policy = ("--policy", "uniform")
    first, rows, last = run(flat, tmp_path / "flat.jsonl", *policy)
    blocks = [row for row in rows if row["record"] == "block"]
    assert [row["frames"] for row in blocks] == [*range(4, 88, 4), 87]
    assert first["memory"] == 160 and first["policy"] == "uniform" and last["record"] == "summary"
    assert blocks[-1]["reanchored"] == last["reanchored"] >= 1
    assert all(row["next_position"] <= 301 and row["visual"] <= 160 for row in blocks)
    # 4 layers with 2 heads of 16 values for keys and for values; a table with 7 columns; all int32 or float32.
    assert all(row["bytes"] >= row["kv_bytes"] == row["visual"] * 4 * 2 * 16 * 2 * 4 for row in blocks)
    assert all(row["bytes"] == row["kv_bytes"] + row["visual"] * 7 * 4 for row in blocks)
    assert last["bytes"]["least"] >= 120 * 1052 and last["bytes"]["most"] <= 160 * 1052
    questions = [row["frames"] for row in rows if row["record"] == "question"]
    assert questions == [*range(8, 88, 8), 87]


def test_the_frames_sent_anew_are_the_last_of_the_stream(flat: Any) -> None:
    model, frames = flat.qwen("tiny", torch.device("cpu"), torch.float32), flat.Frames(torch.device("cpu"))
    session = tokenprune.sessions.session(model, memory=1000)
    session.see(**frames.block(62, 3)).see(**frames.block(65, 5))
    answer = session.ask(flat.QUESTION, max_new_tokens=1, return_dict=True)
    assert (answer.logits[0] - flat.anew(model, frames, 70, 8)).abs().max() < 1e-4


def test_a_slope_is_exact_and_inside_its_interval(flat: Any) -> None:
    frames = list(range(0, 10_000, 10))
    exact = flat.slope(frames, [3 + 0.002 * frame for frame in frames])
    assert all(exact[name] == pytest.approx(2.0) for name in ("rise", "low", "high"))
    noise = np.random.default_rng(1).normal(size=len(frames))
    noisy = flat.slope(frames, list(5 + noise))
    assert noisy["low"] < 0 < noisy["high"] and noisy["low"] < noisy["rise"] < noisy["high"]
    rising = flat.slope(frames, list(5 + noise + np.array(frames) / 1000))
    assert 0 < rising["low"] < 1 < rising["high"]
    parts = [sorted(noise[start : start + 20])[9:11] for start in range(0, 1000, 20)]
    x = [(start + 9.5) * 10 / 1000 for start in range(0, 1000, 20)]
    assert noisy["rise"] == pytest.approx(np.polyfit(x, [5 + sum(pair) / 2 for pair in parts], 1)[0])


def test_a_stream_that_is_too_short_is_refused(flat: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Too few frames"):
        run(flat, tmp_path / "flat.jsonl", "--memory", "5000", "--horizon", "9999")
    assert not any(tmp_path.iterdir())
