# SPDX-License-Identifier: Apache-2.0
"""What methods see of the decoder, against eager attention maps and hooks of the unpatched model: ragged batches,
several images, on either back end, and behind an earlier cut."""

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


def reader(needs: tuple[str, ...], site: str = "IN_LLM", read: Any = None) -> list[Any]:
    """Register "reader", which keeps the first tokens, and notes all that it may read; returns where."""
    seen: list[Any] = []

    def everything(tokens: Any) -> Any:
        found = {name: getattr(tokens, name) for name in needs}
        text = {}
        for name in {"hidden", *needs}:
            one = observable_registry.find_observable(name)
            if type(one).compute_text is not observable.Observable.compute_text:
                text[one.text_name] = getattr(tokens.text, one.text_name)
        place = tokens.text.position
        return SimpleNamespace(segments=tokens.segments, mask=tokens.text.mask, place=place, text=text, **found)

    @tokenprune.register("reader", site=site, needs=needs)
    @dataclass(frozen=True)
    class Reader(tokenprune.Pruner):
        """Note what it sees."""

        layer: int = LAYER

        @property
        def query_aware(self) -> bool:
            return True

        def score(self, tokens: Any) -> Tensor:
            seen.append((read or everything)(tokens))
            return -torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)

    return seen


@torch.no_grad()
def inside(family: Family, model: Any, inputs: Any) -> SimpleNamespace:
    """What hooks see of an unpatched eager model."""
    decoder = model.get_submodule(family.decoder)
    calls: dict[int, tuple] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: calls.update({index: (args, kwargs)}), with_kwargs=True
        )
        for index, layer in enumerate(decoder.layers)
    ]
    made: dict[str, tuple] = {}
    for name in ("self_attn", "mlp"):
        handles.append(
            getattr(decoder.layers[LAYER - 1], name).register_forward_hook(
                lambda module, args, kwargs, output, name=name: made.update({name: (args, kwargs, output)}),
                with_kwargs=True,
            )
        )
    out = model(**inputs, output_attentions=True, use_cache=True)
    for handle in handles:
        handle.remove()
    inputs_of = {i: args[0] if args else kwargs["hidden_states"] for i, (args, kwargs) in calls.items()}
    rotation = {i: kwargs["position_embeddings"] for i, (_, kwargs) in calls.items()}
    unrotated, projected = not_turned(decoder.layers[LAYER - 1], inputs_of[LAYER - 1], calls[LAYER - 1][1])
    _, first = not_turned(decoder.layers[0], inputs_of[0], calls[0][1])
    transitions = []
    for args, kwargs, output in made.values():
        given = args[0] if args else kwargs["hidden_states"]
        output = (output[0] if isinstance(output, tuple) else output).view_as(given)
        cosine = torch.cosine_similarity(given, output, dim=-1)
        transitions.append(torch.stack([output.norm(dim=-1) / given.norm(dim=-1), cosine], -1))
    cache = out.past_key_values.layers
    return SimpleNamespace(
        attention=out.attentions, inputs=inputs_of, rotation=rotation, unrotated=unrotated, projected=projected,
        first=first,
        keys=[one.keys.transpose(1, 2).flatten(2) for one in cache],
        values=[one.values.transpose(1, 2).flatten(2) for one in cache],
        transitions=torch.stack(transitions, 2),
        value_heads=cache[LAYER - 1].values.transpose(1, 2), key_heads=cache[LAYER - 1].keys.transpose(1, 2),
    )  # fmt: skip


def not_turned(layer: Any, entered: Tensor, kwargs: Any) -> tuple[Tensor, list[Any]]:
    """A layer's attention once more, with angles of 0, and what it is made of."""
    cos, sin = kwargs["position_embeddings"]
    still = torch.ones_like(cos), torch.zeros_like(sin)
    more = {name: value for name, value in kwargs.items() if name not in (*compat.CACHE_NAMES, "position_embeddings")}
    normed = layer.input_layernorm(entered)
    with asked(layer.self_attn) as projected:
        _, unrotated = layer.self_attn(normed, position_embeddings=still, **{compat.CACHE: None}, **more)
    return unrotated, projected


