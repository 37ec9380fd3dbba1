# SPDX-License-Identifier: Apache-2.0
"""Broken rules of methods, as errors."""

from __future__ import annotations

from typing import Any

from tokenprune.errors import ConformanceError


def require(condition: Any, message: str) -> None:
    """Raise ConformanceError with `message` unless `condition`."""
    if not condition:
        raise ConformanceError(message)
