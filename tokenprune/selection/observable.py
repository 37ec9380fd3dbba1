# SPDX-License-Identifier: Apache-2.0
"""Base classes of observables: facts about visual tokens that a method may read.

An observable is a class registered by name, like a method. A method lists the name in its `needs`, and reads the value
as an attribute of its `VisualTokens`. The built-in observables are in `selection/observables/`. An engine observes the
modules that `where` names, and refuses observables that `backends` excludes: it contains no names of observables. Base
classes for attention and for the vision tower are in `observable_bases`.

Shapes use S segments of up to N visual tokens, M text tokens, H heads, D features, and B rows of W slots.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tokenprune.kernels.host_random import normal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenprune.models.families import Family
    from tokenprune.selection.segments import Segments, Sizes, TextView
    from tokenprune.selection.source import TokenSource


class ObservedAt(enum.StrEnum):
    """Module or tensor that an observable reads. A member equals its name as a string.

    Examples:
        >>> ObservedAt.CUT == "CUT"
        True
    """

    CUT = "CUT"  # hidden states at the cut: always available, not declared
    ENTRY = "ENTRY"  # input of the decoder
    LAYER_BEFORE = "LAYER_BEFORE"  # attention of the decoder layer before the cut
    NEXT_LAYER = "NEXT_LAYER"  # attention of the layer after the cut, on the tokens before the cut
    INPUT_BEFORE = "INPUT_BEFORE"  # input of the decoder layer before the cut
    UNROTATED = "UNROTATED"  # attention of the layer before the cut, without rotary embedding
    TOWER_BLOCK = "TOWER_BLOCK"  # attention of a block of the vision tower
    TOWER = "TOWER"  # input or output of the vision tower
    FRAMES = "FRAMES"  # frames of videos
    OWN = "OWN"  # decoder modules that `Observable.attach` chooses


class Input(enum.StrEnum):
    """Input of a method, as an engine provides it. A member equals its name as a string, in lower case.

    Examples:
        >>> Input.TOWER_ATTENTION == "tower_attention"
        True
    """

    FEATURES = "features"  # the projected features of an image
    FRAMES = "frames"  # the frames of a video
    QUESTION = "question"  # embeddings of the text after an image
    TOWER_ATTENTION = "tower_attention"  # attention inside the vision tower
    TOWER_FEATURES = "tower_features"  # states of the vision tower: its output, its queries, keys and logits
    PIXELS = "pixels"
    TOWER = "tower"  # the method changes the vision tower
    DECODER = "decoder"  # states of the decoder, or a cut inside it


_INPUTS = {
    ObservedAt.CUT: Input.FEATURES,
    ObservedAt.ENTRY: Input.FEATURES,
    ObservedAt.FRAMES: Input.FRAMES,
    ObservedAt.TOWER: Input.TOWER_FEATURES,
    ObservedAt.TOWER_BLOCK: Input.TOWER_FEATURES,
}


class Backend(enum.StrEnum):
    """Backend that provides an observable: the Hugging Face engine, or vLLM before or inside the language model.

    Examples:
        >>> Backend.HF == "hf"
        True
    """

    HF = "hf"
    VLLM = "vllm"
    VLLM_IN_LLM = "vllm_in_llm"


@dataclass(frozen=True)
class Recorder:
    """Modules to watch during a forward pass. One value per module is recorded for the next cut.

    Args:
        modules: Modules to watch. Each must run after the previous cut.
        read: Function from the positional arguments, the keyword arguments and the output of a module to the value. It
            runs without gradients.
    """

    modules: Sequence[nn.Module]
    read: Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


class Observable:
    """Base class of all observables. A subclass declares where it is observed, and computes its value from a source.

    Attributes:
        name: Attribute of `VisualTokens`, and entry of `needs`. Set by `register_observable`.
        text_name: Attribute of `VisualTokens.text`. Equals `name` unless the subclass sets it.
        where: Module or tensor that it reads.
        backends: Backends that provide it.
        from_input: Input from which an engine provides it. None: it follows from `where`.
        axes: Axes of the tensor for visual tokens: S segments, N tokens, H heads, M text tokens, D features. Empty if
            the value is not a tensor.
        by_layer: True if it is read for one block of `encoder_layers` at a time, as `tokens.name(layer)`.
        needs_full_prompt: True if it needs the whole prompt, including the text after an image.
        all_rows: True if it needs the attention of all tokens.
        rotary: True if it needs rotary position embedding, which not every decoder has.
        absolute: True if its value depends on absolute position ids, and so on left padding.

    Examples:
        >>> from tokenprune.selection import available_observables
        >>> "last_row_attention" in available_observables()
        True
    """

    name: ClassVar[str] = ""
    text_name: ClassVar[str] = ""
    where: ClassVar[ObservedAt]
    backends: ClassVar[frozenset[Backend]] = frozenset({Backend.HF})
    from_input: ClassVar[Input | None] = None
    axes: ClassVar[str] = "SND"
    by_layer: ClassVar[bool] = False
    needs_full_prompt: ClassVar[bool] = False
    all_rows: ClassVar[bool] = False
    rotary: ClassVar[bool] = False
    absolute: ClassVar[bool] = False

    @property
    def input(self) -> Input:
        """Input from which an engine provides it."""
        return self.from_input or _INPUTS.get(self.where, Input.DECODER)

    def is_declared(self, needs: frozenset[str]) -> bool:
        """Return True if a method with these `needs` may read it."""
        return self.where is ObservedAt.CUT or self.name in needs

    def find_obstacle(self, row: Family) -> str | None:
        """Return the missing feature of a model family as a noun phrase, or None if the family is supported."""
        return "cosines and sines of rotary positions" if self.rotary and row.complex_rotation else None

    def attach(self, adapter: Any, layer: int) -> Recorder:
        """Return the modules to watch for a cut at the input of a decoder layer. Only for `where = ObservedAt.OWN`.

        `compute_visual` reads the values with `source.get_recorded(self.name)`, in the order of the modules.

        Args:
            adapter: Adapter of the model, with `decoder.layers`, `get_attention(layer)` and
                `get_attention_and_mlp(layer)`.
            layer: Index of the decoder layer.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement attach()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Any:
        """Return the value for the visual tokens, usually a tensor of shape (S, N, ...).

        Args:
            source: Source of the engine.
            segments: Segments of the visual tokens.
            layer: Block of the vision tower, if `by_layer` is set.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_visual()")

    def compute_text(self, source: TokenSource, text: TextView) -> Any:
        """Return the value for the text after each segment, usually a tensor of shape (S, M, ...).

        Raises:
            AttributeError: If the observable is not defined for text, as in this base class.
        """
        raise AttributeError(f"text tokens have no observable {self.name!r}")

    def example(self, sizes: Sizes, generator: torch.Generator) -> Any:
        """Return a synthetic value for visual tokens. `tokenprune.testing` calls methods with it."""
        return normal(sizes.segments, sizes.tokens, sizes.width, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Any:
        """Return a synthetic value for the text after each segment, or None if it is not defined for text."""
        return None


class PerToken(Observable):
    """Base class of observables with one value for each token of the sequence, visual or text.

    Examples:
        >>> class HiddenNorm(PerToken):
        ...     where = ObservedAt.CUT
        ...     def read_values(self, source):
        ...         return source.hidden.norm(dim=-1)
    """

    def read_values(self, source: TokenSource) -> Tensor:
        """Return the value of each slot at the cut, shape (B, W, ...)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement read_values()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.gather(self.read_values(source), segments.position, segments)

    def compute_text(self, source: TokenSource, text: TextView) -> Tensor:
        return source.gather(self.read_values(source), text.position, text.segments)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.text, sizes.width, generator=generator)
