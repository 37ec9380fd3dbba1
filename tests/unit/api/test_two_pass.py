# SPDX-License-Identifier: Apache-2.0
"""escalate: one small pass, a second one only where the first is unsure, and what both cost."""

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
    made = escalate(demo_model(), processor, images=image, text=prompt(processor, question), **options)
    assert not tokenprune.is_patched(demo_model())
    return made


@torch.no_grad()
def by_hand(method: str | None = None, image: Any = None, question: str = QUESTION, **options: Any) -> Any:
    model, processor = demo_model(), llava()

    def run() -> Any:
        inputs = processor(images=image or photo(200, 200), text=[prompt(processor, question)], return_tensors="pt")
        made = model.generate(
            **inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        return made.sequences, torch.cat(made.logits).double().numpy()

    if method is None:
        return run()
    if method == "downsample":
        options["processor"] = processor
    with tokenprune.patched(model, method, **options):
        return run()


@pytest.mark.parametrize("method, tokens", [("downsample", 64), ("divprune", 64), ("fastv", 128)])
def test_thresholds_force_the_passes(method: str, tokens: int) -> None:
    small, full = by_hand(method, keep=0.25), by_hand()
    one = ask(method=method, min_margin=0, max_entropy=math.inf)
    assert (one.passes, one.accepted, one.guard, one.visual_tokens) == (1, True, None, (tokens,))
    assert torch.equal(one.sequences, small[0])
    assert one.visual_tokens_full == (None if method == "downsample" else 256)
    for options in (dict(min_margin=math.inf), dict(min_margin=0, max_entropy=0.0)):
        two = ask(method=method, **options)
        assert (two.passes, two.accepted, two.visual_tokens) == (2, False, (tokens, 256))
        assert two.visual_tokens_full == 256 and (two.margin, two.entropy) == (one.margin, one.entropy)
        assert torch.equal(two.sequences, full[0])
        assert two.text == llava().decode(full[0][0], skip_special_tokens=True).rpartition("assistant :")[2].strip()


def naive(logits: np.ndarray) -> tuple[float, float]:
    entropies = []
    for row in logits:
        odds = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        entropies.append(-sum(p * math.log(p) for p in odds if p > 0))
    first = np.exp(logits[0] - logits[0].max())
    second, best = sorted(first / first.sum())[-2:]
    return best - second, sum(entropies) / len(entropies)


def test_accepts_what_is_sure_and_repeats_what_is_not() -> None:
    decisions = []
    for example in load_heldout(kinds=("colour", "count"), limit=6):
        margin, entropy = naive(by_hand("divprune", example.image, example.question, keep=16)[1])
        made = ask(example.question, example.image, method="divprune", keep=16)
        assert (made.margin, made.entropy) == (pytest.approx(margin, abs=1e-4), pytest.approx(entropy, abs=1e-4))
        assert made.accepted == (margin >= 0.3 and entropy <= 1.0) == (made.passes == 1)
        decisions.append(made.accepted)
    assert set(decisions) == {True, False}
    unsure = naive(by_hand(keep=16, method="divprune")[1])
    for name, value in zip(("min_margin", "max_entropy"), unsure, strict=True):
        lax = dict(min_margin=0, max_entropy=math.inf)
        for shift, want in ((-1e-3, name == "min_margin"), (1e-3, name != "min_margin")):
            assert ask(method="divprune", keep=16, **(lax | {name: max(0, value + shift)})).accepted == want


def test_the_repr_is_short_and_shows_no_token_ids() -> None:
    ids = torch.arange(5000)[None]
    one = Escalation(ids, "red", 1, True, 0.934, 0.1, None, (64.0,), 256.0)
    assert repr(one) == "Escalation('red', passes=1, margin=0.93, visual tokens: 64 of 256)"
    two = Escalation(ids, "a " * 500, 2, False, 0.1, 2.0, None, (64.0, 256.0), 256.0)
    assert len(repr(two)) < 150 and "visual tokens: 64 + 256 of 256" in repr(two)
    guarded = Escalation(ids, "bar", 1, False, None, None, "question", (256.0,), None)
    assert repr(guarded) == "Escalation('bar', passes=1, guard='question', visual tokens: 256)"


def test_certainty_of_known_odds() -> None:
    logits = tuple(torch.tensor([odds]).log() for odds in ([0.5, 0.3, 0.2], [1.0, 0.0, 0.0]))
    margin, entropy = compute_certainty(logits)
    want = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2)) / 2
    assert (margin, entropy) == (pytest.approx(0.2), pytest.approx(want))


def test_the_guard_goes_to_the_full_size_at_once() -> None:
    for text in ("What does the sign read?", "how many letters?", "the Number, please", "explain the chart"):
        assert asks_for_detail(text)
    assert not asks_for_detail(QUESTION) and not asks_for_detail("is he already there, or in context?")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    soft = photo(200, 200)
    assert has_detailed_image(llava(), noise) and has_detailed_image(llava(), [[soft], [noise]])
    assert not has_detailed_image(llava(), soft)
    for question, image, guard in [("what number is it?", soft, "question"), (QUESTION, noise, "image")]:
        made = ask(question, image, guard=True, min_margin=0, max_entropy=math.inf)
        assert (made.passes, made.accepted, made.guard) == (1, False, guard)
        assert (made.visual_tokens, made.visual_tokens_full) == ((256,), 256)
        assert made.margin is None and made.entropy is None
        assert torch.equal(made.sequences, by_hand(None, image, question)[0])
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
        made = escalate(demo_model(), processor, method=method, keep=keep, **limits, **options)
        assert made.visual_tokens == tokens


def test_what_is_refused_changes_nothing() -> None:
    model, processor = demo_model(), llava()
    before, model_before = state(processor), snapshot(model)
    good = dict(images=photo(200, 200), text=prompt(processor), max_new_tokens=2)
    for more, error, match in [
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
            escalate(model, processor, **(good | more))
    with tokenprune.patched(model, "divprune"), pytest.raises(AlreadyPatchedError, match="unpatch"):
        escalate(model, processor, **good)
    assert state(processor) == before and snapshot(model) == model_before
