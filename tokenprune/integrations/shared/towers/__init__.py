# SPDX-License-Identifier: Apache-2.0
"""Merging and dropping in vision towers, for all engines."""
