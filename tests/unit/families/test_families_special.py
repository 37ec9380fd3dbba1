# SPDX-License-Identifier: Apache-2.0
"""Features of the families in support/families/special.py: states, shared keys, scales, and masks of every form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import snapshot
from each import each
from families import STATEFUL
from families.special import FAMILIES
from oracle import close, survivors
from pruned import check_forward, check_generation, run_pruned
from tokenprune import OptionError, Pruner, UnsupportedModelError
from tokenprune.selection.method import Method, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from turns import check_turns, words
from zoo import Family

METHODS = ["random", "fastv"]
# generate passes a mask only for batches with padding.
BATCHES = {"one row": {"only": 0}, "no padding": {"images": (2, 1), "padding": None}, "text beside": {"images": (0, 2)}}
SHARED_KEYS = ["gemma3n", "gemma4"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@dataclass(frozen=True)
class Probe(Pruner):
    """Keeps every third token without reading attention, and records the hidden states."""

    name: ClassVar[str] = "probe"
    site: ClassVar[Site] = Site.IN_LLM
    layer: int = 1
    recorded: ClassVar[list[Tensor]] = []

    def select(self, tokens: VisualTokens) -> Selection:
        self.recorded.append(tokens.hidden)
        index = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)
        return Selection(tokens.mask & (index % 3 == 0))


class EntryProbe(Probe):
    site: ClassVar[Site] = Site.PRE_LLM


class NextProbe(Probe):
    """Probe that also reads the attention of the layer after the cut."""

    name: ClassVar[str] = "next"
    needs: ClassVar[frozenset[str]] = frozenset({"next_row_attention"})

    def select(self, tokens: VisualTokens) -> Selection:
        assert tokens.next_row_attention.sum(-1).max() <= 1 + 1e-5  # a share of all keys, including keys of the cache
        return super().select(tokens)


@pytest.mark.pairwise
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", BATCHES)
def test_generate(family: Family, model, method: str, batch: str) -> None:
    check_generation(family, model, family.make_inputs(**BATCHES[batch]), method, 0.3)


@pytest.mark.parametrize("method", METHODS)
def test_second_turn(family: Family, model, method: str) -> None:
    check_turns(family, model, family.make_inputs(images=(2, 1)), method)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in STATEFUL])
def test_eager_attention(name: str, build) -> None:
    family = FAMILIES[name]
    check_forward(family, build(family, "eager"), family.make_inputs(images=(2, 1)), "fastv", 0.3)


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(STATEFUL & FAMILIES.keys()))
def test_cuts_before_layers_of_any_kind(name: str, layer: int, build) -> None:
    family = FAMILIES[name]
    check_generation(family, build(family), family.make_inputs(images=(2, 1)), Probe(layer=layer), 0.3)


@pytest.mark.parametrize("name", sorted(STATEFUL & FAMILIES.keys()))
@torch.no_grad()
def test_a_state_is_not_that_of_masked_tokens(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(1, 1), padding=None)
    output, stats = run_pruned(model, inputs, "random", 0.3)
    is_kept = survivors(stats.cuts[0], inputs["input_ids"].shape[1])
    handle = model.get_submodule(family.decoder).register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"attention_mask": is_kept.long()}), with_kwargs=True
    )
    masked = model(**inputs).logits
    handle.remove()
    assert (masked[is_kept] - output.logits[is_kept]).abs().max() > 1e-3


@each("name", sorted(STATEFUL & FAMILIES.keys()))
def test_refusals_of_states(name: str, build) -> None:
    model = build(FAMILIES[name])
    before = snapshot(model)
    for method, layer, match in (
        ("dart", 3, "reads the attention of decoder layer 2, which has none"),
        ("fastv", 1, "reads the attention of decoder layer 0, which has none"),
        ("dyrate", 2, "layers with a state instead of keys"),
    ):
        with pytest.raises(OptionError, match=match):
            tokenprune.patch(model, method, keep=0.5, layer=layer)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", SHARED_KEYS)
def test_shared_keys(name: str, build) -> None:
    """The last two of eight layers use the keys of layers 4 and 5, so cuts are possible up to layer 4."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    before = snapshot(model)
    for layer in (5, 6, 7):
        with pytest.raises(OptionError, match="layers 6 to 7 attend to the keys of layers"):
            tokenprune.patch(model, "dart", keep=0.3, layer=layer)
    assert snapshot(model) == before
    methods = ["random", tokenprune.method("dart", layer=1), Probe(layer=4)]
    _, _, stats = check_generation(family, model, inputs, methods, 0.6, steps=12)  # steps go beyond the window
    assert [cut.layer for cut in stats.cuts] == [0, 1, 4]


