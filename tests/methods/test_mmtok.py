# SPDX-License-Identifier: Apache-2.0
"""mmtok against a naive loop written from its description."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from greedy import alone, check_against, image_tokens, next_pick, picked, unit
from tokenprune import OptionError
from tokenprune.kernels.pairs import Products
from tokenprune.methods.pre_llm.mmtok import shared


def table(x: Tensor, z: Tensor, t: Tensor, alpha: float = 0.5, of_text: float = 0.02, of_image: float = 0.2) -> Tensor:
    """How well each visual token (column) covers each text token, then each visual one."""
    said = [torch.softmax(unit(x) @ unit(word) / of_text, 0) / len(t) for word in t]
    seen = [alpha * torch.softmax(unit(z) @ unit(one) / of_image, 0) / len(z) for one in z]
    return torch.stack(said + seen)


def naive(x: Tensor, z: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, tower: bool = True,
          a: Any = None, **more: Any) -> list[int]:  # fmt: skip
    covers, picks = table(x, z if tower else x, t, **more), []
    best = torch.zeros(len(covers), dtype=torch.float64)
    for _ in range(keep):
        picks.append(next_pick((covers - best[:, None]).clamp(min=0).sum(0), picks, kept, slack))
        best = torch.maximum(best, covers[:, picks[-1]])
    return picks


OPTIONS = [
    ({}, {}),
    ({"alpha": 2, "features": "projected"}, {"alpha": 2, "tower": False}),
    ({"text_temperature": 0.1, "temperature": 0.05}, {"of_text": 0.1, "of_image": 0.05}),
]


@pytest.mark.parametrize(("options", "more"), OPTIONS, ids=str)
def test_equals_the_naive_loop(options: dict, more: dict) -> None:
    check_against(lambda **given: naive(**given, **more), "mmtok", large=not options, slack=1e-4, **options)


def test_without_the_question() -> None:
    tokens = image_tokens([50], [9])
    seen = alone(tokens, 0) | {"t": torch.zeros(0, 32, dtype=torch.float64)}
    want = [sorted(naive(**seen, keep=9))]
    method = tokenprune.method("mmtok", question=False)
    assert picked(method, tokens) == want and not method.query_aware and method.prefix_cache_safe
    silent = {"hidden": torch.randn(1, 3, 32), "mask": torch.zeros(1, 3, dtype=torch.bool)}
    assert picked(tokenprune.method("mmtok"), image_tokens([50], [9], text=silent)) == want
    assert picked(tokenprune.method("mmtok", alpha=1e6), tokens) == want != picked(tokenprune.method("mmtok"), tokens)


def test_text_alone_covers_one_more_word_with_each_pick() -> None:
    tokens = image_tokens([50], [4])
    words = alone(tokens, 0)["t"]
    (got,) = picked(tokenprune.method("mmtok", alpha=0), tokens)
    best = table(**{k: v for k, v in alone(tokens, 0).items() if k != "a"}, alpha=0)[: len(words)].argmax(1).tolist()
    assert len(set(best)) >= 4 and set(got) <= set(best)


def test_rows_sum_to_their_weight_and_padding_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a table, and row by row."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 3, generator=g), torch.randn(2, 6, 3, generator=g)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    rows = torch.arange(5) < torch.tensor([[2], [5]])
    want = (a @ b.transpose(1, 2) / 0.3).masked_fill(~mask[:, None], -math.inf).softmax(2)
    want = want.masked_fill(~rows[:, :, None], 0) * 0.7 / rows.sum(1)[:, None, None]
    for fits in (True, False):
        monkeypatch.setattr(Products, "fits", fits)
        got = shared(Products(a, b), 0.3, 0.7, mask, rows)
        for segment, count in enumerate((6, 4)):
            found = got.rows(segment, torch.arange(5))
            assert torch.allclose(found[:, :count], want[segment, :, :count], atol=1e-6)
            assert not found[~rows[segment]].any()
            for place in range(count):
                assert torch.allclose(got.column(segment, place), found[:, place])


def test_invariance() -> None:
    method, tokens = tokenprune.method("mmtok"), image_tokens([40], [12])
    (want,) = picked(method, tokens)
    scale = 2.0 ** torch.randint(-3, 4, (1, 40, 1), generator=torch.Generator().manual_seed(3))
    assert picked(method, image_tokens([40], [12], hidden=tokens.hidden * scale)) == [want]
    text = tokens.text.hidden[:, torch.randperm(9, generator=torch.Generator().manual_seed(1))]
    assert picked(method, image_tokens([40], [12], text={"hidden": text})) == [want]
    for fewer in (1, 5, 11):
        assert set(picked(method, image_tokens([40], [fewer]))[0]) <= set(want)
    twice = tokens.text.hidden.repeat(1, 2, 1)  # all words twice: the same weights
    assert picked(method, image_tokens([40], [12], text={"hidden": twice})) == [want]


def test_options() -> None:
    assert tokenprune.method("mmtok").needs == {"encoder_features"}
    assert not tokenprune.method("mmtok", features="projected").needs
    for wrong in ({"alpha": -1}, {"temperature": 0}, {"text_temperature": 0}, {"features": "x"}, {"question": 1}):
        with pytest.raises(OptionError, match="mmtok"):
            tokenprune.method("mmtok", **wrong)
