# SPDX-License-Identifier: Apache-2.0
"""Check methods that cut inside the decoder against naive loops, on synthetic tokens and inside eager models."""

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
    dtype: torch.dtype = torch.float32, **replaced: Any,
) -> VisualTokens:  # fmt: skip
    """Build synthetic tokens with all observables that a method needs.

    levels: round values to multiples of 1 / levels, so that ties occur.
    """
    generator, sizes = torch.Generator().manual_seed(seed), Sizes(tuple(counts), TEXT, width=WIDTH, heads=HEADS)

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rounded, value))
        if levels and isinstance(value, Tensor) and value.is_floating_point():
            value = (value * levels).round() / levels
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    observables = {
        name: rounded(find_observable(name).example(sizes, generator)) for name in ("hidden", *sorted(needs))
    }
    text = {
        find_observable(name).text_name: find_observable(name).text_example(sizes, generator) for name in observables
    }
    text = {name: rounded(value) for name, value in text.items() if value is not None}
    lengths = torch.tensor([max(1, TEXT - row) for row in range(len(counts))])
    text["mask"] = torch.arange(TEXT) < lengths[:, None]
    return visual_tokens(counts=counts, keep=list(keep), text=text, **{**observables, **replaced})


def counts_of(method: Any, layers: int, count: int, keep: Any) -> list[tuple[int, int]]:
    """Return the layer of each cut of a method, and the number of kept tokens of an image of `count` tokens."""
    shape = DecoderShape(layers, hidden=8, intermediate=16, heads=1, kv_heads=1, head_dim=8)
    return [
        (stage.cut_layer, *budget.resolve([count], layer=stage.cut_layer, shape=shape, text_tokens=9, original=[count]))
        for stage, budget in method.stages(tokenprune.Budget.from_keep(keep), layers)
    ]


def wanted(counts: Sequence[int], share: float) -> list[int]:
    return [max(1, round(share * count)) for count in counts]


def rows(keep: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in keep]


def best(score: Sequence[float], count: int, among: Sequence[int] | None = None) -> list[int]:
    """Return the indices of the highest scores, the first of equal scores, in increasing order."""
    candidates = range(len(score)) if among is None else among
    return sorted(sorted(candidates, key=lambda i: (-score[i], i))[:count])


@dataclass
class Arrived:
    """Inputs of a naive loop for an image at a cut, from the unpatched model with earlier cuts masked.

    Args:
        places: Positions of the image's tokens that reach the cut.
        text: Positions of the text after the image.
        before: Attention of the layer before the cut, `[H, L, L]`.
        behind: Attention of the layer after the cut, `[H, L, L]`.
        hidden: Input of the layer after the cut, `[L, D]`.
        previous: Input of the layer before the cut, `[L, D]`.
        entered: Input of the decoder, `[L, D]`.
        last: Position of the prompt's last token.
        number: Index of the cut.
        keep: Number of kept tokens.
        all_places: Positions of all tokens of the image.
        keys: Keys of the layer before the cut, `[L, Hkv, D]`.
        values: Values of the layer before the cut, `[L, Hkv, D]`.
        stays: Positions of the kept tokens, for cuts that are not checked.
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
    """Check that every cut of a patched run keeps the tokens that `naive` chooses. Return the cuts."""
    family = FAMILIES[name]
    model, inputs = build(family, "eager"), family.make_inputs(images=images)
    length, valid = inputs["input_ids"].shape[1], inputs["attention_mask"].bool()
    with tokenprune.patched(model, method, keep=keep, record=True, **options):
        model(**inputs)
        cuts = tokenprune.stats(model).cuts
    visual = family.visual_mask(model, inputs)
    for cut_index, cut in enumerate(cuts):
        with reduced(family, model, cuts[:cut_index], length):
            out = model(**inputs, output_attentions=True, output_hidden_states=True)
        before = out.past_key_values.layers[cut.layer - 1]
        keys, values = before.keys.transpose(1, 2), before.values.transpose(1, 2)
        alive = survivors(cuts[cut_index - 1], length) if cut_index else valid
        for row, images_of_row in enumerate(pieces(family, inputs)):
            for positions in images_of_row:
                arrived_positions = [position for position in positions if alive[row, position]]
                stays = [position for position in cut.kept[row] if position in set(arrived_positions)]
                text = [i for i in range(max(positions) + 1, length) if valid[row, i] and not visual[row, i]]
                arrived = Arrived(
                    arrived_positions, text, out.attentions[cut.layer - 1][row], out.attentions[cut.layer][row],
                    out.hidden_states[cut.layer][row], out.hidden_states[cut.layer - 1][row], out.hidden_states[0][row],
                    int(valid[row].nonzero().max()), cut_index, len(stays), positions, keys[row], values[row], stays,
                )  # fmt: skip
                assert sorted(naive(arrived)) == stays
    return cuts


def check_ties(method: Any, naive: Callable[[VisualTokens, int], list[list[int]]], stages: int | None = None) -> None:
    """Check the first `stages` stages of a method (None for all) against `naive`, on synthetic tokens with ties."""
    for seed, counts in enumerate(COUNTS):
        for share in SHARES:
            for levels, dtype in ((4, torch.float32), (None, torch.float32), (None, torch.bfloat16)):
                carry: dict[str, Any] = {}
                for index, (stage, _) in enumerate(method.stages(tokenprune.Budget(keep=0.5), 32)[:stages]):
                    keep = wanted(counts, share)
                    tokens = view(counts, keep, stage.needs, seed=seed, levels=levels, dtype=dtype, carry=carry)
                    selection = stage.select(tokens)
                    carry = dict(tokens.carry)
                    assert isinstance(selection, Selection)
                    assert rows(selection.keep) == naive(tokens, index), (counts, share, levels, dtype, index)


def naive_centres(x: Tensor, count: int, neighbours: int) -> list[int]:
    """Return the density peaks of DPC-KNN.

    The density of a token uses its nearest `neighbours` tokens, including the token. Ties prefer the lower index.
    """
    num_tokens = len(x)
    points = x.double()
    distance = [[float((points[i] - points[j]).norm()) / x.shape[1] ** 0.5 for j in range(num_tokens)]
                for i in range(num_tokens)]  # fmt: skip
    density = [-sum(d * d for d in sorted(row)[:neighbours]) / min(neighbours, num_tokens) for row in distance]
    peak = []
    for i in range(num_tokens):
        denser = [distance[i][j] for j in range(num_tokens) if (density[j], -j) > (density[i], -i)]
        peak.append(min(denser) if denser else max(distance[i]))
    score = [math.exp(density[i]) * peak[i] for i in range(num_tokens)]
    return sorted(range(num_tokens), key=lambda i: (-score[i], i))[:count]
