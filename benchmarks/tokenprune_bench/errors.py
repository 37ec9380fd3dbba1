# SPDX-License-Identifier: Apache-2.0
"""Errors of measuring, beside those of `tokenprune.errors`."""

from __future__ import annotations

from tokenprune.errors import TokenPruneError


class DataError(TokenPruneError, ValueError):
    """Questions to measure on cannot be read, or do not fit the model."""


class RunError(TokenPruneError, RuntimeError):
    """A benchmark cannot go on: its folder belongs to another run or cannot be written, or what it asks fails."""
