# SPDX-License-Identifier: Apache-2.0
"""Warning about numbers of tokens that look like percentages."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger("tokenprune")


@cache
def warn_about_percentage(tokens: int) -> None:
    """Log once per number that an int `keep` such as 50 is a number of tokens, not a percentage."""
    if tokens in range(5, 100, 5):
        logger.warning(
            "tokenprune: keep=%d keeps %d tokens per image, not %d %%. Pass keep=%g for a share; Budget(tokens=%d) "
            "logs no warning.", tokens, tokens, tokens, tokens / 100, tokens,
        )  # fmt: skip
