# SPDX-License-Identifier: Apache-2.0
"""The house is no wider than dev/sizes.toml allows, and the file follows what became smaller."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import tokenprune
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.part import Part

ROOT = Path(__file__).parents[3]
LIMITS = tomllib.loads((ROOT / "dev/sizes.toml").read_text())
SLACK = {"lines": 200, "width": 0}  # a room may be as much smaller than its limit


@pytest.mark.parametrize("kind", SLACK)
def test_nothing_is_larger_than_its_limit(kind: str, house: ModuleType) -> None:
    now, limits = house.sizes()[kind], LIMITS[kind]
    assert now.keys() == limits.keys()
    over = {name: (number, limits[name]) for name, number in now.items() if number > limits[name]}
    assert not over, (
        f"larger than dev/sizes.toml allows (now, limit): {over}; make it smaller, or say why in [[raised]]"
    )
    under = {name: (number, limits[name]) for name, number in now.items() if number < limits[name] - SLACK[kind]}
    assert not under, f"smaller than dev/sizes.toml says (now, limit): {under}; lower the limits"


def test_who_raises_a_limit_says_why() -> None:
    for row in LIMITS.get("raised", ()):
        assert row.keys() == {"what", "from", "to", "why"}
        assert row["what"] in LIMITS["lines"] | LIMITS["width"]
        assert row["from"] < row["to"] and len(row["why"].split()) > 4


def test_widths_are_counted_right(house: ModuleType) -> None:
    width = house.sizes()["width"]
    assert width["fields of Budget"] == len(dataclasses.fields(tokenprune.Budget))
    assert width["fields of Call"] == len(dataclasses.fields(Call))
    assert width["moments of Part"] == sum(value is None for value in vars(Part).values())
    assert width["public names"] == len(tokenprune.__all__) - 1  # less __version__


def test_lines_are_those_of_all_files(house: ModuleType) -> None:
    folders = house.in_numbers()["folders"]
    lines = house.sizes()["lines"]
    for package, name in {"tokenprune": "tokenprune", "tokenprune_bench": "bench/tokenprune_bench"}.items():
        assert lines[name] == sum(one["lines"] for at, one in folders.items() if at.partition("/")[0] == package)
    inside = [one["lines"] for at, one in folders.items() if at.startswith("tokenprune/integrations/hf")]
    assert lines["tokenprune/integrations/hf"] == sum(inside)
