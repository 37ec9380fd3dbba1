# SPDX-License-Identifier: Apache-2.0
"""towerdrop against naive loops over units, and in masked towers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES
from packed_towers import DIFFERENT, MODALITIES, UNIT, check_kept_units, read_states
from tokenprune import OptionError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.checks import find_unserved_reason
from tokenprune.testing import check_method
from tower_features import encode

SCORES = ("diverse", "change", "norm", "detail", "random")
HIDDEN = SCORES[:3]


def split_evenly(num_kept: int, frames: int) -> list[int]:
    """Return the number of kept units per frame. The numbers differ by at most one."""
    return [num_kept * (frame + 1) // frames - num_kept * frame // frames for frame in range(frames)]


def choose_farthest(units: list[list[float]], count: int) -> set[int]:
    """Return the units of a frame that Algorithm 1 of DivPrune keeps, comparing one pair at a time."""

    def distance(a: int, b: int) -> float:
        x, y = units[a], units[b]
        return 1 - sum(p * q for p, q in zip(x, y, strict=True)) / (math.hypot(*x) * math.hypot(*y))

    picked: list[int] = []
    while len(picked) < count:
        rest = [i for i in range(len(units)) if i not in picked]
        if picked:
            picked.append(max(rest, key=lambda i: min(distance(i, j) for j in picked)))
        else:
            picked.append(max(rest, key=lambda i: min([distance(i, j) for j in rest if j != i], default=0)))
    return set(picked)


def choose_highest(units: list[list[float]], count: int, score: str) -> set[int]:
    """Return the units of a frame with the longest values, or with the largest steps between values."""
    colours = [[round(255 * value) for value in unit] for unit in units]
    steps = {i: sum(abs(b - a) for a, b in pairwise(x)) for i, x in enumerate(colours)}
    length = {i: math.hypot(*x) for i, x in enumerate(units)}
    rank = steps if score == "detail" else length
    return set(sorted(rank, key=rank.__getitem__, reverse=True)[:count])


def naive(score: str, x: Tensor, num_kept: int) -> Tensor:
    """Return the kept units of an image or video from the observed values (frames, height, width, values)."""
    keep = torch.zeros(x.shape[:3], dtype=torch.bool)
    for frame, count in enumerate(split_evenly(num_kept, len(x))):
        units = x[frame].flatten(0, 1).double().tolist()
        chosen = choose_farthest(units, count) if score == "diverse" else choose_highest(units, count, score)
        keep[frame].view(-1)[list(chosen)] = True
    return keep


def draw_noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("score", [*HIDDEN, "detail"])
def test_kept_units_match_loop(score: str) -> None:
    method = tokenprune.method("towerdrop", score=score)
    for grid in ((1, 1, 1), (1, 5, 7), (3, 4, 5), (5, 1, 2)):
        units = math.prod(grid)
        x = draw_noise(*grid, 12, seed=units)
        for num_kept in {1, min(2, units), max(1, units // 4), max(1, units // 2), units}:
            got = method.keep_units(x, num_kept)
            assert torch.equal(got, naive(score, x, num_kept)), (grid, num_kept)
            assert got.flatten(1).sum(1).tolist() == split_evenly(num_kept, grid[0])


def test_random_depends_on_seed_and_size() -> None:
    x = draw_noise(2, 6, 6, 4)
    first, again, other = (tokenprune.method("towerdrop", score="random", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.keep_units(x, 20), again.keep_units(-x, 20))
    assert not torch.equal(first.keep_units(x, 20), other.keep_units(x, 20))


def test_uniform_unit_has_no_detail() -> None:
    x = torch.full((1, 3, 3, 48), 0.5)
    x[0, 1, 2], x[0, 2, 0] = torch.rand(48), 0.9
    kept = tokenprune.method("towerdrop", score="detail").keep_units(x, 1)
    assert kept.nonzero().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("score", SCORES)
def test_conforms_and_is_served(score: str) -> None:
    method = tokenprune.method("towerdrop", score=score, layer=1)
    check_method(method)
    assert find_unserved_reason(method) is None


def test_invalid_setups_are_rejected(build) -> None:
    with pytest.raises(OptionError, match="Pass layer=1 or more"):
        tokenprune.method("towerdrop", score="change", layer=0)
    with pytest.raises(OptionError, match="block 4 is out of range: the vision tower has 4"):
        tokenprune.patch(build(FAMILIES["qwen2_vl"]), "towerdrop", layer=4)
    with pytest.raises(OptionError, match=r'score="detail" compares color values.*Pass processor='):
        tokenprune.patch(build(FAMILIES["qwen2_vl"]), "towerdrop", score="detail")
    with pytest.raises(tokenprune.UnsupportedSetupError, match=r"not adjacent in one sequence.*after the tower"):
        tokenprune.patch(build(FAMILIES["mistral3"]), "towerdrop")


def observe_values(score: str, entered: list[Tensor], layer: int) -> Tensor:
    """Return the values that the method scores, shape (units, values), from the inputs of each block."""
    if score == "diverse":
        return entered[layer].mean(1)
    return (entered[layer] - entered[layer - 1] if score == "change" else entered[layer]).flatten(1)


@pytest.mark.parametrize("modality", MODALITIES)
@pytest.mark.parametrize("score", HIDDEN)
@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_tower_matches_masked_tower(name: str, score: str, modality: str, build) -> None:
    family = FAMILIES[name]
    model = build(family)
    images = {"images": (2, 1)} if modality == "image" else {"images": (0, 0), "video": True}
    inputs = family.make_inputs(**images)
    entered, grids = read_states(model, inputs, modality), inputs[f"{modality}_grid_thw"]
    sizes = [t * h * w // UNIT for t, h, w in grids.tolist()]
    for layer in range(score == "change", len(entered)):
        shown = observe_values(score, entered, layer).split(sizes)
        kept = [
            naive(score, x.view(t, h // 2, w // 2, -1), max(1, round(0.3 * len(x)))).flatten()
            for x, (t, h, w) in zip(shown, grids.tolist(), strict=True)
        ]
        with tokenprune.patched(model, "towerdrop", keep=0.3, layer=layer, score=score):
            got = encode(model, inputs)[modality]
        assert all(map(torch.equal, get_record(got).kept, kept)), layer
        check_kept_units(model, inputs, modality, got, kept, layer)
