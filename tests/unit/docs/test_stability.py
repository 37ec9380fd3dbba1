# SPDX-License-Identifier: Apache-2.0
"""The page of stable and experimental names lists the public names of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tokenprune

PAGE = (Path(__file__).parents[3] / "docs/reference/stability.md").read_text()


def read_names(heading: str) -> list[str]:
    """Return the public names in the first paragraph below a heading."""
    paragraph = PAGE.partition(f"\n## {heading}\n\n")[2].partition("\n\n")[0]
    return re.findall(r"`([\w.]+)`", paragraph)


def test_every_public_name_is_in_one_tier() -> None:
    public = {*tokenprune.__all__, *(f"tokenprune.{module}" for module in tokenprune._MODULES)} - {"__version__"}
    stable, experimental = read_names("Stable"), read_names("Experimental")
    assert sorted([*stable, *experimental]) == sorted(public)
    assert set(stable) == tokenprune._STABLE | {"tokenprune.errors"}


def test_public_modules_are_attributes_of_the_package() -> None:
    for module in tokenprune._MODULES:
        code = f"import tokenprune; assert tokenprune.{module}.__all__ and {module!r} in dir(tokenprune)"
        subprocess.run([sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code], check=True)
