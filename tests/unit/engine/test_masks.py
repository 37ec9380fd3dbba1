# SPDX-License-Identifier: Apache-2.0
"""Masks after a cut equal the kept rows and columns of the full mask, and are omitted where possible."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.masking_utils import create_chunked_causal_mask, create_masks_for_generate

import tokenprune
from each import each
from families import FAMILIES
from oracle import close, reduced
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.sequence import masks
from tokenprune.integrations.hf.sequence.mask_functions import MaskFunctions
from zoo import FIRST_TEXT_ID, VOCAB

LENGTH, WINDOW = 24, 7


def make_config(kind: str) -> tuple[Any, Any]:
    """Return a config with one kind of layer, and the function that makes its masks."""
    config = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    if kind == "sliding":
        config.sliding_window = WINDOW
    if kind == "chunked":
        config.attention_chunk_size = WINDOW
    return config, create_chunked_causal_mask if kind == "chunked" else create_masks_for_generate


def draw_kept(g: torch.Generator, empty: bool) -> Tensor:
    """Draw sorted kept indices, long `[2, 13]`, optionally with three empty slots (-1) in the second row."""
    indices = torch.stack([torch.randperm(LENGTH, generator=g)[:13].sort().values for _ in range(2)])
    if empty:
        indices[1, :3] = -1
    return indices


@each("empty", [False, True])
@each("padding", ["none", "left", "right"])
@each("kind", ["full", "sliding", "chunked"])
@each("attention", ["sdpa", "eager"])
def test_a_function_makes_what_a_gather_would(attention: str, kind: str, padding: str, empty: bool) -> None:
    g = torch.Generator().manual_seed(0)
    (config, make_mask), attention_mask = make_config(kind), torch.ones(2, LENGTH, dtype=torch.long)
    config._attn_implementation = attention
    if padding != "none":
        attention_mask[0, slice(0, 4) if padding == "left" else slice(-4, None)] = 0
    embeds, keys = torch.zeros(2, LENGTH, 8), draw_kept(g, empty)
    arguments = dict(inputs_embeds=embeds, attention_mask=attention_mask, past_key_values=None)
    full = make_mask(config, **arguments, **({"allow_is_causal_skip": False} if kind == "chunked" else {}))
    if full is None:
        full = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    functions = MaskFunctions(partial(make_mask, **arguments), config, LENGTH, False)
    queries = keys.clamp(min=0)[:, 5:]
    mask = functions.built.build_mask(queries, keys, is_uncut=False)
    assert mask.dtype == full.dtype and torch.equal(mask, masks.gather_mask(full, queries, keys))
    assert functions.select_for_layer(0, full) is functions.built
    assert functions.select_for_layer(0, None) is None
    heads = full.expand(2, 3, -1, -1)  # a decoder that adds a bias per head
    assert functions.select_for_layer(0, heads) is heads
    other = full.float() if attention == "sdpa" else full == 0
    assert functions.select_for_layer(0, other) is other
    if padding == "none":  # A causal mask of all kept tokens can be omitted, unless a window is shorter.
        plain = functions.built.build_mask(queries, queries, is_uncut=True)
        assert (plain is None) == (attention == "sdpa" and kind == "full")
        assert plain is None or torch.equal(plain, masks.gather_mask(full, queries, queries))


def test_attention_without_masks_of_pairs() -> None:
    config, make_mask = make_config("full")
    for attention in ("flash_attention_2", "flex_attention"):
        config._attn_implementation_internal = attention
        functions, mask = MaskFunctions(make_mask, config, LENGTH, True), torch.ones(1, 1, LENGTH, LENGTH).bool()
        assert functions.attention is None and functions.select_for_layer(0, mask) is mask


@pytest.mark.parametrize(("batch", "kept"), [(1, 700), (2, 1100)])
def test_gather_in_blocks_of_rows(batch: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g, monkeypatch = torch.Generator().manual_seed(0), monkeypatch.setattr(masks, "_ROWS", 64)
    mask = torch.rand(batch, 2, 1200, 1200, generator=g) < 0.5
    rows = torch.stack([torch.randperm(1200, generator=g)[:kept] for _ in range(batch)])
    keys = rows.clone()
    keys[:, 5] = -1
    got = masks.gather_mask(mask, rows, keys)
    for row in range(batch):
        want = mask[row][:, rows[row]][:, :, keys[row]]
        want[:, :, 5] = False
        assert torch.equal(got[row], want)


@contextmanager
def record_masks(model: Any, family: Any) -> Iterator[list[Any]]:
    """Record the masks passed to the decoder's layers."""
    recorded: list[Any] = []
    handles = [
        layer.register_forward_hook(lambda m, a, k, o: recorded.append(k.get("attention_mask")), with_kwargs=True)
        for layer in model.get_submodule(family.decoder).layers
    ]
    yield recorded
    for handle in handles:
        handle.remove()


