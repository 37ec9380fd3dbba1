# SPDX-License-Identifier: Apache-2.0
"""Versions of other packages that were never tried: refused, unless the environment says otherwise."""

from __future__ import annotations

import os

UNTESTED = "TOKENPRUNE_UNTESTED"


def allow_untested() -> bool:
    """Return True if the environment lets versions be used that were never tried: `TOKENPRUNE_UNTESTED=1`."""
    return os.environ.get(UNTESTED) == "1"
