# SPDX-License-Identifier: Apache-2.0
"""Families that hand their decoder more than the common contract."""

from __future__ import annotations
