# SPDX-License-Identifier: Apache-2.0
"""Modes of running a model: attention back ends, beams, samples, threads, embeddings as input."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import _is_packed_sequence

import tokenprune
from basics import MODEL_METHODS
from families.plain import FAMILIES as OTHERS
from hooks import removed_after
from oracle import close, generate_logits, reduced
from pruned import check_generation, run_pruned
from zoo import Family

# One method per site. Methods of a site differ only in their selection, which has its own tests.
SITES = ["divprune", "fastv"]


def record_cuts(model: Any, method: Any, inputs: Any, keep: float = 0.3, **options: Any) -> list:
    with torch.no_grad(), tokenprune.patched(model, method, keep=keep, record=True, **options):
        model.generate(**inputs, max_new_tokens=1)
        return tokenprune.stats(model).cuts


# -- attention back ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", MODEL_METHODS)
@torch.no_grad()
def test_eager_equals_sdpa(method: str, family: Family, build) -> None:
    inputs = family.make_inputs(images=(2, 1))
    logits, kept = {}, {}
    for attention in ("sdpa", "eager"):
        model = build(family, attention)
        with tokenprune.patched(model, method, keep=0.3, record=True):
            out, tokens, _ = generate_logits(model, inputs, 3, tokens=logits["sdpa"][1] if logits else None)
            logits[attention], kept[attention] = (out, tokens), tokenprune.stats(model).cuts[0].kept
    assert kept["eager"] == kept["sdpa"]
    close(logits["eager"][0], logits["sdpa"][0], 2e-4)


def test_eager_equals_its_oracle(family: Family, build) -> None:
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 2))
    check_generation(family, model, inputs, ["divprune", "fastv"], 0.5)


@torch.no_grad()
def test_a_wide_window_without_a_cache(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would treat gaps in positions as borders of packed sequences."""
    model, inputs = OTHERS["mistral3"].prepare(build, images=(2,))
    monkeypatch.setattr(model.config.text_config, "sliding_window", 4096)
    with tokenprune.patched(model, "divprune", keep=0.3):
        close(model(**inputs, use_cache=False).logits[:, -1], model(**inputs).logits[:, -1])


def flash_stand_in(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Emulate a flash kernel with a 2-D mask or no mask, on any device."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    assert attention_mask is None or attention_mask.shape == (batch, keys), "flash kernels take 2-D masks"
    if attention_mask is None and _is_packed_sequence(kwargs.get("position_ids"), batch):
        # Positions with gaps select the kernels' packed path, which is right only for a single sequence.
        starts = kwargs["position_ids"] == kwargs["position_ids"].min()
        assert starts.sum() == 1 and starts[0, 0] and queries == keys
    slots = torch.arange(keys)
    age = slots[keys - queries :, None] - slots
    window = kwargs.get("sliding_window")
    allowed = (age >= 0) if window is None else (age >= 0) & (age < window)
    allowed = allowed[None, None].expand(batch, 1, -1, -1)
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None].bool()
    group = heads // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("flash_stand_in", flash_stand_in)
AttentionMaskInterface.register("flash_stand_in", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])


@pytest.mark.pairwise(runs=lambda family, **_: family != "gemma3")
@pytest.mark.parametrize(
    "batch",
    [{"images": (2, 1)}, {"images": (2, 1), "padding": None}, {"only": 0}],
    ids=["ragged", "no padding", "one row"],
)
@pytest.mark.parametrize("method", MODEL_METHODS)
@torch.no_grad()
def test_flash_masks(method: str, batch: dict, family: Family, build) -> None:
    if family.name == "gemma3":
        pytest.skip("flash attention cannot let images attend both ways, so Gemma 3 differs unpatched")
    sdpa, inputs = build(family), family.make_inputs(**batch)
    with tokenprune.patched(sdpa, method, keep=0.3, record=True):
        want, tokens, _ = generate_logits(sdpa, inputs, 3)
        kept = tokenprune.stats(sdpa).cuts[0].kept
    model = build(family, "flash_stand_in")
    with tokenprune.patched(model, method, keep=0.3, record=True):
        got, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
        assert tokenprune.stats(model).cuts[0].kept == kept
    close(got, want, 2e-5)


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.few_families
@pytest.mark.parametrize("method", SITES)
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 1}], ids=["ragged", "one row"])
def test_beams(method: str, batch: dict, family: Family, model) -> None:
    inputs = family.make_inputs(**batch)
    beams = dict(max_new_tokens=4, num_beams=3, return_dict_in_generate=True, output_scores=True)
    with tokenprune.patched(model, method, keep=0.3, record=True):
        got = model.generate(**inputs, **beams, num_return_sequences=2)
        cuts = tokenprune.stats(model).cuts
    cuts[0].kept = [cuts[0].kept[i] for i in range(0, len(cuts[0].kept), len(cuts[0].kept) // len(inputs["input_ids"]))]
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want = model.generate(**inputs, **beams, num_return_sequences=2)
    assert torch.equal(got.sequences, want.sequences)
    close(got.sequences_scores, want.sequences_scores)


@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"video": (True, False)}], ids=["images", "video"])
def test_beams_keep_the_shape_of_images(batch: dict, family: Family, model) -> None:
    """`generate` repeats rows after the encoder; `pool` needs the image shape of each copy."""
    if "video" in batch and not family.video:
        pytest.skip(f"{family.name} does not support videos")
    inputs = family.make_inputs(**batch)
    (want,) = record_cuts(model, "pool", inputs)
    with tokenprune.patched(model, "pool", keep=0.3, record=True):
        model.generate(**inputs, max_new_tokens=1, num_beams=2)
        (got,) = tokenprune.stats(model).cuts
    assert got.kept == [row for row in want.kept for _ in range(2)]
    assert got.sources == [row for row in want.sources for _ in range(2)]


