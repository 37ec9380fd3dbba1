# SPDX-License-Identifier: Apache-2.0
"""What stands behind a view of visual tokens: each engine has one of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenprune.errors import TokenPruneError

if TYPE_CHECKING:
    from torch import Tensor

    from tokenprune.view.observable import Observable, SeenAttention
    from tokenprune.view.tokens import Patches, Segments, TextTokens, VisualTokens


@dataclass(frozen=True)
class LayerInput:
    """What a decoder layer was called with. hidden: `[B, W, D]`. rotation: (cos, sin), `[B, W, R]` each, or None."""

    hidden: Tensor
    rotation: tuple[Tensor, Tensor] | None = None


class TokenSource:
    """Base of what stands behind a `VisualTokens`: all that an engine knows of the tokens at a cut.

    Observables are computed from its members (see `tokenprune.view.observable`). An engine overrides what it has; what
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

    def read(self, seen: Observable, tokens: VisualTokens, *layer: int | float) -> Any:
        """Return the value of an observable for visual tokens."""
        return seen.of_visual(self, tokens.segments, *layer)

    def read_text(self, seen: Observable, text: TextTokens) -> Any:
        """Return the value of an observable for the text behind an image."""
        return seen.of_text(self, text)

    def attention_from(self, seen: Any, tokens: VisualTokens, weights: Tensor) -> Tensor:
        """Return the sum of rows of text that `VisualTokens.attention_from` returns. seen: the observable."""
        return seen.weighted(self, tokens.text, weights)

    # -- the sequence at the cut

    @property
    def width(self) -> int:
        """W, the number of slots."""
        return self.hidden.shape[1]

    def slots(self, position: Tensor, segments: Segments) -> Tensor:
        """Return long `[S, N]`, the slots in which the tokens at `position` are."""
        return position

    def at(self, values: Tensor, position: Tensor, segments: Segments) -> Tensor:
        """Return `[S, N, ...]`, the values `[B, W, ...]` of the tokens at `position`, long `[S, N]`."""
        place = self.slots(position, segments) + segments.row_index * values.shape[1]
        # Taking whole rows is much faster than indexing with two tensors.
        return values.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, place.shape)

    def last_slot(self) -> Tensor:
        """Return long `[B, 1]`, the slot of each row's last token that is not padding."""
        raise _refused("which token is the prompt's last one")

    @cached_property
    def last_row(self) -> Tensor:
        """float32 `[B, H, K]`, attention of each row's last token that is not padding, in the layer before the cut."""
        return self.before.rows(self.last_slot())[:, :, 0]

    @cached_property
    def text_rows(self) -> dict[str, Tensor]:
        """`[S, H, M, W]`, attention of the text behind each image, by the name of the observable that made it."""
        return {}

    def real(self) -> Tensor:
        """Return bool `[B, W]`, False for slots of padding."""
        raise _refused("which tokens are padding")

    def text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        """Return positions, long `[S, M]`, and mask, bool `[S, M]`, of the text tokens behind each segment."""
        raise _refused("the text")

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return `hidden` `[..., D]` after the decoder's final norm."""
        raise _refused("the decoder's final norm")

    # -- what was observed

    @property
    def before(self) -> SeenAttention:
        """What the attention of the layer before the cut saw."""
        raise _refused("the attention of the language model")

    @property
    def behind(self) -> SeenAttention:
        """What the attention of the layer behind the cut would see."""
        raise _refused("the attention of the layer behind the cut")

    @property
    def input_before(self) -> LayerInput:
        """What the layer before the cut was called with."""
        raise _refused("what enters the layer before the cut")

    @property
    def unrotated(self) -> SeenAttention:
        """What the attention of the layer before the cut would see without rotary embedding."""
        raise _refused("queries and keys before rotary embedding")

    def recorded(self, name: str) -> list[Any]:
        """Return what the observable `name` recorded at a place of its own, a value of each module that it watches."""
        raise _refused(f"what {name} records")

    def entered(self, position: Tensor, segments: Segments) -> Tensor:
        """Return `[S, N, D]`, what entered the decoder of the tokens at `position`, long `[S, N]`."""
        raise _refused("what entered the decoder")

    def of_tower(self, key: tuple, segments: Segments) -> Tensor:
        """Return `[S, N, C]` of what was read in the vision tower, 0 for padding. key: name of the observable, and the
        layer if it is read by layer."""
        raise _refused("the vision tower")

    def patches(self, segments: Segments) -> Patches:
        """Return where in the vision tower the tokens of `segments` come from."""
        raise _refused("the vision tower's patches")


def _refused(what: str) -> TokenPruneError:
    return TokenPruneError(f"it reads {what}, which is not known here")
