# SPDX-License-Identifier: Apache-2.0
"""`TokenSource`: interface through which `VisualTokens` reads the engine. Each engine has its own subclass."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tokenprune.errors import TokenPruneError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenprune.selection.segments import LayerInput, ObservedAttention, Patches, Segments, TextView, VisualView


class Readable(Protocol):
    """Part of an observable that a source reads. See `tokenprune.selection.observable.Observable`."""

    name: ClassVar[str]
    text_name: ClassVar[str]
    needs_full_prompt: ClassVar[bool]

    @property
    def where(self) -> str: ...

    @property
    def backends(self) -> Collection[str]: ...

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Any: ...

    def compute_text(self, source: TokenSource, text: TextView) -> Any: ...


class ReadableByRow(Readable, Protocol):
    """Observable with one row per text token. See `tokenprune.selection.observable.AttentionFromText`."""

    def sum_rows(self, source: TokenSource, text: TextView, weights: Tensor) -> Tensor: ...


class TokenSource:
    """Base class of the sources of `VisualTokens`: everything that an engine knows about the tokens at a cut.

    Observables are computed from these members. An engine overrides the members that it supports. The others raise
    TokenPruneError. Shapes use B rows of W slots, S segments of up to N visual tokens, and M text tokens.

    Attributes:
        needs: Names of the observables that the method declares.
        hidden: Hidden states at the cut, shape (B, W, D).
        carry: Values that earlier stages of the method stored. See `VisualTokens.remember`.

    Examples:
        >>> TokenSource().get_token_mask()
        Traceback (most recent call last):
        tokenprune.errors.TokenPruneError: it reads the padding mask, which this engine does not provide
    """

    needs: frozenset[str]
    hidden: Tensor

    @cached_property
    def carry(self) -> dict[str, Any]:
        return {}

    def remember(self, name: str, value: Any, per_token: bool | None) -> None:
        """Store `value` in `carry`. See `VisualTokens.remember`."""
        self.carry[name] = value

    def note(self, text: str) -> None:
        """Add a note to the statistics. See `VisualTokens.note`."""
        raise _build_unsupported_error("notes")

    def read(self, observable: Readable, tokens: VisualView, *layer: int | float) -> Any:
        """Return the value of an observable for the visual tokens."""
        return observable.compute_visual(self, tokens.segments, *layer)

    def read_text(self, observable: Readable, text: TextView) -> Any:
        """Return the value of an observable for the text after each segment."""
        return observable.compute_text(self, text)

    def attention_from(self, observable: ReadableByRow, tokens: VisualView, weights: Tensor) -> Tensor:
        """Return the weighted sum of the rows of `observable`. See `VisualTokens.attention_from`."""
        return observable.sum_rows(self, tokens.text, weights)

    # -- the sequence at the cut

    @property
    def width(self) -> int:
        """Number of slots per row (W)."""
        return self.hidden.shape[1]

    def find_slots(self, position: Tensor, segments: Segments) -> Tensor:
        """Return the slots of the tokens at `position`, shape (S, N), int64."""
        return position

    def gather(self, values: Tensor, position: Tensor, segments: Segments) -> Tensor:
        """Gather values of the tokens at `position`.

        Args:
            values: One value per slot, shape (B, W, ...).
            position: Positions in the sequence of this call, shape (S, N), int64.
            segments: Segments of the positions.

        Returns:
            Tensor of shape (S, N, ...).
        """
        width = values.shape[1]
        # A method that reads several observables passes the same positions each time.
        cache = vars(self).setdefault("_flat_indices", [])
        indices = next((indices for key, size, indices in cache if key is position and size == width), None)
        if indices is None:
            indices = self.find_slots(position, segments)
            if len(values) > 1:
                is_uncut = indices is segments.position
                indices = segments.flat_indices(width) if is_uncut else indices + segments.row_starts(width)
            cache.append((position, width, indices))
        if len(values) == len(indices) == 1:
            return values.index_select(1, indices[0])
        # `index_select` of whole rows is much faster than indexing with two tensors.
        gathered: Tensor = values.flatten(0, 1).index_select(0, indices.flatten()).unflatten(0, indices.shape)
        return gathered

    def get_last_slot(self) -> Tensor:
        """Return the slot of the last token of each row without padding, shape (B, 1), int64."""
        raise _build_unsupported_error("the last token of the prompt")

    @cached_property
    def last_row(self) -> Tensor:
        """Attention of the last token of each row in the layer before the cut, shape (B, H, K), float32."""
        return self.attention_before.rows(self.get_last_slot())[:, :, 0]

    @cached_property
    def text_rows(self) -> dict[str, Tensor]:
        """Attention of the text after each image, shape (S, H, M, W), by the name of the observable."""
        return {}

    def get_token_mask(self) -> Tensor:
        """Return the mask of tokens, shape (B, W), bool. Padding is False."""
        raise _build_unsupported_error("the padding mask")

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        """Return positions (int64) and mask (bool) of the text tokens after each segment, both of shape (S, M).

        The segments of a row share the positions. The mask excludes the text before a segment.
        """
        raise _build_unsupported_error("the text")

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm of the decoder to `hidden`, shape (..., D)."""
        raise _build_unsupported_error("the final norm of the decoder")

    # -- observed layers

    @property
    def attention_before(self) -> ObservedAttention:
        """Attention of the layer before the cut."""
        raise _build_unsupported_error("the attention of the language model")

    @property
    def attention_after(self) -> ObservedAttention:
        """Attention that the layer after the cut would compute without the cut."""
        raise _build_unsupported_error("the attention of the layer after the cut")

    @property
    def input_before(self) -> LayerInput:
        """Input of the layer before the cut."""
        raise _build_unsupported_error("the input of the layer before the cut")

    @property
    def unrotated_attention(self) -> ObservedAttention:
        """Attention of the layer before the cut, without rotary embedding."""
        raise _build_unsupported_error("queries and keys before rotary embedding")

    def get_recorded(self, name: str) -> list[Any]:
        """Return the values that the `Recorder` of an observable stored, one per watched module."""
        raise _build_unsupported_error(f"the recorded values of {name!r}")

    @property
    def first_layer(self) -> nn.Module:
        """First layer of the decoder."""
        raise _build_unsupported_error("the first layer of the decoder")

    def get_embeddings(self, position: Tensor, segments: Segments) -> Tensor:
        """Return the input of the decoder for the tokens at `position`, shape (S, N, D)."""
        raise _build_unsupported_error("the input of the decoder")

    def read_tower(self, key: tuple[Any, ...], segments: Segments) -> Tensor:
        """Return values that were observed in the vision tower, shape (S, N, C). Padding is 0.

        Args:
            key: Name of the observable, followed by the block if it is read by block.
            segments: Segments of the visual tokens.
        """
        raise _build_unsupported_error("the vision tower")

    def patches(self, segments: Segments) -> Patches:
        """Return the location of each token in the vision tower."""
        raise _build_unsupported_error("the patches of the vision tower")


def _build_unsupported_error(what: str) -> TokenPruneError:
    return TokenPruneError(f"it reads {what}, which this engine does not provide")
