# SPDX-License-Identifier: Apache-2.0
"""Virtual unmerging: tokens merged in the tower are one for the decoder's weights, and many for its attention."""

from __future__ import annotations

import copy
import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import StaticCache

import tokenprune
from basics import snapshot
from exact_attention import exact_attention, rotary_scores, rotate
from oracle import close, generate_logits, survivors
from tests.engine.test_cache import longer, words
from tests.tower.test_encoder import SUPPORTED, expected_sources, image_arguments, with_features
from tokenprune import OptionError, UnsupportedSetupError
from tokenprune.base import Selection
from tokenprune.integrations.hf.decoder.virtual_unmerging import Unmerged
from tokenprune.integrations.hf.sequence.layout import Layout
from tokenprune.methods.encoder.tome import ToMe
from zoo import FAMILIES, HEAD_DIM, TEXT, Family

# As the library computes attention, and the paper's equation 10.
FORMS = {"expanded": lambda model: nullcontext(), "exact": exact_attention}
BATCHES = {"ragged": {"images": (2, 1)}, "text beside": {"images": (0, 2)}, "right": {"padding": "right"}}


@dataclass(frozen=True)
class Merging(ToMe):
    """Stands for any method that merges in the tower and has the option."""

    vtu: str = "expanded"


@pytest.fixture(params=SUPPORTED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def with_decoder(model_type: str, **extra: Any) -> Family:
    config = dict(FAMILIES["llava"].config, text_config={**TEXT, "model_type": model_type, **extra})
    return dataclasses.replace(FAMILIES["llava"], name="llava", config=config)


# -- against plain loops


@torch.no_grad()
def naive_decoder(
    decoder: Any, embeds: Tensor, positions: Tensor, groups: list[list[int]]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One row, written from the spec: the last hidden states `[L, D]`, and each layer's keys and values."""
    owner = torch.empty(len(embeds), dtype=torch.long)
    for number, group in enumerate(groups):
        owner[group] = number
    x = torch.stack([embeds[group].mean(0) for group in groups])
    positions = positions[None] if positions.ndim == 1 else positions[:, None]  # of three axes
    cos, sin = (part[0] for part in decoder.rotary_emb(embeds[None], positions))
    all_keys, all_values = [], []
    for layer in decoder.layers:
        at = layer.self_attn
        h, heads = layer.input_layernorm(x), at.config.num_attention_heads
        q, k, v = (p(h).view(len(h), -1, at.head_dim) for p in (at.q_proj, at.k_proj, at.v_proj))
        if hasattr(at, "q_norm"):
            q, k = at.q_norm(q), at.k_norm(k)
        keys = torch.stack([by_hand(k[owner[n]], cos[n], sin[n]) for n in range(len(embeds))])
        values = torch.stack([v[owner[n]] for n in range(len(embeds))])
        out = torch.empty(len(embeds), heads, at.head_dim)
        for m in range(len(embeds)):
            query = by_hand(q[owner[m]], cos[m], sin[m])
            for head in range(heads):
                shared = head // at.num_key_value_groups
                weights = (keys[: m + 1, shared] @ query[head] * at.scaling).softmax(0)
                out[m, head] = weights @ values[: m + 1, shared]
        x = x + at.o_proj(torch.stack([out[group].mean(0).flatten() for group in groups]))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        all_keys.append(keys.transpose(0, 1))
        all_values.append(values.transpose(0, 1))
    return decoder.norm(x)[owner], all_keys, all_values


def by_hand(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for j in range(half):
        out[..., j] = x[..., j] * cos[j] - x[..., j + half] * sin[j]
        out[..., j + half] = x[..., j + half] * cos[j] + x[..., j] * sin[j]
    return out


@torch.no_grad()
def check_against_loops(family: Family, model: Any, inputs: Any, form: str) -> None:
    with tokenprune.patched(model, Merging(), keep=0.5), FORMS[form](model):
        got = model(**inputs)
        output = model.model.get_image_features(**image_arguments(inputs))
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    visual, real = family.visual_mask(model, inputs), inputs["attention_mask"].bool()
    embeds[visual] = torch.cat(output.pooler_output)
    sources = expected_sources(family, model, inputs, output.pooler_output)
    merged = 0
    for row, of_row in enumerate(sources):
        places = real[row].nonzero().flatten().tolist()
        groups = sorted([*of_row.values(), *([p] for p in places if not visual[row, p])])
        merged += len(places) - len(groups)
        numbered = [[places.index(p) for p in group] for group in groups]
        want, keys, values = naive_decoder(
            model.model.language_model, embeds[row, places], torch.tensor(places), numbered
        )
        close(got.logits[row, places], model.lm_head(want))
        for layer, cached in enumerate(got.past_key_values.layers):
            assert cached.keys.shape[2] == embeds.shape[1]
            close(cached.keys[row][:, places], keys[layer])
            close(cached.values[row][:, places], values[layer])
    assert merged > 0.3 * int(visual.sum())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_equals_plain_loops(family: Family, build, form: str, attn: str) -> None:
    """Logits and, layer by layer, keys and values, in the whole model."""
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
    """Both forms agree, and are not what dropping the merged tokens gives."""
    kind, extra = OTHER_DECODERS[name]
    family = with_decoder(kind, **extra)
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    real = inputs["attention_mask"].bool()
    with tokenprune.patched(model, Merging(), keep=0.5):
        want = model(**inputs).logits[real]
    with tokenprune.patched(model, Merging(), keep=0.5), exact_attention(model):
        close(model(**inputs).logits[real], want)
    with tokenprune.patched(model, "tome", keep=0.5):
        assert (model(**inputs).logits[real] - want).abs().max() > 0.1


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
                want = q[0, head, a, 6:] @ k[0, head, b, 6:]  # not turned
                for j in range(3):
                    (q1, q2), (k1, k2) = q[0, head, a, [j, j + 3]], k[0, head, b, [j, j + 3]]
                    angle = angles[m, j] - angles[n, j]
                    want = want + (q1 * k1 + q2 * k2) * angle.cos() + (q1 * k2 - q2 * k1) * angle.sin()
                torch.testing.assert_close(got[0, head, m, n], want)
    every = slot[:, None, :, None].expand(1, 2, 7, 10)
    plain = rotate(q.gather(2, every), cos, sin) @ rotate(k.gather(2, every), cos, sin).transpose(2, 3)
    torch.testing.assert_close(got, plain)


# -- what merging and unmerging are


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
    assert torch.equal(state.first(x)[0, 2:], x[0, [0, 1, 3]])
    whole = state.expand(merged)
    assert torch.equal(whole[0, 0], whole[0, 2]) and torch.equal(whole[0, 1], whole[0, 4])
    torch.testing.assert_close(state.expand(state.merge(whole)), whole, atol=1e-7, rtol=0)
    for dtype in (torch.float64, torch.bfloat16):
        assert state.merge(x.to(dtype)).dtype == dtype


@torch.no_grad()
def test_each_token_its_own_group_is_the_model(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    before = model(**inputs).logits
    with tokenprune.patched(model, Merging(r=0)):
        assert torch.equal(model(**inputs).logits, before)  # nothing to do
        encoder, seen = model._tokenprune_patch.engine.parts[0], []

        def all_for_themselves(call: Any, segments: Any) -> Selection:
            seen.append(segments)
            places = torch.arange(segments.mask.shape[1]).expand_as(segments.mask)
            return Selection(segments.mask, places.masked_fill(~segments.mask, -1), counts=segments.counts)

        encoder.select = all_for_themselves
        got = model(**inputs).logits
        assert tokenprune.stats(model).keep_ratio == tokenprune.stats(model).prefill_flops_ratio == 1
        del encoder.select
    assert len(seen) == 1
    real = inputs["attention_mask"].bool()
    assert torch.equal(got[real], before[real])
    with tokenprune.patched(model, Merging(), keep=1.0):
        assert torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_before_the_average_attention_is_that_of_the_full_prompt(family: Family, model) -> None:
    """Equal features at the positions of a group: the first layer's attention is the unpatched model's."""
    inputs, seen = family.make_inputs(images=(2, 1)), []
    # This hook comes before those of the patch.
    projection = model.model.language_model.layers[0].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    try:
        with tokenprune.patched(model, Merging(), keep=0.5):
            model(**inputs)
            output = model.model.get_image_features(**image_arguments(inputs))
        with with_features(model, output):
            model(**inputs)
    finally:
        handle.remove()
    real = inputs["attention_mask"].bool()
    close(seen[0][real], seen[1][real])


# -- generation, batches, caches


@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_a_batch_equals_its_rows(family: Family, model, batch: str) -> None:
    inputs = family.make_inputs(**BATCHES[batch])
    real = inputs["attention_mask"].bool()
    with tokenprune.patched(model, Merging(), keep=0.5):
        together = model(**inputs).logits
        for row in range(len(real)):
            alone = family.make_inputs(**BATCHES[batch], only=row)
            close(together[row, real[row]], model(**alone).logits[0])


@torch.no_grad()
def test_generation_goes_on_behind_the_full_prompt(family: Family, model) -> None:
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
    # The unpatched model goes on from the cache.
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
        one = model.generate(**inputs, max_new_tokens=5, num_beams=3)
        two = model.generate(**family.make_inputs(), max_new_tokens=5, num_beams=3)
    assert torch.equal(one[0, -5:], two[0, -5:])


@torch.no_grad()
def test_a_kept_cache(family: Family, model) -> None:
    """A second turn, text alone, equals one prompt of both."""
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
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(padding=None)
    half = inputs["input_ids"].shape[1]
    ids = inputs["input_ids"].repeat(1, 2)
    pixels = inputs["pixel_values"]
    first = Merging() if before == "the same" else "divprune"
    with tokenprune.patched(model, first, keep=0.5):
        cache = model(input_ids=ids[:, :half], pixel_values=pixels).past_key_values
    results = []
    for way in FORMS.values():
        kept = copy.deepcopy(cache)
        with tokenprune.patched(model, Merging(), keep=0.5), way(model):
            out = model(input_ids=ids[:, half:], pixel_values=pixels, past_key_values=kept)
            assert kept.get_seq_length() == 2 * half
            results.append(out.logits)
    close(results[0], results[1])
    if before == "the same":
        with tokenprune.patched(model, Merging(), keep=0.5):
            close(results[0], model(input_ids=ids, pixel_values=pixels.repeat_interleave(2, 0)).logits[:, half:])


@torch.no_grad()
def test_a_static_cache(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(padding=None)
    cache = StaticCache(config=model.config.text_config, max_cache_len=80)
    with tokenprune.patched(model, Merging(), keep=0.5):
        close(model(**inputs, past_key_values=cache).logits, model(**inputs).logits)


# -- what it saves, and what it says of that


@contextmanager
def tokens_seen(decoder: Any, names: list[str]) -> Any:
    seen: dict[str, list[int]] = {name: [] for name in names}
    handles = []
    for layer in decoder.layers:
        for name in names:
            hook = lambda m, args, out, name=name: seen[name].append(args[0].shape[1])  # noqa: E731
            handles.append(layer.get_submodule(name).register_forward_hook(hook))
    yield seen
    for handle in handles:
        handle.remove()


def in_layers(counter: FlopCounterMode) -> int:
    """FLOPs that were counted inside decoder layers."""
    names = [name for name in counter.flop_counts if re.search(r"language_model\.layers\.\d+$", name)]
    return sum(sum(counter.flop_counts[name].values()) for name in names)


@torch.no_grad()
def test_the_work_shrinks_and_the_statistics_say_how_much(family: Family, build) -> None:
    model, inputs = build(family, "eager"), family.make_inputs(only=0)
    names = ["input_layernorm", "post_attention_layernorm", "mlp", *(f"self_attn.{x}_proj" for x in "qkvo")]
    with tokenprune.patched(model, "tome", keep=0.5, record=True):
        model(**inputs)
        merged = tokenprune.stats(model)
    length, visual = inputs["input_ids"].shape[1], sum(inputs.counts[0])
    left = length - visual + merged.visual_tokens_out
    decoder = model.model.language_model
    flops: list[int] = []
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    flops.append(in_layers(counter))
    with tokenprune.patched(model, Merging(), keep=0.5, record=True):
        with tokens_seen(decoder, names) as seen, FlopCounterMode(display=False) as counter:
            out = model(**inputs)
        flops.append(in_layers(counter))
        stats = tokenprune.stats(model)
    assert out.logits.shape[1] == length and left < length
    for name in names:  # a projection's own hook is the last: it sees what the patch handed in
        assert seen[name] == [left] * 4, name
    assert stats.visual_tokens_in == visual
    assert stats.visual_tokens_per_layer == [merged.visual_tokens_out] * 4
    assert stats.visual_tokens_out == merged.visual_tokens_out and stats.keep_ratio == merged.keep_ratio
    assert stats.kv_bytes == stats.kv_bytes_full > merged.kv_bytes
    assert stats.cuts == merged.cuts and stats.encoder_tokens_per_layer == merged.encoder_tokens_per_layer
    assert survivors(stats.cuts[0], length).sum() == left
    assert merged.prefill_flops_ratio < stats.prefill_flops_ratio < 1
    assert stats.overhead_ms > 0
    assert stats.prefill_flops_ratio == pytest.approx(flops[1] / flops[0], rel=1e-9)


# -- the model afterwards


@torch.no_grad()
def test_unpatch_gives_the_same_model_back(family: Family, model) -> None:
    inputs = family.make_inputs()
    before, was = model(**inputs).logits, snapshot(model)
    tokenprune.patch(model, Merging(), keep=0.5)
    assert not torch.equal(model(**inputs).logits, before)
    tokenprune.unpatch(model)
    assert snapshot(model) == was
    assert torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_a_deep_copy_works_on_its_own(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    with tokenprune.patched(model, Merging(), keep=0.5):
        want = model(**inputs).logits
        twin = copy.deepcopy(model)
    assert torch.equal(twin(**inputs).logits, want)
    tokenprune.unpatch(twin)
    assert torch.equal(twin(**inputs).logits, model(**inputs).logits)


@torch.no_grad()
def test_a_failing_forward_leaves_nothing_behind(build) -> None:
    family = FAMILIES["llava"]
    model, inputs, text = build(family), family.make_inputs(), family.make_inputs(images=(0, 0))
    before = model(**text).logits
    with tokenprune.patched(model, Merging(), keep=0.5):
        want = model(**inputs).logits
        handle = model.model.language_model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        handle.remove()
        assert torch.equal(model(**text).logits, before)
        assert torch.equal(model(**inputs).logits, want)


@torch.no_grad()
def test_a_module_that_comes_between_is_not_fooled(build) -> None:
    """An adapter put around a projection after the patch reads the stand-in; that must not pass for a feature."""

    class Around(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 0.1 * x.mean()

    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs()
    with tokenprune.patched(model, Merging(), keep=0.5):
        attention = model.model.language_model.layers[0].self_attn
        attention.q_proj = Around(attention.q_proj)
        assert model(**inputs).logits.isnan().any()


def test_threads(build) -> None:
    """Three threads, all of them inside an attention module at once."""
    family = FAMILIES["llava_next"]
    model = build(family)
    jobs = [family.make_inputs(seed=seed, images=images) for seed, images in enumerate([(2, 1), (0, 1), (0, 0)])]
    with tokenprune.patched(model, Merging(), keep=0.5):
        alone = [generate_logits(model, job, 3)[0] for job in jobs]
        meet = threading.Barrier(len(jobs))
        layers = model.model.language_model.layers
        handles = [
            layers[i].self_attn.v_proj.register_forward_pre_hook(lambda *_: (meet.wait(20), None)[1]) for i in (0, 2)
        ]
        try:
            with ThreadPoolExecutor(len(jobs)) as pool:
                together = list(pool.map(lambda job: generate_logits(model, job, 3)[0], jobs))
        finally:
            for handle in handles:
                handle.remove()
    for got, want in zip(together, alone, strict=True):
        assert torch.equal(got, want)


def test_gradients(build) -> None:
    family = FAMILIES["llava"]
    # Rows of different width: what fills one up must not get into the gradients.
    model, inputs = copy.deepcopy(build(family)), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, Merging(), keep=0.5):
        model(**inputs).logits[:, -1].logsumexp(-1).sum().backward()
    for name, parameter in model.model.language_model.layers.named_parameters():
        assert "k_proj.bias" in name or parameter.grad.abs().sum() > 0, name
    assert model.model.multi_modal_projector.linear_1.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_bfloat16() -> None:
    """In the first layer: random weights blow rounding up."""
    family = FAMILIES["llava"]
    model, seen = family.build().bfloat16(), []
    inputs = family.make_inputs(padding=None)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    model.model.language_model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda m, args: seen.append(args[0])
    )
    for form in FORMS:
        with tokenprune.patched(model, Merging(), keep=0.5), FORMS[form](model):
            logits = model(**inputs).logits
        assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert seen[0].dtype == seen[1].dtype == torch.bfloat16
    close(seen[0].float(), seen[1].float(), 0.02)


# -- what is refused, and said


@pytest.mark.parametrize("other", ["divprune", "fastv", "dart"])
def test_nothing_may_prune_behind_it(build, other: str) -> None:
    model = build(FAMILIES["llava"])
    was = snapshot(model)
    with pytest.raises(OptionError, match=f'tome with vtu="expanded" cannot be composed with {other}.*vtu="off"'):
        tokenprune.patch(model, [Merging(), other], keep=0.5)
    assert snapshot(model) == was and not tokenprune.is_patched(model)


@pytest.mark.parametrize("keep", [0.5, 1.0])
@pytest.mark.parametrize("form", ["fast", "exact"])
def test_unknown_forms(build, form: str, keep: float) -> None:
    with pytest.raises(OptionError, match=f"vtu='{form}' must be one of off, expanded$"):
        tokenprune.patch(build(FAMILIES["llava"]), Merging(vtu=form), keep=keep)


def test_off_is_off(build) -> None:
    model, inputs = build(FAMILIES["llava"]), FAMILIES["llava"].make_inputs()
    with tokenprune.patched(model, "tome", keep=0.5):
        want = model(**inputs).logits
    with tokenprune.patched(model, [Merging(vtu="off"), "fastv"], keep=[0.5, 1.0]):
        assert torch.equal(model(**inputs).logits, want)


def test_models_without_a_decoder() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", pretrained=False)
    with pytest.raises(OptionError, match="no language model to unmerge"):
        tokenprune.patch(model, Merging(), keep=0.5)


def test_unknown_decoders(build) -> None:
    model = copy.deepcopy(build(FAMILIES["llava"]))
    was = snapshot(model)
    attention = model.model.language_model.layers[3].self_attn
    attention.gate = torch.nn.Linear(4, 4)
    with pytest.raises(UnsupportedSetupError, match=r'q_proj.*not LlamaAttention with gate, k_proj.*vtu="off"'):
        tokenprune.patch(model, Merging(), keep=0.5)
    del attention.gate
    rotary = model.model.language_model.rotary_emb
    del model.model.language_model.rotary_emb
    with pytest.raises(UnsupportedSetupError, match="rotary positions"):
        tokenprune.patch(model, Merging(), keep=0.5)
    model.model.language_model.rotary_emb = rotary
    assert snapshot(model) == was


def test_gradient_checkpointing_is_refused(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs()
    model.train()
    model.model.language_model.gradient_checkpointing_enable()
    with (
        tokenprune.patched(model, Merging(), keep=0.5),
        pytest.raises(UnsupportedSetupError, match="forgotten which tokens are one"),
    ):
        model(**inputs)


def test_arguments_for_each_token_that_nobody_knows_are_refused(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    with (
        tokenprune.patched(model, Merging(), keep=0.5),
        pytest.raises(UnsupportedSetupError, match="per-token argument 'per_layer_inputs'"),
    ):
        model(**inputs, per_layer_inputs=torch.zeros(*inputs["input_ids"].shape, 2))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@torch.no_grad()
def test_rotary_positions_of_three_axes(name: str, build) -> None:
    """Each token of a group at its own place of the image: by hand from the patched tower's features."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    logits = {}
    for form in FORMS:
        with tokenprune.patched(model, Merging(), keep=0.5), FORMS[form](model):
            logits[form] = model(**inputs).logits
            assert tokenprune.stats(model).kv_bytes == tokenprune.stats(model).kv_bytes_full
            features = torch.cat(
                model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
            )
    seen: dict[str, Any] = {}
    decoder = model.model.language_model
    handle = decoder.register_forward_pre_hook(lambda m, args, kwargs: seen.update(kwargs), with_kwargs=True)
    model(**inputs)
    handle.remove()
    embeds, visual = seen["inputs_embeds"].clone(), family.visual_mask(model, inputs)
    embeds[visual] = features
    positions = seen["position_ids"][-3:]
    for row in range(len(embeds)):
        real = inputs["attention_mask"][row].bool()
        places = real.nonzero().flatten()
        kept = embeds[row, places]
        groups: list[list[int]] = []
        for place, feature in enumerate(kept):
            same = [g for g in groups if visual[row, places[place]] and torch.equal(kept[g[0]], feature)]
            same[0].append(place) if same else groups.append([place])
        hidden, _, _ = naive_decoder(decoder, kept, positions[:, row, places], groups)
        want = model.lm_head(hidden)
        for form in FORMS:
            close(logits[form][row, places], want)


def test_features_that_enter_between_layers_are_refused(build) -> None:
    model = build(FAMILIES["qwen3_vl"])
    with pytest.raises(UnsupportedSetupError, match="between the decoder's layers"):
        tokenprune.patch(model, Merging(vtu="expanded"), keep=0.5)
    assert not tokenprune.is_patched(model)


def test_it_is_an_option_of_dymu(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    pixels = list(torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(0)))
    found = tokenprune.calibrate(model, pixels, keep=0.5, progress=False)
    with torch.no_grad(), tokenprune.patched(model, "dymu", keep=0.5, thresholds=found, vtu="expanded"):
        model(**inputs)
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_out < stats.visual_tokens_in
    assert stats.kv_bytes == stats.kv_bytes_full
    with pytest.raises(OptionError, match="vtu='both' must be 'off' or 'expanded'"):
        tokenprune.method("dymu", vtu="both")
