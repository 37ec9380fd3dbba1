# SPDX-License-Identifier: Apache-2.0
"""Errors of benchmarks, in addition to `tokenprune.errors`."""

from __future__ import annotations

from tokenprune.errors import TokenPruneError


class DataError(TokenPruneError, ValueError):
    """The questions cannot be read, or do not fit the model."""


class RunError(TokenPruneError, RuntimeError):
    """The benchmark cannot continue: its folder belongs to another run, cannot be written, or an engine failed."""