@pytest.mark.few_families
@pytest.mark.parametrize("method", SITES)
def test_samples(method: str, family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    cuts = record_cuts(model, method, inputs)
    draw = dict(max_new_tokens=4, do_sample=True, num_return_sequences=3)
    torch.manual_seed(5)
    with tokenprune.patched(model, method, keep=0.3):
        got = model.generate(**inputs, **draw)
    torch.manual_seed(5)
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want = model.generate(**inputs, **draw)
    assert torch.equal(got, want)
    assert not torch.equal(got[0], got[1])


@pytest.mark.few_families
@pytest.mark.parametrize("method", SITES)
def test_threads(method: str, family: Family, model) -> None:
    jobs = [family.make_inputs(seed=seed, images=images) for seed, images in enumerate([(2, 1), (1, 1), (1, 0)])]
    with tokenprune.patched(model, method, keep=0.3):
        sequential = [generate_logits(model, job, 4)[0] for job in jobs]
        barrier = threading.Barrier(len(jobs))
        layers = model.get_submodule(family.decoder).layers

        def wait(*_: Any) -> None:
            barrier.wait(120)

        handles = [layers[i].register_forward_pre_hook(wait) for i in (0, 2)]
        with removed_after(handles), ThreadPoolExecutor(len(jobs)) as pool:
            concurrent = list(pool.map(lambda job: generate_logits(model, job, 4)[0], jobs))
        # The statistics belong to the job that finished last.
        counts = {sum(map(sum, job.counts)) for job in jobs}
        assert tokenprune.stats(model).visual_tokens_in in counts
    for got, want in zip(concurrent, sequential, strict=True):
        assert torch.equal(got, want)


@pytest.mark.few_families
@pytest.mark.parametrize("method", SITES)
def test_text_only(method: str, family: Family, model) -> None:
    inputs, images = family.make_inputs(images=(0, 0)), family.make_inputs()
    before, tokens, _ = generate_logits(model, inputs, 3)
    with tokenprune.patched(model, method, keep=0.3):
        got, got_tokens, _ = generate_logits(model, inputs, 3)
        stats = tokenprune.stats(model)
        assert (stats.visual_tokens_in, stats.visual_tokens_out) == (0, 0)
        assert stats.keep_ratio == stats.prefill_flops_ratio == 1 and "no visual tokens" in repr(stats)
        model.generate(**images, max_new_tokens=2)
        image_stats = repr(tokenprune.stats(model))
        repeated, repeated_tokens, _ = generate_logits(model, inputs, 3)
        # A call without images leaves the statistics of the last call with images.
        assert repr(tokenprune.stats(model)) == image_stats and "no visual tokens" not in image_stats
    for logits, new_tokens in ((got, got_tokens), (repeated, repeated_tokens)):
        assert torch.equal(logits, before) and torch.equal(new_tokens, tokens)


# -- plain forwards ----------------------------------------------------------------------------------------------------


@pytest.mark.few_families
@pytest.mark.parametrize("method", SITES)
@torch.no_grad()
def test_forms_of_call(method: str, family: Family, model) -> None:
    """Calls without a cache, with a tuple output, with positional arguments and with hidden states."""
    inputs = family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, method, keep=0.3):
        want = model(**inputs).logits
        bare = model(**inputs, use_cache=False)
        assert bare.past_key_values is None and tokenprune.stats(model).kv_bytes == 0
        close(bare.logits, want)
        assert torch.equal(model(**inputs, return_dict=False)[0], want)
        rest = {key: value for key, value in inputs.items() if key != "input_ids"}
        assert torch.equal(model(inputs["input_ids"], **rest).logits, want)
        close(model(**inputs, logits_to_keep=1).logits, want[:, -1:])
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    assert len(hidden) == 5  # one entry per layer, shorter than the prompt


@pytest.mark.few_families
@pytest.mark.parametrize("method", SITES)
@torch.no_grad()
def test_no_mask(method: str, family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1), padding=None)
    bare = {key: value for key, value in inputs.items() if key != "attention_mask"}
    with tokenprune.patched(model, method, keep=0.3):
        close(model(**bare).logits, model(**inputs).logits)
        close(model(**bare, use_cache=False).logits, model(**inputs).logits)


@pytest.mark.few_families
@pytest.mark.parametrize("method", SITES)
@torch.no_grad()
def test_embeddings_in_place_of_ids(method: str, family: Family, model) -> None:
    inputs = family.make_inputs()
    arguments = {key: value for key, value in inputs.items() if key != "input_ids"}
    arguments["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"])
    try:
        model(**arguments)
    except Exception as error:
        pytest.skip(f"{family.name} does not take embeddings with images: {type(error).__name__}")
    output, stats = run_pruned(model, arguments, method, 0.3)
    got = output.logits
    cuts = stats.cuts
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want = model(**arguments).logits
    close(got[:, -4:], want[:, -4:])
