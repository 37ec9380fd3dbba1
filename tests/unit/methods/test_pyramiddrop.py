# SPDX-License-Identifier: Apache-2.0
"""pyramiddrop against naive loops written from its description."""

from __future__ import annotations

import pytest

import tokenprune
from several_cuts import counts_of
from tokenprune import Budget, BudgetError, OptionError
from tokenprune.budgets.schedule import choose_layers


def test_schedule_matches_paper() -> None:
    """int(576 * ratio) tokens after layers 8, 16 and 24 by default. keep= sets the average over layers."""
    method = tokenprune.method("pyramiddrop")
    assert counts_of(method, 32, 576, method.default_keep) == [(8, 288), (16, 144), (24, 72)]
    assert [layer for layer, _ in counts_of(method, 28, 576, 0.5)] == [7, 14, 21]
    for keep in (1 / 3, 2 / 9, 1 / 9, 0.06):
        cuts = counts_of(method, 32, 576, keep)
        spent = sum(after * (end - layer) for (layer, after), end in
                    zip(cuts, [layer for layer, _ in cuts[1:]] + [32], strict=True))  # fmt: skip
        assert (cuts[0][0] * 576 + spent) / 32 == pytest.approx(576 * keep, abs=1)
    other = tokenprune.method("pyramiddrop", layers=[2, 9], ratios=[0.5, 0.1])
    assert [layer for layer, _ in counts_of(other, 32, 576, 0.2)] == [2, 9]


def test_invalid_schedules_are_rejected() -> None:
    with pytest.raises(BudgetError, match="Cut earlier"):
        tokenprune.method("pyramiddrop", layers=(8, 16, 24)).stages(Budget(keep=0.1), 32)
    with pytest.raises(OptionError, match="too shallow"):
        tokenprune.method("pyramiddrop").stages(Budget(keep=0.5), 3)


def test_cuts_are_at_different_layers() -> None:
    for layers in range(4, 40):
        for keep in (0.9, 0.4, 0.1, 0.02):
            for depths in ((0.1, 0.2, 0.5), (0.9, 0.95, 0.99), (0.01, 0.02, 0.03)):
                chosen = choose_layers(depths, layers, Budget(keep=keep))
                assert chosen == sorted(set(chosen)) and chosen[0] >= 1 and chosen[-1] < layers
    assert choose_layers((0.25, 0.5), 32, Budget(keep=0.25)) == [4, 8]
    assert choose_layers((0.25, 0.5), 32, Budget(average_share=0.25)) == [4, 8]
    assert choose_layers((0.25, 0.5), 32, Budget(average_tokens=3)) == [8, 16]
