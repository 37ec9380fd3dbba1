# SPDX-License-Identifier: Apache-2.0
"""The scores by which a method ranked the visual tokens of one prompt, for those that rank by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.selection.method import Pruner
from tokenprune.statistics import Stats
from tokenprune_bench.profiling.model import Model

Found = dict[str, tuple[Tensor, Tensor]]  # by method: the scores of its first choice, `[S, N]`, and the mask of tokens


@contextmanager
def watched_scores(model: Any) -> Iterator[Found]:
    """Return a context that gives the scores of the methods that a model is patched with, as they are worked out."""
    found: Found = {}
    methods = get_attachment(model).methods
    watched = [one for one in methods if isinstance(one, Pruner)]
    for method in watched:
        object.__setattr__(method, "score", _watched(method, found))  # of this one instance, which is frozen
    try:
        yield found
    finally:
        for method in watched:
            object.__delattr__(method, "score")


def _watched(method: Pruner, found: Found) -> Callable[[Any], Tensor]:
    original = method.score

    def score(tokens: Any) -> Tensor:
        made = original(tokens)
        found.setdefault(method.name, (made.detach().float().cpu(), tokens.mask.cpu()))
        return made

    return score


def placed_scores(subject: Model, inputs: dict[str, Any], stats: Stats, found: Found) -> np.ndarray | None:
    """Return the scores of the last method that has some, for each visual token of the one prompt, float; NaN for those
    that had left before. None where no method ranks by a score, or where its tokens cannot be placed."""
    (mask,) = (mask for mask in subject.adapter.visual_mask(inputs).values() if mask.any())
    places = mask[0].nonzero().flatten().tolist()
    made, alive = None, places
    for cut in stats.cuts:
        if cut.method in found:
            score, there = found[cut.method]
            values = score[there].numpy()
            if len(values) == len(alive):
                made = np.full(len(places), np.nan)
                made[np.isin(places, alive)] = values
        kept = set(cut.kept[0])
        alive = [place for place in alive if place in kept]
    return made


__all__ = ["placed_scores", "watched_scores"]
