# SPDX-License-Identifier: Apache-2.0
"""Budgets: `keep` resolved into a number of visual tokens for each image."""

from tokenprune.budgets.budget import Budget, compute_joint_share

__all__ = ["Budget", "compute_joint_share"]
