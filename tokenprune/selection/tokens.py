# SPDX-License-Identifier: Apache-2.0
"""`VisualTokens`: the read-only input of a method. Its observables are computed on first access."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tokenprune.errors import TokenPruneError
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.observable import Observable
from tokenprune.selection.observable_bases import AttentionFromText
from tokenprune.selection.observable_registry import (
    RESERVED_NAMES,
    find_observable,
    find_text_observable,
    suggest_names,
)
from tokenprune.selection.segments import Patches, Segments
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class _TextObservables:
    """Types of text observables. `TextTokens.__getattr__` computes their values."""

    hidden: Tensor
    normed: Tensor
    keys: Tensor


class _VisualObservables:
    """Types of visual observables. `VisualTokens.__getattr__` computes their values."""

    hidden: Tensor
    normed: Tensor
    keys: Tensor
    last_row_attention: Tensor
    received_attention: Tensor
    next_row_attention: Tensor
    patches: Patches
    frames: list[list[int]]
    frame: Tensor
    place: Tensor


@dataclass(frozen=True, eq=False)
class TextTokens(_TextObservables):
    """Text tokens after each segment, in the row of the segment.

    Text observables are attributes, computed on first access: `hidden`, shape (S, M, D), is always available. `keys`,
    shape (S, M, F), and others are available if the method declares the visual observable of that name.

    Args:
        mask: Mask of text tokens, shape (S, M), bool. M is the largest number of text tokens after any segment.
        position: Position of each text token in the sequence of this call, shape (S, M), int64.
        segments: Segments that the text follows.

    Examples:
        >>> from tokenprune.testing import visual_tokens
        >>> tokens = visual_tokens(torch.zeros(1, 4, 8), text={"hidden": torch.zeros(1, 3, 8)})
        >>> tokens.text.hidden.shape
        torch.Size([1, 3, 8])
    """

    mask: Tensor
    position: Tensor
    segments: Segments
    _source: TokenSource = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        observable = _find_declared(name, find_text_observable, self._source, "text tokens")
        value = self._source.read_text(observable, self)
        self.__dict__[name] = value
        return value


@dataclass(frozen=True, eq=False)
class VisualTokens(_VisualObservables):
    """Visual tokens at the cut of a method, in S segments (images) of up to N tokens with D features.

    Observables that the method declares in its `needs` are attributes, computed on first access. An observable of the
    vision tower is called with a block: `tokens.encoder_attention(layer)`. `hidden`, `normed`, `frame` and `place` are
    always available. See `tokenprune.selection.observables`, and docs/extend/add-a-method.md for the list.

    Args:
        segments: Rows, positions, grids and modality of the segments.
        keep: Number of tokens to keep per segment, as Python ints.

    Examples:
        >>> from tokenprune.testing import visual_tokens
        >>> tokens = visual_tokens(torch.zeros(2, 4, 8), counts=[4, 3], keep=2)
        >>> tokens.hidden.shape, tokens.counts, tokens.keep
        (torch.Size([2, 4, 8]), [4, 3], [2, 2])
    """

    segments: Segments
    keep: list[int]
    _source: TokenSource = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        observable = _find_declared(name, find_observable, self._source, "visual tokens")
        read = partial(self._source.read, observable, self)
        value = _ValuesByBlock(read) if observable.by_layer else read()
        self.__dict__[name] = value
        return value

    @property
    def mask(self) -> Tensor:
        """Mask of visual tokens, shape (S, N), bool. Padding is False. It must not influence a score."""
        return self.segments.mask

    @property
    def counts(self) -> list[int]:
        """Number of tokens per segment."""
        return self.segments.counts

    @property
    def grids(self) -> list[tuple[int, int, int] | None]:
        """Grid of each segment as (frames, height, width) in tokens. None if it is incomplete or unknown."""
        return self.segments.grids

    @cached_property
    def budget(self) -> Tensor:
        """Number of tokens to keep per segment, shape (S,), int64. The same numbers as `keep`."""
        make = partial(to_device, self.keep, self.mask.device)
        return self.segments.cache.get(("budget", *self.keep), make)

    @cached_property
    def text(self) -> TextTokens:
        """Text tokens after each segment, without later images and padding."""
        position, mask = self._source.find_text_after(self.segments)
        return TextTokens(mask, position, self.segments, self._source)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm of the decoder to `hidden`, shape (..., D)."""
        return self._source.final_norm(hidden)

    def attention_from(self, weights: Tensor, name: str = "text_attention") -> Tensor:
        """Return the weighted sum of the attention from the text after each image.

        The memory does not grow with the length of the text.

        Args:
            weights: Weight of each text token, shape (S, M) or (S, H, M).
            name: "text_attention" or "next_text_attention". The method must declare it in `needs`.

        Returns:
            Attention to each visual token, shape (S, H, N), float32.
        """
        observable = _find_declared(name, find_observable, self._source, "text tokens")
        if not isinstance(observable, AttentionFromText):
            raise TokenPruneError(
                f"{name!r} is not an attention from the text. Use 'text_attention' or 'next_text_attention'."
            )
        return self._source.attention_from(observable, self, weights)

    @property
    def carry(self) -> Mapping[str, Any]:
        """Values that earlier stages of the method stored with `remember`, by name. Read-only."""
        return self._source.carry

    def remember(self, name: str, value: Any, per_token: bool | None = None) -> None:
        """Store a value for later stages of the method, which read it from `carry`.

        A tensor of shape (S, N, ...) is cut together with the visual tokens: later stages receive the entries of the
        kept tokens, and 0 for padding. Tensors and lists with S entries lose the entries of dropped images. Other
        values are stored unchanged.

        Args:
            name: Key in `carry`.
            value: Any value.
            per_token: False if the leading sizes of a tensor equal S and N by coincidence. None: decide by the shape.
        """
        self._source.remember(name, value, per_token)

    def note(self, text: str) -> None:
        """Add `text` to `Stats.notes` of this call, once, such as a fallback that the user should know of."""
        self._source.note(text)

    def generator(self, segment: int, seed: int) -> torch.Generator:
        """Return a CPU generator for a segment, so that a batch gives the same result as its rows one by one.

        The state depends on `seed` and on the index of the segment in its row.
        """
        return torch.Generator("cpu").manual_seed((seed * 1_000_003 + self.segments.ordinal[segment]) % 2**63)


class _ValuesByBlock(dict[int | float, "Tensor"]):
    """Values of an observable by block of the vision tower. Each is computed on first access."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self._read = read

    def __call__(self, layer: int | float) -> Tensor:
        return self[layer]

    def __missing__(self, layer: int | float) -> Tensor:
        self[layer] = self._read(layer)
        return self[layer]


def _find_declared(name: str, find: Callable[[str], Observable | None], source: TokenSource, tokens: str) -> Observable:
    """Return the observable `name`.

    Raises:
        AttributeError: If it does not exist.
        TokenPruneError: If the method does not declare it.
    """
    observable = None if name.startswith("_") else find(name)
    if observable is None:
        hint = "" if name.startswith("_") else suggest_names(name)
        raise AttributeError(f"{tokens} have no observable {name!r}. {hint}".rstrip())
    if not observable.is_declared(source.needs):
        raise TokenPruneError(_UNDECLARED.format(observable.name))
    return observable


_UNDECLARED = "The method reads {!r} without declaring it. Add it to needs=(...) in @register."


def require(value: T | None, name: str) -> T:
    """Return the value of an observable, or raise TokenPruneError if it is None because it was not declared."""
    if value is None:
        raise TokenPruneError(_UNDECLARED.format(name))
    return value


RESERVED_NAMES.update(dir(VisualTokens))
