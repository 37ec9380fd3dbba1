# SPDX-License-Identifier: Apache-2.0
"""Measure, tune and compare methods of tokenprune, and show them in a browser."""

__version__ = "0.1.0"
