# SPDX-License-Identifier: Apache-2.0
"""escalate: a pruned pass, an unpruned pass if the answer is uncertain, and the cost of both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import TextStreamer

import tokenprune
from basics import snapshot
from processors import demo_model, llava, photo, state
from tokenprune import AlreadyPatchedError, Budget, BudgetError, OptionError, UnknownMethodError
from tokenprune.methods.pixels.dynres import asks_for_detail
from tokenprune_bench.two_pass import Escalation, compute_certainty, escalate, has_detailed_image
from tokenprune_demo.heldout import load_heldout

QUESTION = "what color is the circle?"


def prompt(processor: Any, question: str = QUESTION, images: int = 1) -> str:
    content = [{"type": "image"}] * images + [{"type": "text", "text": question}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )


def ask(question: str = QUESTION, image: Any = None, **options: Any) -> Escalation:
    processor = llava()
    options = dict(guard=False, max_new_tokens=3, do_sample=False) | options
    image = photo(200, 200) if image is None else image
    escalation = escalate(demo_model(), processor, images=image, text=prompt(processor, question), **options)
    assert not tokenprune.is_patched(demo_model())
    return escalation


@torch.no_grad()
def by_hand(method: str | None = None, image: Any = None, question: str = QUESTION, **options: Any) -> Any:
    model, processor = demo_model(), llava()

    def run() -> Any:
        inputs = processor(images=image or photo(200, 200), text=[prompt(processor, question)], return_tensors="pt")
        output = model.generate(
            **inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        return output.sequences, torch.cat(output.logits).double().numpy()

    if method is None:
        return run()
    if method == "downsample":
        options["processor"] = processor
    with tokenprune.patched(model, method, **options):
        return run()


@pytest.mark.parametrize("method, tokens", [("downsample", 64), ("divprune", 64), ("fastv", 128)])
def test_thresholds_force_the_passes(method: str, tokens: int) -> None:
    pruned, unpruned = by_hand(method, keep=0.25), by_hand()
    first = ask(method=method, min_margin=0, max_entropy=math.inf)
    assert (first.passes, first.accepted, first.guard, first.visual_tokens) == (1, True, None, (tokens,))
    assert torch.equal(first.sequences, pruned[0])
    assert first.visual_tokens_full == (None if method == "downsample" else 256)
    for options in (dict(min_margin=math.inf), dict(min_margin=0, max_entropy=0.0)):
        repeated = ask(method=method, **options)
        assert (repeated.passes, repeated.accepted, repeated.visual_tokens) == (2, False, (tokens, 256))
        assert repeated.visual_tokens_full == 256 and (repeated.margin, repeated.entropy) == (
            first.margin,
            first.entropy,
        )
        assert torch.equal(repeated.sequences, unpruned[0])
        assert (
            repeated.text
            == llava().decode(unpruned[0][0], skip_special_tokens=True).rpartition("assistant :")[2].strip()
        )


def naive(logits: np.ndarray) -> tuple[float, float]:
    entropies = []
    for row in logits:
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        entropies.append(-sum(p * math.log(p) for p in probabilities if p > 0))
    first = np.exp(logits[0] - logits[0].max())
    second, highest = sorted(first / first.sum())[-2:]
    return highest - second, sum(entropies) / len(entropies)


def test_accepts_what_is_sure_and_repeats_what_is_not() -> None:
    decisions = []
    for example in load_heldout(kinds=("colour", "count"), limit=6):
        margin, entropy = naive(by_hand("divprune", example.image, example.question, keep=16)[1])
        escalation = ask(example.question, example.image, method="divprune", keep=16)
        assert (escalation.margin, escalation.entropy) == (
            pytest.approx(margin, abs=1e-4),
            pytest.approx(entropy, abs=1e-4),
        )
        assert escalation.accepted == (margin >= 0.3 and entropy <= 1.0) == (escalation.passes == 1)
        decisions.append(escalation.accepted)
    assert set(decisions) == {True, False}
    thresholds = naive(by_hand(keep=16, method="divprune")[1])
    for name, value in zip(("min_margin", "max_entropy"), thresholds, strict=True):
        limits = dict(min_margin=0, max_entropy=math.inf)
        for shift, expected in ((-1e-3, name == "min_margin"), (1e-3, name != "min_margin")):
            assert ask(method="divprune", keep=16, **(limits | {name: max(0, value + shift)})).accepted == expected


def test_the_repr_is_short_and_shows_no_token_ids() -> None:
    ids = torch.arange(5000)[None]
    accepted = Escalation(ids, "red", 1, True, 0.934, 0.1, None, (64.0,), 256.0)
    assert repr(accepted) == "Escalation('red', passes=1, margin=0.93, visual tokens: 64 of 256)"
    repeated = Escalation(ids, "a " * 500, 2, False, 0.1, 2.0, None, (64.0, 256.0), 256.0)
    assert len(repr(repeated)) < 150 and "visual tokens: 64 + 256 of 256" in repr(repeated)
    guarded = Escalation(ids, "bar", 1, False, None, None, "question", (256.0,), None)
    assert repr(guarded) == "Escalation('bar', passes=1, guard='question', visual tokens: 256)"


def test_certainty_of_known_odds() -> None:
    logits = tuple(torch.tensor([probabilities]).log() for probabilities in ([0.5, 0.3, 0.2], [1.0, 0.0, 0.0]))
    margin, entropy = compute_certainty(logits)
    expected = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2)) / 2
    assert (margin, entropy) == (pytest.approx(0.2), pytest.approx(expected))


def test_the_guard_goes_to_the_full_size_at_once() -> None:
    for text in ("What does the sign read?", "how many letters?", "the Number, please", "explain the chart"):
        assert asks_for_detail(text)
    assert not asks_for_detail(QUESTION) and not asks_for_detail("is he already there, or in context?")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    smooth = photo(200, 200)
    assert has_detailed_image(llava(), noise) and has_detailed_image(llava(), [[smooth], [noise]])
    assert not has_detailed_image(llava(), smooth)
    for question, image, guard in [("what number is it?", smooth, "question"), (QUESTION, noise, "image")]:
        escalation = ask(question, image, guard=True, min_margin=0, max_entropy=math.inf)
        assert (escalation.passes, escalation.accepted, escalation.guard) == (1, False, guard)
        assert (escalation.visual_tokens, escalation.visual_tokens_full) == ((256,), 256)
        assert escalation.margin is None and escalation.entropy is None
        assert torch.equal(escalation.sequences, by_hand(None, image, question)[0])
        assert ask(question, image, min_margin=0, max_entropy=math.inf).guard is None
    assert ask(guard=True, min_margin=0, max_entropy=math.inf).visual_tokens == (64,)


def test_configured_methods_and_several_images() -> None:
    processor = llava()
    text = prompt(processor, images=2)
    options = dict(images=[photo(200, 200), photo(90, 90)], text=text, guard=False, max_new_tokens=2, do_sample=False)
    for method, keep, limits, tokens in (
        (tokenprune.method("random", seed=3), 10, dict(min_margin=math.inf), (20, 512)),
        ("view_select", Budget(tokens=1), dict(min_margin=0, max_entropy=math.inf), (256,)),
    ):
        escalation = escalate(demo_model(), processor, method=method, keep=keep, **limits, **options)
        assert escalation.visual_tokens == tokens


def test_what_is_refused_changes_nothing() -> None:
    model, processor = demo_model(), llava()
    state_before, model_before = state(processor), snapshot(model)
    valid = dict(images=photo(200, 200), text=prompt(processor), max_new_tokens=2)
    for invalid, error, match in [
        (dict(streamer=TextStreamer(processor.tokenizer)), OptionError, "stream"),
        (dict(num_beams=2), OptionError, "num_beams"),
        (dict(num_return_sequences=2, do_sample=True), OptionError, "num_return_sequences"),
        (dict(output_logits=True), OptionError, "output_logits"),
        (dict(min_margin=-0.1), OptionError, "min_margin"),
        (dict(max_entropy=math.nan), OptionError, "max_entropy"),
        (dict(text=[prompt(processor)]), OptionError, "one prompt"),
        (dict(method="divprume"), UnknownMethodError, "divprune"),
        (dict(keep=0), BudgetError, "keep=0"),
    ]:
        with pytest.raises(error, match=match):
            escalate(model, processor, **(valid | invalid))
    with tokenprune.patched(model, "divprune"), pytest.raises(AlreadyPatchedError, match="unpatch"):
        escalate(model, processor, **valid)
    assert state(processor) == state_before and snapshot(model) == model_before
