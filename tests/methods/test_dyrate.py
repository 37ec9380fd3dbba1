# SPDX-License-Identifier: Apache-2.0
"""dyrate: visual tokens go while the answer is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from naive_dyrate import naive
from oracle import close, generate_logits, reduced
from tests.engine.test_cache import longer, prefill, steps, words
from tests.engine.test_modes import flash_stand_in  # registers the back end
from tokenprune import OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.cache.reduced_cache import reduction_of
from zoo import FAMILIES, Family

assert flash_stand_in
# Decisions early and often, so that short answers meet several.
OFTEN = dict(layer=1, warmup=1, update_every=2, k_min=0.05, grid=40, ema=0.3)
SCHEDULE = dict(rate="schedule", schedule=[0.6, 0.6, 0.8, 0.95], layer=2, k_min=0.05)
MODES = ("evict", "mask")


def answer(model: Any, inputs: Any, tokens: Tensor | None = None, steps: int = 7, keep: float = 0.5, **options: Any):
    """Logits, tokens, cache and statistics of a generation with dyrate."""
    with tokenprune.patched(model, "dyrate", keep=keep, record=True, **options):
        logits, tokens, out = generate_logits(model, inputs, steps, tokens=tokens)
        return logits, tokens, out.past_key_values, tokenprune.stats(model)


# -- against loops over the unpatched model ----------------------------------------------------------------------------

WAYS = {
    "ragged": ({"images": (2, 1)}, {}),
    "right": ({"images": (0, 2), "padding": "right"}, {}),
    "may return": ({"images": (2, 1)}, {"monotone": False, "mode": "mask", "ema": 0.0, "update_every": 1}),
    "shared": ({"images": (1, 2, 0)}, {"batch_policy": "shared", "max_rate": 0.4}),
    "schedule": ({"only": 1}, SCHEDULE),
}


# One way for every family, every way for three.
CASES = [
    (name, way) for name in FAMILIES for way in WAYS if way == "ragged" or name in ("llava", "qwen2_5_vl", "gemma3")
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_equals_the_naive_loop(name: str, way: str, build) -> None:
    family, (batch, options) = FAMILIES[name], WAYS[way]
    options = OFTEN | options
    if options.get("rate") == "schedule":
        options = SCHEDULE
    inputs = family.make_inputs(**batch, seed=1)
    got, tokens, cache, stats = answer(build(family), inputs, keep=0.7, **options)
    eager = build(family, "eager")
    with naive(family, eager, inputs, 0.7, **{k: v for k, v in options.items() if k != "mode"}) as want:
        logits, _, _ = generate_logits(eager, inputs, 7, tokens=tokens)
    assert stats.decode_kept == want.counts
    torch.testing.assert_close(torch.tensor(stats.decode_rates), torch.tensor(want.rates))
    visual = [set(row) for row in want.visual]
    for cut, kept in ((stats.cuts[0], want.prefill), (stats.cuts[-1], want.kept)):
        assert [sorted(set(row) & own) for row, own in zip(cut.kept, visual, strict=True)] == kept
    assert len(stats.cuts) > 1 and stats.cuts[-1].step > 0, "nothing was dropped while decoding"
    # With padding on the right, transformers reads the first logits at the padding.
    read = 1 if way == "right" else 0
    close(got[:, read:], logits[:, read:], 2e-5)
    masses = reduction_of(cache).decode.masses
    torch.testing.assert_close(masses, torch.stack([torch.stack(row) for row in want.history]), atol=1e-5, rtol=0)
    torch.testing.assert_close(masses.sum(-1), torch.ones(masses.shape[:-1]), atol=1e-5, rtol=0)
    assert not masses[:, 0, :, 3].any() and (masses[:, 1:, :, 3] > 0).all()


@pytest.mark.parametrize("name", ["llava_next", "qwen3_vl", "gemma3"])
def test_equals_masking(name: str, build) -> None:
    """Tokens that go at a step are as good as masked from that step on."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    got, tokens, _, stats = answer(model, inputs, **SCHEDULE)
    assert [cut.step for cut in stats.cuts] == [0, 1, 3, 4]
    assert all(set(late) <= set(early) for late, early in zip(stats.cuts[2].kept, stats.cuts[1].kept, strict=True))
    with reduced(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        close(got, generate_logits(model, inputs, 7, tokens=tokens)[0])
    with reduced(family, model, stats.cuts[:-1], inputs["input_ids"].shape[1]), pytest.raises(AssertionError):
        close(got, generate_logits(model, inputs, 7, tokens=tokens)[0])


@pytest.mark.few_families
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 0}], ids=["ragged", "one row"])
def test_modes_agree(batch: dict, family: Family, model) -> None:
    inputs = family.make_inputs(**batch)
    want, tokens, _, stats = answer(model, inputs, **SCHEDULE, mode="mask")
    got, _, _, others = answer(model, inputs, tokens, **SCHEDULE, mode="evict")
    close(got, want)
    assert others.cuts == stats.cuts and others.decode_rates == stats.decode_rates


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attn", ["eager", "flash_stand_in"])
def test_back_ends_agree(attn: str, mode: str, build) -> None:
    family = FAMILIES["qwen2_vl"]
    for batch in ({"images": (2, 1)}, {"only": 0}):
        inputs = family.make_inputs(**batch)
        want, tokens, _, stats = answer(build(family), inputs, **SCHEDULE, mode=mode)
        got, _, _, others = answer(build(family, attn), inputs, tokens, **SCHEDULE, mode=mode)
        close(got, want, 2e-5)
        assert others.cuts == stats.cuts


