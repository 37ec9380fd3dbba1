# SPDX-License-Identifier: Apache-2.0
"""`docprune` on drawn pages, against a loop over patches that is written from its description."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from families import FAMILIES
from tokenprune import OptionError
from tokenprune.abilities import unserved
from tokenprune.testing import check_method

SIDE = 4  # pixels of a patch


def page(height: int = 6, width: int = 5, frames: int = 1, seed: int = 0) -> Tensor:
    """Units `[T, H, W, P]` of a white page with a box, words of noise, a lonely pixel, and a unit of near white."""
    g = torch.Generator().manual_seed(seed)
    x = torch.full((frames, height, width, 4, 3, SIDE * SIDE), 1.0)
    x[:, 1:3, 1] = torch.tensor([0.2, 0.6, 0.4]).view(3, 1)
    x[:, 4] = torch.randint(256, x[:, 4].shape, generator=g) / 255
    x[:, 0, 3, 2, :, 7] = 0.0
    x[:, 3, 2] = 253 / 255
    return x.flatten(3)


def naive(x: Tensor, threshold: float, tolerance: float, most: int) -> Tensor:
    """Return the units that stay, worked out a pixel at a time."""
    frames, height, width, _ = x.shape
    colours = x.view(frames, height * width, 4, 3, -1).mul(255).round().tolist()
    shares = []
    for units in colours:
        grey = [[[round(0.299 * r + 0.587 * g + 0.114 * b) for r, g, b in zip(*patch, strict=True)] for patch in unit]
                for unit in units]  # fmt: skip
        counted = Counter(value for unit in grey for patch in unit for value in patch)
        ground = min(value for value, times in counted.items() if times == max(counted.values()))
        shares += [min(sum(abs(v - ground) < tolerance for v in patch) / len(patch) for patch in unit) for unit in grey]
    stay = [unit for unit, share in enumerate(shares) if share <= threshold]
    number = min(most, max(1, len(stay)))
    kept = sorted(range(len(shares)), key=lambda unit: shares[unit])[:number]
    keep = torch.zeros(len(shares), dtype=torch.bool)
    keep[kept] = True
    return keep.view(frames, height, width)


@each("tolerance", [1.0, 3.0, 200.0])
@each("threshold", [0.0, 0.5, 0.9, 0.95, 1.0])
def test_units_that_stay_are_those_of_the_loop(threshold: float, tolerance: float) -> None:
    method = tokenprune.method("docprune", threshold=threshold, tolerance=tolerance)
    for x in (page(), page(frames=3), page(5, 7, seed=1), torch.full((1, 3, 3, 48), 0.5)):
        for most in (1, 4, 10**6):
            assert torch.equal(method.keep_units(x, most), naive(x, threshold, tolerance, most))


def test_the_rules_of_its_description() -> None:
    blank, method = torch.full((1, 4, 4, 192), 0.7), tokenprune.method("docprune")
    assert int(method.keep_units(blank, 16).sum()) == 1
    assert tokenprune.method("docprune", threshold=1.0).keep_units(blank, 16).all()
    kept = method.keep_units(page(), 10**6)[0]
    assert kept[4].all() and kept[1:3, 1].all() and kept[3, 2] and int(kept.sum()) == 8  # a pixel of 16 is 0.94
    closer = tokenprune.method("docprune", threshold=0.93)
    assert int(closer.keep_units(page(), 10**6).sum()) == 8
    assert int(tokenprune.method("docprune", threshold=0.94).keep_units(page(), 10**6).sum()) == 9
    assert not tokenprune.method("docprune", tolerance=3.0).keep_units(page(), 10**6)[0, 3, 2]
    assert tokenprune.method("docprune", tolerance=2.0).keep_units(page(), 10**6)[0, 3, 2]  # equality is foreign


def test_conforms_is_served_and_takes_colours(build) -> None:
    check_method("docprune")
    assert unserved(tokenprune.method("docprune")) is None
    for options in ({"threshold": 1.5}, {"tolerance": 0.0}, {"tolerance": "1"}):
        with pytest.raises(OptionError):
            tokenprune.method("docprune", **options)
    with pytest.raises(OptionError, match="pass processor="):
        tokenprune.patch(build(FAMILIES["qwen2_vl"]), "docprune")
