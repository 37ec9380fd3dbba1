# SPDX-License-Identifier: Apache-2.0
"""Facts about the tokens of a call, read to the host once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tokenprune.kernels.compact import partition
from tokenprune.kernels.transfer import FIFOCache

_PROMPTS = FIFOCache()


@dataclass(frozen=True, eq=False)
class PromptInfo:
    """Tokens of a call of `batch` rows and `length` columns. All tensors are on the host.

    Calls with equal prompts share one instance, so that its properties are computed once.

    Attributes:
        placeholders: Placeholder mask of each modality, shape (batch, length), bool.
        padding: Padding mask, shape (batch, length), bool, or None if the caller passed no mask.
        input_ids: Token ids, shape (batch, length), int64, or None if they are unknown or no part reads them.
        position_ids: Positions that the caller passed, shape (..., batch or 1, length), int64, or None.
        has_sample_numbers: Whether the caller's attention mask has values above 1, which number packed samples.
    """

    placeholders: dict[str, Tensor]
    padding: Tensor | None = None
    input_ids: Tensor | None = None
    position_ids: Tensor | None = None
    has_sample_numbers: bool = False

    @staticmethod
    def from_arguments(
        arguments: dict[str, Any],
        placeholders: dict[str, Tensor],
        with_ids: bool,
        get_padding: Callable[[int], Tensor | None],
    ) -> PromptInfo:
        """Read a prompt to the host in a single transfer.

        This is the only wait for the device, unless a cut reads counts from it.

        Args:
            arguments: Arguments of the base model's forward.
            placeholders: Placeholder mask of each modality, on any device.
            with_ids: Whether to read the token ids.
            get_padding: Returns the padding mask for a length if the attention mask is not 2-dimensional.
        """
        first = next(iter(placeholders.values()))
        positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
        if positions is not None and positions.is_floating_point():
            positions = None  # fractional positions of one family: concatenation would make all values floats
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            padding = get_padding(first.shape[1])
            mask = None if padding is None else ~padding
        elif mask.is_floating_point():
            mask = mask.ceil().long()
        ids = arguments.get("input_ids") if with_ids else None
        optional = {"mask": mask, "ids": ids, "positions": positions}
        tensors = {
            name: value.to(first.device) for name, value in (placeholders | optional).items() if value is not None
        }
        # Masks become integers if one of the tensors holds integers.
        flat = torch.cat([value.flatten() for value in tensors.values()]).cpu()
        shapes = {name: value.shape for name, value in tensors.items()}
        key = (flat.dtype, flat.numpy().tobytes(), *shapes.items())
        return _PROMPTS.get(key, lambda: _split(flat, shapes, list(placeholders)))

    @cached_property
    def placeholders_per_row(self) -> dict[str, list[int]]:
        """Number of placeholders in each row, by modality."""
        return {modality: mask.sum(1).tolist() for modality, mask in self.placeholders.items()}

    @cached_property
    def is_visual(self) -> Tensor:
        """Placeholder mask of all modalities, shape (batch, length), bool."""
        return torch.stack(list(self.placeholders.values())).any(0)

    @cached_property
    def is_real(self) -> Tensor:
        """False at padding, shape (batch, length), bool."""
        return torch.ones_like(self.is_visual) if self.padding is None else ~self.padding

    @cached_property
    def padding_to_drop(self) -> Tensor | None:
        """Padding that the first cut drops, shape (batch, length), bool, or None without padding.

        Masked visual tokens are not included, because budgets count them.
        """
        padding = ~self.is_real & ~self.is_visual
        return padding if bool(padding.any()) else None

    @cached_property
    def no_padding_after_cut(self) -> bool:
        """True if no padding remains after a cut: the caller masks no visual token."""
        return bool((self.is_real | ~self.is_visual).all())

    @cached_property
    def tokens_per_row(self) -> list[int]:
        """Number of tokens in each row, without `padding_to_drop`."""
        return (self.is_real | self.is_visual).sum(1).tolist()

    @cached_property
    def text_after_image(self) -> tuple[Tensor, Tensor]:
        """Indices of the text after the first placeholder of each row, shape (batch, tokens), int64, and their mask.

        The number of tokens is that of the longest row, including padding (at least 1).
        """
        after = (self.is_visual.cumsum(1) > 0) & ~self.is_visual
        text = after & self.is_real
        order = partition(text)[:, : max(1, int(after.sum(1).max()))]
        return order, text.gather(1, order)

    @cached_property
    def last_index(self) -> list[int]:
        """Index of the last token of each row that is not padding."""
        return (self.is_real * torch.arange(1, self.is_real.shape[1] + 1, device="cpu")).argmax(1).tolist()

    @cached_property
    def visual_ends(self) -> list[tuple[int, int]]:
        """(row, index) of the last token of each row that ends with a visual token."""
        return [(row, index) for row, index in enumerate(self.last_index) if self.is_visual[row, index]]


def _split(flat: Tensor, shapes: dict[str, torch.Size], modalities: list[str]) -> PromptInfo:
    """Split the concatenated values of a prompt into tensors with `shapes`."""
    # A copy, because the tensors outlive the staging buffer.
    parts = flat.clone().split([shape.numel() for shape in shapes.values()])
    values = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    placeholders, padding, has_sample_numbers = {name: values[name].bool() for name in modalities}, None, False
    if (mask := values.get("mask")) is not None:
        length = next(iter(placeholders.values())).shape[1]
        padding, has_sample_numbers = mask[:, -length:] == 0, bool((mask > 1).any())
    return PromptInfo(placeholders, padding, values.get("ids"), values.get("positions"), has_sample_numbers)
