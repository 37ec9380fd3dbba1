# SPDX-License-Identifier: Apache-2.0
"""dyrate with beams, later turns, cropped caches, other patches and drafts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import tokenprune
from oracle import close, generate_logits, reduced
from tests.unit.engine.test_cache import prefill, steps
from tests.unit.methods.test_dyrate import MODES, OFTEN, SCHEDULE, generate
from tokenprune.integrations.hf.cache.reduced_cache import get_reduction
from turns import longer, words
from zoo import FAMILIES


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 1}], ids=["ragged", "one row"])
def test_beams(batch: dict, mode: str, build) -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs(**batch)
    options = OFTEN | {"mode": mode, "keep": 0.7}
    with tokenprune.patched(model, "dyrate", **options):
        beams = model.generate(
            **inputs, max_new_tokens=7, num_beams=3, num_return_sequences=2, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        dropped = tokenprune.stats(model).decode_kept
    assert dropped[-1] != dropped[0]
    for index, (sequence, score) in enumerate(zip(beams.sequences, beams.sequences_scores, strict=True)):
        row = {"only": index // 2} | batch
        tokens = sequence[None, -7:]
        logits = generate(model, family.make_inputs(**row), tokens, **options)[0]
        want = logits.log_softmax(-1).gather(2, tokens[..., None]).sum() / 7
        torch.testing.assert_close(score, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_second_turn_drops_no_token_at_prefill(name: str, mode: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    new_words = words(2, 4)

    def run_turns(forced: list) -> tuple[list[Tensor], list[Tensor]]:
        first, tokens, out = generate_logits(model, inputs, 4, tokens=forced[0])
        turn = longer(inputs, family, out.sequences, new_words)
        second, second_tokens, _ = generate_logits(
            model, turn, 4, tokens=forced[1], past_key_values=out.past_key_values
        )
        return [first, second], [tokens, second_tokens]

    with tokenprune.patched(model, "dyrate", keep=0.5, record=True, **SCHEDULE, mode=mode):
        got, tokens = run_turns([None, None])
        stats = tokenprune.stats(model)
    # Steps 1 to 3: first answer. Steps 4 to 8: its last token and the second question. Then the second answer.
    assert [cut.step for cut in stats.cuts] == [0, 1, 3, 9] and len(stats.decode_rates) == 6
    with reduced(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        want, _ = run_turns(tokens)
    for actual, expected in zip(got, want, strict=True):
        close(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_image_in_the_second_turn(mode: str, build) -> None:
    """The new image is cut like the first image. Afterwards, the tokens of both images compete."""
    family = FAMILIES["llava"]
    model, inputs, later = build(family), family.make_inputs(only=0), family.make_inputs(seed=4, only=0)
    with tokenprune.patched(model, "dyrate", keep=0.5, record=True, **SCHEDULE, mode=mode):
        cache, _ = prefill(model, inputs)
        steps(model, inputs, cache, words(1, 2))
        mask = torch.ones(1, cache.get_seq_length() + later["input_ids"].shape[1], dtype=torch.long)
        model(**{**later, "attention_mask": mask}, past_key_values=cache)
        state = get_reduction(cache).decode
        # 36 tokens per image: rate 0.6 left 15 of the first, and the new image has 18.
        assert state.visual.tolist() == [72] and state.count.tolist() == [15 + 18]
        kinds = state.types[0].tolist()
        assert 0 not in kinds[kinds.index(1) :], "only tokens before the first image are the system prompt"
        assert state.masses.shape[1] == 1 and not state.masses[..., 3].any()
        steps(model, {"attention_mask": mask}, cache, words(1, 4, seed=2))
        assert state.count.tolist() == [4]
        assert state.stats is tokenprune.stats(model) and state.stats.decode_kept == [[29], [29], [15], [4]]
        lengths = [layer.keys.shape[-2] for layer in cache.layers]
    total = mask.shape[1] + 4
    # The first image lost 18 tokens in prefill and 3 in the first two steps. Only "evict" removes them from the cache.
    assert lengths == [total, total, *[total - 72 + (4 if mode == "evict" else 36)] * 2]


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_caches_are_independent(mode: str, build) -> None:
    family = FAMILIES["llava_next"]
    model, text = build(family), words(2, 5)
    jobs = [family.make_inputs(images=(2, 1)), family.make_inputs(images=(1, 0), seed=3)]
    with tokenprune.patched(model, "dyrate", keep=0.5, **OFTEN, mode=mode):
        separate = [steps(model, job, prefill(model, job)[0], text) for job in jobs]
        caches = [prefill(model, job)[0] for job in jobs]
        for step in range(5):
            for job, cache, want in zip(jobs, caches, separate, strict=True):
                if step == 3:
                    steps(model, job, copy.deepcopy(cache), text, done=step)
                assert torch.equal(steps(model, job, cache, text[:, : step + 1], done=step)[:, 0], want[:, step])
        inputs = jobs[0]
        for change, order in (
            (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
            (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
            (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        ):
            cache, _ = prefill(model, inputs)
            steps(model, inputs, cache, text[:, :2])
            change(cache)
            selected_rows = {"attention_mask": inputs["attention_mask"][order]}
            close(steps(model, selected_rows, cache, text[order], done=2), separate[0][order, 2:])


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_cropped_tokens(mode: str, build) -> None:
    family = FAMILIES["llava"]
    model, inputs, text = build(family), family.make_inputs(), words(2, 5)
    with tokenprune.patched(model, "dyrate", keep=0.5, **SCHEDULE, mode=mode):
        cache, _ = prefill(model, inputs)
        want = steps(model, inputs, cache, text)
        state = get_reduction(cache).decode
        before = state.kept
        cache.crop(-1)
        assert state.masses.shape[1] == 5 and len(state.times) == 4
        assert torch.equal(state.kept, before)
        close(steps(model, inputs, cache, text, done=4), want[:, 4:])
        cache.reset()
        assert get_reduction(cache) is None


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_another_patch_keeps_the_cache(mode: str, build) -> None:
    family = FAMILIES["llava"]
    model, inputs, text = build(family), family.make_inputs(), words(2, 5)
    with tokenprune.patched(model, "dyrate", keep=0.5, **SCHEDULE, mode=mode):
        cache, _ = prefill(model, inputs)
        steps(model, inputs, cache, text[:, :1])
    results = []
    for method in ("divprune", tokenprune.method("dyrate", layer=1), tokenprune.method("fastv", layer=2)):
        with tokenprune.patched(model, method, keep=0.3):
            other = copy.deepcopy(cache)
            results.append(steps(model, inputs, other, text, done=1))
            assert get_reduction(other).decode.count.tolist() == [15, 15]
    close(results[1], results[0])
    close(results[2], results[0])


@pytest.mark.parametrize(
    "methods",
    [["divprune", "dyrate"], ["fastv", "dyrate"], ["dyrate", "fastv"]],
    ids=["before the decoder", "before", "after"],
)
@pytest.mark.parametrize("mode", MODES)
def test_composed(methods: list[str], mode: str, build) -> None:
    family = FAMILIES["llava_next"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    layers = [3 if methods[0] == "dyrate" else 1, 2]
    configured = [
        tokenprune.method("dyrate", **SCHEDULE, mode=mode) if name == "dyrate"
        else tokenprune.method(name, **({"layer": layers[0]} if name == "fastv" else {}))
        for name in methods
    ]  # fmt: skip
    with tokenprune.patched(model, configured, keep=0.6, record=True):
        got, tokens, _ = generate_logits(model, inputs, 6)
        cuts = tokenprune.stats(model).cuts
    assert [cut.step for cut in cuts] == [0, 0, 1, 3, 4] or [cut.step for cut in cuts] == [0, 0, 3, 4]
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        close(got, generate_logits(model, inputs, 6, tokens=tokens)[0])


def test_rejected_drafts_have_no_effect(build) -> None:
    """Prompt lookup passes several tokens at once and crops some. Only accepted tokens change the kept tokens."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, "dyrate", keep=0.5, layer=2, rate="schedule", schedule=[0.5]):
        want = model.generate(**inputs, max_new_tokens=8)
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, prompt_lookup_num_tokens=3), want)
