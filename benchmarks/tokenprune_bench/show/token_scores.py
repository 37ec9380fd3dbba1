# SPDX-License-Identifier: Apache-2.0
"""Scores of the visual tokens of one prompt, for methods that rank tokens."""

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

# By method: scores of the first selection, shape (segments, tokens), and the mask of tokens.
Recorded = dict[str, tuple[Tensor, Tensor]]


@contextmanager
def record_scores(model: Any) -> Iterator[Recorded]:
    """Record the scores of the methods that a model is patched with."""
    recorded: Recorded = {}
    methods = get_attachment(model).methods
    pruners = [method for method in methods if isinstance(method, Pruner)]
    for method in pruners:
        object.__setattr__(method, "score", _record(method, recorded))  # on this instance, which is a frozen dataclass
    try:
        yield recorded
    finally:
        for method in pruners:
            object.__delattr__(method, "score")


def _record(method: Pruner, recorded: Recorded) -> Callable[[Any], Tensor]:
    original = method.score

    def score(tokens: Any) -> Tensor:
        scores = original(tokens)
        recorded.setdefault(method.name, (scores.detach().float().cpu(), tokens.mask.cpu()))
        return scores

    return score


def align_scores(subject: Model, inputs: dict[str, Any], stats: Stats, recorded: Recorded) -> np.ndarray | None:
    """Return the score of each visual token of the last method with scores.

    Returns:
        Float array with NaN for tokens that earlier cuts dropped. None if no method ranks tokens, or if scores and
        tokens do not match.
    """
    (mask,) = (mask for mask in subject.adapter.visual_mask(inputs).values() if mask.any())
    positions = mask[0].nonzero().flatten().tolist()
    scores, alive = None, positions
    for cut in stats.cuts:
        if cut.method in recorded:
            score, mask = recorded[cut.method]
            values = score[mask].numpy()
            if len(values) == len(alive):
                scores = np.full(len(positions), np.nan)
                scores[np.isin(positions, alive)] = values
        kept = set(cut.kept[0])
        alive = [position for position in alive if position in kept]
    return scores


__all__ = ["align_scores", "record_scores"]
