# SPDX-License-Identifier: Apache-2.0
"""Decoder observables equal eager attention maps and hooks of the unpatched model.

Batches are ragged, with several images, on both attention backends, and after an earlier cut.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import pieces
from oracle import close
from pruned import run_pruned
from tokenprune import OptionError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.forward.part import PerCall
from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.selection import observable, observable_bases
from tokenprune.selection import observable_registry as observable_registry
from tokenprune.selection.observable import ObservedAt
from zoo import FAMILIES, Family

pytestmark = pytest.mark.usefixtures("restored_registries")
LAYER = 2
DECODER = [
    name
    for name in tokenprune.selection.available_observables()
    if observable_registry.find_observable(name).where
    not in (ObservedAt.TOWER, ObservedAt.TOWER_BLOCK, ObservedAt.CUT, ObservedAt.FRAMES)
]


def register_reader(needs: tuple[str, ...], site: str = "IN_LLM", read: Any = None) -> list[Any]:
    """Register "reader", which keeps the first tokens, and return the list of its observations."""
    observations: list[Any] = []

    def everything(tokens: Any) -> Any:
        values = {name: getattr(tokens, name) for name in needs}
        text = {}
        for name in {"hidden", *needs}:
            entry = observable_registry.find_observable(name)
            if type(entry).compute_text is not observable.Observable.compute_text:
                text[entry.text_name] = getattr(tokens.text, entry.text_name)
        position = tokens.text.position
        return SimpleNamespace(segments=tokens.segments, mask=tokens.text.mask, position=position, text=text, **values)

    @tokenprune.register("reader", site=site, needs=needs)
    @dataclass(frozen=True)
    class Reader(tokenprune.Pruner):
        """Record the observables."""

        layer: int = LAYER

        @property
        def query_aware(self) -> bool:
            return True

        def score(self, tokens: Any) -> Tensor:
            observations.append((read or everything)(tokens))
            return -torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)

    return observations


@torch.no_grad()
def observe_layers(family: Family, model: Any, inputs: Any) -> SimpleNamespace:
    """Record the activations of an unpatched eager model with hooks."""
    decoder = model.get_submodule(family.decoder)
    calls: dict[int, tuple] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: calls.update({index: (args, kwargs)}), with_kwargs=True
        )
        for index, layer in enumerate(decoder.layers)
    ]
    module_calls: dict[str, tuple] = {}
    for name in ("self_attn", "mlp"):
        handles.append(
            getattr(decoder.layers[LAYER - 1], name).register_forward_hook(
                lambda module, args, kwargs, output, name=name: module_calls.update({name: (args, kwargs, output)}),
                with_kwargs=True,
            )
        )
    out = model(**inputs, output_attentions=True, use_cache=True)
    for handle in handles:
        handle.remove()
    inputs_of = {i: args[0] if args else kwargs["hidden_states"] for i, (args, kwargs) in calls.items()}
    rotation = {i: kwargs["position_embeddings"] for i, (_, kwargs) in calls.items()}
    unrotated, projected = attend_unrotated(decoder.layers[LAYER - 1], inputs_of[LAYER - 1], calls[LAYER - 1][1])
    _, first_projection = attend_unrotated(decoder.layers[0], inputs_of[0], calls[0][1])
    transitions = []
    for args, kwargs, output in module_calls.values():
        module_input = args[0] if args else kwargs["hidden_states"]
        output = (output[0] if isinstance(output, tuple) else output).view_as(module_input)
        cosine = torch.cosine_similarity(module_input, output, dim=-1)
        transitions.append(torch.stack([output.norm(dim=-1) / module_input.norm(dim=-1), cosine], -1))
    cache = out.past_key_values.layers
    return SimpleNamespace(
        attention=out.attentions, inputs=inputs_of, rotation=rotation, unrotated=unrotated, projected=projected,
        first_projection=first_projection,
        keys=[layer.keys.transpose(1, 2).flatten(2) for layer in cache],
        values=[layer.values.transpose(1, 2).flatten(2) for layer in cache],
        transitions=torch.stack(transitions, 2),
        value_heads=cache[LAYER - 1].values.transpose(1, 2), key_heads=cache[LAYER - 1].keys.transpose(1, 2),
    )  # fmt: skip


def attend_unrotated(layer: Any, entered: Tensor, kwargs: Any) -> tuple[Tensor, list[Any]]:
    """Run a layer's attention without rotation; return its map and its query, key and scaling."""
    cos, sin = kwargs["position_embeddings"]
    no_rotation = torch.ones_like(cos), torch.zeros_like(sin)
    more = {name: value for name, value in kwargs.items() if name not in (*compat.CACHE_NAMES, "position_embeddings")}
    normed = layer.input_layernorm(entered)
    with record_attention(layer.self_attn) as projected:
        _, unrotated = layer.self_attn(normed, position_embeddings=no_rotation, **{compat.CACHE: None}, **more)
    return unrotated, projected


