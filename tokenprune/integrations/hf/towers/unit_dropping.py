# SPDX-License-Identifier: Apache-2.0
"""Checks and pixel values for methods that drop units at the input of a block of a tower."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.units import UnitDropper


def check_drops(method: UnitDropper, budget: Budget, depth: int) -> None:
    """Check a method that drops units, for a tower of `depth` blocks.

    Raises:
        BudgetError: If the budget is not per image.
        OptionError: If the method names a block that does not exist.
    """
    method.checked_block(depth)
    if budget.per != "image" or budget.target == "flops_share":
        raise BudgetError(
            f"{method.name} acts before the prompt is known and does not support {budget}. Use keep, "
            'average_tokens, average_share or kv_share, with per="image".'
        )


Colours = tuple[Tensor, Tensor]  # mean and standard deviation of each channel


def coloured(pixels: Tensor, colours: Colours | None) -> Tensor:
    """Undo the normalisation of `pixels`, `[patches, channels * P]`, if the processor's colours are known."""
    if colours is None:
        return pixels
    mean, std = (to_device(of, pixels.device) for of in colours)
    return torch.addcmul(mean[:, None], pixels.view(len(pixels), len(std), -1), std[:, None]).flatten(1)


def colours_of(processor: Any) -> Colours | None:
    """Return the mean and standard deviation with which a processor normalises each channel, or None if unknown."""
    for one in (processor, *(getattr(processor, name, None) for name in ("image_processor", "video_processor"))):
        mean, std = getattr(one, "image_mean", None), getattr(one, "image_std", None)
        if mean is not None and std is not None:
            colours = [mean, std] if getattr(one, "do_normalize", True) else [[0.0] * 3, [1.0] * 3]
            return tuple(torch.tensor(colours, dtype=torch.float32, device="cpu"))
    return None