@contextmanager
def asked(attention: Any) -> Iterator[list[Any]]:
    """Note queries and keys, `[B, H, L, D]`, and the scaling with which a module calls eager attention."""
    home, noted = sys.modules[type(attention).__module__], []
    function = home.eager_attention_forward

    def note(module: Any, query: Tensor, key: Tensor, *args: Any, scaling: float, **kwargs: Any) -> Any:
        noted[:] = [query, key.repeat_interleave(query.shape[1] // key.shape[1], 1), scaling]
        return function(module, query, key, *args, scaling=scaling, **kwargs)

    home.eager_attention_forward = note
    try:
        yield noted
    finally:
        home.eager_attention_forward = function


def mean_query(projected: Any, row: int, among: list[int], own: list[int]) -> Tensor:
    """Return the attention of the mean of the queries `among`, within these tokens, to the tokens `own`."""
    query, key, scaling = projected
    logits = torch.einsum("hd,hld->hl", query[row, :, among].mean(1), key[row, :, among]) * scaling
    return logits.softmax(1)[:, [among.index(one) for one in own]]


def texts(family: Family, model: Any, inputs: Any) -> list[list[int]]:
    real = inputs["attention_mask"].bool() & ~family.visual_mask(model, inputs)
    return [row.nonzero().flatten().tolist() for row in real]


def check(saw: Any, family: Family, model: Any, inputs: Any, want: Any) -> None:
    text = texts(family, model, inputs)
    last = [max(row.nonzero().flatten().tolist()) for row in inputs["attention_mask"].bool()]
    real = inputs["attention_mask"].bool()
    assert len(saw.segments) == sum(map(len, pieces(family, inputs)))
    for s, (row, count) in enumerate(zip(saw.segments.row, saw.segments.counts, strict=True)):
        own = saw.segments.position[s, :count].tolist()
        behind = [i for i in text[row] if i > own[-1]]
        assert saw.place[s, saw.mask[s]].tolist() == behind and len(behind) > 1
        before, after, here = want.attention[LAYER - 1][row], want.attention[LAYER][row], saw.mask[s]
        for name, (mine, theirs) in {
            "keys": (saw.keys, want.keys[LAYER - 1]), "values": (saw.values, want.values[LAYER - 1]),
            "value_heads": (saw.value_heads, want.value_heads), "key_heads": (saw.key_heads, want.key_heads),
            "embeddings": (saw.embeddings, want.inputs[0]),
            "previous_hidden": (saw.previous_hidden, want.inputs[LAYER - 1]),
            "hidden": (None, want.inputs[LAYER]),
        }.items():  # fmt: skip
            if mine is not None:
                close(mine[s, :count], theirs[row, own])
            close(saw.text[name][s, here], theirs[row, behind])
        for mine, of_text, theirs in zip(saw.rotation, saw.text["rotation"], want.rotation[LAYER - 1], strict=True):
            angles = theirs.expand(len(real), -1, -1)[row]
            close(mine[s, :count], angles[own])
            close(of_text[s, here], angles[behind])
        same = torch.einsum("nhd,ngd->nhg", *(saw.query_heads[s, :count].float(),) * 2)  # whatever the rotation
        query = want.projected[0][row][:, own].transpose(0, 1)
        close(same, torch.einsum("nhd,ngd->nhg", query, query))
        values = want.value_heads[row].repeat_interleave(before.shape[0] // want.value_heads.shape[2], 1)
        close(saw.last_row_output[s], torch.einsum("hk,khd->hd", before[:, last[row]], values))
        close(saw.transitions[s, :count], want.transitions[row, own])
        close(saw.head_maxima[s, 0, :count], before[:, own][..., own].amax(0).mean(0))
        close(saw.head_maxima[s, 1, :count], before[:, behind][..., own].amax(0).mean(0))
        assert not saw.head_maxima[s, :, count:].any()
        paid = before[:, behind][..., own].mean(0)
        close(saw.text_sum_and_max[s, :, :count], torch.stack([paid.sum(0), paid.amax(0)]))
        assert not saw.text_sum_and_max[s, :, count:].any()
        close(saw.last_row_attention[s, :, :count], before[:, last[row], own])
        close(saw.next_row_attention[s, :, :count], after[:, last[row], own])
        close(saw.unrotated_last_row[s, :, :count], want.unrotated[row][:, last[row], own])
        among = [i for i in real[row].nonzero().flatten().tolist() if i <= own[-1]]
        close(saw.mean_query_attention[s, :, :count], mean_query(want.projected, row, among, own))
        assert not saw.mean_query_attention[s, :, count:].any()
        query, key = (one[row] for one in want.first[:2])
        scores = torch.einsum("htd,hvd->htv", query[:, behind], key[:, own]).mean(1) * key.shape[-1] ** -0.5
        close(saw.first_layer_scores[s, :, :count], scores)
        assert not saw.first_layer_scores[s, :, count:].any()
        for mine, text_mine, maps in (
            (saw.text_attention, saw.text["attention"], before),
            (saw.next_text_attention, saw.text["next_attention"], after),
        ):
            close(mine[s][:, here][..., :count], maps[:, behind][..., own])
            close(text_mine[s][:, here][..., here], maps[:, behind][..., behind])
            assert not mine[s][:, ~here].any() and not mine[s][..., count:].any()
            assert not text_mine[s][:, ~here].any() and not text_mine[s][..., ~here].any()


@pytest.mark.parametrize("padding", ["left", "right"])
@torch.no_grad()
def test_what_a_layer_showed(padding: str, family: Family, build) -> None:
    inputs = family.make_inputs(images=(1, 2), padding=padding)
    want = inside(family, build(family, "eager"), inputs)
    seen = reader(tuple(DECODER))
    for attention in (None, "eager"):
        model = build(family) if attention is None else build(family, attention)
        with tokenprune.patched(model, "reader", keep=0.5):
            model(**inputs)
            if padding == "right":  # generate counts positions from the first token that is no padding
                model.generate(**inputs, max_new_tokens=2)
    assert len(seen) == (4 if padding == "right" else 2)
    for saw in seen:
        check(saw, family, build(family), inputs, want)


@torch.no_grad()
def test_behind_an_earlier_cut(family: Family, build) -> None:
    """What is left after a cut at the entry is seen as a model sees it to which the rest is masked."""
    inputs = family.make_inputs(images=(1, 2))
    model = build(family)
    seen = reader(tuple(DECODER))
    kept = run_pruned(model, inputs, ["divprune", "reader"], [0.5, 0.5])[1].cuts[0].kept
    (saw,) = seen
    embeds = inside(family, build(family, "eager"), inputs).inputs[0]
    for s, (row, count) in enumerate(zip(saw.segments.row, saw.segments.counts, strict=True)):
        own = saw.segments.position[s, :count].tolist()
        assert set(own) < set(kept[row])
        close(saw.embeddings[s, :count], embeds[row, own])
        behind = saw.place[s, saw.mask[s]].tolist()
        close(saw.text["embeddings"][s, saw.mask[s]], embeds[row, behind])
        # The last text token is the prompt's last one: its row is the last row.
        for rows, last in (
            (saw.text_attention, saw.last_row_attention), (saw.next_text_attention, saw.next_row_attention)
        ):  # fmt: skip
            close(rows[s][:, saw.mask[s]][:, -1, :count], last[s, :, :count])


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

    seen = reader(("text_attention", "next_text_attention"), read=read)
    with tokenprune.patched(build(family), "reader", keep=0.5):
        build(family)(**inputs)
        monkeypatch.setattr(observable_bases, "_MAX_ELEMENTS", 1)  # a row at a time
        build(family)(**inputs)
    for whole, pieced in zip(*seen, strict=True):
        close(whole, pieced, 1e-6)


@torch.no_grad()
def test_what_is_there_at_the_entry(family: Family, build) -> None:
    inputs = family.make_inputs(images=(1, 2))

    def read(tokens: Any) -> tuple[Tensor, ...]:
        return tokens.embeddings, tokens.hidden, tokens.text.embeddings, tokens.text.hidden

    seen = reader(("embeddings",), "PRE_LLM", read)
    model = build(family)
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    embeddings, hidden, of_text, text_hidden = seen[0]
    assert torch.equal(embeddings, hidden) and torch.equal(of_text, text_hidden)
    for need in set(DECODER) - {"embeddings", "first_layer_scores"}:
        reader((need,), "PRE_LLM")
        with pytest.raises(OptionError, match=f"PRE_LLM method cannot need .*{need}"):
            tokenprune.patch(model, "reader", keep=0.5)


@torch.no_grad()
def test_nothing_is_kept_that_nobody_reads(build) -> None:
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
        reader(needs, read=read)
        with tokenprune.patched(model, "reader", keep=0.5):
            model(**inputs)
            parts = get_attachment(model).engine.parts
        assert observed.pop() == fields
        kept = [one for part in parts for one in vars(part).values() if isinstance(one, PerCall)]
        assert kept or not needs
        assert not any(calls[-1] in one for one in kept)
