# SPDX-License-Identifier: Apache-2.0
"""What a patch adds to a prefill and to a step of decoding, held without a clock: calls of the library's functions, and
ATen operations and launches on a device beyond those of the unpatched model."""

from __future__ import annotations

import json

import pytest

import engine_costs
import tokenprune
from each import each
from tokenprune.selection.method import Site

WANTED = json.loads(engine_costs.TABLE.read_text())


@pytest.fixture(autouse=True)
def same_versions() -> None:
    """Other versions of torch take other operations for the same."""
    if WANTED["versions"] != engine_costs.versions():
        pytest.skip(f"the table is of {WANTED['versions']}, and this is {engine_costs.versions()}")


@each("method", engine_costs.CASES)
def test_a_patch_adds_no_more_than_the_table_says(method: str) -> None:
    found = engine_costs.added(method)
    sums, wanted = engine_costs.sums(found), WANTED["added"][method]
    more = {name: (wanted[name], sums[name]) for name in wanted if sums[name] > wanted[name]}
    named = {name: found[name.split()[0]][name.split()[1]].most_common(10) for name in more}
    assert not more, (
        f"{method}: more than in {engine_costs.TABLE.name} (allowed, found): {more}. Take it out; or raise the number "
        f"by hand, and say why in the commit. Most frequent: {named}"
    )
    assert sums.keys() == wanted.keys()


def test_each_site_inside_the_model_is_counted() -> None:
    """Methods before the encoder act in the processor: a forward knows nothing of them."""
    sites = {tokenprune.method_info(method).site for method in engine_costs.CASES}
    assert sites == set(Site) - {Site.PRE_ENCODER}
    assert WANTED["added"].keys() == engine_costs.CASES.keys()
