# SPDX-License-Identifier: Apache-2.0
"""`reduce`: prune the features of images with any method that acts before the decoder, without a model."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.budgets.checks import IMAGE_TARGETS
from tokenprune.errors import BudgetError, OptionError
from tokenprune.methods import DEFAULT_METHOD
from tokenprune.selection.apply import limit_budget, validate_selection
from tokenprune.selection.inputs import ANY_DEPTH
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.plain_inputs import PlainInputs, check_finite, read_grid, read_tensor
from tokenprune.selection.tokens import VisualTokens
from tokenprune.settings.arguments import read_budgets, read_methods

_MAX_POSITION = 2**62  # positions are int64


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

        Raises:
            OptionError: If the shape is wrong.

        Examples:
            >>> image = tokenprune.reduce(torch.eye(4), "pool", keep=2, grid=(2, 2))
            >>> image.apply(torch.tensor([[1.0], [3.0], [5.0], [9.0]])).tolist()
            [[3.0], [6.0]]
        """
        values = read_tensor("rows", rows)
        if values.ndim != 2 or len(values) != self.count:
            raise OptionError(f"rows must be [{self.count}, C], all rows of the image, not {list(values.shape)}.")
        merged = self.selection.apply(values[None])[0]
        kept = merged.index_select(0, read_tensor("kept", self.kept))
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
            OptionError: If the grid does not have `count` cells, or `start` is not an int.

        Examples:
            >>> image = tokenprune.reduce(torch.eye(4), "uniform", keep=2, grid=(2, 2))
            >>> image.positions(start=5).tolist(), image.positions((1, 2, 2), start=5).tolist()
            ([7, 8], [[5, 5], [6, 6], [5, 6]])
        """
        first = _read_position(start)
        if grid is None:
            return self.kept + first
        sides = read_grid(grid)
        if math.prod(sides) != self.count:
            raise OptionError(f"grid={sides} does not have {self.count} cells. Pass (height, width) in tokens.")
        kept = read_tensor("kept", self.kept)
        height, width = sides[-2:]
        axes = [kept // (height * width), kept // width % height, kept % width]
        positions = torch.stack(axes[3 - len(sides) :]) + first
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
        OptionError: If the method needs an input that is missing, or an argument has the wrong shape, NaN or
            infinite values.
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
    configured = read_method(method, options, _ARGUMENTS)
    if seed is not None and any(option.name == "seed" for option in dataclasses.fields(configured)):
        configured = dataclasses.replace(configured, seed=seed)  # type: ignore[call-arg]  # only these have a seed
    (budget,) = read_budgets(keep, [configured])
    stage, budget = find_stage(configured, budget)
    inputs = PlainInputs(stage, images, is_single)
    inputs.add_layout(grid, frames)
    inputs.add_text(question)
    inputs.add_observables(observables or {}, tower_attention, tower_features)
    tokens, source = inputs.build(resolve_budget(stage, budget, inputs.counts))
    selection, reduced = _select(stage, budget, tokens), []
    for index, image in enumerate(images):
        part = _slice(selection, index, len(image))
        result = ReducedImage(image, part.keep[0].nonzero()[:, 0], _list_sources(part), len(image), part, source.notes)
        result = dataclasses.replace(result, features=result.apply(image))
        reduced.append(result if isinstance(_get_first(features), Tensor) else result.to_arrays())
    return reduced[0] if is_single else reduced


def _read_position(start: Any) -> int:
    try:
        first = operator.index(start)
    except TypeError:
        first = None
    if first is None or isinstance(start, bool) or abs(first) >= _MAX_POSITION:
        raise OptionError(f"start={start!r} must be an int, the position of the first row.")
    return first


_ARGUMENTS = ("keep", "grid", "frames", "question", "tower_attention", "tower_features", "observables", "seed")


def read_method(method: Any, options: dict[str, Any], arguments: Sequence[str]) -> Method:
    """Return the configured method. Raise OptionError if there are several."""
    methods = read_methods(DEFAULT_METHOD if method is None else method, options, arguments)
    if len(methods) > 1:
        raise OptionError(f"{len(methods)} methods need tokenprune.patch. Pass a single method.")
    return methods[0]


def _get_first(features: Any) -> Any:
    return features[0] if isinstance(features, (list, tuple)) else features


def _read_features(features: Any) -> tuple[list[Tensor], bool]:
    """Return the features of each image, and True if there is a single image without a list."""
    is_list = isinstance(features, (list, tuple))
    images = [read_tensor("features", image) for image in (features if is_list else [features])]
    is_single = not is_list and images[0].ndim == 2
    if not is_list and images[0].ndim == 3:
        images = list(images[0])
    for image in images:
        if image.ndim != 2 or not image.numel() or not image.is_floating_point() or image.layout != torch.strided:
            raise OptionError(f"features must be float [N, D] per image, not {image.dtype} {list(image.shape)}.")
        check_finite("features", image)
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
