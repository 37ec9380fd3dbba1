# SPDX-License-Identifier: Apache-2.0
"""Budget checks and pixel denormalisation for methods that drop units at the input of a tower block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.units import UnitDropper


def check_drops(method: UnitDropper, budget: Budget, depth: int) -> None:
    """Check the block and the budget of a method that drops units in a tower with `depth` blocks.

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


ColorStatistics = tuple[Tensor, Tensor]  # mean and standard deviation of each channel


def denormalize(pixels: Tensor, statistics: ColorStatistics | None) -> Tensor:
    """Undo the normalisation of `pixels`, shape (patches, channels * pixels), unless `statistics` is None."""
    if statistics is None:
        return pixels
    mean, std = (to_device(values, pixels.device) for values in statistics)
    return torch.addcmul(mean[:, None], pixels.view(len(pixels), len(std), -1), std[:, None]).flatten(1)


def get_color_statistics(processor: Any) -> ColorStatistics | None:
    """Return the mean and standard deviation of a processor's normalisation, or None if it has none."""
    parts = (getattr(processor, name, None) for name in ("image_processor", "video_processor"))
    for part in (processor, *parts):
        mean, std = getattr(part, "image_mean", None), getattr(part, "image_std", None)
        if mean is not None and std is not None:
            statistics = [mean, std] if getattr(part, "do_normalize", True) else [[0.0] * 3, [1.0] * 3]
            return tuple(torch.tensor(statistics, dtype=torch.float32, device="cpu"))
    return None
