# SPDX-License-Identifier: Apache-2.0
"""The leaderboard: what a run of `tokenprune bench` says, checked and written as one small file."""
