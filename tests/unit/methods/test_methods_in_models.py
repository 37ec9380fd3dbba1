# SPDX-License-Identifier: Apache-2.0
"""Methods inside models keep the same tokens as naive loops over the unpatched model's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import MODEL_METHODS, pieces
from families import FAMILIES as EVERY_FAMILY
from looking import look
from module_calls import record_inputs
from tests.unit.methods.naive.cdpruner import naive_divprune
from tests.unit.methods.test_methods import naive_dart
from zoo import ANYRES, FAMILIES, Family


@torch.no_grad()
def look_inside(family: Family, model: Any, inputs: Any, layer: int) -> tuple[Tensor, Any]:
    """Return the unpatched model's hidden states at the input of a layer (0: the embeddings), and its output."""
    with record_inputs(model.get_submodule(family.decoder).layers[layer]) as states:
        out = model(**inputs, output_attentions=model.config._attn_implementation == "eager")
    return states[0], out


def list_kept(model: Any, inputs: Any, method: str, keep: float, **options: Any) -> list[set[int]]:
    with torch.no_grad(), tokenprune.patched(model, method, keep=keep, record=True, **options):
        model(**inputs)
        return [set(row) for row in tokenprune.stats(model).cuts[-1].kept]


def compare(kept: list[set[int]], family: Family, inputs: Any, choose: Any) -> None:
    for row, row_pieces in enumerate(pieces(family, inputs)):
        for piece in row_pieces:
            want = {piece[i] for i in choose(row, piece, max(1, round(0.3 * len(piece))))}
            assert kept[row] & set(piece) == want


def test_divprune_in_a_model(family: Family, model) -> None:
    inputs = family.make_inputs(images=(1, 2))
    embeds, _ = look_inside(family, model, inputs, 0)
    kept = list_kept(model, inputs, "divprune", 0.3)
    compare(kept, family, inputs, lambda row, piece, k: naive_divprune(embeds[row, piece].double(), None, k))


@pytest.mark.few_families
@pytest.mark.parametrize("texts", [4, 0])
@torch.no_grad()
def test_dart_in_a_model(texts: int, family: Family, model) -> None:
    inputs = family.make_inputs(images=(1, 2))
    hidden, out = look_inside(family, model, inputs, 2)
    normed = model.get_submodule(family.decoder).norm(hidden)
    keys = out.past_key_values.layers[1].keys.transpose(1, 2).flatten(2)
    text = inputs["attention_mask"].bool() & ~family.visual_mask(model, inputs)

    def choose(row: int, piece: list[int], keep: int) -> list[int]:
        following = [i for i in text[row].nonzero().flatten().tolist() if i > piece[-1]]
        text_states, text_keys = normed[row, following], keys[row, following]
        return naive_dart(normed[row, piece], keys[row, piece], text_states, text_keys, keep, texts=texts)

    compare(list_kept(model, inputs, "dart", 0.3, pivot_text=texts), family, inputs, choose)


@pytest.mark.pairwise
@pytest.mark.parametrize("query", ["last", "all"])
@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_fastv_in_a_model(query: str, layer: int, padding: str, family: Family, build) -> None:
    inputs = family.make_inputs(images=(1, 2), padding=padding)
    attention = look_inside(family, build(family, "eager"), inputs, 0)[1].attentions[layer - 1].mean(1)
    mask = inputs["attention_mask"].bool()

    def choose(row: int, piece: list[int], keep: int) -> list[int]:
        positions = mask[row].nonzero().flatten()
        if query == "last":
            score = attention[row, positions[-1], piece]  # zero outside a sliding window; ties select the first tokens
        else:
            rows = attention[row][positions][:, piece]
            score = rows.sum(0) / (rows > 0).sum(0)  # the mean over queries that attend to it
        return score.argsort(descending=True, stable=True)[:keep].tolist()

    for attn in ("eager", "sdpa"):
        kept = list_kept(build(family, attn), inputs, "fastv", 0.3, layer=layer, query=query)
        compare(kept, family, inputs, choose)


SHAPES = {
    "llava": ("llava", {}, [(36, (1, 6, 6))] * 2),
    "gemma3": ("gemma3", {}, [(16, (1, 4, 4))] * 2),
    "a tile": ("internvl", dict(sizes=(1,)), [(16, (1, 4, 4))] * 2),
    "four tiles": ("internvl", dict(sizes=(4,)), [(64, None)] * 2),
    "the whole view alone": ("idefics3", dict(sizes=((0, 0),)), [(16, (1, 4, 4))] * 2),
    "three tiles and the whole view": ("smolvlm", dict(sizes=((1, 3),)), [(64, None)] * 2),
    "rows of a known number": ("qwen2_vl", dict(sizes=((4, 16),)), [(16, (1, 2, 8))] * 2),
    # A base view of 4 x 4 tokens, and 4 x 4 tokens with a newline after each row.
    "newlines": ("llava_next", dict(sizes=((16, 16),)), [(36, None)] * 2),
    "newlines, too": ("llava_onevision", dict(sizes=((16, 16),)), [(36, None)] * 2),
    "queries": ("blip-2", {}, [(16, None)] * 2),
    "a tower for any shape": ("llava_pixtral", dict(sizes=((16, 64),)), [(64, None)] * 2),
    # Square token counts imply the grid of an image, but not of a video (9 and 16 tokens here).
    "a video with a newline": ("llava_onevision", dict(images=(0,), video=2), [(9, None)]),
    "a video": ("qwen2_5_vl", dict(images=(0,), video=4), [(16, (4, 2, 2))]),
    "a video with timestamps": ("qwen3_vl", dict(images=(0,), video=4), [(16, (4, 2, 2))]),
}


@torch.no_grad()
@pytest.mark.parametrize("name", SHAPES)
def test_grid_inference_depends_on_the_family(name: str, build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some families have square images."""
    monkeypatch.setitem(ANYRES, (16, 16), 36)
    method, grids = look(lambda tokens: list(zip(tokens.counts, tokens.grids, strict=True)))
    kind, batch, want = SHAPES[name]
    family = EVERY_FAMILY[kind]
    with tokenprune.patched(build(family), method, keep=0.5):
        build(family)(**family.make_inputs(**batch))
    assert grids == [want]


CONFIGURED = [
    *map(tokenprune.method, MODEL_METHODS),
    tokenprune.method("dart", pivot_text=0),
    tokenprune.method("vscan", stage2=False),
]


def select_for_two_questions(family: Family, model: Any, method: Any) -> tuple[list[set[int]], list[set[int]]]:
    inputs = family.make_inputs(images=(2, 1))
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, -4:] = torch.arange(100, 104)
    return list_kept(model, inputs, method, 0.3), list_kept(model, other, method, 0.3)


@pytest.mark.few_families
@pytest.mark.parametrize("method", [method for method in CONFIGURED if method.prefix_cache_safe], ids=str)
def test_prefix_cache_safe_methods_ignore_the_question(method: Any, family: Family, model) -> None:
    first, second = select_for_two_questions(family, model, method)
    assert first == second


@pytest.mark.parametrize("method", [method for method in CONFIGURED if method.query_aware], ids=str)
def test_query_aware_methods_depend_on_the_question(method: Any, build) -> None:
    selections = (select_for_two_questions(family, build(family), method) for family in FAMILIES.values())
    assert any(first != second for first, second in selections)  # until a family shows a difference
