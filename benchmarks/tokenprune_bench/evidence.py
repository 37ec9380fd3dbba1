# SPDX-License-Identifier: Apache-2.0
"""Evidence recall: the share of the image or video regions needed for an answer that is still visible after pruning.

It needs no answer, so it also works for models that cannot answer: kept tokens are compared with the boxes of drawn
questions. A question has one or more looks (`DrawnQuestion.looks`). A look is a set of regions (image or frame, and
box), any of which is enough. A look is still possible if a kept token represents one of its regions: a token inside the
box, or a merged token with at least half of its weight from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenprune.errors import UnsupportedSetupError

if TYPE_CHECKING:
    from tokenprune.statistics import Cut
    from tokenprune_bench.profiling.model import Model
    from tokenprune_demo.drawn_videos import Region

Grid = tuple[int, int]
Left = Any  # sparse matrix of scipy
_CROPPED = 1.02  # larger changes of the aspect ratio are crops or padding


def compute_recall(looks: Sequence[np.ndarray], shares: Left) -> float:
    """Return the share of looks that are still possible.

    Args:
        looks: For each look, the visual tokens in its regions, bool, shape (tokens,).
        shares: Result of `trace_tokens`.
    """
    return float(np.mean([(shares @ look).max(initial=0.0) >= 0.5 - 1e-6 for look in looks]))


def trace_tokens(cuts: Sequence[Cut], positions: Sequence[int], row: int = 0) -> Left:
    """Return the composition of the visual tokens of a row after prefill.

    Args:
        cuts: `Stats.cuts`.
        positions: Ascending positions of the row's visual tokens in the caller's sequence.
        row: Index of the row.

    Returns:
        A sparse matrix (tokens, tokens): entry (i, j) is the share of original token j in token i. Rows of dropped
        tokens are zero.
    """
    from scipy import sparse  # a dependency of tokenprune-bench

    index = {position: index_of_token for index_of_token, position in enumerate(positions)}
    shares = sparse.identity(len(positions), format="csr")
    for cut in cuts:
        if cut.step:
            continue
        if cut.sources is not None:
            shares = _merge(cut, row, index) @ shares
        alive = set(cut.kept[row])
        shares = sparse.diags([float(position in alive) for position in positions]) @ shares
    return shares


def _merge(cut: Cut, row: int, index: dict[int, int]) -> Left:
    """Return the matrix of a merge: each target is a mean of its sources. Rows of other tokens are zero."""
    from scipy import sparse

    targets, origins, shares = [], [], []
    for target, sources in cut.sources[row].items():
        targets += [index[target]] * len(sources)
        origins += [index[source] for source in sources]
        shares += [1 / len(sources)] * len(sources) if cut.weights is None else cut.weights[row][target]
    return sparse.csr_array((shares, (targets, origins)), shape=(len(index), len(index)))


def find_evidence_tokens(
    looks: Sequence[Sequence[Region]], sizes: Sequence[tuple[int, int]], grids: Sequence[Grid], count: int
) -> list[np.ndarray]:
    """Return the visual tokens in the regions of each look, bool, shape (count,).

    A token is inside a box if its centre is. If a box contains no centre, the token nearest to the box's centre counts.

    Args:
        looks: Looks of a question.
        sizes: (width, height) of each image or frame in pixels.
        grids: (height, width) in tokens of each image or frame of the model. A model frame may join several input
            frames; its tokens belong to the boxes of all of them.
        count: Number of visual tokens of the prompt. Tokens after the last grid (newlines) are in no box.
    """
    step = math.ceil(len(sizes) / len(grids))
    starts = np.cumsum([0, *(height * width for height, width in grids)])
    masks = []
    for look in looks:
        mask = np.zeros(count, bool)
        for image, (left, top, right, bottom) in look:
            grid_index = image // step
            (height, width), (across, down) = grids[grid_index], sizes[image]
            rows = _find_covered_cells(top / down * height, bottom / down * height, height)
            columns = _find_covered_cells(left / across * width, right / across * width, width)
            mask[(starts[grid_index] + rows[:, None] * width + columns).ravel()] = True
        masks.append(mask)
    return masks


def _find_covered_cells(begin: float, end: float, count: int) -> np.ndarray:
    """Return the cells in [0, count) with centres between `begin` and `end`, or else the cell of the midpoint."""
    first, last = max(0, math.ceil(begin - 0.5)), min(count, math.floor(end - 0.5) + 1)
    return np.arange(first, last) if first < last else np.array([min(count - 1, int((begin + end) / 2))])


def compute_batch_recalls(
    subject: Model, inputs: dict[str, Any], questions: Sequence[Any], cuts: Sequence[Cut]
) -> list[float | None]:
    """Return the evidence recall of each question of the batch that just ran with recording.

    None for a question without evidence, or if the image regions of the tokens are not known (tiles, crops).

    Args:
        subject: The model.
        inputs: Arguments of the batch.
        questions: Questions with `looks`, and `video` or `images`.
        cuts: Recorded cuts.
    """
    if not any(getattr(question, "looks", ()) for question in questions):
        return [None] * len(questions)
    shown = [question.video if question.is_video else question.images for question in questions]
    try:
        grids = _split_grids(subject, inputs, shown, questions[0].is_video)
    except UnsupportedSetupError:
        return [None] * len(questions)
    visual = sum(mask.int() for mask in subject.adapter.visual_mask(inputs).values()).bool().tolist()
    recalls: list[float | None] = []
    for row, (question, images, mine) in enumerate(zip(questions, shown, grids, strict=True)):
        if not getattr(question, "looks", ()):
            recalls.append(None)
            continue
        positions = [position for position, is_visual in enumerate(visual[row]) if is_visual]
        sizes = [image.size for image in images]
        looks = find_evidence_tokens(question.looks, sizes, mine, len(positions))
        recalls.append(compute_recall(looks, trace_tokens(cuts, positions, row)))
    return recalls


def _split_grids(
    subject: Model, inputs: dict[str, Any], shown: Sequence[Sequence[Any]], video: bool
) -> list[list[Grid]]:
    """Return the grids of each row's images, or of the frames of the video."""
    from tokenprune_bench.show.grids import get_grids

    grids = iter(get_grids(subject, inputs, sum(map(len, shown)), video))
    if video:
        return [list(grids)]
    pixels = inputs.get("pixel_values")
    if pixels is not None and pixels.ndim == 4:
        aspect = pixels.shape[-1] / pixels.shape[-2]
        for image in (image for images in shown for image in images):
            if max(aspect / (image.width / image.height), image.width / image.height / aspect) > _CROPPED:
                raise UnsupportedSetupError(
                    "The processor crops or pads an image, so the regions of its tokens are not known."
                )
    return [[next(grids) for _ in images] for images in shown]


__all__ = ["compute_batch_recalls", "compute_recall", "find_evidence_tokens", "trace_tokens"]
