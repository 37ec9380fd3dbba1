# SPDX-License-Identifier: Apache-2.0
"""Recomputed log-probabilities of sampled answers equal the rollout if the method sees the same prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from oracle import close
from tokenprune.integrations.hf import compat
from zoo import FAMILIES

QUESTION_FREE = ["divprune", "pool", "visionzip", "random"]  # independent of the question
QUESTION_AWARE = ["fastv", "dart", "pyramiddrop", "sparsevlm", "dyrate"]


def select_answers(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]


@torch.no_grad()
def rollout(model: Any, prompt: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    out = model.generate(
        **prompt, do_sample=True, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, top_k=0
    )
    answers = out.sequences[:, prompt["input_ids"].shape[1] :]
    return answers, select_answers(torch.stack(out.logits, 1), answers)


def append_answers(prompt: dict[str, Any], answers: torch.Tensor) -> dict[str, Any]:
    more = {"input_ids": answers, "attention_mask": torch.ones_like(answers)}
    more |= {name: torch.zeros_like(answers) for name in ("mm_token_type_ids", "token_type_ids") if name in prompt}
    return {**prompt, **{name: torch.cat([prompt[name], value], 1) for name, value in more.items()}}


def compute_positions(name: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return positions as `generate` counts them; Qwen2.5-VL computes positions of a prompt itself."""
    return {} if name == "qwen2_5_vl" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def score_at_once(name: str, model: Any, prompt: dict[str, Any], answers: torch.Tensor) -> torch.Tensor:
    inputs = append_answers(prompt, answers)
    logits = model(**inputs, **compute_positions(name, inputs["attention_mask"])).logits
    return select_answers(logits[:, -answers.shape[1] - 1 : -1], answers)


def score_prompt_first(name: str, model: Any, prompt: dict[str, Any], answers: torch.Tensor) -> torch.Tensor:
    prefill = model(**prompt, **compute_positions(name, prompt["attention_mask"]), use_cache=True)
    mask = append_answers(prompt, answers)["attention_mask"][:, :-1]
    positions = (mask.cumsum(1) - 1)[:, 1 - answers.shape[1] :]
    if name == "qwen2_5_vl":
        positions = (positions + model.model.rope_deltas).expand(3, -1, -1)
    cache = {compat.CACHE: compat.get_cache(prefill)}
    rest = model(input_ids=answers[:, :-1], attention_mask=mask, position_ids=positions, **cache)
    return select_answers(torch.cat([prefill.logits[:, -1:], rest.logits], 1), answers)


@pytest.mark.parametrize("method", [*QUESTION_FREE, *QUESTION_AWARE])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_log_probabilities_are_those_of_the_rollout(name: str, method: str, build) -> None:
    """With the answer in the prompt, only methods that ignore the question keep the same tokens.

    Every method does if the prompt is read first. Gradients are finite, and equal for equal tokens.
    """
    model, prompt = build(FAMILIES[name]), FAMILIES[name].make_inputs(images=(2, 1))
    weight = model.get_output_embeddings().weight
    with tokenprune.patched(model, method, keep=0.4):
        answers, drawn = rollout(model, prompt)
        prompt_first_scores, at_once_scores = (
            score(name, model, prompt, answers) for score in (score_prompt_first, score_at_once)
        )
        close(prompt_first_scores.detach(), drawn, 1e-4)
        (gradient,) = torch.autograd.grad(prompt_first_scores.sum(), weight)
        if method in QUESTION_FREE:
            close(at_once_scores.detach(), drawn, 1e-4)
            close(gradient, torch.autograd.grad(at_once_scores.sum(), weight)[0], 1e-4)
    assert gradient.isfinite().all() and gradient.abs().max() > 0
    assert method not in ("fastv", "pyramiddrop") or (at_once_scores.detach() - drawn).abs().max() > 1e-2


@torch.no_grad()
def test_another_seed_is_another_choice(build) -> None:
    model, prompt = build(FAMILIES["llava"]), FAMILIES["llava"].make_inputs()
    with tokenprune.patched(model, "random", keep=0.4, seed=1):
        answers, drawn = rollout(model, prompt)
        close(score_at_once("llava", model, prompt, answers), drawn, 1e-4)
    with tokenprune.patched(model, "random", keep=0.4, seed=2):
        assert (score_at_once("llava", model, prompt, answers) - drawn).abs().max() > 1e-2