def test_a_constant_rate_is_fastv(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    got, tokens, _, stats = answer(model, inputs, keep=0.4, rate="schedule", schedule=[0.6], layer=2)
    with tokenprune.patched(model, "fastv", layer=2, keep=0.4, record=True):
        want, same, _ = generate_logits(model, inputs, 7)
        assert tokenprune.stats(model).cuts[0].kept == stats.cuts[0].kept
    assert torch.equal(tokens, same) and torch.equal(got, want)
    assert len(stats.cuts) == 1 and len(stats.decode_rates) == 6
    if family.name == "llava":  # only rate 0 is left: nothing goes after prefill
        got, _, _, stats = answer(model, inputs, keep=0.4, layer=2, grid=1, warmup=0, update_every=1)
        assert torch.equal(got, want) and len(stats.cuts) == 1


@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"images": (0, 1, 3)}], ids=["images", "text beside"])
@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "gemma3"])
def test_a_batch_does_what_its_rows_do(batch: dict, name: str, build) -> None:
    family, batch = FAMILIES[name], batch | {"seed": 1}
    model, inputs = build(family), family.make_inputs(**batch)
    got, tokens, _, stats = answer(model, inputs, **OFTEN)
    assert len(stats.cuts) > 1
    for row in range(len(tokens)):
        alone, _, _, own = answer(model, family.make_inputs(**batch, only=row), tokens[row : row + 1], **OFTEN)
        close(got[row], alone[0], 2e-5)
        if inputs.counts[row]:
            assert [step[row] for step in stats.decode_kept] == [step[0] for step in own.decode_kept]
            assert [step[row] for step in stats.decode_rates] == [step[0] for step in own.decode_rates]
        else:
            assert {step[row] for step in stats.decode_kept} == {0} and not own.cuts


