# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tokenprune.kernels.host_random import uniform
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Site
from tokenprune.selection.tokens import VisualTokens


@register("random", site=Site.PRE_LLM, paper="none (baseline)")
@dataclass(frozen=True)
class Random(Pruner):
    """Keep random visual tokens: the baseline that every method must beat.

    The draw depends on the seed, the number of tokens and the index of the image in its prompt. Results are therefore
    equal in a batch and for a single row, and repeat in a second run.

    Args:
        seed: Seed of the draw.

    Examples:
        >>> model = tokenprune.patch(model, Random(seed=1), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    never_nan: ClassVar[bool] = True

    seed: int = 0

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        scores = torch.zeros(tokens.mask.shape, dtype=torch.float32, device="cpu")
        for segment, count in enumerate(tokens.counts):
            scores[segment, :count] = uniform(count, generator=tokens.generator(segment, self.seed))
        return to_device(scores, tokens.mask.device)
