# SPDX-License-Identifier: Apache-2.0
"""Visual tokens made of plain tensors, as a method sees them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import find_observable, find_text_observable, suggest_names
from tokenprune.selection.segments import Segments, TextView, VisualView
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
    """Return the view that a method gets, made of plain tensors.

    hidden:  `[S, N, D]`, the visual tokens of S images; `[N, D]` is one image.
    counts:  how many of the N tokens each image has; None is all. What stands behind them is padding.
    keep:    what the method has to keep: a share, a number, a `Budget` of these, or a list of a number for each image.
    text:    the text after each image: `hidden` `[S, M, D]` and, if the method reads them, `keys` and others by the
             names that `VisualTokens.text` has; `mask`, bool `[S, M]`, is all True if it is left out. `text_hidden=`,
             `text_keys=` and so on are another way to say it, where no observable has that name.
    rows:    the prompt that each image stands in, in order; None: each in one of its own.
    grids:   (frames, height, width) of each image, None where it is not known.
    modality: "image" or "video", of all or of each.
    final_norm: stands for the decoder's final norm; None leaves hidden states as they are.
    carry:   what earlier stages of the method remember.
    observables: by their names (`selection.available_observables()`), the tensors that the method reads, each
             `[S, N, ...]` or as its documentation says; of one that is read by block of the vision tower a dict
             {layer: tensor}, or a tensor for every layer.

    The method may read what was given: anything else raises TokenPruneError as in the engine. Raises OptionError for a
    name that is no observable, and for shapes that do not fit `hidden`.
    """
    hidden = hidden[None] if hidden.ndim == 2 else hidden
    if hidden.ndim != 3:
        raise OptionError(f"hidden must be [S, N, D] or [N, D], not {list(hidden.shape)}")
    counts = [hidden.shape[1]] * len(hidden) if counts is None else list(counts)
    if len(counts) != len(hidden) or not all(1 <= count <= hidden.shape[1] for count in counts):
        raise OptionError(f"counts={counts} do not fit hidden {list(hidden.shape)}: give 1 .. N for each of the S")
    segments = _segments(hidden, counts, rows, grids, modality, observables.get("frames"))
    of_text = dict(text or {})
    for name in [name for name in observables if name.startswith("text_") and find_observable(name) is None]:
        of_text[name.removeprefix("text_")] = observables.pop(name)
    for name, value in observables.items():
        _check(name, value, hidden)
    source = _TensorSource(observables | {"hidden": hidden}, of_text, final_norm)
    source.carry.update(carry or {})
    return VisualTokens(segments, _kept(keep, counts), source)


def _check(name: str, value: Any, hidden: Tensor) -> None:
    seen = find_observable(name)
    if seen is None:
        raise OptionError(f"there is no observable {name!r}: {suggest_names(name)}see available_observables()")
    if isinstance(value, Mapping) and not seen.by_layer:
        raise OptionError(f"{name} is not read by layer: give a tensor, not a dict")
    for one in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(one, Tensor) or not seen.axes:
            continue
        sizes = dict(zip(seen.axes, one.shape, strict=False))
        if one.ndim != len(seen.axes) or (sizes["S"], sizes.get("N", hidden.shape[1])) != tuple(hidden.shape[:2]):
            wanted = f"[{', '.join(seen.axes)}] with S, N = {list(hidden.shape[:2])}"
            raise OptionError(f"{name} must be {wanted}, not {list(one.shape)}")


def _kept(keep: Any, counts: list[int]) -> list[int]:
    if isinstance(keep, (list, tuple)):
        fine = len(keep) == len(counts) and all(1 <= one <= count for one, count in zip(keep, counts, strict=True))
        if not fine:
            raise OptionError(f"keep={list(keep)} does not fit counts={counts}: give 1 .. count for each segment")
        return list(keep)
    budget = Budget.from_keep(keep)
    if budget.keep is None:
        raise OptionError(f"{budget} is of a whole decoder, and there is none here: give keep as a number or a list")
    return [budget.resolve_keep(count) for count in counts]


def _segments(
    hidden: Tensor,
    counts: list[int],
    rows: Sequence[int] | None,
    grids: Sequence[Any] | None,
    modality: str | Sequence[str],
    frames: Sequence[list[int] | None] | None,
) -> Segments:
    number, width = hidden.shape[:2]
    rows = list(range(number)) if rows is None else list(rows)
    if len(rows) != number or rows != sorted(rows):
        raise OptionError(f"rows={rows} must name the row of each of the {number} segments, in order")
    ordinals = [place for _, group in itertools.groupby(rows) for place, _ in enumerate(group)]
    place = torch.arange(width, device=hidden.device)
    # Segments of one row stand behind each other.
    start = torch.tensor([ordinal * width for ordinal in ordinals], device=hidden.device)[:, None]
    mask = place < torch.tensor(counts, device=hidden.device)[:, None]
    grids = list(grids) if grids is not None else [None] * number
    modality = [modality] * number if isinstance(modality, str) else list(modality)
    return Segments(
        row=rows,
        ordinal=ordinals,
        counts=counts,
        position=start + place * mask,
        mask=mask,
        grids=grids,
        modality=modality,
        frames=list(frames or []) or [_frames(*one) for one in zip(counts, grids, modality, strict=True)],
    )


def _frames(count: int, grid: tuple[int, int, int] | None, modality: str) -> list[int] | None:
    """Return how many tokens each frame has: an image is one frame, and the grid of a video tells of its frames."""
    if modality == "image":
        return [count]
    return [grid[1] * grid[2]] * grid[0] if grid is not None and math.prod(grid) == count else None


@dataclass
class _TensorSource(TokenSource):
    """Backs a `VisualTokens` with tensors that somebody gave, by name of the observable, and those of the text."""

    visual: dict[str, Any]
    of_text: dict[str, Any]
    norm: Callable[[Tensor], Tensor] | None = None
    needs: frozenset[str] = field(init=False)
    hidden: Tensor = field(init=False)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hidden = self.visual["hidden"]
        text = {seen.name for name in self.of_text if (seen := find_text_observable(name)) is not None}
        self.needs = frozenset(self.visual.keys() | text | {"frames"})  # which are known of images at least

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm is None else self.norm(hidden)

    def read(self, seen: Readable, tokens: VisualView, *layer: int | float) -> Any:
        if seen.name == "normed" and "normed" not in self.visual:
            return self.final_norm(tokens.hidden)
        if seen.where is ObservedAt.FRAMES and seen.name not in self.visual:
            return super().read(seen, tokens)
        value = _given(self.visual, seen.name, seen.name)
        if isinstance(value, Mapping):
            return _given(value, layer[0], f"{seen.name} of block {layer[0]}")
        return value

    def note(self, text: str) -> None:
        self.notes.append(text)

    def attention_from(self, seen: ReadableByRow, tokens: VisualView, weights: Tensor) -> Tensor:
        rows = self.read(seen, tokens)
        weights = weights if weights.ndim == 3 else weights[:, None]
        return torch.einsum("shm,shmn->shn", weights.float().expand(rows.shape[:3]), rows.float())

    def read_text(self, seen: Readable, text: TextView) -> Any:
        if seen.text_name == "normed" and "normed" not in self.of_text:
            return self.final_norm(text.hidden)
        return _given(self.of_text, seen.text_name, f"text.{seen.text_name}")

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        if not self.of_text:
            raise TokenPruneError("it reads the text after an image, and none was given: pass text=")
        mask = self.of_text.get("mask")
        if mask is None:
            mask = torch.ones(next(iter(self.of_text.values())).shape[:2], dtype=torch.bool, device=self.hidden.device)
        return torch.arange(mask.shape[1], device=mask.device).expand_as(mask), mask


def _given(values: Mapping[Any, Any], key: Any, what: str) -> Any:
    if key not in values:
        raise TokenPruneError(f"it reads {what}, which visual_tokens() was not given")
    return values[key]
