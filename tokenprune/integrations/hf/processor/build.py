# SPDX-License-Identifier: Apache-2.0
"""The part of a patch that acts on a processor, for each kind of method that does."""

from __future__ import annotations

from typing import Any

from tokenprune.budget import Budget
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.processor.image_selection import ViewPatch
from tokenprune.integrations.hf.processor.resizing import PixelPatch
from tokenprune.sites.pixels import ImageChooser, ResizeMethod


def patch_for(
    method: ResizeMethod | ImageChooser, budget: Budget, processor: Any, adapter: Adapter | None = None
) -> PixelPatch | ViewPatch:
    """Return the part of a patch that makes `processor` do what `method` says; raises as `PixelPatch` and `ViewPatch`
    do."""
    if isinstance(method, ImageChooser):
        return ViewPatch(method, budget, processor, adapter)
    return PixelPatch(method, budget, processor, adapter)
