# SPDX-License-Identifier: Apache-2.0
"""Virtual unmerging equals plain loops, also in generation and batches."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from transformers import StaticCache

import tokenprune
from merging_models import SUPPORTED, image_arguments
from merging_towers import FORMS, Merging, exact_attention, naive_decoder, rotary_scores, rotate
from oracle import close, generate_logits
from tests.unit.tower.test_encoder import expected_sources
from tokenprune.integrations.hf.attention.virtual_unmerging import Unmerged
from tokenprune.integrations.hf.forward.token_state import Layout
from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.selection.method import Selection
from tower_features import as_encoded
from turns import longer, words
from zoo import FAMILIES, HEAD_DIM, TEXT, Family

BATCHES = {"ragged": {"images": (2, 1)}, "text beside": {"images": (0, 2)}, "right": {"padding": "right"}}


@pytest.fixture(params=SUPPORTED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def with_decoder(model_type: str, **extra: Any) -> Family:
    config = dict(FAMILIES["llava"].config, text_config={**TEXT, "model_type": model_type, **extra})
    return dataclasses.replace(FAMILIES["llava"], name="llava", config=config)


# -- against plain loops -----------------------------------------------------------------------------------------------


@torch.no_grad()
def check_against_loops(family: Family, model: Any, inputs: Any, form: str) -> None:
    with tokenprune.patched(model, Merging(), keep=0.5), FORMS[form](model):
        got = model(**inputs)
        output = model.model.get_image_features(**image_arguments(inputs))
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    visual, is_valid = family.visual_mask(model, inputs), inputs["attention_mask"].bool()
    embeds[visual] = torch.cat(output.pooler_output)
    sources = expected_sources(family, model, inputs, output.pooler_output)
    merged = 0
    for row, row_sources in enumerate(sources):
        positions = is_valid[row].nonzero().flatten().tolist()
        groups = sorted([*row_sources.values(), *([p] for p in positions if not visual[row, p])])
        merged += len(positions) - len(groups)
        group_indices = [[positions.index(p) for p in group] for group in groups]
        want, keys, values = naive_decoder(
            model.model.language_model, embeds[row, positions], torch.tensor(positions), group_indices
        )
        close(got.logits[row, positions], model.lm_head(want))
        for layer, cached in enumerate(got.past_key_values.layers):
            assert cached.keys.shape[2] == embeds.shape[1]
            close(cached.keys[row][:, positions], keys[layer])
            close(cached.values[row][:, positions], values[layer])
    assert merged > 0.3 * int(visual.sum())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_equals_plain_loops(family: Family, build, form: str, attn: str) -> None:
    check_against_loops(family, build(family, attn), family.make_inputs(images=(2, 1)), form)


@pytest.mark.parametrize("form", FORMS)
def test_queries_and_keys_with_a_norm(form: str) -> None:
    family = with_decoder("qwen3", head_dim=HEAD_DIM)
    check_against_loops(family, family.build(), family.make_inputs(), form)


YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=128)

OTHER_DECODERS = {
    "fused projections": ("phi3", {}),
    "window": ("mistral", {"sliding_window": 16}),
    "part of each head turned": ("stablelm", {}),
    "turned and scaled": ("llama", {"rope_parameters": YARN}),
    "norm over all heads": ("olmo2", {}),
}


@pytest.mark.parametrize("name", OTHER_DECODERS)
@torch.no_grad()
def test_other_decoders(name: str) -> None:
    model_type, extra = OTHER_DECODERS[name]
    family = with_decoder(model_type, **extra)
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    is_valid = inputs["attention_mask"].bool()
    with tokenprune.patched(model, Merging(), keep=0.5):
        want = model(**inputs).logits[is_valid]
    with tokenprune.patched(model, Merging(), keep=0.5), exact_attention(model):
        close(model(**inputs).logits[is_valid], want)
    with tokenprune.patched(model, "tome", keep=0.5):
        assert (model(**inputs).logits[is_valid] - want).abs().max() > 0.1


def test_scores_are_equation_10() -> None:
    g = torch.Generator().manual_seed(0)
    slot = torch.tensor([[0, 1, 2, 1, 3, 2, 2]])
    q, k = (torch.randn(1, 2, 4, 10, generator=g, dtype=torch.float64) for _ in range(2))
    angles = torch.arange(7)[:, None] * torch.tensor([1.0, 0.3, 0.02], dtype=torch.float64)
    cos, sin = (f(torch.cat([angles, angles], -1))[None, None] for f in (torch.cos, torch.sin))
    got = rotary_scores(q, k, cos, sin, slot)
    for head in range(2):
        for m, a in enumerate(slot[0]):
            for n, b in enumerate(slot[0]):
                want = q[0, head, a, 6:] @ k[0, head, b, 6:]  # without rotation
                for j in range(3):
                    (q1, q2), (k1, k2) = q[0, head, a, [j, j + 3]], k[0, head, b, [j, j + 3]]
                    angle = angles[m, j] - angles[n, j]
                    want = want + (q1 * k1 + q2 * k2) * angle.cos() + (q1 * k2 - q2 * k1) * angle.sin()
                torch.testing.assert_close(got[0, head, m, n], want)
    every = slot[:, None, :, None].expand(1, 2, 7, 10)
    plain = rotate(q.gather(2, every), cos, sin) @ rotate(k.gather(2, every), cos, sin).transpose(2, 3)
    torch.testing.assert_close(got, plain)


# -- merge and expand --------------------------------------------------------------------------------------------------


def test_merge_and_expand() -> None:
    slot = torch.tensor([[0, 1, 0, 2, 1], [0, 1, 2, 3, 4]])
    layout = Layout(
        torch.tensor([[2, 4, 0, 1, 3], [0, 1, 2, 3, 4]]),
        torch.tensor([[False] * 2 + [True] * 3, [True] * 5]),
        5,
        [3, 5],
    )
    slot[0] += 2
    state = Unmerged(layout, slot)
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    merged = state.merge(x)
    torch.testing.assert_close(merged[0, 2:], torch.stack([(x[0, 0] + x[0, 2]) / 2, (x[0, 1] + x[0, 4]) / 2, x[0, 3]]))
    assert torch.equal(merged[1], x[1])
    assert torch.equal(state.gather_first(x)[0, 2:], x[0, [0, 1, 3]])
    expanded = state.expand(merged)
    assert torch.equal(expanded[0, 0], expanded[0, 2]) and torch.equal(expanded[0, 1], expanded[0, 4])
    torch.testing.assert_close(state.expand(state.merge(expanded)), expanded, atol=1e-7, rtol=0)
    for dtype in (torch.float64, torch.bfloat16):
        assert state.merge(x.to(dtype)).dtype == dtype


@torch.no_grad()
def test_groups_of_one_token_equal_the_model(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    before = model(**inputs).logits
    with tokenprune.patched(model, Merging(r=0)):
        assert torch.equal(model(**inputs).logits, before)  # no token merges
        encoder, recorded = get_attachment(model).engine.parts[0], []

        def keep_all(call: Any, device: Any, num_kept: Any) -> Selection:
            segments = call.state.segments.to(device)
            recorded.append(segments)
            indices = torch.arange(segments.mask.shape[1]).expand_as(segments.mask)
            return Selection(segments.mask, indices.masked_fill(~segments.mask, -1), counts=segments.counts)

        encoder._select = keep_all
        got = model(**inputs).logits
        assert tokenprune.stats(model).keep_ratio == tokenprune.stats(model).prefill_flops_ratio == 1
        del encoder._select
    assert len(recorded) == 1
    is_valid = inputs["attention_mask"].bool()
    assert torch.equal(got[is_valid], before[is_valid])
    with tokenprune.patched(model, Merging(), keep=1.0):
        assert torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_attention_before_the_average_is_unpruned(family: Family, model) -> None:
    """With equal features in each group, attention of the first layer equals the unpatched model's."""
    inputs, outputs = family.make_inputs(images=(2, 1)), []
    # This hook runs before the hooks of the patch.
    projection = model.model.language_model.layers[0].self_attn.o_proj
    with projection.register_forward_pre_hook(lambda m, args: outputs.append(args[0])):
        with tokenprune.patched(model, Merging(), keep=0.5):
            model(**inputs)
            output = model.model.get_image_features(**image_arguments(inputs))
        with as_encoded(model, {"image": output}):
            model(**inputs)
    is_valid = inputs["attention_mask"].bool()
    close(outputs[0][is_valid], outputs[1][is_valid])


