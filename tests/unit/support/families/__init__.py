# SPDX-License-Identifier: Apache-2.0
"""Tiny random models for every model type of transformers' image-text-to-text mapping that has visual tokens in a
decoder, some in several variants. `Family` is defined in zoo.py."""

from __future__ import annotations

import zoo
from families import mrope, ocr, plain, qformer, refused, retrieval, special

FAMILIES: dict[str, zoo.Family] = (
    zoo.FAMILIES | plain.FAMILIES | ocr.FAMILIES | mrope.FAMILIES | special.FAMILIES | qformer.FAMILIES
)

# Model types that must be refused. Tests check the error only.
REFUSED: dict[str, refused.Refused] = refused.REFUSED

# Model types that return vectors instead of logits: see test_retrieval.py.
RETRIEVERS: dict[str, retrieval.Retriever] = retrieval.RETRIEVERS

# Families whose oracle is only_kept.py: some of their layers carry a state.
STATEFUL: set[str] = special.STATEFUL
