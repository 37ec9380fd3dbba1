# SPDX-License-Identifier: Apache-2.0
"""Observables: the facts about visual tokens that a method may read, each a class registered by name like a method.

Ours lie in `selection/observables/`, in files named for what they read. A class of yours is registered by the same
decorator; a method then names it in its `needs` and reads it as an attribute of its `VisualTokens`. Engines know no
observable by name: they observe what `where` says, and refuse what `backends` does not have.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tokenprune.kernels.host_random import normal, uniform
from tokenprune.kernels.transfer import to_device

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenprune.models.families import Family
    from tokenprune.selection.segments import ObservedAttention, Segments, Sizes, TextView
    from tokenprune.selection.source import TokenSource


_ELEMENTS = 2**24  # of the attention map that is made at a time


class ObservedAt(enum.StrEnum):
    """The place at which an observable is observed; a member equals its name as a string."""

    CUT = "CUT"  # what arrives at the cut: always there, and declared by nobody
    ENTRY = "ENTRY"  # what enters the decoder
    LAYER_BEFORE = "LAYER_BEFORE"  # the attention of the decoder layer before the cut
    NEXT_LAYER = "NEXT_LAYER"  # the attention of the layer after the cut, if nothing was cut
    INPUT_BEFORE = "INPUT_BEFORE"  # what the decoder layer before the cut is called with
    UNROTATED = "UNROTATED"  # the attention of the layer before the cut, if it did not rotate
    TOWER_BLOCK = "TOWER_BLOCK"  # the attention of a block of the vision tower
    TOWER = "TOWER"  # the vision tower as a whole
    FRAMES = "FRAMES"  # which frame of a video tokens are of
    OWN = "OWN"  # modules of the decoder that the observable names itself: see `Observable.attach`


class Backend(enum.StrEnum):
    """The back end that serves an observable: the Hugging Face engine, vLLM before the language model, vLLM inside
    it."""

    HF = "hf"
    VLLM = "vllm"
    VLLM_IN_LLM = "vllm_in_llm"


@dataclass(frozen=True)
class Recorder:
    """Values that an observable with a place of its own records in a forward: one of each module, for the next cut.

    modules: the modules to watch, each of which runs after the cut before. read: returns a value from a module's
    arguments, by place and by name, and its output; it runs without gradient.
    """

    modules: Sequence[nn.Module]
    read: Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


class Observable:
    """Base of all observables. A subclass says where it is observed and by whom, and computes itself from a source.

    name:     the attribute of `VisualTokens`, and what a method writes in its `needs`; set by `register_observable`.
    text_name: the attribute of `VisualTokens.text`, if it is another; set by `register_observable` if it is not.
    where:    see `ObservedAt`. backends: see `Backend`.
    axes:     of the tensor that it is for visual tokens: S segments, N tokens, H heads, M text tokens, D features;
              empty if it is no tensor.
    by_layer: whether it is read of one block at a time, `tokens.<name>(layer)`, out of the method's `encoder_layers`.
    whole:    whether it takes the whole prompt, with the text after an image.
    all_rows: whether it takes what all tokens attend to.
    rotary:   whether it takes rotary positions, which not every decoder has.
    absolute: whether it depends on absolute position ids, so that positions that count left padding change it.
    """

    name: ClassVar[str] = ""
    text_name: ClassVar[str] = ""
    where: ClassVar[ObservedAt]
    backends: ClassVar[frozenset[Backend]] = frozenset({Backend.HF})
    axes: ClassVar[str] = "SND"
    by_layer: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    all_rows: ClassVar[bool] = False
    rotary: ClassVar[bool] = False
    absolute: ClassVar[bool] = False

    def is_declared(self, needs: frozenset[str]) -> bool:
        """Return whether a method of these `needs` may read it."""
        return self.where is ObservedAt.CUT or self.name in needs

    def find_obstacle(self, row: Family) -> str | None:
        """Return, as a noun phrase, what a family lacks, so that this cannot be observed on it; None if it can."""
        return "cosines and sines of rotary positions" if self.rotary and row.complex_rotation else None

    def attach(self, adapter: Any, layer: int) -> Recorder:
        """Return what to record for a cut at the input of decoder layer `layer`, where `where` is OWN.

        `compute_visual` finds the values by `source.get_recorded(self.name)`, in the order of the modules.

        adapter: finds modules of any family: `decoder.layers`, `attention_of(layer)`, `modules_of(layer)`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement attach()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Any:
        """Return the value for the visual tokens of `segments`, `[S, N, ...]`. layer: if `by_layer`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_visual()")

    def compute_text(self, source: TokenSource, text: TextView) -> Any:
        """Return the value for the text tokens after each segment, `[S, M, ...]`; raise AttributeError if there is
        none, as here."""
        raise AttributeError(f"the text after an image has no {self.name!r}")

    def example(self, sizes: Sizes, generator: torch.Generator) -> Any:
        """Return a made-up value for visual tokens, on which methods are tried (`tokenprune.testing`)."""
        return normal(sizes.segments, sizes.tokens, sizes.width, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Any:
        """Return a made-up value for the text after each segment; None if it has none."""
        return None


class PerToken(Observable):
    """Base of what each token of the sequence has one of; the text after an image has it too."""

    def read_values(self, source: TokenSource) -> Tensor:
        """Return `[B, W, ...]`, one for each slot of the sequence as it is at the cut."""
        raise NotImplementedError(f"{type(self).__name__} does not implement read_values()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.gather(self.read_values(source), segments.position, segments)

    def compute_text(self, source: TokenSource, text: TextView) -> Tensor:
        return source.gather(self.read_values(source), text.position, text.segments)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.text, sizes.width, generator=generator)


class AttentionToTokens(Observable):
    """Base of what the attention of a decoder layer pays to each token, by head."""

    axes = "SHN"
    whole = True

    def read_columns(self, source: TokenSource) -> Tensor:
        """Return float32 `[B, H, W]`, over the slots of the sequence as it is at the cut."""
        raise NotImplementedError(f"{type(self).__name__} does not implement read_columns()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        columns = self.read_columns(source)
        if segments.row != list(range(len(columns))):
            columns = columns[segments.row_index.squeeze(1)]
        slots = source.find_slots(segments.position, segments)
        return columns.gather(2, slots[:, None, :].expand(-1, columns.shape[1], -1))

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)


def add_up(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, at least one, holding one at a time."""
    return reduce(torch.add, parts)