# -- generation, batches, caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_a_batch_equals_its_rows(family: Family, model, batch: str) -> None:
    inputs = family.make_inputs(**BATCHES[batch])
    is_valid = inputs["attention_mask"].bool()
    with tokenprune.patched(model, Merging(), keep=0.5):
        batched = model(**inputs).logits
        for row in range(len(is_valid)):
            single = family.make_inputs(**BATCHES[batch], only=row)
            close(batched[row, is_valid[row]], model(**single).logits[0])


@torch.no_grad()
def test_generation_continues_after_the_full_prompt(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    mask, length = inputs["attention_mask"], inputs["input_ids"].shape[1]
    with tokenprune.patched(model, Merging(), keep=0.5):
        got, tokens, out = generate_logits(model, inputs, 4)
        stats = tokenprune.stats(model)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        prompt = model(**inputs, position_ids=positions)
    assert out.past_key_values.get_seq_length() == length + 3
    assert [layer.keys.shape[2] for layer in out.past_key_values.layers] == [length + 3] * 4
    assert stats.kv_bytes == stats.kv_bytes_full > 0
    # The unpatched model continues with the cache.
    logits, cache = [prompt.logits[:, -1]], prompt.past_key_values
    for step in range(3):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        out = model(
            input_ids=tokens[:, step : step + 1], attention_mask=mask, past_key_values=cache,
            position_ids=positions[:, -1:] + step + 1,
        )  # fmt: skip
        logits.append(out.logits[:, -1])
    close(got, torch.stack(logits, 1))


@torch.no_grad()
def test_beams(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, Merging(), keep=0.5):
        single = model.generate(**inputs, max_new_tokens=5, num_beams=3)
        batched = model.generate(**family.make_inputs(), max_new_tokens=5, num_beams=3)
    assert torch.equal(single[0, -5:], batched[0, -5:])


@torch.no_grad()
def test_a_kept_cache(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    more = words(2, 5)
    with tokenprune.patched(model, Merging(), keep=0.5):
        _, _, out = generate_logits(model, inputs, 2)
        turn = longer(inputs, family, out.sequences, more)
        got, _, _ = generate_logits(model, turn, 1, past_key_values=out.past_key_values)
        want, _, _ = generate_logits(model, {**inputs, **turn}, 1)
    close(got, want)


@pytest.mark.parametrize("before", ["the same", "cut"])
@torch.no_grad()
def test_images_in_a_later_turn(build, before: str) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    half = inputs["input_ids"].shape[1]
    ids = inputs["input_ids"].repeat(1, 2)
    pixels = inputs["pixel_values"]
    first = Merging() if before == "the same" else "divprune"
    with tokenprune.patched(model, first, keep=0.5):
        cache = model(input_ids=ids[:, :half], pixel_values=pixels).past_key_values
    results = []
    for form in FORMS.values():
        kept = copy.deepcopy(cache)
        with tokenprune.patched(model, Merging(), keep=0.5), form(model):
            out = model(input_ids=ids[:, half:], pixel_values=pixels, past_key_values=kept)
            assert kept.get_seq_length() == 2 * half
            results.append(out.logits)
    close(results[0], results[1])
    if before == "the same":
        with tokenprune.patched(model, Merging(), keep=0.5):
            close(results[0], model(input_ids=ids, pixel_values=pixels.repeat_interleave(2, 0)).logits[:, half:])


@torch.no_grad()
def test_a_static_cache(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    cache = StaticCache(config=model.config.text_config, max_cache_len=80)
    with tokenprune.patched(model, Merging(), keep=0.5):
        close(model(**inputs, past_key_values=cache).logits, model(**inputs).logits)
