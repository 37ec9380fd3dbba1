# SPDX-License-Identifier: Apache-2.0
"""Budgets: the number of visual tokens to keep."""

from tokenprune.budgets.budget import Budget
from tokenprune.budgets.joint_share import compute_joint_share

__all__ = ["Budget", "compute_joint_share"]
