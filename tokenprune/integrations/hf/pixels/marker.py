# SPDX-License-Identifier: Apache-2.0
"""The attribute that marks the class of a patched processor or image processor. A processor has at most one patch."""

from __future__ import annotations

from typing import Any

from tokenprune.errors import AlreadyPatchedError
from tokenprune.models.processor_settings import get_image_processor

MARK = "_tokenprune_patch"


def find_patch(processor: Any) -> Any:
    """Return the patch of a processor or of its image processor, or None."""
    return getattr(type(get_image_processor(processor)), MARK, None) or getattr(type(processor), MARK, None)


def refuse_second_patch(processor: Any) -> None:
    """Raise AlreadyPatchedError if the processor is patched."""
    if present := find_patch(processor):
        raise AlreadyPatchedError(
            f"The processor is already patched with {present.describe()}. Call tokenprune.unpatch or "
            "tokenprune.unpatch_processor first, or use a separate processor for each model."
        )
