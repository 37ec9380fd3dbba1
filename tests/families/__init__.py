# SPDX-License-Identifier: Apache-2.0
"""A tiny random model for every model type of transformers' image-text-to-text mapping that has visual tokens in a
decoder, some in several variants. See zoo.py for what a `Family` is."""

from __future__ import annotations

import zoo
from families import mrope, ocr, plain, special

FAMILIES: dict[str, zoo.Family] = zoo.FAMILIES | plain.FAMILIES | ocr.FAMILIES | mrope.FAMILIES | special.FAMILIES

# Tiny models that must be refused. Other model types that tokenprune/integrations/hf/families.py refuses are not built:
# the type is reason enough.
REFUSED: dict[str, zoo.Family] = special.REFUSED
