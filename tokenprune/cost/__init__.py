# SPDX-License-Identifier: Apache-2.0
"""Closed forms of what a prefill, a decode step and an assisted draft cost."""
