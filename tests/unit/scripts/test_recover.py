# SPDX-License-Identifier: Apache-2.0
"""Test benchmarks/experiments/recover.py on a few drawn questions: its training data, its training, and its rows."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import tokenprune
from tokenprune_bench.profiling.model import load_model
from tokenprune_demo.heldout import load_heldout

ROOT = Path(__file__).parents[3]
ROW = {
    "image": Image.new("RGB", (224, 224), "red"),
    "prompt": [{"role": "user", "content": "what color is the circle?"}],
    "completion": [{"role": "assistant", "content": "red"}],
}
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("recover")


def test_a_run_of_a_few_steps(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recover.jsonl"
    sizes = "--images 2 --validation 1 --heldout 1 --steps 2 --try-steps 1 --batch 2 --rates 0 0.001".split()
    monkeypatch.setattr(sys, "argv", ["recover.py", *sizes, "--json", str(path)])
    script.main()
    header, *records = (json.loads(line) for line in path.read_text().splitlines())
    assert header["questions"] == len(header["kinds"]) == 9
    tried, tuned = ([row for row in records if row["record"] == name] for name in ("tried", "tuned"))
    assert [row["rate"] for row in tried] == [0, 0.001] and tried[0]["validation_loss"] != tried[1]["validation_loss"]
    assert [(row["under"], row["rate"]) for row in tuned] == [("pruning", 0.001), ("nothing", 0.001)]
    for row in tuned:
        assert len(row["losses"]) == 2 and {"seconds", "cpu_seconds", "load"} <= row.keys()
    assert tuned[0]["losses"] != tuned[1]["losses"]  # the same questions with other visual tokens
    results = {(row["tuned"], row["method"], row["keep"]): row for row in records if row["record"] == "result"}
    assert len(results) == 3 * 5 and {len(row["right"]) for row in results.values()} == {9}
    unpruned = results[None, "nothing", 1.0]["tokens"]
    assert results["pruning", "divprune", 0.11]["tokens"] == pytest.approx(0.11 * unpruned, abs=1)

    monkeypatch.setattr(importlib.import_module("recover_page"), "RESULTS", path)
    monkeypatch.setattr(importlib.import_module("recover_page"), "ROOT", tmp_path)
    text = importlib.import_module("recover_page").recover()
    assert "4 questions about 2 drawn images" in text and text.count("| `uniform`, keep") == 2

    before = path.read_text()
    path.write_text("".join(before.splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(script, "tune", None)  # measure only the missing row: an answer of the shipped model
    script.main()
    *_, last = (json.loads(line) for line in path.read_text().splitlines())
    assert (last["tuned"], last["method"]) == (None, "nothing") and last["right"] == records[-1]["right"]


def test_the_frozen_tower_changes_nothing(script: Any) -> None:
    torch.manual_seed(0)
    tower, plain = script.FrozenTower(), load_model("demo_qwen", device="cpu")
    cached = script.loaded(tower)
    batch = next(script.batches(script.draw(script.VALIDATION, 3), 3, (1,)))
    assert len({sample.image.size for sample in batch}) > 1
    results = []
    for subject in (plain, cached, cached):
        with tokenprune.patched(subject.model.train(), "divprune", keep=0.25, guard="off"):
            loss = subject.model(**script.lesson(subject, batch), use_cache=False).loss
        (gradient,) = torch.autograd.grad(loss, subject.model.model.visual.merger.mlp[0].weight)
        results.append((loss.detach(), gradient))
    assert len(tower.known) == 3 and results[0][1].abs().max() > 0
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_training_data_and_held_out_questions_are_disjoint(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "load_heldout", None)
    splits = []
    monkeypatch.setattr(script, "load_photos", lambda split: splits.append(split) or ())
    tuning_batches, validation_batches = script.draw(script.TUNING, 2), script.draw(script.VALIDATION, 2)
    assert set(splits) == {"train"}
    assert len({batch[0].image.tobytes() for batch in (*tuning_batches, *validation_batches)}) == 4
    assert script.SEED not in (20260101, 20260102, 20260202)
    subject = load_model("demo_qwen", device="cpu")
    inputs = script.lesson(subject, [tuning_batches[0][0], load_heldout(limit=1, folder=subject.heldout)[0]])
    assert (inputs["labels"] >= 0).sum(1).tolist() == [2, 2]  # the answer and the end token
    assert inputs["labels"].shape == inputs["input_ids"].shape == inputs["attention_mask"].shape


def test_supervised_fine_tuning(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    recover_sft, page = importlib.import_module("recover_sft"), importlib.import_module("recover_page")
    monkeypatch.setattr(recover_sft, "lessons", lambda subject, size: recover_sft.Dataset.from_list(size * [ROW]))
    patched, patch = [], tokenprune.patch
    monkeypatch.setattr(tokenprune, "patch", lambda *args, **kw: patched.append(kw) or patch(*args, **kw))
    path = tmp_path / "recover_sft.jsonl"
    sizes = "--model demo_vlm --heldout 4 --steps 3 --batch 1 --rate 0.01 --whole".split()
    monkeypatch.setattr(sys, "argv", ["recover_sft.py", *sizes, "--json", str(path)])
    recover_sft.main()
    assert [options["keep"] for options in patched if "replace" in options] == [0.25, 0.11, 0.25]
    header, *records = (json.loads(line) for line in path.read_text().splitlines())
    assert header["questions"] == len(header["kinds"]) == 4
    (tuned,) = (record for record in records if record["record"] == "tuned")
    assert len(tuned["losses"]) == 3 and tuned["parameters"] > 0
    results = {(record["tuned"], record["keep"]): record for record in records if record["record"] == "result"}
    assert results.keys() == {(name, keep) for name in (None, "sft") for keep in (0.25, 0.11, 1.0)}
    assert results["sft", 0.25]["tokens"] == 0.25 * results[None, 1.0]["tokens"]

    monkeypatch.setattr(page, "SFT", path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    assert page.sft().count("| `divprune`, keep") == 2 and "3 steps of 1 lessons" in page.sft()