@pytest.mark.parametrize("name", ["llama4", "exaone4_5", "gemma4_bidirectional", "muse_glimmer"])
def test_windows_are_measured_in_the_full_prompt(name: str, build) -> None:
    """Decoding continues beyond windows, and across the border of a chunk."""
    family = FAMILIES[name]
    for method in ("random", "dart"):
        check_generation(family, build(family), family.make_inputs(images=(2, 1)), method, 0.3, steps=20)


# Without families where images attend both ways: unpatched, transformers 5.19 drops this mask with a kept cache.
KEPT_CACHE = (
    "exaone4_5 gemma3n gemma4 gemma4_moe granite4_vision kimi_k25 lfm2_vl llama4 minicpmv4_6 nemotron_h_omni".split()
)
PROBES = [EntryProbe(), Probe(layer=2), NextProbe(layer=3)]


@pytest.mark.parametrize("method", PROBES, ids=["PRE_LLM", "IN_LLM", "next"])
@pytest.mark.parametrize("name", KEPT_CACHE)
@torch.no_grad()
def test_a_second_image_with_a_kept_cache(name: str, method: Method, build) -> None:
    """Two images in two calls on one cache equal two images in one call."""
    family = FAMILIES[name]
    model = build(family)
    if method.name == "next" and name == "nemotron_h_omni":
        method = NextProbe(layer=4)  # layer 3 has a state
    first, second = family.make_inputs(only=0), family.make_inputs(only=0, seed=5)
    both = {key: torch.cat([first[key], second[key]], -1 if name == "minicpmv4_6" and key == "pixel_values" else 0)
            for key in first}  # fmt: skip
    for key in ("input_ids", "attention_mask", *([family.types] if family.types else [])):
        both[key] = torch.cat([first[key], second[key]], 1)
    with tokenprune.patched(model, method, keep=0.3):
        want = model(**both).logits[:, -1]
        cache = model(**first, use_cache=True).past_key_values
        got = model(**second | {"attention_mask": both["attention_mask"]}, past_key_values=cache).logits[:, -1]
        assert tokenprune.stats(model).visual_tokens_out < tokenprune.stats(model).visual_tokens_in
    close(got, want)


@torch.no_grad()
def test_methods_see_the_features_of_granite(build) -> None:
    """Granite's decoder gets zeros at images; a method at the entry gets the first features added later."""
    model, inputs = FAMILIES["granite4_vision"].prepare(build, rows=1)
    features = model.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).deepstack_features
    first = dict(features)[0][0]
    EntryProbe.recorded.clear()
    with tokenprune.patched(model, EntryProbe(), keep=0.3):
        model(**inputs)
    torch.testing.assert_close(EntryProbe.recorded[0][0], first)


@torch.no_grad()
def test_methods_see_one_stream_of_gemma3n(build) -> None:
    family = FAMILIES["gemma3n"]
    model, inputs = build(family), family.make_inputs(rows=1)
    streams = []
    handle = (
        model.get_submodule(family.decoder).layers[1].register_forward_hook(lambda m, a, out: streams.append(out[0]))
    )
    Probe.recorded.clear()
    with tokenprune.patched(model, Probe(layer=2), keep=0.3):
        model(**inputs)
    handle.remove()
    visual = family.visual_mask(model, inputs)
    torch.testing.assert_close(Probe.recorded[0][0], streams[0][visual])


def test_a_model_that_prunes_itself_is_refused(build) -> None:
    model = build(FAMILIES["nemotron_h_omni"])
    model.video_pruning_rate = 0.5
    try:
        with pytest.raises(UnsupportedModelError, match="video_pruning_rate = 0"):
            tokenprune.patch(model, "random", keep=0.5)
    finally:
        model.video_pruning_rate = 0.0


@torch.no_grad()
def test_a_decoder_that_takes_images(build) -> None:
    """Chameleon merges images in its decoder: pixels, features and embeddings of text give equal results."""
    model, inputs = FAMILIES["chameleon"].prepare(build, images=(2, 1))
    pixels, ids = (
        inputs["pixel_values"],
        {"input_ids": None, "inputs_embeds": model.model.embed_tokens(inputs["input_ids"])},
    )
    encoded = {"pixel_values": None, "mm_encoder_outputs": {"image": model.get_image_features(pixels)}}
    unpruned = model(**inputs).logits
    with tokenprune.patched(model, "divprune", keep=0.3):
        want = model(**inputs).logits
        for other in (encoded, ids):
            assert torch.equal(model(**inputs | other).logits, want)
        assert tokenprune.stats(model).visual_tokens_in == 3 * 16
        with pytest.raises(ValueError, match="both pixel_values and mm_encoder_outputs"):
            model(**inputs, mm_encoder_outputs={"image": None})
        with pytest.raises(ValueError, match="exactly one"):
            model(**inputs | ids | {"input_ids": inputs["input_ids"]})
        text = words(2, 6)
        got = model(text).logits
    assert torch.equal(got, model(text).logits)
    assert not torch.equal(want, unpruned)
