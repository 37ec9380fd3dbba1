# SPDX-License-Identifier: Apache-2.0
"""Evidence recall: how much of what has to be seen to answer a question is left of an image or video.

No answer is needed, and so no model that can give one: what a method keeps is set against the boxes of drawn questions.
A question says what it takes to answer it, look by look (`DrawnQuestion.looks`); a look is a set of places (image or
frame, and box) of which one is enough. It is still possible if a kept token stands for one of these places: a token of
its own, or a merged one at least half of whose weight comes from there.
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
Left = Any  # a sparse matrix of scipy
_CROPPED = 1.02  # an image whose shape differs more from that of what the model gets of it was cropped or padded


def compute_recall(looks: Sequence[np.ndarray], left: Left) -> float:
    """Return the share of looks that are still possible.

    looks: for each, bool `[N]`, which visual tokens lie where it looks. left: as of `outcome`.
    """
    return float(np.mean([(left @ look).max(initial=0.0) >= 0.5 - 1e-6 for look in looks]))


def trace_tokens(cuts: Sequence[Cut], positions: Sequence[int], row: int = 0) -> Left:
    """Return what prefill left of the visual tokens of a row, a sparse matrix `[N, N]`: for each token the share that
    every token had in it, a row of zeros for one that is gone.

    cuts: of `Stats.cuts`. positions: of the row's visual tokens, in the caller's sequence, ascending.
    """
    from scipy import sparse  # of the extra `bench`, which this is a part of

    index = {position: number for number, position in enumerate(positions)}
    left = sparse.identity(len(positions), format="csr")
    for cut in cuts:
        if cut.step:
            continue
        if cut.sources is not None:
            left = _merge(cut, row, index) @ left
        alive = set(cut.kept[row])
        left = sparse.diags([float(position in alive) for position in positions]) @ left
    return left


def _merge(cut: Cut, row: int, index: dict[int, int]) -> Left:
    """Return for each token the targets it is a mean of, as shares; a token that is no target becomes a row of
    zeros."""
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
    """Return for each look bool `[count]`: which visual tokens lie where it looks.

    A token lies in a box if its middle does; of a box in which no middle lies, that is the token nearest to the box's
    own. sizes: (width, height) of each image or frame, in pixels. grids: (height, width) in tokens of each image or
    frame of the model: it may have joined several frames to one, and a token then lies in the boxes of all of them.
    count: visual tokens of the prompt; those after the last grid (a newline) lie nowhere.
    """
    step = math.ceil(len(sizes) / len(grids))
    starts = np.cumsum([0, *(height * width for height, width in grids)])
    found = []
    for look in looks:
        mine = np.zeros(count, bool)
        for image, (left, top, right, bottom) in look:
            number = image // step
            (height, width), (across, down) = grids[number], sizes[image]
            rows = _covered(top / down * height, bottom / down * height, height)
            columns = _covered(left / across * width, right / across * width, width)
            mine[(starts[number] + rows[:, None] * width + columns).ravel()] = True
        found.append(mine)
    return found


def _covered(begin: float, end: float, count: int) -> np.ndarray:
    """Return the cells of 0..count whose middles lie between two places; if there are none, the cell of their own
    middle."""
    first, last = max(0, math.ceil(begin - 0.5)), min(count, math.floor(end - 0.5) + 1)
    return np.arange(first, last) if first < last else np.array([min(count - 1, int((begin + end) / 2))])


def compute_batch_recalls(
    subject: Model, inputs: dict[str, Any], questions: Sequence[Any], cuts: Sequence[Cut]
) -> list[float | None]:
    """Return the evidence recall of each question of the batch that just ran, recorded; None for a question without
    evidence, and where it is not known which token shows what (tiles, crops).

    questions: with `looks`, and `video` or `images`.
    """
    if not any(getattr(question, "looks", ()) for question in questions):
        return [None] * len(questions)
    shown = [question.video if question.is_video else question.images for question in questions]
    try:
        grids = _grids(subject, inputs, shown, questions[0].is_video)
    except UnsupportedSetupError:
        return [None] * len(questions)
    visual = sum(mask.int() for mask in subject.adapter.visual_mask(inputs).values()).bool().tolist()
    made: list[float | None] = []
    for row, (question, images, mine) in enumerate(zip(questions, shown, grids, strict=True)):
        if not getattr(question, "looks", ()):
            made.append(None)
            continue
        positions = [position for position, is_visual in enumerate(visual[row]) if is_visual]
        sizes = [image.size for image in images]
        looks = find_evidence_tokens(question.looks, sizes, mine, len(positions))
        made.append(compute_recall(looks, trace_tokens(cuts, positions, row)))
    return made


def _grids(subject: Model, inputs: dict[str, Any], shown: Sequence[Sequence[Any]], video: bool) -> list[list[Grid]]:
    """Return the grids of each row's images, or of the frames of the one video."""
    from tokenprune_bench.show.grids import grids_of

    grids = iter(grids_of(subject, inputs, sum(map(len, shown)), video))
    if video:
        return [list(grids)]
    pixels = inputs.get("pixel_values")
    if pixels is not None and pixels.ndim == 4:
        made = pixels.shape[-1] / pixels.shape[-2]
        for image in (image for images in shown for image in images):
            if max(made / (image.width / image.height), image.width / image.height / made) > _CROPPED:
                raise UnsupportedSetupError("the processor makes another shape of an image: what it shows is not known")
    return [[next(grids) for _ in images] for images in shown]


__all__ = ["compute_batch_recalls", "compute_recall", "find_evidence_tokens", "trace_tokens"]
