# SPDX-License-Identifier: Apache-2.0
"""Leaderboard: check runs of `tokenprune bench` and store each as one small file."""
