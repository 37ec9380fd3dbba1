# SPDX-License-Identifier: Apache-2.0
"""The page of stable and experimental names is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

import tokenprune

PAGE = (Path(__file__).parents[3] / "docs/reference/stability.md").read_text()


def named(heading: str) -> list[str]:
    """Return the public names in the first paragraph below a heading."""
    paragraph = PAGE.partition(f"\n## {heading}\n\n")[2].partition("\n\n")[0]
    return re.findall(r"`(\w+)`", paragraph)


def test_every_public_name_is_in_one_tier() -> None:
    public = set(tokenprune.__all__) - {"__version__"}
    stable, experimental = named("Stable"), named("Experimental")
    assert sorted([*stable, *experimental]) == sorted(public)
    assert set(stable) == tokenprune._STABLE
