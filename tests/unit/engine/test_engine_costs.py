# SPDX-License-Identifier: Apache-2.0
"""Costs that a patch adds to a prefill and a decoding step, without a clock.

Counted are calls of the library's functions, and ATen operations and device launches beyond the unpatched model.
"""

from __future__ import annotations

import json

import pytest

import engine_costs
import tokenprune
from each import each
from tokenprune.selection.method import Site

EXPECTED = json.loads(engine_costs.TABLE.read_text())


@pytest.fixture(autouse=True)
def same_versions() -> None:
    """Other versions of torch need other operations."""
    if EXPECTED["versions"] != engine_costs.versions():
        pytest.skip(f"the table was measured with {EXPECTED['versions']}, not {engine_costs.versions()}")


@each("method", engine_costs.CASES)
def test_a_patch_adds_no_more_than_the_table_says(method: str) -> None:
    costs = engine_costs.added(method)
    sums, limits = engine_costs.sums(costs), EXPECTED["added"][method]
    more = {name: (limits[name], sums[name]) for name in limits if sums[name] > limits[name]}
    frequent = {name: costs[name.split()[0]][name.split()[1]].most_common(10) for name in more}
    assert not more, (
        f"{method}: more than in {engine_costs.TABLE.name} (allowed, measured): {more}. Remove the cost, or raise "
        f"the number by hand and give the reason in the commit. Most frequent: {frequent}"
    )
    assert sums.keys() == limits.keys()


def test_each_site_inside_the_model_is_counted() -> None:
    """Methods before the encoder act in the processor, outside the forward pass."""
    sites = {tokenprune.method_info(method).site for method in engine_costs.CASES}
    assert sites == set(Site) - {Site.PRE_ENCODER}
    assert EXPECTED["added"].keys() == engine_costs.CASES.keys()