def test_a_row_that_keeps_all_goes_on_keeping_all(build) -> None:
    """15 tokens an image: more than the small image has."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(sizes=((8, 12), (4, 8)))
    stats = answer(model, inputs, keep=15, **SCHEDULE)[3]
    assert [step[1] for step in stats.decode_kept] == [8] * 6
    assert stats.decode_kept[-1][0] < stats.decode_kept[0][0] < 15


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 0}], ids=["ragged", "one row"])
def test_the_cache_holds_what_it_must(batch: dict, mode: str, build) -> None:
    """S tokens before the cut; from it on S - N + n of the widest row, or of prefill if nothing is freed."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(**batch)
    held: list[list[int]] = []

    def look(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        held.append([layer.keys.shape[-2] for layer in output.past_key_values.layers])

    handle = model.get_submodule(family.decoder).register_forward_hook(look, with_kwargs=True)
    try:
        cache, stats = answer(model, inputs, **SCHEDULE, mode=mode)[2:]
    finally:
        handle.remove()
    length, visual = inputs["input_ids"].shape[1], [sum(row) for row in inputs.counts]
    real = inputs["attention_mask"].sum(1).tolist()
    first = [len(set(kept) & set(range(length))) for kept in stats.cuts[0].kept]
    started = [kept - (tokens - n) for kept, tokens, n in zip(first, real, visual, strict=True)]
    for step, counts in enumerate([started, *stats.decode_kept]):
        now = counts if mode == "evict" else started
        widest = max(tokens + step - n + left for tokens, n, left in zip(real, visual, now, strict=True))
        assert held[step] == [length + step] * 2 + [widest] * 2
    assert cache.get_seq_length() == length + 6


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_memory_after_64_tokens(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    held = {}
    for mode in ("evict", "mask"):
        cache, stats = answer(model, inputs, steps=65, **SCHEDULE, mode=mode)[2:]
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        held[mode] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert stats.kv_bytes == held[mode] < stats.kv_bytes_full
        if name == "llava":  # no views of older memory; a sliding layer of transformers is one by itself
            assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == held[mode]
    layers = 2 if name == "llava" else 1  # a full window holds as much whatever was dropped
    start = [sum(round(0.5 * n) for n in row) for row in inputs.counts]
    per_token = 2 * len(inputs["input_ids"]) * 2 * 16 * 4
    text = [int(mask.sum()) - sum(n) for mask, n in zip(inputs["attention_mask"], inputs.counts, strict=True)]
    widths = [
        max(words + left for words, left in zip(text, kept, strict=True)) for kept in (start, stats.decode_kept[-1])
    ]
    assert held["mask"] - held["evict"] == layers * per_token * (widths[0] - widths[1])


# -- the ways in which it is run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 1}], ids=["ragged", "one row"])
def test_beams(batch: dict, mode: str, build) -> None:
    """The score of each hypothesis is what it has when it is written alone."""
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
    for place, (sequence, score) in enumerate(zip(beams.sequences, beams.sequences_scores, strict=True)):
        row = {"only": place // 2} | batch
        tokens = sequence[None, -7:]
        logits = answer(model, family.make_inputs(**row), tokens, **options)[0]
        want = logits.log_softmax(-1).gather(2, tokens[..., None]).sum() / 7
        torch.testing.assert_close(score, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_second_turn(name: str, mode: str, build) -> None:
    """The words of a next turn drop nothing; what was kept stays, and its answer goes on from there."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    more = words(2, 4)

    def talk(forced: list) -> tuple[list[Tensor], list[Tensor]]:
        first, tokens, out = generate_logits(model, inputs, 4, tokens=forced[0])
        turn = longer(inputs, family, out.sequences, more)
        second, others, _ = generate_logits(model, turn, 4, tokens=forced[1], past_key_values=out.past_key_values)
        return [first, second], [tokens, others]

    with tokenprune.patched(model, "dyrate", keep=0.5, record=True, **SCHEDULE, mode=mode):
        got, tokens = talk([None, None])
        stats = tokenprune.stats(model)
    # Steps 1 to 3 are the first answer, 4 to 8 its last token and the words, then the second answer.
    assert [cut.step for cut in stats.cuts] == [0, 1, 3, 9] and len(stats.decode_rates) == 6
    with reduced(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        want, _ = talk(tokens)
    for one, other in zip(got, want, strict=True):
        close(one, other)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_a_image_in_the_second_turn(mode: str, build) -> None:
    """It is cut like the first one, and both compete from then on."""
    family = FAMILIES["llava"]
    model, inputs, later = build(family), family.make_inputs(only=0), family.make_inputs(seed=4, only=0)
    with tokenprune.patched(model, "dyrate", keep=0.5, record=True, **SCHEDULE, mode=mode):
        cache, _ = prefill(model, inputs)
        steps(model, inputs, cache, words(1, 2))
        mask = torch.ones(1, cache.get_seq_length() + later["input_ids"].shape[1], dtype=torch.long)
        model(**{**later, "attention_mask": mask}, past_key_values=cache)
        state = reduction_of(cache).decode
        # 36 tokens each: 15 left after rate 0.6, and 18 of the new image.
        assert state.visual.tolist() == [72] and state.count.tolist() == [15 + 18]
        kinds = state.types[0].tolist()
        assert 0 not in kinds[kinds.index(1) :], "only what comes before the first image of all is the system prompt"
        assert state.masses.shape[1] == 1 and not state.masses[..., 3].any()
        steps(model, {"attention_mask": mask}, cache, words(1, 4, seed=2))
        assert state.count.tolist() == [4]
        assert state.stats is tokenprune.stats(model) and state.stats.decode_kept == [[29], [29], [15], [4]]
        lengths = [layer.keys.shape[-2] for layer in cache.layers]
    total = mask.shape[1] + 4
    # The first image lost 18 tokens in prefill and 3 at the first two steps, which only "evict" forgets.
    assert lengths == [total, total, *[total - 72 + (4 if mode == "evict" else 36)] * 2]


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_caches_are_apart(mode: str, build) -> None:
    """Copies, and generations that take turns, do not see each other; rows take their state along."""
    family = FAMILIES["llava_next"]
    model, text = build(family), words(2, 5)
    jobs = [family.make_inputs(images=(2, 1)), family.make_inputs(images=(1, 0), seed=3)]
    with tokenprune.patched(model, "dyrate", keep=0.5, **OFTEN, mode=mode):
        alone = [steps(model, job, prefill(model, job)[0], text) for job in jobs]
        caches = [prefill(model, job)[0] for job in jobs]
        for step in range(5):
            for job, cache, want in zip(jobs, caches, alone, strict=True):
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
            chosen = {"attention_mask": inputs["attention_mask"][order]}
            close(steps(model, chosen, cache, text[order], done=2), alone[0][order, 2:])


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_tokens_taken_back(mode: str, build) -> None:
    family = FAMILIES["llava"]
    model, inputs, text = build(family), family.make_inputs(), words(2, 5)
    with tokenprune.patched(model, "dyrate", keep=0.5, **SCHEDULE, mode=mode):
        cache, _ = prefill(model, inputs)
        want = steps(model, inputs, cache, text)
        state = reduction_of(cache).decode
        before = state.kept
        cache.crop(-1)
        assert state.masses.shape[1] == 5 and len(state.times) == 4
        assert torch.equal(state.kept, before)
        close(steps(model, inputs, cache, text, done=4), want[:, 4:])
        cache.reset()
        assert reduction_of(cache) is None


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_another_patch_leaves_the_cache_as_it_is(mode: str, build) -> None:
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
            assert reduction_of(other).decode.count.tolist() == [15, 15]
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
    made = [
        tokenprune.method("dyrate", **SCHEDULE, mode=mode) if name == "dyrate"
        else tokenprune.method(name, **({"layer": layers[0]} if name == "fastv" else {}))
        for name in methods
    ]  # fmt: skip
    with tokenprune.patched(model, made, keep=0.6, record=True):
        got, tokens, _ = generate_logits(model, inputs, 6)
        cuts = tokenprune.stats(model).cuts
    assert [cut.step for cut in cuts] == [0, 0, 1, 3, 4] or [cut.step for cut in cuts] == [0, 0, 3, 4]
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        close(got, generate_logits(model, inputs, 6, tokens=tokens)[0])


def test_drafts_decide_nothing(build) -> None:
    """Prompt lookup hands over several tokens at once and takes some back: the kept set is that of accepted tokens."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, "dyrate", keep=0.5, layer=2, rate="schedule", schedule=[0.5]):
        want = model.generate(**inputs, max_new_tokens=8)
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, prompt_lookup_num_tokens=3), want)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(rate="attention"), "rate="),
        (dict(mode="index"), "mode='index' must be 'evict' or 'mask'"),
        (dict(monotone=False), "mode='mask'"),
        (dict(k_min=1.5), "k_min"),
        (dict(grid=0), "grid"),
        (dict(ema=1.0), "ema"),
        (dict(warmup=-1), "warmup"),
        (dict(update_every=0), "update_every"),
        (dict(schedule=[0.5]), "rate='schedule'"),
        (dict(rate="schedule"), "schedule=\\[...\\]"),
        (dict(rate="schedule", schedule=[2.0]), "each entry a number >= 0 and <= 1"),
        (dict(rate="predictor"), "tokenprune fit dyrate --model"),
        (dict(predictor="there.safetensors"), "rate='predictor'"),
        (dict(rate="predictor", predictor="nowhere.safetensors"), "nowhere"),
        (dict(layer=4), "out of range"),
        (dict(batch_policy="each"), "batch_policy"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_bad_options(options: dict, says: str, build) -> None:
    with pytest.raises(OptionError, match=says):
        tokenprune.patch(build(FAMILIES["llava"]), "dyrate", **options)


def test_bad_company(build) -> None:
    model, two = build(FAMILIES["llava"]), [tokenprune.method("dyrate", layer=layer) for layer in (1, 2)]
    with pytest.raises(OptionError, match="same place"):
        tokenprune.patch(model, [tokenprune.method("fastv", layer=3), "dyrate"])
    with pytest.raises(OptionError, match="only one"):
        tokenprune.patch(model, two)


@torch.no_grad()
def test_windows_of_ragged_rows_on_flash(build) -> None:
    family = FAMILIES["gemma3"]
    model = build(family, "flash_stand_in")
    with tokenprune.patched(model, "dyrate", keep=0.5, layer=1):
        with pytest.raises(UnsupportedSetupError, match="mode='mask'"):
            model(**family.make_inputs())
        model(**family.make_inputs(only=0))
