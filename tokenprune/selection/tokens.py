# SPDX-License-Identifier: Apache-2.0
"""The read-only view of the visual tokens that a method gets; everything costly in it is computed on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tokenprune.errors import TokenPruneError
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.observable import AttentionFromText, Observable
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


class _OfText:
    """Types of observables of text; their values come from `TextTokens.__getattr__`."""

    hidden: Tensor
    normed: Tensor
    keys: Tensor


class _OfVisual:
    """Types of observables of visual tokens; their values come from `VisualTokens.__getattr__`."""

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
class TextTokens(_OfText):
    """The text tokens that follow each segment in its row; M are the most after any.

    mask: bool `[S, M]`; position: long `[S, M]`, in this call's sequence.
    Observables of text are attributes, computed on first use: `hidden` `[S, M, D]`, and `keys` `[S, M, F]` and others
    for a method that needs those of the visual tokens.
    """

    mask: Tensor
    position: Tensor
    segments: Segments
    _source: TokenSource = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        seen = _declared(name, find_text_observable, self._source, "the text after an image")
        value = self._source.read_text(seen, self)
        self.__dict__[name] = value
        return value


@dataclass(frozen=True, eq=False)
class VisualTokens(_OfVisual):
    """Visual tokens at the place where a method acts. S segments (images), N tokens in the longest, D model width.

    mask:     bool `[S, N]`; False marks the padding of short segments: never keep it, never let it influence a score.
    counts:   how many tokens each segment has, S ints.
    budget:   long `[S]`, how many tokens each segment has to keep; `keep` is the same as a list of int.
    segments: the `Segments` (rows, grids, positions, modality).

    Every registered observable that the method declared in its `needs` is an attribute, computed on first use; one that
    is read of a block of the vision tower is called with the block (`tokens.encoder_attention(layer)`). `hidden`,
    `normed`, `frame` and `place` are always there. See `selection.observables`, and docs/extend/add-a-method.md for the
    list.
    """

    segments: Segments
    keep: list[int]
    _source: TokenSource = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        seen = _declared(name, find_observable, self._source, "visual tokens")
        read = partial(self._source.read, seen, self)
        value = _ByLayer(read) if seen.by_layer else read()
        self.__dict__[name] = value
        return value

    @property
    def mask(self) -> Tensor:
        return self.segments.mask

    @property
    def counts(self) -> list[int]:
        return self.segments.counts

    @property
    def grids(self) -> list[tuple[int, int, int] | None]:
        return self.segments.grids

    @cached_property
    def budget(self) -> Tensor:
        make = partial(to_device, self.keep, self.mask.device)
        return self.segments.cache.get(("budget", *self.keep), make)

    @cached_property
    def text(self) -> TextTokens:
        """The text tokens after each segment, later images and padding left out."""
        position, mask = self._source.find_text_after(self.segments)
        return TextTokens(mask, position, self.segments, self._source)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the decoder's final norm to `hidden` `[..., D]`."""
        return self._source.final_norm(hidden)

    def attention_from(self, weights: Tensor, name: str = "text_attention") -> Tensor:
        """Return float32 `[S, H, N]`: attention from the text after each image, the rows of its tokens summed with
        `weights`, `[S, M]` or `[S, H, M]`; memory does not grow with the length of the text. name: "text_attention",
        which the method has to need, or "next_text_attention"."""
        seen = _declared(name, find_observable, self._source, "text")
        if not isinstance(seen, AttentionFromText):
            raise TokenPruneError(f"{name!r} is no attention of the text: use text_attention or next_text_attention")
        return self._source.attention_from(seen, self, weights)

    @property
    def carry(self) -> Mapping[str, Any]:
        """Values that earlier stages of the method remember, by name; to be read only (see `remember`)."""
        return self._source.carry

    def remember(self, name: str, value: Any, per_token: bool | None = None) -> None:
        """Keep `value` for later stages of the method, which find it in `carry`.

        A tensor `[S, N, ...]` follows the visual tokens: later stages find the entries of those that reach them, in
        their order, and 0 at padding. Tensors and lists of S entries lose those of images that are withdrawn. All else
        is kept as it is. per_token: False for a tensor that has S and N for its first two sizes by chance alone.
        """
        self._source.remember(name, value, per_token)

    def note(self, text: str) -> None:
        """Have the statistics of this call say `text`, once: what a user should know of how the method acted."""
        self._source.note(text)

    def generator(self, segment: int, seed: int) -> torch.Generator:
        """Return a CPU generator that depends on `seed` and the segment's index in its row only: a batch equals its
        single rows."""
        return torch.Generator("cpu").manual_seed((seed * 1_000_003 + self.segments.ordinal[segment]) % 2**63)


class _ByLayer(dict[int | float, "Tensor"]):
    """An observable by block of the vision tower; each is computed once."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self._read = read

    def __call__(self, layer: int | float) -> Tensor:
        return self[layer]

    def __missing__(self, layer: int | float) -> Tensor:
        self[layer] = self._read(layer)
        return self[layer]


def _declared(name: str, find: Callable[[str], Observable | None], source: TokenSource, of: str) -> Observable:
    """Return the observable `name`; raise AttributeError if there is none, TokenPruneError if it was not declared."""
    seen = None if name.startswith("_") else find(name)
    if seen is None:
        hint = "" if name.startswith("_") else suggest_names(name)
        raise AttributeError(f"{of}: there is no observable {name!r}{f': {hint}' if hint else ''}".rstrip())
    if not seen.is_declared(source.needs):
        raise TokenPruneError(
            f"{seen.name!r} was read but not declared: add it to the method's needs in @register(...)"
        )
    return seen


def require(value: T | None, what: str) -> T:
    """Return `value`; raise TokenPruneError if it was not observed."""
    if value is None:
        raise TokenPruneError(f"{what!r} was read but not declared: add it to the method's needs in @register(...)")
    return value


RESERVED_NAMES.update(dir(VisualTokens))
