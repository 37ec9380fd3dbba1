# SPDX-License-Identifier: Apache-2.0
"""Kept for `python -m tokenprune.integrations.lmms_eval`: the model for lmms-eval is `tokenprune.lmms_eval`."""