class AttentionFromText(Observable):
    """Base of what the attention of a decoder layer pays from the text after an image, by head."""

    axes = "SHMN"
    whole = True

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        """Return what the attention of the layer saw."""
        raise NotImplementedError(f"{type(self).__name__} does not implement get_attention()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        position, mask = source.find_text_after(segments)
        found = self._to(source, segments, position, segments.position)
        return found.mul_((mask[:, None, :, None] & segments.mask[:, None, None, :]).float())

    def compute_text(self, source: TokenSource, text: TextView) -> Tensor:
        """float32 `[S, H, M, M]`, 0 at padding."""
        found = self._to(source, text.segments, text.position, text.position)
        return found.mul_((text.mask[:, None, :, None] & text.mask[:, None, None, :]).float())

    def sum_rows(self, source: TokenSource, text: TextView, weights: Tensor) -> Tensor:
        """Return float32 `[S, H, N]`, the sum of the text's rows. weights: `[S, M]` or `[S, H, M]`, of each row."""
        weights = weights.float().masked_fill(~(text.mask if weights.ndim == 2 else text.mask[:, None]), 0)
        weights = weights.unsqueeze(1) if weights.ndim == 2 else weights
        parts = self._text_rows(source, text.segments, text.position, text.segments.position)
        total = add_up((rows * weights[..., part, None]).sum(2) for rows, part in parts)
        return total.masked_fill(~text.segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.text, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Any:
        return uniform(sizes.segments, sizes.heads, sizes.text, sizes.text, generator=generator)

    def _to(self, source: TokenSource, segments: Segments, position: Tensor, to: Tensor) -> Tensor:
        """Return `[S, H, M, K]`, the attention of the text at `position`, `[S, M]`, to the tokens at `to`, `[S, K]`."""
        return torch.cat([rows for rows, _ in self._text_rows(source, segments, position, to)], dim=2)

    def _text_rows(
        self, source: TokenSource, segments: Segments, position: Tensor, to: Tensor
    ) -> Iterator[tuple[Tensor, slice]]:
        """Yield `[S, H, R, K]`, the attention of R of the text tokens at `position` (`[S, M]`, see `text_after`) to the
        tokens at `to` (`[S, K]`), and which R they are.

        Images of a row share its text: each token's row is made once, and of it each image takes its own columns. Rows
        that are made in one go are kept for all who read them.
        """
        seen, device = self.get_attention(source), position.device
        batch, heads, width, most = seen.query.shape[0], seen.query.shape[1], source.width, max(segments.ordinal) + 1
        asked, columns = source.find_slots(position, segments), source.find_slots(to, segments)
        if not (alone := segments.row == list(range(batch))):  # else each row has one image
            row, place = to_device(segments.row, device), to_device(segments.ordinal, device)
            firsts = to_device([place for place, ordinal in enumerate(segments.ordinal) if ordinal == 0], device)
            asked = asked.new_zeros(batch, asked.shape[1]).index_copy(0, row[firsts], asked[firsts])
            columns = columns.new_zeros(batch, most, columns.shape[1]).index_put((row, place), columns).flatten(1)
        step = max(1, _ELEMENTS // max(1, batch * heads * max(width, columns.shape[1])))
        for start in range(0, asked.shape[1], step):
            part = slice(start, start + step)
            rows = source.text_rows.get(self.name)
            if rows is None:
                rows = seen.rows(asked[:, part])[..., -width:]
                if step >= asked.shape[1]:
                    source.text_rows[self.name] = rows
            found = rows.gather(3, columns[:, None, None].expand(*rows.shape[:3], -1))
            yield found if alone else found.unflatten(3, (most, -1))[row, :, :, place], part

    def _rows(self, source: TokenSource, segments: Segments, position: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield `[S, H, R, W]`, the attention of R of the tokens at `position` to all slots, and which R they are."""
        seen = self.get_attention(source)
        slots, device = source.find_slots(position, segments), position.device
        batch, heads, width = seen.query.shape[0], seen.query.shape[1], seen.key.shape[2]
        most = max(segments.ordinal) + 1  # segments of a row ask for their rows side by side
        row, place = to_device(segments.row, device), to_device(segments.ordinal, device)
        step = max(1, _ELEMENTS // max(1, batch * heads * most * width))
        for start in range(0, slots.shape[1], step):
            part = slice(start, start + step)
            own = slots[:, part]
            if segments.row == list(range(batch)):
                yield seen.rows(own)[..., -source.width :], part
                continue
            index = own.new_zeros(batch, most, own.shape[1]).index_put((row, place), own)
            found = seen.rows(index.flatten(1)).unflatten(2, (most, -1))
            yield found[row, :, place][..., -source.width :], part


class TowerBlock(Observable):
    """Base of what the attention of a block of the vision tower says of each patch.

    A token made of several patches gets their mean, in float32; what is no patch (newlines, a class token) gets 0.
    """

    where = ObservedAt.TOWER_BLOCK
    backends = frozenset({Backend.HF, Backend.VLLM})
    by_layer = True

    def compute_per_patch(self, seen: ObservedAttention, protected: int) -> Tensor:
        """Return `[rows, H, patches]` or `[rows, H, patches, Dh]`, class tokens left out. seen: queries and keys of one
        block, with `protected` class tokens in front of the patches of each row."""
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_per_patch()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        """float32 `[S, N, C]`."""
        return source.read_tower((self.name, *layer), segments)


class TowerOutput(Observable):
    """Base of what is made of the vision tower's output, as the projector gets it."""

    where = ObservedAt.TOWER

    def compute_from_features(self, features: Tensor, protected: int) -> Tensor:
        """Return `[rows, patches, C]`, class tokens left out. features: `[rows, tokens, Dv]`, with `protected` class
        tokens in front."""
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_from_features()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        """float32 `[S, N, C]`; a token made of several patches gets their mean, what is no patch 0."""
        return source.read_tower((self.name,), segments)


class TowerInput(Observable):
    """Base of what is made of the colours of each token's pixels, in towers that pack the patches of all images; it
    takes the model's processor, which knows the colours."""

    where = ObservedAt.TOWER

    def find_obstacle(self, row: Family) -> str | None:
        packed = row.tower_rows == "all images" and row.patches == "runs"
        return None if packed else "pixels that are packed token by token"

    def compute_from_colors(self, colours: Tensor) -> Tensor:
        """Return float32 `[tokens, C]`. colours: float32 `[tokens, patches, channels, P]`, from 0 to 1."""
        raise NotImplementedError(f"{type(self).__name__} does not implement compute_from_colors()")

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        """float32 `[S, N, C]`, 0 for padding."""
        return source.read_tower((self.name,), segments)


class TowerScores(TowerBlock):
    """Base of scores of patches by head: `[S, H, N]`."""

    axes = "SHN"

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return super().compute_visual(source, segments, *layer).transpose(1, 2)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)
