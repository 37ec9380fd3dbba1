# SPDX-License-Identifier: Apache-2.0
"""Stages of a call in a profile."""

from __future__ import annotations

# In order of execution. All but the last make up the time to the first token.
STAGES = {
    "processor": "processor",
    "tower": "vision tower and projector",
    "selection": "choosing and removing tokens",
    "prefill": "decoder's prefill",
    "rest": "output head, embeddings, generate()",
    "decode": "a step of decoding",
}
FIRST_TOKEN = tuple(STAGES)[:-1]
