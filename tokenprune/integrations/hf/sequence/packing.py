# SPDX-License-Identifier: Apache-2.0
"""Rows that hold several samples, as training without padding lays them: each becomes a row of its own, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.kernels.transfer import to_device

# Arguments that say where samples begin, or which sample each token is of; with these go others, of flash attention.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
_BORDERS = (*_LENGTHS, "seq_idx")
# Without any of these, and out of training, no call is looked at: only there numbers in a mask are read.
BORDER_ARGUMENTS = {*_BORDERS, "position_ids"}
# A row of its own has none of these, no cache, and no tokens of which the head alone would make logits.
_GONE = (*_BORDERS, "max_length_q", "max_length_k", "logits_to_keep", "cache_position")
# A text axis before the three or more of M-RoPE makes so many: transformers reads borders off that axis.
_WITH_TEXT = 4


def has_restart(positions: Tensor, real: Tensor | None = None) -> bool:
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


def find_borders(arguments: Mapping[str, Any], numbered: bool, positions: Tensor | None, mrope: bool) -> str | None:
    """Return which arguments of a model's forward say that a row holds several samples, in words; None if none does.

    numbered: whether the mask numbers tokens above 1. positions: on the host. mrope: whether the model counts positions
    on several axes, and reads borders off a further one alone.
    """
    if given := [name for name in _BORDERS if arguments.get(name) is not None]:
        return " and ".join(given)
    if numbered:
        return "attention_mask with numbers above 1"
    mask = arguments.get("attention_mask")
    if positions is None or (isinstance(mask, Tensor) and mask.ndim == 2) or not has_restart(positions):
        return None
    if mask is not None:
        return "position_ids that begin anew inside a row, beside an attention_mask of pairs"
    with_text = positions.ndim == 3 and len(positions) >= _WITH_TEXT
    return None if mrope and not with_text else "position_ids that begin anew inside a row"


def explain_restart(arguments: Mapping[str, Any], padding: Tensor | None, positions: Tensor | None) -> str | None:
    """Return why positions that begin anew tell no borders in a call without `find_borders`, in words; None where they do
    not begin anew. padding: bool `[B, L]`, on the host, as `positions`."""
    if positions is None or not has_restart(positions, None if padding is None else ~padding):
        return None
    if arguments.get("attention_mask") is not None:
        return "an attention mask of tokens tells no borders"
    return "this model reads borders off a text axis in front of the three alone"


def find_samples(arguments: Mapping[str, Any], shape: tuple[int, int], mrope: bool, training: bool) -> Tensor | None:
    """Return the sample of each token, long `[B, T]` on the host, rising from 0, -1 at padding; None where each row is
    one. Asks the device only where an argument may say so: numbers in a mask are read in training.

    Raises UnsupportedSetupError where two arguments disagree, or one is none of what transformers makes.
    """
    given = {name: one.cpu() for name in _BORDERS if (one := arguments.get(name)) is not None}
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    numbers = None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        positions = None  # which transformers does not look at then
        numbers = mask.cpu() if (training or given) and not mask.is_floating_point() else None
    positions = positions.cpu() if positions is not None and not positions.is_floating_point() else None
    numbered = numbers is not None and bool((numbers > 1).any())
    reason = find_borders(arguments, numbered, positions, mrope)
    if reason is None:
        return None
    begins = torch.zeros(shape, dtype=torch.bool, device="cpu")
    begins[:, 0] = True
    if lengths := [given[name] for name in _LENGTHS if name in given]:
        ends = lengths[0].long()
        rising = bool((ends.diff() >= 0).all()) and (int(ends[0]), int(ends[-1])) == (0, begins.numel())
        if not rising or any(not torch.equal(one, lengths[0]) for one in lengths):
            raise UnsupportedSetupError(
                f"{' and '.join(_LENGTHS)} must be the same, and rise from 0 to the {begins.numel()} tokens of the call"
            )
        begins.view(-1)[ends[ends < begins.numel()]] = True
    elif "seq_idx" in given:
        begins[:, 1:] = given["seq_idx"].diff(dim=-1) != 0
    elif numbers is not None and numbered:
        begins[:, 1:] = numbers.diff(dim=-1) != 0
    if positions is not None and has_restart(positions):
        text = positions[0] if positions.ndim == 3 else positions
        anew = begins.clone()
        anew[:, 1:] = text.expand(shape).diff(dim=-1) != 1  # transformers' own rule
        if given and not torch.equal(anew, begins) and not (mrope and positions.ndim == 2):
            raise UnsupportedSetupError(f"{reason} begin other samples in a row than position_ids do")
        begins = begins if given else anew
    sample = begins.flatten().cumsum(0).view(shape) - 1
    if numbers is not None:
        sample = sample.masked_fill(numbers == 0, -1)
    elif mask is not None:
        _check_pairs(mask, sample)
    return sample


def _check_pairs(mask: Any, sample: Tensor) -> None:
    """Raise UnsupportedSetupError unless a mask of pairs lets each token of a sample see those before it, no more."""
    if isinstance(mask, Tensor) and mask.ndim == 4:
        sees = mask.cpu() if mask.dtype == torch.bool else mask.cpu() == 0
        wanted = (sample[:, :, None] == sample[:, None]).tril()
        if sees.shape[-2:] == wanted.shape[-2:] and bool((sees == wanted[:, None]).all()):
            return
    raise UnsupportedSetupError(
        "attention_mask of pairs is not that of the samples of a row, each token seeing those before it "
        "in its sample: leave the mask out, or pad"
    )


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The samples of a call's rows, each as a row of its own, padded on the left.

    shape: rows and tokens of a row in the call. index: long `[S, L]`, for each sample the number of its tokens among
    the call's, 0 at padding; real: bool `[S, L]`. slots, places: long `[T]`, of each token of a sample where it stands
    in `[S, L]`, and where in the call, both laid end to end.
    """

    shape: tuple[int, int]
    index: Tensor
    real: Tensor
    slots: Tensor
    places: Tensor

    @staticmethod
    def from_samples(sample: Tensor, device: torch.device) -> PackedRows:
        """sample: long `[B, T]` on the host, see `find_samples`."""
        flat = sample.flatten()
        places = (flat >= 0).nonzero()[:, 0]
        counts = flat[places].unique_consecutive(return_counts=True)[1]
        slots = torch.arange(int(counts.max()), device="cpu") - (counts.max() - counts)[:, None]
        real = slots >= 0
        first = counts.cumsum(0) - counts
        index = places[(first[:, None] + slots).clamp(min=0)] * real
        taken = (to_device(one, device) for one in (index, real, real.flatten().nonzero()[:, 0], places))
        return PackedRows((sample.shape[0], sample.shape[1]), *taken)

    def split(self, arguments: Mapping[str, Any], ordinary: int) -> dict[str, Any]:
        """Return the arguments of a forward in which each sample is a row. ordinary: an id of text, for padding."""
        found = {name: value for name, value in arguments.items() if name not in _GONE}
        fill = {"input_ids": ordinary, "labels": -100}
        for name, value in found.items():
            if not isinstance(value, Tensor) or name.startswith(("pixel", "image", "video")):
                continue
            if name == "position_ids":
                whole = value.expand(*value.shape[:-2], *self.shape)
                found[name] = whole.reshape(*value.shape[:-2], -1)[..., self.index]
            elif value.shape[:2] == self.shape:
                taken = value.flatten(0, 1)[self.index]
                gone = ~self.real.view(*self.real.shape, *[1] * (taken.ndim - 2))
                found[name] = taken.masked_fill(gone, fill.get(name, 0))
        return {**found, "attention_mask": self.real.long(), "use_cache": False}

    def join(self, value: Any) -> Any:
        """Return what the forward made of the samples, a tensor or any collection of tensors, in the call's rows."""
        if isinstance(value, Tensor):
            if value.shape[:2] != self.real.shape:
                return value
            flat = value.new_zeros(self.shape[0] * self.shape[1], *value.shape[2:])
            joined = flat.index_copy(0, self.places, value.flatten(0, 1)[self.slots])
            return joined.view(*self.shape, *value.shape[2:])
        if isinstance(value, tuple):
            return tuple(map(self.join, value))
        if isinstance(value, dict):
            for name in list(value):
                value[name] = self.join(value[name])
        return value
