# SPDX-License-Identifier: Apache-2.0
"""Bases of methods by site, beside `Pruner`."""
