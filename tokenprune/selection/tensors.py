# SPDX-License-Identifier: Apache-2.0
"""Visual tokens from plain tensors, as methods receive them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import find_observable, find_text_observable, suggest_names
from tokenprune.selection.segments import Patches, Segments, TextView, VisualView
from tokenprune.selection.source import Readable, ReadableByRow, TokenSource
from tokenprune.selection.tokens import VisualTokens


def visual_tokens(
    hidden: Tensor,
    counts: Sequence[int] | None = None,
    *,
    keep: float | int | Sequence[int] | Budget = 0.25,
    text: Mapping[str, Tensor] | None = None,
    rows: Sequence[int] | None = None,
    grids: Sequence[tuple[int, int, int] | None] | None = None,
    modality: str | Sequence[str] = "image",
    final_norm: Callable[[Tensor], Tensor] | None = None,
    carry: Mapping[str, Any] | None = None,
    **observables: Any,
) -> VisualTokens:
    """Create the input of a method from plain tensors.

    The method can read only the given observables. Reading another one raises TokenPruneError, as in the engine.

    Args:
        hidden: Visual tokens of S images, `[S, N, D]`, or of one image, `[N, D]`.
        counts: Number of tokens per image; the others are padding. None if all tokens are valid.
        keep: Budget: a share, a number, a `Budget` of these, or one number per image.
        text: Text after each image: `hidden` `[S, M, D]`, observables by their names in `VisualTokens.text`, and
            `mask`, bool `[S, M]`, True by default. `text_hidden=`, `text_keys=` and so on are equivalent.
        rows: Index of the prompt of each image, ascending. None: each image has its own prompt.
        grids: (frames, height, width) of each image, or None if unknown.
        modality: "image" or "video", for all images or one per image.
        final_norm: Final norm of the decoder. None does not normalize.
        carry: Values remembered by earlier stages of the method.
        observables: Observables by name (`selection.available_observables()`), `[S, N, ...]` or as documented.
            Observables of tower blocks are a dict {layer: tensor}, or one tensor for every layer.

    Returns:
        The input of `Method.select`.

    Raises:
        OptionError: If a name is not an observable, or a shape does not fit `hidden`.

    Examples:
        >>> from tokenprune.testing import visual_tokens
        >>> tokens = visual_tokens(torch.randn(2, 16, 8), keep=0.25)
        >>> tokenprune.method("divprune").select(tokens).keep.sum(1).tolist()
        [4, 4]
    """
    hidden = hidden[None] if hidden.ndim == 2 else hidden
    if hidden.ndim != 3:
        raise OptionError(f"hidden must be [S, N, D] or [N, D], not {list(hidden.shape)}")
    counts = [hidden.shape[1]] * len(hidden) if counts is None else list(counts)
    if len(counts) != len(hidden) or not all(1 <= count <= hidden.shape[1] for count in counts):
        raise OptionError(f"counts={counts} do not fit hidden {list(hidden.shape)}. Pass S numbers in [1, N].")
    segments = build_segments(hidden, counts, rows, grids, modality, observables.get("frames"))
    of_text = dict(text or {})
    for name in [name for name in observables if name.startswith("text_") and find_observable(name) is None]:
        of_text[name.removeprefix("text_")] = observables.pop(name)
    for name, value in observables.items():
        check_observable(name, value, hidden)
    source = TensorSource(observables | {"hidden": hidden}, of_text, final_norm)
    source.carry.update(carry or {})
    return VisualTokens(segments, _resolve_keep(keep, counts), source)


def check_observable(name: str, value: Any, hidden: Tensor) -> None:
    """Raise OptionError if `name` is not an observable, or its shape does not fit the tokens."""
    reading = find_observable(name)
    if reading is None:
        raise OptionError(f"unknown observable {name!r}. {suggest_names(name) or 'See available_observables().'}")
    if isinstance(value, Mapping) and not reading.by_layer:
        raise OptionError(f"{name} is not read by layer. Pass a tensor, not a dict.")
    for tensor in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(tensor, Tensor) or not reading.axes:
            continue
        sizes = dict(zip(reading.axes, tensor.shape, strict=False))
        if tensor.ndim != len(reading.axes) or (sizes["S"], sizes.get("N", hidden.shape[1])) != tuple(hidden.shape[:2]):
            expected = f"[{', '.join(reading.axes)}] with S, N = {list(hidden.shape[:2])}"
            raise OptionError(f"{name} must be {expected}, not {list(tensor.shape)}")


def _resolve_keep(keep: Any, counts: list[int]) -> list[int]:
    if isinstance(keep, (list, tuple)):
        fine = len(keep) == len(counts) and all(
            1 <= budget_ <= count for budget_, count in zip(keep, counts, strict=True)
        )
        if not fine:
            raise OptionError(f"keep={list(keep)} does not fit counts={counts}. Pass a number in [1, count] per image.")
        return list(keep)
    budget = Budget.from_keep(keep)
    if budget.keep is None:
        raise OptionError(f"{budget} is a budget of a whole decoder. Pass keep as a number or a list.")
    return [budget.resolve_keep(count) for count in counts]


def build_segments(
    hidden: Tensor,
    counts: list[int],
    rows: Sequence[int] | None,
    grids: Sequence[Any] | None,
    modality: str | Sequence[str],
    frames: Sequence[list[int] | None] | None,
) -> Segments:
    """Return the segments of visual tokens. See `visual_tokens` for the arguments."""
    num_segments, width = hidden.shape[:2]
    rows = list(range(num_segments)) if rows is None else list(rows)
    if len(rows) != num_segments or rows != sorted(rows):
        raise OptionError(f"rows={rows} must be {num_segments} row indices in order")
    ordinals = [token_index for _, group in itertools.groupby(rows) for token_index, _ in enumerate(group)]
    token_index = torch.arange(width, device=hidden.device)
    # Segments of one row are consecutive.
    start = torch.tensor([ordinal * width for ordinal in ordinals], device=hidden.device)[:, None]
    mask = token_index < torch.tensor(counts, device=hidden.device)[:, None]
    grids = list(grids) if grids is not None else [None] * num_segments
    modality = [modality] * num_segments if isinstance(modality, str) else list(modality)
    return Segments(
        row=rows,
        ordinal=ordinals,
        counts=counts,
        position=start + token_index * mask,
        mask=mask,
        grids=grids,
        modality=modality,
        frames=list(frames or [])
        or [_compute_frame_sizes(*facts) for facts in zip(counts, grids, modality, strict=True)],
    )


def _compute_frame_sizes(count: int, grid: tuple[int, int, int] | None, modality: str) -> list[int] | None:
    """Return the number of tokens per frame. An image is one frame, and a video needs a grid."""
    if modality == "image":
        return [count]
    return [grid[1] * grid[2]] * grid[0] if grid is not None and math.prod(grid) == count else None


@dataclass
class TensorSource(TokenSource):
    """Source of `VisualTokens` that reads plain tensors, by name of the observable."""

    visual: dict[str, Any]
    of_text: dict[str, Any]
    norm: Callable[[Tensor], Tensor] | None = None
    needs: frozenset[str] = field(init=False)
    hidden: Tensor = field(init=False)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hidden = self.visual["hidden"]
        text = {reading.name for name in self.of_text if (reading := find_text_observable(name)) is not None}
        self.needs = frozenset(self.visual.keys() | text | {"frames"})  # always known for images

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm is None else self.norm(hidden)

    def read(self, reading: Readable, tokens: VisualView, *layer: int | float) -> Any:
        if reading.name == "normed" and "normed" not in self.visual:
            return self.final_norm(tokens.hidden)
        if reading.where in (ObservedAt.FRAMES, ObservedAt.TOWER) and reading.name not in self.visual:
            return super().read(reading, tokens)
        value = _lookup(self.visual, reading.name, reading.name)
        if isinstance(value, Mapping):
            return _lookup(value, layer[0], f"{reading.name} of block {layer[0]}")
        return value

    def read_tower(self, key: tuple[Any, ...], segments: Segments) -> Tensor:
        value: Tensor = _lookup(self.visual, key[0], key[0])
        return value

    def patches(self, segments: Segments) -> Patches:
        """Return the given patches, or those of images of one tile, if all grids are known."""
        if "patches" in self.visual or any(grid is None for grid in segments.grids):
            return cast(Patches, _lookup(self.visual, "patches", "patches"))
        grids = torch.tensor(segments.grids, device=segments.mask.device)  # [S, 3]
        height, width = (grids[:, axis, None].expand(segments.mask.shape) for axis in (1, 2))
        index = torch.arange(segments.mask.shape[1], device=segments.mask.device).expand_as(height)
        tile = torch.where(segments.mask, index // (height * width), -1)
        row, column = index // width % height, index % width
        return Patches(tile, row, column, height, width, torch.ones_like(tile), tiles=int(grids[:, 0].max()))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def attention_from(self, reading: ReadableByRow, tokens: VisualView, weights: Tensor) -> Tensor:
        rows = self.read(reading, tokens)
        weights = weights if weights.ndim == 3 else weights[:, None]
        return torch.einsum("shm,shmn->shn", weights.float().expand(rows.shape[:3]), rows.float())

    def read_text(self, reading: Readable, text: TextView) -> Any:
        if reading.text_name == "normed" and "normed" not in self.of_text:
            return self.final_norm(text.hidden)
        return _lookup(self.of_text, reading.text_name, f"text.{reading.text_name}")

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        if not self.of_text:
            raise TokenPruneError("The method reads the text after an image. Pass text= to visual_tokens().")
        mask = self.of_text.get("mask")
        if mask is None:
            mask = torch.ones(next(iter(self.of_text.values())).shape[:2], dtype=torch.bool, device=self.hidden.device)
        return torch.arange(mask.shape[1], device=mask.device).expand_as(mask), mask


def _lookup(values: Mapping[Any, Any], key: Any, what: str) -> Any:
    if key not in values:
        raise TokenPruneError(f"The method reads {what}, which was not passed to visual_tokens().")
    return values[key]
