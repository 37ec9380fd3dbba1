# SPDX-License-Identifier: Apache-2.0
"""The stages of one call that a profile times."""

from __future__ import annotations

# In the order in which they follow each other; all but the last make up the time to the first token.
STAGES = {
    "processor": "processor",
    "tower": "vision tower and projector",
    "selection": "choosing and removing tokens",
    "prefill": "decoder's prefill",
    "rest": "output head, embeddings, generate()",
    "decode": "a step of decoding",
}
FIRST_TOKEN = tuple(STAGES)[:-1]