@contextmanager
def record_attention(attention: Any) -> Iterator[list[Any]]:
    """Record the query and key `[B, H, L, D]` and the scaling of a module's eager attention."""
    module_globals, recorded = sys.modules[type(attention).__module__], []
    function = module_globals.eager_attention_forward

    def record(module: Any, query: Tensor, key: Tensor, *args: Any, scaling: float, **kwargs: Any) -> Any:
        recorded[:] = [query, key.repeat_interleave(query.shape[1] // key.shape[1], 1), scaling]
        return function(module, query, key, *args, scaling=scaling, **kwargs)

    module_globals.eager_attention_forward = record
    try:
        yield recorded
    finally:
        module_globals.eager_attention_forward = function


def mean_query(projected: Any, row: int, among: list[int], targets: list[int]) -> Tensor:
    """Return the attention of the mean query of tokens `among`, among these tokens, to `targets`."""
    query, key, scaling = projected
    logits = torch.einsum("hd,hld->hl", query[row, :, among].mean(1), key[row, :, among]) * scaling
    return logits.softmax(1)[:, [among.index(target) for target in targets]]


def list_text(family: Family, model: Any, inputs: Any) -> list[list[int]]:
    is_text = inputs["attention_mask"].bool() & ~family.visual_mask(model, inputs)
    return [row.nonzero().flatten().tolist() for row in is_text]


def check(actual: Any, family: Family, model: Any, inputs: Any, want: Any) -> None:
    text = list_text(family, model, inputs)
    last = [max(row.nonzero().flatten().tolist()) for row in inputs["attention_mask"].bool()]
    is_valid = inputs["attention_mask"].bool()
    assert len(actual.segments) == sum(map(len, pieces(family, inputs)))
    for s, (row, count) in enumerate(zip(actual.segments.row, actual.segments.counts, strict=True)):
        visual_index = actual.segments.position[s, :count].tolist()
        text_index = [i for i in text[row] if i > visual_index[-1]]
        assert actual.position[s, actual.mask[s]].tolist() == text_index and len(text_index) > 1
        before, after, text_slots = want.attention[LAYER - 1][row], want.attention[LAYER][row], actual.mask[s]
        for name, (visual, expected) in {
            "keys": (actual.keys, want.keys[LAYER - 1]), "values": (actual.values, want.values[LAYER - 1]),
            "value_heads": (actual.value_heads, want.value_heads), "key_heads": (actual.key_heads, want.key_heads),
            "embeddings": (actual.embeddings, want.inputs[0]),
            "previous_hidden": (actual.previous_hidden, want.inputs[LAYER - 1]),
            "hidden": (None, want.inputs[LAYER]),
        }.items():  # fmt: skip
            if visual is not None:
                close(visual[s, :count], expected[row, visual_index])
            close(actual.text[name][s, text_slots], expected[row, text_index])
        for visual, text_angles, expected in zip(
            actual.rotation, actual.text["rotation"], want.rotation[LAYER - 1], strict=True
        ):
            angles = expected.expand(len(is_valid), -1, -1)[row]
            close(visual[s, :count], angles[visual_index])
            close(text_angles[s, text_slots], angles[text_index])
        products = torch.einsum(
            "nhd,ngd->nhg", *(actual.query_heads[s, :count].float(),) * 2
        )  # independent of the rotation
        query = want.projected[0][row][:, visual_index].transpose(0, 1)
        close(products, torch.einsum("nhd,ngd->nhg", query, query))
        values = want.value_heads[row].repeat_interleave(before.shape[0] // want.value_heads.shape[2], 1)
        close(actual.last_row_output[s], torch.einsum("hk,khd->hd", before[:, last[row]], values))
        close(actual.transitions[s, :count], want.transitions[row, visual_index])
        close(actual.head_maxima[s, 0, :count], before[:, visual_index][..., visual_index].amax(0).mean(0))
        close(actual.head_maxima[s, 1, :count], before[:, text_index][..., visual_index].amax(0).mean(0))
        assert not actual.head_maxima[s, :, count:].any()
        received = before[:, text_index][..., visual_index].mean(0)
        close(actual.text_sum_and_max[s, :, :count], torch.stack([received.sum(0), received.amax(0)]))
        assert not actual.text_sum_and_max[s, :, count:].any()
        close(actual.last_row_attention[s, :, :count], before[:, last[row], visual_index])
        close(actual.next_row_attention[s, :, :count], after[:, last[row], visual_index])
        close(actual.unrotated_last_row[s, :, :count], want.unrotated[row][:, last[row], visual_index])
        among = [i for i in is_valid[row].nonzero().flatten().tolist() if i <= visual_index[-1]]
        close(actual.mean_query_attention[s, :, :count], mean_query(want.projected, row, among, visual_index))
        assert not actual.mean_query_attention[s, :, count:].any()
        query, key = (projection[row] for projection in want.first_projection[:2])
        scores = (
            torch.einsum("htd,hvd->htv", query[:, text_index], key[:, visual_index]).mean(1) * key.shape[-1] ** -0.5
        )
        close(actual.first_layer_scores[s, :, :count], scores)
        assert not actual.first_layer_scores[s, :, count:].any()
        for visual, text_maps, maps in (
            (actual.text_attention, actual.text["attention"], before),
            (actual.next_text_attention, actual.text["next_attention"], after),
        ):
            close(visual[s][:, text_slots][..., :count], maps[:, text_index][..., visual_index])
            close(text_maps[s][:, text_slots][..., text_slots], maps[:, text_index][..., text_index])
            assert not visual[s][:, ~text_slots].any() and not visual[s][..., count:].any()
            assert not text_maps[s][:, ~text_slots].any() and not text_maps[s][..., ~text_slots].any()


@pytest.mark.parametrize("padding", ["left", "right"])
@torch.no_grad()
def test_observables_equal_the_eager_model(padding: str, family: Family, build) -> None:
    inputs = family.make_inputs(images=(1, 2), padding=padding)
    want = observe_layers(family, build(family, "eager"), inputs)
    observations = register_reader(tuple(DECODER))
    for attention in (None, "eager"):
        model = build(family) if attention is None else build(family, attention)
        with tokenprune.patched(model, "reader", keep=0.5):
            model(**inputs)
            if padding == "right":  # generate counts positions from the first token that is not padding
                model.generate(**inputs, max_new_tokens=2)
    assert len(observations) == (4 if padding == "right" else 2)
    for actual in observations:
        check(actual, family, build(family), inputs, want)


@torch.no_grad()
def test_observables_after_an_earlier_cut(family: Family, build) -> None:
    """After a cut at the entry, observables equal the model with the dropped tokens masked."""
    inputs = family.make_inputs(images=(1, 2))
    model = build(family)
    observations = register_reader(tuple(DECODER))
    kept = run_pruned(model, inputs, ["divprune", "reader"], [0.5, 0.5])[1].cuts[0].kept
    (actual,) = observations
    embeds = observe_layers(family, build(family, "eager"), inputs).inputs[0]
    for s, (row, count) in enumerate(zip(actual.segments.row, actual.segments.counts, strict=True)):
        visual_index = actual.segments.position[s, :count].tolist()
        assert set(visual_index) < set(kept[row])
        close(actual.embeddings[s, :count], embeds[row, visual_index])
        text_index = actual.position[s, actual.mask[s]].tolist()
        close(actual.text["embeddings"][s, actual.mask[s]], embeds[row, text_index])
        # The last text token ends the prompt, so its row is the last row.
        for rows, last in (
            (actual.text_attention, actual.last_row_attention), (actual.next_text_attention, actual.next_row_attention)
        ):  # fmt: skip
            close(rows[s][:, actual.mask[s]][:, -1, :count], last[s, :, :count])


@torch.no_grad()
def test_rows_weighted_in_pieces(family: Family, build, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = family.make_inputs(images=(1, 2))

    def read(tokens: Any) -> tuple[Tensor, ...]:
        weights = torch.rand(*tokens.text.mask.shape, generator=torch.Generator().manual_seed(0))
        by_head = torch.rand(len(weights), tokens.text_attention.shape[1], weights.shape[1])
        want = (tokens.text_attention * weights[:, None, :, None]).sum(2)
        want_by_head = (tokens.text_attention * by_head[..., None]).sum(2)
        close(tokens.attention_from(weights), want)
        close(tokens.attention_from(by_head), want_by_head)
        close(
            tokens.attention_from(weights, "next_text_attention"),
            (tokens.next_text_attention * weights[:, None, :, None]).sum(2),
        )
        return want, tokens.text.attention

    observations = register_reader(("text_attention", "next_text_attention"), read=read)
    with tokenprune.patched(build(family), "reader", keep=0.5):
        build(family)(**inputs)
        monkeypatch.setattr(observable_bases, "_MAX_ELEMENTS", 1)  # one row at a time
        build(family)(**inputs)
    for at_once, in_pieces in zip(*observations, strict=True):
        close(at_once, in_pieces, 1e-6)


@torch.no_grad()
def test_observables_at_the_entry(family: Family, build) -> None:
    inputs = family.make_inputs(images=(1, 2))

    def read(tokens: Any) -> tuple[Tensor, ...]:
        return tokens.embeddings, tokens.hidden, tokens.text.embeddings, tokens.text.hidden

    observations = register_reader(("embeddings",), "PRE_LLM", read)
    model = build(family)
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    embeddings, hidden, text_embeddings, text_hidden = observations[0]
    assert torch.equal(embeddings, hidden) and torch.equal(text_embeddings, text_hidden)
    for need in set(DECODER) - {"embeddings", "first_layer_scores"}:
        register_reader((need,), "PRE_LLM")
        with pytest.raises(OptionError, match=f"PRE_LLM method cannot need .*{need}"):
            tokenprune.patch(model, "reader", keep=0.5)


@torch.no_grad()
def test_only_needed_activations_are_recorded(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    calls, observed = [], []

    def read(tokens: Any) -> None:
        calls.append(tokens._source.call)
        observed.append(set(tokens._source.observed))

    for needs, fields in (
        ((), set()),
        (("previous_hidden",), {"INPUT_BEFORE"}),
        (("embeddings",), {"ENTRY"}),
        (("unrotated_last_row",), {"LAYER_BEFORE", "INPUT_BEFORE", "UNROTATED"}),
    ):
        register_reader(needs, read=read)
        with tokenprune.patched(model, "reader", keep=0.5):
            model(**inputs)
            parts = get_attachment(model).engine.parts
        assert observed.pop() == fields
        kept = [state for part in parts for state in vars(part).values() if isinstance(state, PerCall)]
        assert kept or not needs
        assert not any(calls[-1] in state for state in kept)
