# SPDX-License-Identifier: Apache-2.0
"""Answers to a batch of questions, as back ends return them and run folders store them."""

from __future__ import annotations

from typing import Any

Batch = tuple[list[str], dict[str, Any]]  # the answers, and their cost
