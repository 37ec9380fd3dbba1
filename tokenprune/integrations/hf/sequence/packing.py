# SPDX-License-Identifier: Apache-2.0
"""Packed rows with several samples, as in padding-free training: split them into one row per sample, and join them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.kernels.transfer import to_device

# Arguments that define the borders of samples, or the sample of each token.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
_BORDERS = (*_LENGTHS, "seq_idx")
# A call outside of training is checked for packed rows only if it has one of these arguments.
BORDER_ARGUMENTS = {*_BORDERS, "position_ids"}
# Arguments that are dropped when each sample gets its own row.
_DROPPED = (*_BORDERS, "max_length_q", "max_length_k", "logits_to_keep", "cache_position")
# Number of axes of M-RoPE positions with a text axis, from which transformers reads borders.
_WITH_TEXT = 4


def has_restart(positions: Tensor, is_real: Tensor | None = None) -> bool:
    """Return True if positions restart inside a row: all axes fall between two positions where they rise.

    Constant padding at an end of a row, jumps, and repeated positions are not restarts.

    Args:
        positions: Position ids, shape (..., batch or 1, length), int64.
        is_real: False at padding, whose positions are ignored, shape (batch, length), bool. None if unknown.
    """
    step = positions.reshape(-1, *positions.shape[-2:]).diff(dim=-1)
    falls, rises = (step < 0).all(0), (step > 0).any(0)
    if is_real is not None:
        inside = is_real[:, 1:] & is_real[:, :-1]
        falls, rises = falls & inside, rises & inside
    risen = rises.cumsum(-1)
    return bool((falls & (risen > 0) & (risen < risen[:, -1:])).any())


def find_borders(
    arguments: Mapping[str, Any], has_sample_numbers: bool, positions: Tensor | None, has_mrope: bool
) -> str | None:
    """Describe the arguments of a forward by which a row holds several samples. Return None without such arguments.

    Args:
        arguments: Arguments of the base model's forward.
        has_sample_numbers: Whether the attention mask has values above 1.
        positions: Position ids on the host, or None.
        has_mrope: Whether the model has M-RoPE, and reads borders only from an additional text axis.
    """
    if names := [name for name in _BORDERS if arguments.get(name) is not None]:
        return " and ".join(names)
    if has_sample_numbers:
        return "attention_mask with values above 1"
    mask = arguments.get("attention_mask")
    if positions is None or (isinstance(mask, Tensor) and mask.ndim == 2) or not has_restart(positions):
        return None
    if mask is not None:
        return "position_ids that restart inside a row, with a 4-D attention_mask"
    with_text = positions.ndim == 3 and len(positions) >= _WITH_TEXT
    return None if has_mrope and not with_text else "position_ids that restart inside a row"


def explain_restart(arguments: Mapping[str, Any], padding: Tensor | None, positions: Tensor | None) -> str | None:
    """Describe why position ids that restart define no samples here. Return None if they do not restart.

    Args:
        arguments: Arguments of the base model's forward, without borders (see `find_borders`).
        padding: Padding mask, shape (batch, length), bool, on the host, or None.
        positions: Position ids on the host, or None.
    """
    if positions is None or not has_restart(positions, None if padding is None else ~padding):
        return None
    if arguments.get("attention_mask") is not None:
        return "a 2-D attention mask has no borders"
    return "this model reads borders only from a text axis before the three M-RoPE axes"


def find_samples(
    arguments: Mapping[str, Any], shape: tuple[int, int], has_mrope: bool, training: bool
) -> Tensor | None:
    """Return the index of each token's sample, or None if each row is one sample.

    Reads tensors from the device only if an argument may define samples. Values of a mask are read in training.

    Args:
        arguments: Arguments of the base model's forward.
        shape: Shape of the call, (batch, length).
        has_mrope: See `find_borders`.
        training: Whether the model is in training mode.

    Returns:
        Indices from 0 on, shape (batch, length), int64, on the host, -1 at padding.

    Raises:
        UnsupportedSetupError: If two arguments disagree, or a mask has an unknown form.
    """
    borders = {name: value.cpu() for name in _BORDERS if (value := arguments.get(name)) is not None}
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    numbers = None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        positions = None  # transformers ignores them in this case
        numbers = mask.cpu() if (training or borders) and not mask.is_floating_point() else None
    positions = positions.cpu() if positions is not None and not positions.is_floating_point() else None
    has_sample_numbers = numbers is not None and bool((numbers > 1).any())
    reason = find_borders(arguments, has_sample_numbers, positions, has_mrope)
    if reason is None:
        return None
    begins = torch.zeros(shape, dtype=torch.bool, device="cpu")
    begins[:, 0] = True
    if lengths := [borders[name] for name in _LENGTHS if name in borders]:
        ends = lengths[0].long()
        rising = bool((ends.diff() >= 0).all()) and (int(ends[0]), int(ends[-1])) == (0, begins.numel())
        if not rising or any(not torch.equal(value, lengths[0]) for value in lengths):
            raise UnsupportedSetupError(
                f"{' and '.join(_LENGTHS)} must be equal, and rise from 0 to {begins.numel()}, the number of tokens."
            )
        begins.view(-1)[ends[ends < begins.numel()]] = True
    elif "seq_idx" in borders:
        begins[:, 1:] = borders["seq_idx"].diff(dim=-1) != 0
    elif numbers is not None and has_sample_numbers:
        begins[:, 1:] = numbers.diff(dim=-1) != 0
    if positions is not None and has_restart(positions):
        text = positions[0] if positions.ndim == 3 else positions
        restart = begins.clone()
        restart[:, 1:] = text.expand(shape).diff(dim=-1) != 1  # the rule of transformers
        if borders and not torch.equal(restart, begins) and not (has_mrope and positions.ndim == 2):
            raise UnsupportedSetupError(f"{reason} and position_ids define different samples. Pass only one of them.")
        begins = begins if borders else restart
    sample = begins.flatten().cumsum(0).view(shape) - 1
    if numbers is not None:
        sample = sample.masked_fill(numbers == 0, -1)
    elif mask is not None:
        _check_pair_mask(mask, sample)
    return sample


def _check_pair_mask(mask: Any, sample: Tensor) -> None:
    """Raise UnsupportedSetupError unless a 4-D mask is causal within each sample."""
    if isinstance(mask, Tensor) and mask.ndim == 4:
        sees = mask.cpu() if mask.dtype == torch.bool else mask.cpu() == 0
        expected = (sample[:, :, None] == sample[:, None]).tril()
        if sees.shape[-2:] == expected.shape[-2:] and bool((sees == expected[:, None]).all()):
            return
    raise UnsupportedSetupError(
        "The 4-D attention_mask is not causal within each sample of a row. Leave it out, or give each sample its own "
        "row with padding."
    )


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The samples of a call, each as one row with left padding.

    Attributes:
        shape: Shape of the call, (batch, length).
        index: Flat index of each sample's tokens in the call, shape (samples, width), int64, 0 at padding.
        is_real: False at padding, shape (samples, width), bool.
        slots: Flat index of each token in `index`, int64.
        indices: Flat index of each token in the call, int64.
    """

    shape: tuple[int, int]
    index: Tensor
    is_real: Tensor
    slots: Tensor
    indices: Tensor

    @staticmethod
    def from_samples(sample: Tensor, device: torch.device) -> PackedRows:
        """Build the rows from the result of `find_samples`."""
        flat = sample.flatten()
        indices = (flat >= 0).nonzero()[:, 0]
        counts = flat[indices].unique_consecutive(return_counts=True)[1]
        slots = torch.arange(int(counts.max()), device="cpu") - (counts.max() - counts)[:, None]
        is_real = slots >= 0
        first = counts.cumsum(0) - counts
        index = indices[(first[:, None] + slots).clamp(min=0)] * is_real
        tensors = (to_device(tensor, device) for tensor in (index, is_real, is_real.flatten().nonzero()[:, 0], indices))
        return PackedRows((sample.shape[0], sample.shape[1]), *tensors)

    def split(self, arguments: Mapping[str, Any], text_id: int) -> dict[str, Any]:
        """Return the arguments of a forward with one row per sample. text_id: Token id for padding."""
        split = {name: value for name, value in arguments.items() if name not in _DROPPED}
        fill = {"input_ids": text_id, "labels": -100}
        for name, value in split.items():
            if not isinstance(value, Tensor) or name.startswith(("pixel", "image", "video")):
                continue
            if name == "position_ids":
                expanded = value.expand(*value.shape[:-2], *self.shape)
                split[name] = expanded.reshape(*value.shape[:-2], -1)[..., self.index]
            elif value.shape[:2] == self.shape:
                gathered = value.flatten(0, 1)[self.index]
                padding = ~self.is_real.view(*self.is_real.shape, *[1] * (gathered.ndim - 2))
                split[name] = gathered.masked_fill(padding, fill.get(name, 0))
        return {**split, "attention_mask": self.is_real.long(), "use_cache": False}

    def join(self, value: Any) -> Any:
        """Return the output of the forward, a tensor or a collection of tensors, in the rows of the call."""
        if isinstance(value, Tensor):
            if value.shape[:2] != self.is_real.shape:
                return value
            flat = value.new_zeros(self.shape[0] * self.shape[1], *value.shape[2:])
            joined = flat.index_copy(0, self.indices, value.flatten(0, 1)[self.slots])
            return joined.view(*self.shape, *value.shape[2:])
        if isinstance(value, tuple):
            return tuple(map(self.join, value))
        if isinstance(value, dict):
            for name in list(value):
                value[name] = self.join(value[name])
        return value
