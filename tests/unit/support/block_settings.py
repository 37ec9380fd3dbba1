# SPDX-License-Identifier: Apache-2.0
"""Settings and references for attention in blocks of frames."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import tests.unit.engine.test_modes  # noqa: F401  (registers flash_stand_in)
from dense_blocks import dense_mask
from hooks import removed_after
from oracle import seen_before
from tests.unit.kernels.test_block_attention import naive_ids
from tokenprune.integrations.hf import compat
from tokenprune.kernels.block_attention import PADDING, SINK, TAIL
from tokenprune.selection.frames import Visual
from zoo import FAMILIES, VIDEO, Family

VIDEO_FAMILIES = [family for family in FAMILIES.values() if family.video]

SINK_FRAMES, BLOCK_FRAMES = 2, 4

SMALL = dict(sink_frames=SINK_FRAMES, block_frames=BLOCK_FRAMES, min_frames=1)

WAYS = (nullcontext, dense_mask)  # the library's attention and its reference

# The other row lacks a video, or has a video with another number of frames if the family can batch these.
BATCHES: dict[str, dict[str, Any]] = {
    "one row": dict(video=13, images=(0,), rows=1),
    "left": dict(video=(13, 13), images=(0, 0)),
    "right": dict(video=(13, 13), images=(0, 0), padding="right"),
    "mixed": dict(video=13, images=(0, 1)),
    "image after": dict(video=13, images=(1, 0), padding="right"),
    "no padding": dict(video=(13, 13), images=(0, 0), padding=None),
}


def visuals_of(inputs: Any, row: int, frames: int) -> list[Visual]:
    """Return the videos (of `frames` frames) and images of a row, from its input ids."""
    ids, visuals = inputs["input_ids"][row].tolist(), []
    positions = [position for position, token in enumerate(ids) if token in (VIDEO, VIDEO - 1)]
    for count in inputs.counts[row]:
        segment, positions = positions[:count], positions[count:]
        num_frames = frames if ids[segment[0]] == VIDEO else 1
        size = count // num_frames
        ends = [*(segment[(n + 1) * size - 1] + 1 for n in range(num_frames - 1)), segment[-1] + 1]
        visuals.append(Visual("video" if num_frames > 1 else "image", tuple(zip(segment[::size], ends, strict=False))))
    return visuals


def block_ids(inputs: Any, frames: int = 13, sink: int = SINK_FRAMES, block: int = BLOCK_FRAMES) -> Tensor:
    """Return the block id of each token by the rule, shape (batch, length)."""
    rows = []
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        visuals, end = visuals_of(inputs, row, frames), int(mask.nonzero()[-1]) + 1
        blocked = any(visual.modality == "video" for visual in visuals)
        ids = naive_ids(visuals, end, sink, block) if blocked else [SINK] * end
        ids = torch.tensor(ids + [SINK] * (len(mask) - end))
        rows.append(ids.masked_fill(~mask, PADDING))
    return torch.stack(rows)


@contextmanager
def blocked(family: Family, model: Any, ids: Tensor, dense: tuple[int, ...] = ()) -> Iterator[Any]:
    """Within this context, the unpatched model masks tokens outside the block of each query in prefill."""
    query, key = ids[:, :, None], ids[:, None, :]
    allowed = ((key == SINK) | (key == query) | (query == TAIL)) & (key != PADDING)
    allowed = allowed.tril() | torch.eye(ids.shape[1], dtype=torch.bool)
    handles = []
    for index, layer in enumerate(model.get_submodule(family.decoder).layers):

        def enter(module: Any, args: tuple, kwargs: dict, index: int = index) -> tuple:
            if not seen_before(compat.get_cache(kwargs), index):
                kwargs = kwargs | {"attention_mask": allowed[:, None]}
            return args, kwargs

        if index not in dense:
            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
    with removed_after(handles):
        yield model


def real_of(inputs: Any) -> Tensor:
    return inputs["attention_mask"].bool()
