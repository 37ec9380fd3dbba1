# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters with pruning, on both model runners: tokens follow the log-probabilities of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import DIVPRUNE, Engine, check_same

OFF = {"off": True}
STEPS = 6
BIASED, ALLOWED = {100: 6.0, 101: 5.5, 102: 5.0}, [90, 91, 92, 93]


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine]) -> Engine:
    return start("llava", DIVPRUNE)


def params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**dict(max_tokens=STEPS, ignore_eos=True, logprobs=5) | options)


def choose_biased(logprobs: Tensor, generated: list[int]) -> int:
    """Choose the likeliest token with a bias for some tokens and a penalty for each repetition."""
    logits = logprobs.clone()
    for token, bias in BIASED.items():
        logits[token] += bias
    for token in set(generated):
        logits[token] -= 1.5 + 0.5 * generated.count(token)
    return int(logits.argmax())


def choose_allowed(logprobs: Tensor, generated: list[int]) -> int:
    return ALLOWED[int(logprobs[ALLOWED].argmax())]


def ask(engine: Engine, cases: list[tuple[dict[str, Any], Any]]) -> list[Any]:
    prompt, images = engine.checkpoint.prompt(2), engine.checkpoint.images(2)
    requests = [engine.request(prompt, images, override) for override, _ in cases]
    return engine.llm.generate(requests, [sampling for _, sampling in cases], use_tqdm=False)


def expected(
    engine: Engine, reference: Any, override: dict[str, Any], choose: Any, steps: int = STEPS
) -> tuple[list[int], Tensor]:
    prompt, images = engine.checkpoint.prompt(2), engine.checkpoint.images(2)
    setting = None if override is OFF else DIVPRUNE | override
    return reference("llava").greedy(prompt, images, steps, setting, choose=choose)


def test_greedy_answers(engine: Engine, reference: Any) -> None:
    bias = params(temperature=0.0, logit_bias=BIASED, presence_penalty=1.5, frequency_penalty=0.5)
    within = params(temperature=0.0, allowed_token_ids=ALLOWED)
    cases = [
        (override, *choice) for override in ({}, OFF) for choice in ((bias, choose_biased), (within, choose_allowed))
    ]
    outputs = ask(engine, [case[:2] for case in cases])
    for (override, _, choose), output in zip(cases, outputs, strict=True):
        tokens, logprobs = expected(engine, reference, override, choose)
        assert list(output.outputs[0].token_ids) == tokens and len(set(tokens)) > (choose is choose_biased)
        first = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
        assert all(abs(value - float(logprobs[0, token])) < 1e-4 for token, value in first.items())


def test_seeded_answers(engine: Engine, reference: Any) -> None:
    """Single and batched requests give the same tokens, and their log-probabilities match the reference."""
    cases = [({}, params(seed=7)), ({}, params(seed=8)), (OFF, params(seed=7)), ({}, params(seed=7, min_p=0.05))]
    batched = ask(engine, cases)
    answers = [tuple(output.outputs[0].token_ids) for output in batched]
    for case, output in zip(cases, batched, strict=True):
        (single,) = ask(engine, [case])
        assert single.outputs[0].token_ids == output.outputs[0].token_ids
        forced = list(output.outputs[0].token_ids)
        check_same(
            output,
            *expected(engine, reference, case[0], lambda logprobs, generated, forced=forced: forced[len(generated)]),
        )
    assert len(set(answers[:3])) == 3


def test_structured_output(engine: Engine, reference: Any) -> None:
    """The likeliest word of a grammar is chosen letter by letter."""
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer = engine.llm.get_tokenizer()
    words = ["abbey", "azure", "mango", "mirth", "zebra", "zonal"]
    spellings = [[*tokenizer.encode(word, add_special_tokens=False), tokenizer.eos_token_id] for word in words]

    def spell(logprobs: Tensor, generated: list[int]) -> int:
        letters = sorted({ids[len(generated)] for ids in spellings if ids[: len(generated)] == generated})
        return letters[int(logprobs[letters].argmax())]

    sampling = params(temperature=0.0, ignore_eos=False, structured_outputs=StructuredOutputsParams(choice=words))
    cases = [{}, OFF, {"method": "uniform", "keep": 3}]
    for override, output in zip(cases, ask(engine, [(override, sampling) for override in cases]), strict=True):
        tokens, logprobs = expected(engine, reference, override, spell)
        answer, first = output.outputs[0], sorted({ids[0] for ids in spellings})
        assert list(answer.token_ids) == tokens and answer.text in words
        for token, expected_logprob in zip(first, logprobs[0, first].log_softmax(0).tolist(), strict=True):
            assert abs(answer.logprobs[0][token].logprob - expected_logprob) < 1e-4


@pytest.mark.only_v1("Triton's interpreter cannot run V2's kernel for top_k and top_p")
def test_cut_distributions(engine: Engine, reference: Any) -> None:
    for sampling in (params(seed=7, top_k=3), params(seed=7, top_p=0.3)):
        (output,) = ask(engine, [({}, sampling)])
        forced = list(output.outputs[0].token_ids)
        _, logprobs = expected(engine, reference, {}, lambda logprobs, generated, forced=forced: forced[len(generated)])
        for token, row in zip(forced, logprobs, strict=True):
            above = row[row > row[token]]
            assert len(above) < 3 if sampling.top_k == 3 else float(above.exp().sum()) < 0.3
    assert torch.isfinite(logprobs).all()
