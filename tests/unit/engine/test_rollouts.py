# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled answers, computed anew under pruning: those of the rollout, where a method sees what it
saw then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from oracle import close
from tokenprune.integrations.hf import compat
from zoo import FAMILIES

FREE = ["divprune", "pool", "visionzip", "random"]  # of the question
ASKING = ["fastv", "dart", "pyramiddrop", "sparsevlm", "dyrate"]


def of_answers(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]


@torch.no_grad()
def rollout(model: Any, prompt: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    out = model.generate(
        **prompt, do_sample=True, max_new_tokens=4, output_logits=True, return_dict_in_generate=True, top_k=0
    )
    answers = out.sequences[:, prompt["input_ids"].shape[1] :]
    return answers, of_answers(torch.stack(out.logits, 1), answers)


def lengthened(prompt: dict[str, Any], answers: torch.Tensor) -> dict[str, Any]:
    more = {"input_ids": answers, "attention_mask": torch.ones_like(answers)}
    more |= {name: torch.zeros_like(answers) for name in ("mm_token_type_ids", "token_type_ids") if name in prompt}
    return {**prompt, **{name: torch.cat([prompt[name], one], 1) for name, one in more.items()}}


def counted(name: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions as `generate` counts them; a model with several axes of positions makes those of a prompt itself."""
    return {} if name == "qwen2_5_vl" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def at_once(name: str, model: Any, prompt: dict[str, Any], answers: torch.Tensor) -> torch.Tensor:
    whole = lengthened(prompt, answers)
    logits = model(**whole, **counted(name, whole["attention_mask"])).logits
    return of_answers(logits[:, -answers.shape[1] - 1 : -1], answers)


def prompt_first(name: str, model: Any, prompt: dict[str, Any], answers: torch.Tensor) -> torch.Tensor:
    read = model(**prompt, **counted(name, prompt["attention_mask"]), use_cache=True)
    mask = lengthened(prompt, answers)["attention_mask"][:, :-1]
    places = (mask.cumsum(1) - 1)[:, 1 - answers.shape[1] :]
    if name == "qwen2_5_vl":
        places = (places + model.model.rope_deltas).expand(3, -1, -1)
    cache = {compat.CACHE: compat.get_cache(read)}
    rest = model(input_ids=answers[:, :-1], attention_mask=mask, position_ids=places, **cache)
    return of_answers(torch.cat([read.logits[:, -1:], rest.logits], 1), answers)


@pytest.mark.parametrize("method", [*FREE, *ASKING])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_log_probabilities_are_those_of_the_rollout(name: str, method: str, build) -> None:
    """A method that does not look at the question keeps the same tokens with the answer in the prompt; any does where
    the prompt is read first. Gradients are finite, and the same where both ways keep the same."""
    model, prompt = build(FAMILIES[name]), FAMILIES[name].make_inputs(images=(2, 1))
    weight = model.get_output_embeddings().weight
    with tokenprune.patched(model, method, keep=0.4):
        answers, drawn = rollout(model, prompt)
        first, once = (way(name, model, prompt, answers) for way in (prompt_first, at_once))
        close(first.detach(), drawn, 1e-4)
        (gradient,) = torch.autograd.grad(first.sum(), weight)
        if method in FREE:
            close(once.detach(), drawn, 1e-4)
            close(gradient, torch.autograd.grad(once.sum(), weight)[0], 1e-4)
    assert gradient.isfinite().all() and gradient.abs().max() > 0
    assert method not in ("fastv", "pyramiddrop") or (once.detach() - drawn).abs().max() > 1e-2


@torch.no_grad()
def test_another_seed_is_another_choice(build) -> None:
    model, prompt = build(FAMILIES["llava"]), FAMILIES["llava"].make_inputs()
    with tokenprune.patched(model, "random", keep=0.4, seed=1):
        answers, drawn = rollout(model, prompt)
        close(at_once("llava", model, prompt, answers), drawn, 1e-4)
    with tokenprune.patched(model, "random", keep=0.4, seed=2):
        assert (at_once("llava", model, prompt, answers) - drawn).abs().max() > 1e-2
