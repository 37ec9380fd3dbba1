# SPDX-License-Identifier: Apache-2.0
"""The source of a view of visual tokens: each engine has its own."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tokenprune.errors import TokenPruneError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenprune.selection.segments import LayerInput, ObservedAttention, Patches, Segments, TextView, VisualView


class Readable(Protocol):
    """An observable as a source reads it (see `tokenprune.selection.observable.Observable`)."""

    name: ClassVar[str]
    text_name: ClassVar[str]
    whole: ClassVar[bool]

    @property
    def where(self) -> str:
        """The place where it is observed."""

    @property
    def backends(self) -> Collection[str]:
        """The back ends that serve it."""

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Any:
        """Return its value for visual tokens."""

    def compute_text(self, source: TokenSource, text: TextView) -> Any:
        """Return its value for the text that follows each segment."""


class ReadableByRow(Readable, Protocol):
    """An observable with a row for each token of the text."""

    def sum_rows(self, source: TokenSource, text: TextView, weights: Tensor) -> Tensor:
        """Return the weighted sum of the rows."""


class TokenSource:
    """Base of what stands behind a `VisualTokens`: all that an engine knows of the tokens at a cut.

    Observables are computed from its members (see `selection.observable`). An engine overrides what it has; what
    it has not is refused here, with TokenPruneError.

    needs: what the method declared. hidden: `[B, W, D]`, what arrives at the cut, B rows of W slots. carry: what
    earlier stages of the method remember (see `VisualTokens.remember`).
    """

    needs: frozenset[str]
    hidden: Tensor

    @cached_property
    def carry(self) -> dict[str, Any]:
        return {}

    def remember(self, name: str, value: Any, per_token: bool | None) -> None:
        """Keep `value` in `carry`; see `VisualTokens.remember`."""
        self.carry[name] = value

    def note(self, text: str) -> None:
        """Say `text` to the user of this call; see `VisualTokens.note`."""
        raise _refused("where to note something")

    def read(self, seen: Readable, tokens: VisualView, *layer: int | float) -> Any:
        """Return the value of an observable for visual tokens."""
        return seen.compute_visual(self, tokens.segments, *layer)

    def read_text(self, seen: Readable, text: TextView) -> Any:
        """Return the value of an observable for the text after an image."""
        return seen.compute_text(self, text)

    def attention_from(self, seen: ReadableByRow, tokens: VisualView, weights: Tensor) -> Tensor:
        """Return the sum of rows of text that `VisualTokens.attention_from` returns. seen: the observable."""
        return seen.sum_rows(self, tokens.text, weights)

    # -- the sequence at the cut

    @property
    def width(self) -> int:
        """W, the number of slots."""
        return self.hidden.shape[1]

    def find_slots(self, position: Tensor, segments: Segments) -> Tensor:
        """Return long `[S, N]`, the slots in which the tokens at `position` are."""
        return position

    def gather(self, values: Tensor, position: Tensor, segments: Segments) -> Tensor:
        """Return `[S, N, ...]`, the values `[B, W, ...]` of the tokens at `position`, long `[S, N]`."""
        width = values.shape[1]
        # A method that reads several observables asks for the same tokens each time.
        known = vars(self).setdefault("_places", [])
        place = next((place for given, of_width, place in known if given is position and of_width == width), None)
        if place is None:
            own = (slots := self.find_slots(position, segments)) is segments.position
            place = segments.flat_indices(width) if own else slots + segments.row_starts(width)
            known.append((position, width, place))
        # Taking whole rows is much faster than indexing with two tensors.
        found: Tensor = values.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, place.shape)
        return found

    def get_last_slot(self) -> Tensor:
        """Return long `[B, 1]`, the slot of each row's last token that is not padding."""
        raise _refused("which token is the prompt's last one")

    @cached_property
    def last_row(self) -> Tensor:
        """float32 `[B, H, K]`, attention of each row's last token that is not padding, in the layer before the cut."""
        return self.attention_before.rows(self.get_last_slot())[:, :, 0]

    @cached_property
    def text_rows(self) -> dict[str, Tensor]:
        """`[S, H, M, W]`, attention of the text after each image, by the name of the observable that made it."""
        return {}

    def get_token_mask(self) -> Tensor:
        """Return bool `[B, W]`, False for slots of padding."""
        raise _refused("which tokens are padding")

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        """Return positions, long `[S, M]`, and mask, bool `[S, M]`, of the text tokens after each segment: the same
        positions for all segments of a row, of which the mask leaves out those before a segment."""
        raise _refused("the text")

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return `hidden` `[..., D]` after the decoder's final norm."""
        raise _refused("the decoder's final norm")

    # -- what was observed

    @property
    def attention_before(self) -> ObservedAttention:
        """Queries and keys of the attention of the layer before the cut."""
        raise _refused("the attention of the language model")

    @property
    def attention_after(self) -> ObservedAttention:
        """Queries and keys that the attention of the layer after the cut would have without the cut."""
        raise _refused("the attention of the layer after the cut")

    @property
    def input_before(self) -> LayerInput:
        """The input of the layer before the cut."""
        raise _refused("what enters the layer before the cut")

    @property
    def unrotated_attention(self) -> ObservedAttention:
        """Queries and keys of the layer before the cut as they are without rotary embedding."""
        raise _refused("queries and keys before rotary embedding")

    def get_recorded(self, name: str) -> list[Any]:
        """Return what the observable `name` recorded at a place of its own, a value of each module that it watches."""
        raise _refused(f"what {name} records")

    @property
    def first_layer(self) -> nn.Module:
        """The decoder's first layer."""
        raise _refused("the decoder's first layer")

    def get_embeddings(self, position: Tensor, segments: Segments) -> Tensor:
        """Return `[S, N, D]`, what entered the decoder of the tokens at `position`, long `[S, N]`."""
        raise _refused("what entered the decoder")

    def read_tower(self, key: tuple[Any, ...], segments: Segments) -> Tensor:
        """Return `[S, N, C]` of what was read in the vision tower, 0 for padding. key: name of the observable, and the
        layer if it is read by layer."""
        raise _refused("the vision tower")

    def patches(self, segments: Segments) -> Patches:
        """Return where in the vision tower the tokens of `segments` come from."""
        raise _refused("the vision tower's patches")


def _refused(what: str) -> TokenPruneError:
    return TokenPruneError(f"it reads {what}, which is not known here")
