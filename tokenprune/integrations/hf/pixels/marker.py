# SPDX-License-Identifier: Apache-2.0
"""The mark that a patched processor carries on its class, or on that of its image processor: one patch at a time."""

from __future__ import annotations

from typing import Any

from tokenprune.errors import AlreadyPatchedError
from tokenprune.models.token_counts import get_image_processor

MARK = "_tokenprune_patch"


def patch_on(processor: Any) -> Any:
    """Return the patch that a processor, or its image processor, carries; None if there is none."""
    return getattr(type(get_image_processor(processor)), MARK, None) or getattr(type(processor), MARK, None)


def refuse_second_patch(processor: Any) -> None:
    """Raise AlreadyPatchedError if the processor carries a patch."""
    if present := patch_on(processor):
        raise AlreadyPatchedError(
            f"the processor is patched already with {present.describe()}: undo that first "
            "(tokenprune.unpatch, tokenprune.unpatch_processor), or use a processor of its own for each model"
        )
