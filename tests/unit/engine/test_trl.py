# SPDX-License-Identifier: Apache-2.0
"""TRL trains a pruned model with the losses and log-probabilities of the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import tokenprune
from oracle import close
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.heldout import load_heldout

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets")
LORA = LoraConfig(r=2, target_modules=r".*language_model\..*\.(q_proj|v_proj)")
QUIET = dict(max_steps=1, learning_rate=1e-3, save_strategy="no", report_to="none", bf16=False, disable_tqdm=True,
             dataloader_pin_memory=False)  # fmt: skip # pinned memory would be allocated on a simulated device


@pytest.fixture
def subject() -> Iterator[Model]:
    yield load_model("demo_vlm", device="cpu")


def make_rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "image": question.image,
            "prompt": [{"role": "user", "content": question.question}],
            "completion": [{"role": "assistant", "content": question.answer}],
            "answer": question.answer,
        }
        for question in load_heldout(limit=1)[:count]
    ]


def make_trainer(subject: Model, folder: Path, **settings: Any) -> Any:
    config = trl.SFTConfig(folder, per_device_train_batch_size=2, max_length=None, **QUIET, **settings)
    train = datasets.Dataset.from_list(make_rows(2))
    return trl.SFTTrainer(
        subject.model, config, train_dataset=train, processing_class=subject.processor, peft_config=LORA
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_supervised_fine_tuning(checkpointing: bool, subject: Model, tmp_path: Path) -> None:
    """The loss equals the model's for padded and packed rows, and a step changes only adapters."""
    trainer = make_trainer(subject, tmp_path, gradient_checkpointing=checkpointing)
    padded = trainer.data_collator(make_rows(2))
    is_valid = padded["attention_mask"].bool()
    assert not is_valid.all()
    flat = {name: padded[name][is_valid][None] for name in ("input_ids", "labels")}
    packed = {**flat, "position_ids": (is_valid.cumsum(1) - 1)[is_valid][None], "pixel_values": padded["pixel_values"]}
    with torch.no_grad():
        unpruned = trainer.compute_loss(trainer.model, dict(padded))
    with tokenprune.patched(subject.model, "divprune", keep=0.25):
        with torch.no_grad():
            want = subject.model(**padded).loss
            close(trainer.compute_loss(trainer.model, dict(padded)), want, 1e-4)
            close(trainer.compute_loss(trainer.model, dict(packed)), want, 1e-4)
        assert abs(want - unpruned) > 1e-4
        before = {name: parameter.detach().clone() for name, parameter in subject.model.named_parameters()}
        trainer.train()
        assert tokenprune.stats(subject.model).keep_ratio == 0.25
    changed = {name for name, parameter in subject.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed and all("lora_B" in name for name in changed)  # lora_A gets no gradient in the first step


def test_trl_refuses_images_without_padding(subject: Model, tmp_path: Path) -> None:
    """As stated in the notebook. If this fails, the notebook no longer needs its collator."""
    with pytest.raises(ValueError, match="not supported for vision datasets"):
        make_trainer(subject, tmp_path, padding_free=True)


def test_group_relative_policy_optimization(subject: Model, tmp_path: Path) -> None:
    """The trainer's log-probabilities of a rollout equal the probabilities that it was sampled with."""
    outputs, rewards = [], iter([1.0, 0.0])
    generate = subject.model.generate

    def generate_and_record(*args: Any, **kwargs: Any) -> torch.Tensor:
        outputs.append(generate(*args, **kwargs, output_logits=True, return_dict_in_generate=True))
        return outputs[0].sequences

    config = trl.GRPOConfig(
        tmp_path, per_device_train_batch_size=2, num_generations=2, max_completion_length=3, num_iterations=2, **QUIET
    )
    config.max_steps = 2
    with tokenprune.patched(subject.model, "divprune", keep=0.25):
        trainer = trl.GRPOTrainer(
            subject.model,
            lambda completions, **_: [next(rewards) for _ in completions],
            config,
            datasets.Dataset.from_list(make_rows(1)),
            processing_class=subject.processor,
            peft_config=LORA,
        )
        subject.model.generate = generate_and_record
        batches, compute = [], trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: batches.append(compute(inputs)) or batches[0]
        trainer.train()
        del subject.model.generate
    (batch,) = batches
    answers, is_valid = batch["completion_ids"], batch["completion_mask"].bool()
    logits = torch.stack(outputs[0].logits, 1)[:, : answers.shape[1]]
    drawn = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    close(batch["old_per_token_logps"][is_valid], drawn[is_valid], 1e-4)
