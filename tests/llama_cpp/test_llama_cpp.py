# SPDX-License-Identifier: Apache-2.0
"""Test that llama.cpp with a pruned prompt equals transformers, and refuses unsupported requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama_cpp import LlamaGrammar

import tokenprune
from conftest import Reference, answer, ask_about, complete, read_logits
from tokenprune import llama_cpp
from tokenprune.errors import (
    AlreadyPatchedError,
    BudgetError,
    NotPatchedError,
    OptionError,
    UnsupportedModelError,
    UnsupportedSetupError,
)
from tokenprune.integrations import llama_cpp as module

# The tower rounds differently, and llama.cpp stores weights of the convolution in float32.
TOLERANCE = dict(rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("keep", [1.0, 0.25, 0.11])
def test_answers_equal_those_of_transformers(llm: Any, reference: Reference, questions: list[Any], keep: float) -> None:
    llama_cpp.patch(llm, "divprune", keep=keep)
    for question in questions:
        messages = ask_about([question.image], question.question)
        with tokenprune.patched(reference.model, "divprune", keep=keep):
            expected = reference.answer(messages)
        assert answer(llm, messages) == expected
        stats = llama_cpp.stats(llm)
        assert (stats.visual_tokens_in, stats.visual_tokens_out) == (196, max(1, round(196 * keep)))


@pytest.mark.parametrize("method", ["divprune", "pool", "apet", "restore", "uniform", "random"])
def test_logits_equal_those_of_transformers(llm: Any, reference: Reference, questions: list[Any], method: str) -> None:
    """Some methods merge tokens. Kept tokens keep their three position ids."""
    messages = ask_about([questions[1].image], questions[1].question)
    llama_cpp.patch(llm, method, keep=0.2)
    with tokenprune.patched(reference.model, method, keep=0.2):
        expected = reference.logits(messages)
    torch.testing.assert_close(read_logits(llm, messages), expected, **TOLERANCE)


def test_keep_of_one_is_bit_equal(llm: Any, questions: list[Any]) -> None:
    messages = ask_about([questions[0].image], questions[0].question)
    unpatched = read_logits(llm, messages)
    llama_cpp.patch(llm, "divprune", keep=1.0)
    assert torch.equal(read_logits(llm, messages), unpatched)
    llama_cpp.unpatch(llm)
    assert torch.equal(read_logits(llm, messages), unpatched)


def test_several_images_and_a_second_turn(llm: Any, reference: Reference, questions: list[Any]) -> None:
    first, second = questions[0], questions[3]
    messages = ask_about([first.image, second.image], second.question)
    llama_cpp.patch(llm, "divprune", keep=40)
    with tokenprune.patched(reference.model, "divprune", keep=40):
        torch.testing.assert_close(read_logits(llm, messages), reference.logits(messages), **TOLERANCE)
        assert llama_cpp.stats(llm).visual_tokens_out == 80
        reply = {"role": "assistant", "content": reference.answer(messages)}
        messages = [*messages, reply, {"role": "user", "content": first.question.lower()}]
        torch.testing.assert_close(read_logits(llm, messages), reference.logits(messages), **TOLERANCE)
        assert answer(llm, messages) == reference.answer(messages)


def test_a_model_without_mrope_renumbers_positions(
    load: Callable[..., Any], reference: Reference, questions: list[Any]
) -> None:
    """The oracle is the decoder of transformers on the kept rows, with consecutive positions."""
    llm, model = load("plain"), reference.model
    messages = ask_about([questions[2].image], questions[2].question)
    with pytest.raises(UnsupportedSetupError, match="accepts no gaps in the positions of qwen2"):
        llama_cpp.patch(llm, "divprune", keep=0.25)
    llama_cpp.patch(llm, "divprune", keep=0.25, positions="renumbered")
    inputs = reference.inputs(messages)
    ids = inputs["input_ids"][0]
    (image,) = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    rows = tokenprune.reduce(image.detach(), "divprune", keep=0.25).features
    visual = (ids == model.config.image_token_id).nonzero()[:, 0]
    embeds = model.get_input_embeddings()(ids)
    embeds = torch.cat([embeds[: visual[0]], rows, embeds[visual[-1] + 1 :]])[None]
    with torch.no_grad():
        positions = torch.arange(embeds.shape[1]).expand(3, 1, -1)
        hidden = model.model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)
        expected = model.lm_head(hidden.last_hidden_state[0, -1])
    torch.testing.assert_close(read_logits(llm, messages), expected, **TOLERANCE)


def test_a_pruned_prompt_fits_into_a_smaller_context(load: Callable[..., Any], questions: list[Any]) -> None:
    """Two images have 392 tokens."""
    llm, messages = load(n_ctx=256), ask_about([questions[0].image, questions[1].image], questions[0].question)
    with pytest.raises(ValueError, match=r"exceeds n_ctx|Failed to evaluate chunk"):
        complete(llm, messages)
    llama_cpp.patch(llm, "divprune", keep=0.25)
    assert answer(llm, messages)


def test_streams_and_structured_output(llm: Any, questions: list[Any]) -> None:
    messages = ask_about([questions[0].image], questions[0].question)
    llama_cpp.patch(llm, "divprune", keep=0.25)
    chunks = [part["choices"][0]["delta"].get("content", "") for part in complete(llm, messages, stream=True)]
    assert "".join(chunks).strip() == answer(llm, messages)
    grammar = LlamaGrammar.from_string('root ::= " dog"', verbose=False)
    assert answer(llm, messages, grammar=grammar) == "dog"


def test_a_bad_image_does_not_change_the_next_answer(llm: Any, questions: list[Any]) -> None:
    messages = ask_about([questions[0].image], questions[0].question)
    llama_cpp.patch(llm, "divprune", keep=0.25)
    expected = read_logits(llm, messages)
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(ValueError, match="bitmap"):
        llm.create_chat_completion([{"role": "user", "content": [url]}])
    assert torch.equal(read_logits(llm, messages), expected)


def test_text_without_images_is_not_changed(llm: Any) -> None:
    messages = [{"role": "user", "content": "what color is the bar?"}]
    unpatched = read_logits(llm, messages)
    llama_cpp.patch(llm, "divprune", keep=0.25)
    assert torch.equal(read_logits(llm, messages), unpatched) and llama_cpp.stats(llm).visual_tokens_in == 0


def test_unsupported_requests_change_nothing(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, patch = llm.chat_handler, llama_cpp.patch
    for name, needs in {
        "scope": "tower_attention", "fastv": "decoder", "tome": "tower", "cdpruner": "question", "evs": "frames",
        "downsample": "pixels",
    }.items():  # fmt: skip
        with pytest.raises(UnsupportedSetupError, match=f"{name} needs .*{needs}.*llama.cpp does not provide"):
            patch(llm, name)
    with pytest.raises(OptionError, match="keeps the original positions exactly"):
        patch(llm, positions="renumbered")
    with pytest.raises(OptionError, match="positions='nearest' is invalid"):
        patch(llm, positions="nearest")
    with pytest.raises(BudgetError):
        patch(llm, keep=tokenprune.Budget.from_flops_share(0.5))
    with pytest.raises(BudgetError, match="later images"):
        patch(llm, keep=tokenprune.Budget.by_age(0.5, ((0, 1.0), (2, 0.5))))
    with pytest.raises(NotPatchedError):
        llama_cpp.unpatch(llm)
    library = module._load_library()
    with monkeypatch.context() as context:
        context.setattr(library, "llama_model_is_hybrid", lambda model: True)
        with pytest.raises(UnsupportedModelError, match="qwen2vl has recurrent layers"):
            patch(llm)
    assert handler._mtmd_cpp.__name__ == "llama_cpp.mtmd_cpp"
    patch(llm, keep=0.5)
    with pytest.raises(AlreadyPatchedError):
        patch(llm, keep=0.25)
    assert handler._mtmd_cpp.budget.keep == 0.5
    assert patch(llm, keep=0.25, replace=True).chat_handler._mtmd_cpp.budget.keep == 0.25


def test_audio_is_refused(llm: Any, questions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp.patch(llm, keep=0.5)
    proxy = llm.chat_handler._mtmd_cpp
    kind = proxy.module.MTMD_INPUT_CHUNK_TYPE_AUDIO
    monkeypatch.setattr(proxy.module, "mtmd_input_chunk_get_type", lambda chunk: kind)
    with pytest.raises(UnsupportedSetupError, match="contains audio"):
        complete(llm, ask_about([questions[0].image], questions[0].question))
