# SPDX-License-Identifier: Apache-2.0
"""Position ids, frames and cells of the tokens of a block."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.families import Adapter
from tokenprune.selection.frames import count_tokens_per_frame

_TYPES = {"image": 1, "video": 2}


def count_axes(adapter: Adapter) -> int:
    """Return the number of position axes of the decoder: 3 with M-RoPE, otherwise 1."""
    return 3 if hasattr(adapter.base, "get_rope_index") else 1


def make_text_positions(adapter: Adapter, start: int, count: int, device: torch.device) -> Tensor:
    """Return position ids of text, shape (axes, 1, count), int64."""
    return torch.arange(start, start + count, device=device).expand(count_axes(adapter), 1, -1)


def make_block_positions(adapter: Adapter, ids: Tensor, inputs: Mapping[str, Any], start: int) -> tuple[Tensor, int]:
    """Return the position ids of a block and the next position.

    Args:
        adapter: Adapter of the model.
        ids: Token ids of the block, shape (1, tokens).
        inputs: Other model inputs of the block.
        start: Position of the first token.

    Returns:
        Position ids, shape (axes, 1, tokens), int64, and the position of a text token after the block.
    """
    if count_axes(adapter) == 1 or not any("grid" in name for name in inputs):
        return make_text_positions(adapter, start, ids.shape[1], ids.device), start + ids.shape[1]
    # The next position after a video is not the largest position plus one. A text token is appended to find it.
    extended = torch.cat([ids, ids.new_full((1, 1), _get_text_id(adapter))], 1)
    types = torch.zeros_like(extended, dtype=torch.int)
    for modality, token in adapter.placeholders.items():
        types[extended == token] = _TYPES[modality]
    grids = {name: value for name, value in inputs.items() if "grid" in name}
    positions, _ = adapter.base.get_rope_index(extended, mm_token_type_ids=types, **grids)
    positions = positions + start
    return positions[..., :-1], int(positions[0, 0, -1])


def _get_text_id(adapter: Adapter) -> int:
    """Return a token id that is not a placeholder."""
    return next(token for token in range(3) if token not in adapter.placeholders.values())


def find_frames_and_cells(adapter: Adapter, ids: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Assign the tokens of a block to frames and cells.

    A run of placeholders is one frame, or several frames if the inputs say so. Tokens between two runs are split: the
    first half belongs to the frame before, the second half to the frame after.

    Args:
        adapter: Adapter of the model.
        ids: Token ids of the block, shape (1, tokens).
        inputs: Other model inputs of the block.

    Returns:
        The frame of each token, from 0, and its index among the visual tokens of the frame (-1 for other tokens), shape
        (2, tokens), int64; and the number of frames.
    """
    row = ids[0].tolist()
    modality_of = {token: modality for modality, token in adapter.placeholders.items()}
    runs = [(modality, [index for index, _ in run]) for modality, run in
            groupby(enumerate(row), lambda item: modality_of.get(item[1])) if modality]  # fmt: skip
    table = torch.full((2, len(row)), -1, device="cpu")
    num_frames, previous_end = 0, 0
    for modality, indices in runs:
        start, end = indices[0], indices[-1] + 1
        if num_frames:
            middle = previous_end + (start - previous_end + 1) // 2
            table[0, previous_end:middle] = num_frames - 1
            previous_end = middle
        table[0, previous_end:start] = num_frames
        frame_counts = _count_frames(adapter, modality, inputs)
        same_modality = [run for run in runs if run[0] == modality]
        run_index = next(index for index, run in enumerate(same_modality) if run[1][0] == start)
        if len(frame_counts) == len(same_modality):
            frames = frame_counts[run_index]
        else:
            frames = sum(frame_counts) if len(same_modality) == 1 else 1
        num_after = adapter.family.after_video if modality == "video" else 0
        for size in count_tokens_per_frame(end - start, frames, num_after) or [end - start]:
            table[0, start : start + size], table[1, start : start + size] = (
                num_frames,
                torch.arange(size, device="cpu"),
            )
            num_frames, start = num_frames + 1, start + size
        previous_end = end - num_after
    if num_frames:
        table[0, previous_end:] = num_frames - 1
    return table, num_frames


def _count_frames(adapter: Adapter, modality: str, inputs: Mapping[str, Any]) -> list[int]:
    """Return the number of frames of each image or video of a block, or an empty list if it is unknown."""
    if modality == "video":
        return adapter.video_frames({name: value for name, value in inputs.items() if "video" in name}) or []
    per_image = [inputs[name] for name in ("image_sizes", "image_grid_thw", "pixel_values") if name in inputs]
    is_tiled = adapter.family.square == "tile"  # one run can have any number of tiles
    return [1] * len(per_image[0]) if per_image and not is_tiled else []
