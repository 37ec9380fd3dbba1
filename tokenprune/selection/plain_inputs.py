# SPDX-License-Identifier: Apache-2.0
"""Arguments of `tokenprune.reduce` as the input of a method."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenprune.errors import OptionError
from tokenprune.selection.frames import count_tokens_per_frame
from tokenprune.selection.inputs import list_inputs
from tokenprune.selection.method import Pruner
from tokenprune.selection.observable import Input, Observable
from tokenprune.selection.observable_registry import select_observables
from tokenprune.selection.segments import Patches, Segments
from tokenprune.selection.tensors import TensorSource, build_segments, check_observable
from tokenprune.selection.tokens import VisualTokens


class PlainInputs:
    """Arguments of `reduce`, by image and by observable."""

    def __init__(self, method: Pruner, images: list[Tensor], is_single: bool) -> None:
        self.method, self.images, self.is_single = method, images, is_single
        self.counts = [len(image) for image in images]
        self.device = images[0].device
        self.grids: list[tuple[int, int, int] | None] = []
        self.frames: list[list[int] | None] = []
        self.text: dict[str, Tensor] = {}
        self.visual: dict[str, Any] = {"hidden": pad_rows(images)}

    def _list_per_image(self, value: Any, ndim: int) -> list[Any]:
        """Return one value per image. An array with more than `ndim` axes has an image axis."""
        if self.is_single:
            return [value]
        if not isinstance(value, (list, tuple)) and getattr(value, "ndim", 0) <= ndim:
            return [value] * len(self.images)
        if len(value) != len(self.images):
            raise OptionError(f"A list has {len(value)} entries for {len(self.images)} images. Pass one per image.")
        return list(value)

    def add_layout(self, grid: Any, frames: Any) -> None:
        """Read the grid and the frames of each image."""
        is_shared = isinstance(grid, (list, tuple)) and not any(
            size is None or hasattr(size, "__len__") for size in grid
        )
        grids = [grid] * len(self.images) if is_shared else self._list_per_image(grid, 1)
        facts = zip(self.counts, grids, self._list_per_image(frames, 0), strict=True)
        for count, sides, video in facts:
            size = None if sides is None else read_grid(sides)
            sizes = None if video is None else _read_frames(count, video)
            num_frames = None if sizes is None else len(sizes)
            if num_frames is None and size is not None and len(size) == 3 and size[0] > 1:
                num_frames, sizes = size[0], count_tokens_per_frame(count, size[0])
            if size is not None:
                size = (num_frames or 1, *size) if len(size) == 2 else size
                if math.prod(size) != count:
                    raise OptionError(f"grid={size} does not have {count} cells. Pass the grid in tokens, or None.")
            self.grids.append(size)  # type: ignore[arg-type]  # three sides
            self.frames.append(sizes)

    def add_text(self, question: Any) -> None:
        """Read the text after each image, with padding."""
        if question is None:
            return
        texts = [self._read("question", text) for text in self._list_per_image(question, 2)]
        width = self.images[0].shape[1]
        if any(text.ndim != 2 or text.shape[1] != width or not text.is_floating_point() for text in texts):
            raise OptionError(f"question must be float [M, {width}], the embeddings of text tokens.")
        mask = pad_rows([torch.ones(len(text), 1, dtype=torch.bool, device=self.device) for text in texts])[..., 0]
        self.text = {"hidden": pad_rows(texts), "mask": mask}
        self.text["embeddings"] = self.text["hidden"]

    def add_observables(self, observables: Mapping[str, Any], attention: Any, features: Any) -> None:
        """Read the observables of the method.

        Raises:
            OptionError: If the method reads an observable that is missing, or a shape is wrong.
        """
        if not isinstance(observables, Mapping) or not all(isinstance(name, str) for name in observables):
            raise OptionError("observables must be a dict of values by name. See available_observables().")
        for name, value in observables.items():
            value = {key: self._to_tensor(part) for key, part in value.items()} if isinstance(value, Mapping) else (
                self._to_tensor(value)
            )  # fmt: skip
            check_observable(name, value, self.visual["hidden"])
            self.visual[name] = value
        needs = list_inputs(self.method)
        if Input.QUESTION in needs and not self.text:
            raise self._missing("the question", "question=, the embeddings of the text after the image, [M, D]")
        if Input.FRAMES in needs and all(frames is None for frames in self.frames):
            raise self._missing("the frames of a video", "frames=, the number of frames")
        for observable in select_observables(self.method.needs):
            if observable.name not in self.visual and observable.input not in (Input.FEATURES, Input.FRAMES):
                self.visual[observable.name] = self._read_tower(observable, attention, features)

    def _read_tower(self, observable: Observable, attention: Any, features: Any) -> Any:
        if observable.input is Input.TOWER_ATTENTION:
            if attention is None:
                raise self._missing("the attention of the vision tower", "tower_attention=, [heads, N]")
            return self._read_attention(observable, attention)
        if observable.input is Input.TOWER_FEATURES and not observable.by_layer:
            if features is None:
                raise self._missing("the output of the vision tower", "tower_features=, [N, Dv]")
            rows = [self._read("tower_features", rows) for rows in self._list_per_image(features, 2)]
            for image, count in zip(rows, self.counts, strict=True):
                if image.ndim != 2 or len(image) != count:
                    raise OptionError(f"tower_features must be [N, Dv] with N = {count}, not {list(image.shape)}.")
            return pad_rows(rows)
        where = "dict {block: tensor} of the vision tower" if observable.by_layer else "tensor"
        raise self._missing(repr(observable.name), f"observables={{{observable.name!r}: ...}}, a {where}")

    def _read_attention(self, observable: Observable, attention: Any) -> Any:
        layers = self.method.encoder_layers
        by_layer = attention if isinstance(attention, Mapping) else {layers[0]: attention}
        if missing := [layer for layer in layers if layer not in by_layer]:
            raise self._missing(
                f"the attention of tower blocks {', '.join(map(str, layers))}", f"tower_attention={{{missing[0]}: ...}}"
            )
        values = {}
        for layer in layers:
            rows = [self._read("tower_attention", row) for row in self._list_per_image(by_layer[layer], 2)]
            rows = [row[None] if row.ndim == 1 else row for row in rows]
            for row, count in zip(rows, self.counts, strict=True):
                if row.ndim != 2 or row.shape[1] != count or len(row) != len(rows[0]):
                    raise OptionError(
                        f"tower_attention must be [N] or [H, N] with N = {count}, not {list(row.shape)}. All images "
                        "need the same number of heads H."
                    )
            values[layer] = pad_rows([row.T for row in rows]).transpose(1, 2)
        return values if observable.by_layer else values[layers[0]]

    def _to_tensor(self, value: Any) -> Any:
        return torch.as_tensor(value, device=self.device) if hasattr(value, "__array__") else value

    def _read(self, name: str, value: Any) -> Tensor:
        tensor = read_tensor(name, value).to(self.device)
        check_finite(name, tensor)
        return tensor

    def _missing(self, what: str, argument: str) -> OptionError:
        return OptionError(f"{self.method.name} needs {what}. Pass {argument}.")

    def build(self, keep: list[int]) -> tuple[VisualTokens, TensorSource]:
        """Return the input of the method, and its source."""
        modality = ["image" if frames is None else "video" for frames in self.frames]
        frames = [[count] if frames is None else frames for count, frames in zip(self.counts, self.frames, strict=True)]
        hidden = self.visual["hidden"]
        segments = build_segments(hidden, self.counts, [0] * len(self.counts), self.grids, modality, frames)
        source = _FeatureSource(self.visual, self.text, method=self.method)
        return VisualTokens(segments, keep, source), source


@dataclass
class _FeatureSource(TensorSource):
    """Source that names the argument of `reduce` if the method reads the location of tokens without a grid."""

    method: Pruner = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs = self.method.needs

    def patches(self, segments: Segments) -> Patches:
        if any(grid is None for grid in segments.grids) and "patches" not in self.visual:
            raise OptionError(f"{self.method.name} needs the location of each row. Pass grid=, (height, width).")
        return super().patches(segments)


def read_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor, or a CPU tensor of the values of a numpy array, whatever the default device is."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
        # torch needs the native byte order, positive strides and writable memory.
        return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError):
        raise OptionError(f"{name} must be a tensor or a numpy array, not {type(value).__name__}.") from None


def check_finite(name: str, values: Tensor) -> None:
    """Raise OptionError if a row has NaN or infinite values: every method would select the wrong rows."""
    damaged = int((~values.float().isfinite()).any(-1).sum())
    if damaged:
        raise OptionError(f"{damaged} rows of {name} have NaN or infinite values. Check the vision tower's output.")


def read_grid(grid: Any) -> tuple[int, ...]:
    """Return the sides of a grid: (height, width) or (frames, height, width)."""
    try:
        sides = tuple(map(operator.index, grid))
    except TypeError:
        sides = ()
    if len(sides) not in (2, 3) or min(sides) < 1:
        raise OptionError(f"grid={grid!r} is invalid. Pass (height, width) or (frames, height, width) in tokens.")
    return sides


def _read_frames(count: int, frames: Any) -> list[int]:
    """Return the number of rows in each frame of a video with `count` rows."""
    try:
        is_list = isinstance(frames, (list, tuple))
        sizes = [*map(operator.index, frames)] if is_list else count_tokens_per_frame(count, operator.index(frames))
    except TypeError:
        sizes = None
    if not sizes or min(sizes) < 0 or sum(sizes) > count:
        raise OptionError(f"frames={frames!r} does not fit {count} rows. Pass the number of rows in each frame.")
    return sizes


def pad_rows(rows: list[Tensor]) -> Tensor:
    """Stack tensors of shape (N, C), padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