def pad_left(inputs: Any, width: int) -> Any:
    """Return a copy of the inputs with `width` padding tokens on the left."""
    inputs = copy.copy(inputs)
    for name in ("input_ids", "attention_mask"):
        inputs[name] = torch.nn.functional.pad(inputs[name], (width, 0))
    return inputs


@torch.no_grad()
def test_one_padded_prompt_needs_no_mask_behind_its_cut(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    with tokenprune.patched(model, "fastv", keep=0.5, guard="off"):
        want = model(**inputs).logits
        with record_masks(model, family) as recorded:
            got = model(**pad_left(inputs, 6)).logits
    assert [mask is None for mask in recorded] == [False, False, True, True]
    close(got[:, 6:], want)


@torch.no_grad()
def test_a_visual_token_that_the_caller_masks_stays_masked(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    visual = family.visual_mask(model, inputs)[0].nonzero()[:, 0]
    inputs["attention_mask"][0, visual[1::2]] = 0
    with tokenprune.patched(model, "dart", keep=len(visual) - 1, record=True, guard="off"):
        got, cuts = model(**inputs).logits, tokenprune.stats(model).cuts
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want = model(**inputs).logits
    close(got[:, -4:], want[:, -4:])


@torch.no_grad()
def test_prompts_of_one_shape_share_mask_inputs(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared values do not change if the caller overwrites its mask later."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    visual = family.visual_mask(model, inputs)[0].nonzero()[:, 0]
    mask = inputs.pop("attention_mask").bool()
    mask[0, visual[1::2]] = False  # A masked token that is kept, so the validity stays part of the mask.
    calls, original = [], compat.create_masks
    monkeypatch.setattr(compat, "create_masks", lambda *arguments: calls.append(1) or original(*arguments))
    with tokenprune.patched(model, "fastv", keep=len(visual) - 1, guard="off"):
        mask_copy = mask.clone()
        want = model(**inputs, attention_mask=mask).logits
        mask.fill_(True)
        got = model(**inputs, attention_mask=mask_copy).logits
        other = model(**inputs, attention_mask=mask).logits
    assert torch.equal(got, want) and not torch.equal(other, want)
    assert len(calls) == 1  # without padding no mask is needed


@torch.no_grad()
@pytest.mark.parametrize("method", ["uniform", "fastv", ["pool", "dart"]], ids=["PRE_LLM", "IN_LLM", "both"])
@pytest.mark.parametrize("name", ["exaone4_5", "gemma3"])
def test_images_after_a_turn_longer_than_the_window(name: str, method: Any, build) -> None:
    """Sliding layers evict keys before the first image arrives, but only keys outside the image's window."""
    family = FAMILIES[name]
    model, inputs, length = build(family), family.make_inputs(only=0), 40
    words = torch.randint(FIRST_TEXT_ID, VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
    turn = inputs | {"attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (length, 0), value=1)}
    types = {"token_type_ids": torch.zeros_like(words)} if "token_type_ids" in inputs else {}
    logits = []
    with tokenprune.patched(model, method, keep=0.4, guard="off"):
        for cache in (DynamicCache(config=model.config.get_text_config()), DynamicCache()):
            model(input_ids=words, past_key_values=cache, **types)
            logits.append(model(**turn, past_key_values=cache).logits)
            assert tokenprune.stats(model).visual_tokens_out < tokenprune.stats(model).visual_tokens_in
    close(*logits)
