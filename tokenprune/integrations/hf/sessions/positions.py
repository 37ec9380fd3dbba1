# SPDX-License-Identifier: Apache-2.0
"""Positions of the tokens of a block, as the model's family counts them, moved to where the stream stands."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.families import Adapter
from tokenprune.selection.frames import count_tokens_per_frame

_TYPES = {"image": 1, "video": 2}


def axes(adapter: Adapter) -> int:
    """Return on how many axes the decoder counts positions: 3 with M-RoPE, else 1."""
    return 3 if hasattr(adapter.base, "get_rope_index") else 1


def text_positions(adapter: Adapter, start: int, count: int, device: torch.device) -> Tensor:
    """Return positions of text, long `[A, 1, count]`."""
    return torch.arange(start, start + count, device=device).expand(axes(adapter), 1, -1)


def block_positions(adapter: Adapter, ids: Tensor, inputs: Mapping[str, Any], start: int) -> tuple[Tensor, int]:
    """Return positions of a block (long `[A, 1, n]`), and the position of a token of text after it.

    ids: long `[1, n]`. start: position of the block's first token. After a video that is not the greatest position
    plus one, so a token of text is put after the block, and the family's own rule is asked.
    """
    if axes(adapter) == 1 or not any("grid" in name for name in inputs):
        return text_positions(adapter, start, ids.shape[1], ids.device), start + ids.shape[1]
    behind = torch.cat([ids, ids.new_full((1, 1), _text_id(adapter))], 1)
    types = torch.zeros_like(behind, dtype=torch.int)
    for modality, token in adapter.placeholders.items():
        types[behind == token] = _TYPES[modality]
    grids = {name: value for name, value in inputs.items() if "grid" in name}
    found, _ = adapter.base.get_rope_index(behind, mm_token_type_ids=types, **grids)
    found = found + start
    return found[..., :-1], int(found[0, 0, -1])


def _text_id(adapter: Adapter) -> int:
    """Return an id that stands for no image."""
    return next(token for token in range(3) if token not in adapter.placeholders.values())


def frames_and_cells(adapter: Adapter, ids: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return long `[2, n]`: the frame of each token of a block, from 0 on, and its place among the visual tokens of
    that frame, -1 for tokens that wrap it; and how many frames there are.

    ids: long `[1, n]`. A run of placeholders is a frame, or as many as the encoder's arguments tell. Tokens between two
    runs belong half to the frame before, half to the one after.
    """
    row = ids[0].tolist()
    modality_of = {token: modality for modality, token in adapter.placeholders.items()}
    runs = [(modality, [place for place, _ in run]) for modality, run in
            groupby(enumerate(row), lambda one: modality_of.get(one[1])) if modality]  # fmt: skip
    found = torch.full((2, len(row)), -1, device="cpu")
    number, before = 0, 0  # frames so far; the place after the last run
    for modality, places in runs:
        start, end = places[0], places[-1] + 1
        if number:
            middle = before + (start - before + 1) // 2
            found[0, before:middle] = number - 1
            before = middle
        found[0, before:start] = number
        units = _frames_of_each(adapter, modality, inputs)
        alike = [run for run in runs if run[0] == modality]
        which = next(index for index, run in enumerate(alike) if run[1][0] == start)
        frames = units[which] if len(units) == len(alike) else sum(units) if len(alike) == 1 else 1
        behind = adapter.family.after_video if modality == "video" else 0
        for size in count_tokens_per_frame(end - start, frames, behind) or [end - start]:
            found[0, start : start + size], found[1, start : start + size] = number, torch.arange(size, device="cpu")
            number, start = number + 1, start + size
        before = end - behind
    if number:
        found[0, before:] = number - 1
    return found, number


def _frames_of_each(adapter: Adapter, modality: str, inputs: Mapping[str, Any]) -> list[int]:
    """Return how many frames each image or video of a block has in the decoder."""
    if modality == "video":
        return adapter.video_frames({name: value for name, value in inputs.items() if "video" in name}) or []
    of_each = [inputs[name] for name in ("image_sizes", "image_grid_thw", "pixel_values") if name in inputs]
    tiled = adapter.family.square == "tile"  # as many tiles as it likes in one run
    return [1] * len(of_each[0]) if of_each and not tiled else []
