# SPDX-License-Identifier: Apache-2.0
"""Drawings of the tokens that a method keeps, drops and merges."""
