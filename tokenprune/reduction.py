# SPDX-License-Identifier: Apache-2.0
"""`reduce`: prune the features of images with any method that acts before the decoder, without a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.budgets.checks import IMAGE_TARGETS
from tokenprune.errors import BudgetError, OptionError
from tokenprune.methods import DEFAULT_METHOD
from tokenprune.selection.apply import limit_budget, validate_selection
from tokenprune.selection.frames import count_tokens_per_frame
from tokenprune.selection.inputs import ANY_DEPTH, list_inputs
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.observable import Input, Observable
from tokenprune.selection.observable_registry import select_observables
from tokenprune.selection.segments import Patches, Segments
from tokenprune.selection.tensors import TensorSource, build_segments, check_observable
from tokenprune.selection.tokens import VisualTokens
from tokenprune.settings.arguments import read_budgets, read_methods


@dataclass(frozen=True, eq=False)
class ReducedImage:
    """Features of an image after `reduce`. Tensors, or numpy arrays if the features were numpy arrays.

    Attributes:
        features: Features of the kept rows, in order, shape (K, D). Merged if the method merges.
        kept: Index of each row among the rows before, shape (K,), int64, ascending.
        sources: Indices of the rows that each row comes from: its own index, and the rows merged into it.
        count: Number of rows before.
        selection: Selection of the method for this image, with S = 1.
        notes: Notes of the method, such as a fallback.

    Examples:
        >>> image = tokenprune.reduce(torch.eye(4), "pool", keep=2, grid=(2, 2))
        >>> image.kept.tolist(), image.sources
        ([2, 3], ((0, 2), (1, 3)))
    """

    features: Any
    kept: Any
    sources: tuple[tuple[int, ...], ...]
    count: int
    selection: Selection
    notes: list[str]

    def apply(self, rows: Any) -> Any:
        """Reduce other rows of the same image, such as features for deeper layers, shape (N, C), in the same way.

        Examples:
            >>> image = tokenprune.reduce(torch.eye(4), "pool", keep=2, grid=(2, 2))
            >>> image.apply(torch.tensor([[1.0], [3.0], [5.0], [9.0]])).tolist()
            [[3.0], [6.0]]
        """
        merged = self.selection.apply(torch.as_tensor(rows)[None])[0]
        kept = merged.index_select(0, torch.as_tensor(self.kept))
        return kept if isinstance(rows, Tensor) else kept.numpy()

    def to_arrays(self) -> ReducedImage:
        """Return the image with numpy arrays."""
        return dataclasses.replace(self, features=self.features.numpy(), kept=self.kept.numpy())

    def positions(self, grid: Sequence[int] | None = None, start: int = 0) -> Any:
        """Return the original position ids of the kept rows.

        Args:
            grid: None: one position per row. (height, width): row and column. (frames, height, width): the three axes
                of M-RoPE. The token after an image has the position `start + max(grid)` in M-RoPE, and otherwise
                `start + count`.
            start: Position of the first row before the reduction.

        Returns:
            Position ids, shape (K,), or (axes, K) with a grid, int64.

        Raises:
            OptionError: If the grid does not have `count` cells.

        Examples:
            >>> image = tokenprune.reduce(torch.eye(4), "uniform", keep=2, grid=(2, 2))
            >>> image.positions(start=5).tolist(), image.positions((1, 2, 2), start=5).tolist()
            ([7, 8], [[5, 5], [6, 6], [5, 6]])
        """
        if grid is None:
            return self.kept + start
        if len(grid) not in (2, 3) or math.prod(grid) != self.count:
            raise OptionError(f"grid={tuple(grid)} does not have {self.count} cells. Pass (height, width) in tokens.")
        kept = torch.as_tensor(self.kept)
        height, width = grid[-2:]
        axes = [kept // (height * width), kept // width % height, kept % width]
        positions = torch.stack(axes[3 - len(grid) :]) + start
        return positions if isinstance(self.kept, Tensor) else positions.numpy()


def reduce(
    features: Any,
    /,
    method: str | Method | None = None,
    keep: float | int | Budget | None = None,
    *,
    grid: Any = None,
    frames: Any = None,
    question: Any = None,
    tower_attention: Any = None,
    tower_features: Any = None,
    observables: Mapping[str, Any] | None = None,
    seed: int | None = None,
    **options: Any,
) -> Any:
    """Select and merge the features of images as `patch` does, for any engine. No model is involved.

    Runs every method that acts before the decoder (site PRE_LLM). `method_info(name).needs` lists the inputs that a
    method needs. Inputs that it does not read are ignored. For several images, an argument is a list with one entry per
    image, or one value for all images.

    Args:
        features: Projected features of one image, `[N, D]`, or of the images of a prompt in order: a list of `[N, D]`,
            or `[S, N, D]`. Tensors or numpy arrays.
        method: Registered name or configured `Method`. Default: "divprune".
        keep: Share of the rows of each image, rows per image, or a `Budget` of these. See `patch`.
        grid: (height, width) of an image in tokens, or (frames, height, width). None: unknown, as for an image with
            newline tokens.
        frames: Number of frames of a video, or the number of rows in each frame. None: an image.
        question: Embeddings of the text after an image, `[M, D]`.
        tower_attention: Attention to each row in the last block of the vision tower that the model reads, `[N]` or
            `[H, N]`: from the class token, or the mean that a row receives. Or a dict {block: attention}, for methods
            that read other blocks (`Pruner.encoder_layers`).
        tower_features: Output of the vision tower before the projector, `[N, Dv]`.
        observables: Other observables by name, as for `tokenprune.testing.visual_tokens`.
        seed: Seed of methods that draw random numbers. None: their default.
        options: Options of the method.

    Returns:
        A `ReducedImage` for one image, else a list of `ReducedImage`.

    Raises:
        OptionError: If the method needs an input that is missing, or an argument has the wrong shape.
        BudgetError: If `keep` is not a budget of images.
        UnknownMethodError: If no method has this name.

    Examples:
        >>> image = tokenprune.reduce(torch.randn(576, 64), "divprune", keep=0.25)
        >>> image.features.shape, image.kept.shape
        (torch.Size([144, 64]), torch.Size([144]))
        >>> tokenprune.reduce(torch.randn(576, 64), "scope")
        Traceback (most recent call last):
        tokenprune.errors.OptionError: scope needs the attention of the vision tower. Pass tower_attention=...
    """
    images, is_single = _read_features(features)
    (configured,) = read_methods(DEFAULT_METHOD if method is None else method, options, _ARGUMENTS)
    if seed is not None and any(option.name == "seed" for option in dataclasses.fields(configured)):
        configured = dataclasses.replace(configured, seed=seed)  # type: ignore[call-arg]  # only these have a seed
    (budget,) = read_budgets(keep, [configured])
    stage, budget = find_stage(configured, budget)
    inputs = _Inputs(stage, images, is_single)
    inputs.add_layout(grid, frames)
    inputs.add_text(question)
    inputs.add_observables(observables or {}, tower_attention, tower_features)
    tokens, source = inputs.build(resolve_budget(stage, budget, inputs.counts))
    selection, reduced = _select(stage, budget, tokens), []
    for index, image in enumerate(images):
        part = _slice(selection, index, len(image))
        result = ReducedImage(image, part.keep[0].nonzero()[:, 0], _list_sources(part), len(image), part, source.notes)
        result = dataclasses.replace(result, features=result.apply(image))
        reduced.append(result if isinstance(_first(features), Tensor) else result.to_arrays())
    return reduced[0] if is_single else reduced


_ARGUMENTS = ("keep", "grid", "frames", "question", "tower_attention", "tower_features", "observables", "seed")


def _first(features: Any) -> Any:
    return features[0] if isinstance(features, (list, tuple)) else features


def _read_features(features: Any) -> tuple[list[Tensor], bool]:
    """Return the features of each image, and True if there is a single image without a list."""
    is_list = isinstance(features, (list, tuple))
    images = [torch.as_tensor(image) for image in (features if is_list else [features])]
    is_single = not is_list and images[0].ndim == 2
    if not is_list and images[0].ndim == 3:
        images = list(images[0])
    for image in images:
        if image.ndim != 2 or not len(image) or not image.is_floating_point():
            raise OptionError(f"features must be float [N, D] per image, not {image.dtype} {list(image.shape)}.")
    if not images or len({image.shape[1] for image in images}) > 1:
        raise OptionError("features must have at least one image, and the same width D for all images.")
    return images, is_single


def find_stage(method: Method, budget: Budget) -> tuple[Pruner, Budget]:
    """Return the only stage of a method with its budget. Raise OptionError if it also acts elsewhere."""
    name = method.name
    if method.site is not Site.PRE_LLM:
        raise OptionError(
            f"{name} acts {method.site.description} and needs a model. Use tokenprune.patch, or a method that acts "
            'before the language model, such as "divprune".'
        )
    stages = method.stages(budget, ANY_DEPTH)
    if len(stages) > 1:
        options = ", ".join(f"{option}={value!r}" for option, value in method.query_free.items())
        hint = f"pass {options}" if options else 'another method, such as "divprune"'
        raise OptionError(f"{name} also cuts inside the decoder. Use tokenprune.patch, or {hint}.")
    stage, budget = stages[0]
    if not isinstance(stage, Pruner) or stage.site is not Site.PRE_LLM:
        raise OptionError(f"{method!r} acts {stage.site.description} and needs a model. Use tokenprune.patch.")
    if budget.per != "image" or budget.video is not None or budget.target not in IMAGE_TARGETS:
        raise BudgetError(f"{budget} needs a prompt or a decoder. Pass a share or a number of tokens per image.")
    return stage, budget


def resolve_budget(method: Pruner, budget: Budget, counts: list[int]) -> list[int]:
    """Return the number of rows that a method keeps of each image."""
    shape: Any = None  # budgets of images do not read the decoder
    requested = budget.resolve(counts, layer=0, shape=shape, text_tokens=0)
    return [limit_budget(method, count, share) for count, share in zip(counts, requested, strict=True)]


class _Inputs:
    """Inputs of `reduce`, by image and by observable."""

    def __init__(self, method: Pruner, images: list[Tensor], is_single: bool) -> None:
        self.method, self.images, self.is_single = method, images, is_single
        self.counts = [len(image) for image in images]
        self.device = images[0].device
        self.grids: list[tuple[int, int, int] | None] = []
        self.frames: list[list[int] | None] = []
        self.text: dict[str, Tensor] = {}
        self.visual: dict[str, Any] = {"hidden": _pad(images)}

    def _per_image(self, value: Any, ndim: int) -> list[Any]:
        """Return one value per image. An array with more than `ndim` axes has an image axis."""
        if self.is_single:
            return [value]
        if isinstance(value, (list, tuple)):
            if len(value) != len(self.images):
                raise OptionError(f"A list has {len(value)} entries for {len(self.images)} images. Pass one per image.")
            return list(value)
        return list(value) if getattr(value, "ndim", 0) > ndim else [value] * len(self.images)

    def add_layout(self, grid: Any, frames: Any) -> None:
        """Read the grid and the frames of each image."""
        is_shared = isinstance(grid, (list, tuple)) and all(isinstance(size, int) for size in grid)
        grids = [grid] * len(self.images) if is_shared else self._per_image(grid, 1)
        facts = zip(self.counts, grids, self._per_image(frames, 0), strict=True)
        for count, size, video in facts:
            num_frames = len(video) if isinstance(video, (list, tuple)) else video
            if num_frames is None and size is not None and len(size) == 3 and size[0] > 1:
                num_frames = size[0]
            if size is not None:
                size = (num_frames or 1, *size) if len(size) == 2 else tuple(size)
                if math.prod(size) != count:
                    raise OptionError(f"grid={size} does not have {count} cells. Pass the grid in tokens, or None.")
            self.grids.append(size)
            sizes = list(video) if isinstance(video, (list, tuple)) else None
            if num_frames is not None and sizes is None:
                sizes = count_tokens_per_frame(count, num_frames)
            if num_frames is not None and (not sizes or sum(sizes) > count):
                raise OptionError(f"frames={video!r} does not fit {count} rows. Pass the number of rows in each frame.")
            self.frames.append(sizes)

    def add_text(self, question: Any) -> None:
        """Read the text after each image, with padding."""
        if question is None:
            return
        texts = [torch.as_tensor(text, device=self.device) for text in self._per_image(question, 2)]
        width = self.images[0].shape[1]
        if any(text.ndim != 2 or text.shape[1] != width for text in texts):
            raise OptionError(f"question must be [M, {width}], the embeddings of text tokens.")
        mask = _pad([torch.ones(len(text), 1, dtype=torch.bool, device=self.device) for text in texts])[..., 0]
        self.text = {"hidden": _pad(texts), "mask": mask}
        self.text["embeddings"] = self.text["hidden"]

    def add_observables(self, observables: Mapping[str, Any], attention: Any, features: Any) -> None:
        """Read the observables of the method.

        Raises:
            OptionError: If the method reads an observable that is missing, or a shape is wrong.
        """
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
            return _pad([torch.as_tensor(rows, device=self.device) for rows in self._per_image(features, 2)])
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
            rows = [torch.as_tensor(row, device=self.device) for row in self._per_image(by_layer[layer], 2)]
            rows = [row[None] if row.ndim == 1 else row for row in rows]
            if [row.shape[-1] for row in rows] != self.counts:
                raise OptionError(f"tower_attention must be [H, N] with N = {self.counts[0]} rows of the image.")
            values[layer] = _pad([row.T for row in rows]).transpose(1, 2)
        return values if observable.by_layer else values[layers[0]]

    def _to_tensor(self, value: Any) -> Any:
        return torch.as_tensor(value, device=self.device) if hasattr(value, "__array__") else value

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


def _pad(rows: list[Tensor]) -> Tensor:
    """Stack tensors of shape (N, C), padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _select(method: Pruner, budget: Budget, tokens: VisualTokens) -> Selection:
    """Return the selection of the method, or all tokens if the budget keeps them."""
    unpruned = Selection(tokens.mask)
    if budget.is_identity() or (tokens.keep == tokens.counts and not method.chooses_count):
        return unpruned
    with torch.no_grad():
        selection = method.select(tokens)
    keep, counts = validate_selection(selection, tokens.segments, method)
    return unpruned if counts == tokens.counts else dataclasses.replace(selection, keep=keep)


def _slice(selection: Selection, index: int, count: int) -> Selection:
    """Return the selection of one image, without padding."""
    parts = (selection.keep, selection.assign, selection.weight)
    return Selection(*(None if part is None else part[index : index + 1, :count] for part in parts))  # type: ignore[arg-type]


def _list_sources(selection: Selection) -> tuple[tuple[int, ...], ...]:
    """Return the rows that each kept row of an image comes from."""
    groups: dict[int, list[int]] = {row: [] for row in selection.keep[0].nonzero()[:, 0].tolist()}
    targets = [*range(selection.keep.shape[1])] if selection.assign is None else selection.assign[0].tolist()
    for row, target in enumerate(targets):
        if target in groups:
            groups[target].append(row)
    return tuple(map(tuple, groups.values()))
