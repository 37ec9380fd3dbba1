# SPDX-License-Identifier: Apache-2.0
"""Families that hand their decoder more than the common contract, or that are refused."""

from __future__ import annotations

from zoo import Family

FAMILIES: dict[str, Family] = {}
REFUSED: dict[str, Family] = {}
