# SPDX-License-Identifier: Apache-2.0
"""Find rows that hold several samples, as training without padding lays them: a cut would take them for one sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Arguments that say where samples begin, or which sample each token is of.
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
# A text axis before the three or more of M-RoPE makes so many: transformers reads borders off that axis.
_WITH_TEXT = 4


def restarts(positions: Tensor, real: Tensor | None = None) -> bool:
    """Return whether positions begin anew inside a row: all axes fall between two places where they rise.

    positions: long `[..., B or 1, L]`. real: bool `[B, L]`, False at padding, which may have any position; None: none
    is known. Padding of one position at an end of a row is none of these, nor are positions that leap or stand still.
    """
    step = positions.reshape(-1, *positions.shape[-2:]).diff(dim=-1)
    falls, rises = (step < 0).all(0), (step > 0).any(0)
    if real is not None:
        inside = real[:, 1:] & real[:, :-1]
        falls, rises = falls & inside, rises & inside
    risen = rises.cumsum(-1)
    return bool((falls & (risen > 0) & (risen < risen[:, -1:])).any())


def borders(arguments: Mapping[str, Any], numbered: bool, positions: Tensor | None, mrope: bool) -> str | None:
    """Return which arguments of a model's forward say that a row holds several samples, in words; None if none does.

    numbered: whether the mask numbers tokens above 1. positions: on the host. mrope: whether the model counts positions
    on several axes, and reads borders off a further one alone.
    """
    if given := [name for name in _BORDERS if arguments.get(name) is not None]:
        return " and ".join(given)
    if numbered:
        return "attention_mask with numbers above 1"
    mask = arguments.get("attention_mask")
    if positions is None or (isinstance(mask, Tensor) and mask.ndim == 2) or not restarts(positions):
        return None
    if mask is not None:
        return "position_ids that begin anew inside a row, beside an attention_mask of pairs"
    with_text = positions.ndim == 3 and len(positions) >= _WITH_TEXT
    return None if mrope and not with_text else "position_ids that begin anew inside a row"


def unread(arguments: Mapping[str, Any], padding: Tensor | None, positions: Tensor | None) -> str | None:
    """Return why positions that begin anew tell no borders in a call without `borders`, in words; None where they do
    not begin anew. padding: bool `[B, L]`, on the host, as `positions`."""
    if positions is None or not restarts(positions, None if padding is None else ~padding):
        return None
    if arguments.get("attention_mask") is not None:
        return "an attention mask of tokens tells no borders"
    return "this model reads borders off a text axis in front of the three alone"
