# SPDX-License-Identifier: Apache-2.0
"""Methods that cut inside the decoder, against naive loops: on made-up tokens, and inside eager models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tokenprune
from basics import pieces
from oracle import reduced, survivors
from tokenprune import Selection, VisualTokens
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.observable_registry import find_observable
from tokenprune.selection.segments import Sizes
from tokenprune.testing import visual_tokens
from zoo import FAMILIES

TEXT = 5
WIDTH, HEADS = 12, 3
COUNTS = ([64], [17, 9, 1], [30, 31])
SHARES = (0.03, 0.3, 0.7, 1.0)


def view(
    counts: Sequence[int], keep: Sequence[int], needs: Sequence[str], *, seed: int = 0, levels: int | None = None,
    dtype: torch.dtype = torch.float32, **given: Any,
) -> VisualTokens:  # fmt: skip
    """Made-up tokens with all that a method needs. levels: numbers are rounded to so many a unit, which makes ties."""
    g, sizes = torch.Generator().manual_seed(seed), Sizes(tuple(counts), TEXT, width=WIDTH, heads=HEADS)

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rounded, value))
        if levels and isinstance(value, Tensor) and value.is_floating_point():
            value = (value * levels).round() / levels
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    seen = {name: rounded(find_observable(name).example(sizes, g)) for name in ("hidden", *sorted(needs))}
    text = {find_observable(name).text_name: find_observable(name).text_example(sizes, g) for name in seen}
    text = {name: rounded(value) for name, value in text.items() if value is not None}
    lengths = torch.tensor([max(1, TEXT - row) for row in range(len(counts))])
    text["mask"] = torch.arange(TEXT) < lengths[:, None]
    return visual_tokens(counts=counts, keep=list(keep), text=text, **{**seen, **given})


def counts_of(method: Any, layers: int, count: int, keep: Any) -> list[tuple[int, int]]:
    """Return the layer of each cut of a method, and how many of an image's `count` tokens it keeps."""
    shape = DecoderShape(layers, hidden=8, intermediate=16, heads=1, kv_heads=1, head_dim=8)
    return [
        (stage.cut_layer, *part.resolve([count], layer=stage.cut_layer, shape=shape, text_tokens=9, original=[count]))
        for stage, part in method.stages(tokenprune.Budget.from_keep(keep), layers)
    ]


def wanted(counts: Sequence[int], share: float) -> list[int]:
    return [max(1, round(share * count)) for count in counts]


def rows(keep: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in keep]


def best(score: Sequence[float], number: int, among: Sequence[int] | None = None) -> list[int]:
    """The highest of a list, of equal ones the first; sorted by place."""
    places = range(len(score)) if among is None else among
    return sorted(sorted(places, key=lambda i: (-score[i], i))[:number])


@dataclass
class Arrived:
    """What a naive loop sees of one image at one cut, of the unpatched model with earlier cuts masked.

    places: positions of its tokens that arrive. text: of the text behind it. before, behind: attention `[H, L, L]` of
    the layers before and behind the cut. hidden, previous: `[L, D]`, what enters the layer behind and before it.
    entered: `[L, D]`. keys, values: `[L, Hkv, D]`, of the layer before. last: position of the prompt's last token.
    number: of the cut. keep: how many tokens stay. stays: which do; for cuts that are not looked at.
    """

    places: list[int]
    text: list[int]
    before: Tensor
    behind: Tensor
    hidden: Tensor
    previous: Tensor
    entered: Tensor
    last: int
    number: int
    keep: int
    all_places: list[int]
    keys: Tensor
    values: Tensor
    stays: list[int]


@torch.no_grad()
def check_in_model(
    method: Any, naive: Callable[[Arrived], list[int]], build: Any, keep: float = 0.3, name: str = "llava",
    images: tuple[int, ...] = (2, 1), **options: Any,
) -> list[Any]:  # fmt: skip
    """Every cut of a patched run keeps what `naive` chooses; returns the cuts."""
    family = FAMILIES[name]
    model, inputs = build(family, "eager"), family.make_inputs(images=images)
    length, real = inputs["input_ids"].shape[1], inputs["attention_mask"].bool()
    with tokenprune.patched(model, method, keep=keep, record=True, **options):
        model(**inputs)
        cuts = tokenprune.stats(model).cuts
    visual = family.visual_mask(model, inputs)
    for number, cut in enumerate(cuts):
        with reduced(family, model, cuts[:number], length):
            out = model(**inputs, output_attentions=True, output_hidden_states=True)
        before = out.past_key_values.layers[cut.layer - 1]
        keys, values = before.keys.transpose(1, 2), before.values.transpose(1, 2)
        alive = survivors(cuts[number - 1], length) if number else real
        for row, images_of_row in enumerate(pieces(family, inputs)):
            for places in images_of_row:
                left = [place for place in places if alive[row, place]]
                stays = [place for place in cut.kept[row] if place in set(left)]
                behind = [i for i in range(max(places) + 1, length) if real[row, i] and not visual[row, i]]
                arrived = Arrived(
                    left, behind, out.attentions[cut.layer - 1][row], out.attentions[cut.layer][row],
                    out.hidden_states[cut.layer][row], out.hidden_states[cut.layer - 1][row], out.hidden_states[0][row],
                    int(real[row].nonzero().max()), number, len(stays), places, keys[row], values[row], stays,
                )  # fmt: skip
                assert sorted(naive(arrived)) == stays
    return cuts


def check_ties(method: Any, naive: Callable[[VisualTokens, int], list[list[int]]], stages: int | None = None) -> None:
    """The first stages of a configured method, by default all, keep what `naive` says of made-up tokens, of which many
    are equal."""
    for seed, counts in enumerate(COUNTS):
        for share in SHARES:
            for levels, dtype in ((4, torch.float32), (None, torch.float32), (None, torch.bfloat16)):
                carry: dict[str, Any] = {}
                for number, (stage, _) in enumerate(method.stages(tokenprune.Budget(keep=0.5), 32)[:stages]):
                    keep = wanted(counts, share)
                    tokens = view(counts, keep, stage.needs, seed=seed, levels=levels, dtype=dtype, carry=carry)
                    selection = stage.select(tokens)
                    carry = dict(tokens.carry)
                    assert isinstance(selection, Selection)
                    assert rows(selection.keep) == naive(tokens, number), (counts, share, levels, dtype, number)


def naive_centres(x: Tensor, number: int, neighbours: int) -> list[int]:
    """Peaks of density, by so many nearest tokens, each its own nearest; of equals the first."""
    count = len(x)
    points = x.double()
    distance = [[float((points[i] - points[j]).norm()) / x.shape[1] ** 0.5 for j in range(count)]
                for i in range(count)]  # fmt: skip
    dense = [-sum(d * d for d in sorted(row)[:neighbours]) / min(neighbours, count) for row in distance]
    peak = []
    for i in range(count):
        denser = [distance[i][j] for j in range(count) if (dense[j], -j) > (dense[i], -i)]
        peak.append(min(denser) if denser else max(distance[i]))
    score = [math.exp(dense[i]) * peak[i] for i in range(count)]
    return sorted(range(count), key=lambda i: (-score[i], i))[:number]
