# SPDX-License-Identifier: Apache-2.0
"""Select tokens of one request inside the language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.selection.before_llm import Grid, Norm, check_keep
from tokenprune.kernels.host_random import normal
from tokenprune.kernels.observation import Observation
from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.observable import Backend
from tokenprune.selection.observable_registry import list_served, list_unserved
from tokenprune.selection.row_ends import keep_row_ends
from tokenprune.selection.segments import LayerInput, ObservedAttention, Segments, VisualView
from tokenprune.selection.source import Readable, TokenSource
from tokenprune.selection.tokens import VisualTokens


@dataclass(frozen=True)
class RequestSource(TokenSource):
    """Source of a `VisualTokens`: the tokens of one request in a step, at the input of the layer of the cut.

    Attributes:
        hidden: Hidden states, shape (1, tokens, channels).
        needs: Observables that the method needs.
        observed: Query, key and value of the layer before, if the method needs them.
        is_whole_prompt: Whether the step has the whole prompt. Only then is the text after an image available.
        visual: Indices of all visual tokens.
        layer_input: Input of the layer before, if the method needs it.
    """

    hidden: Tensor
    needs: frozenset[str]
    norm: Norm
    observed: Observation | None
    is_whole_prompt: bool
    visual: list[int] = field(default_factory=list)
    layer_input: LayerInput | None = None

    def read(self, seen: Readable, tokens: VisualView, *layer: int | float) -> Any:
        if seen.needs_full_prompt:
            self._check_whole_prompt(seen.name)
        return super().read(seen, tokens, *layer)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    @property
    def attention_before(self) -> ObservedAttention:
        return super().attention_before if self.observed is None else self.observed

    @property
    def input_before(self) -> LayerInput:
        return super().input_before if self.layer_input is None else self.layer_input

    def get_last_slot(self) -> Tensor:
        return torch.tensor([[self.width - 1]], device=self.hidden.device)

    def get_token_mask(self) -> Tensor:
        return torch.ones(1, self.width, dtype=torch.bool, device=self.hidden.device)

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        self._check_whole_prompt("the text after an image")
        is_text = torch.ones(self.width, dtype=torch.bool, device="cpu")
        is_text[self.visual] = False
        indices = torch.arange(self.width, device="cpu")
        last = segments.position.masked_fill(~segments.mask, -1).amax(1).cpu()
        after = is_text & (indices > last[:, None])
        # All images share one index: the text after any image.
        after_any = after.any(0)
        order = (~after_any).to(torch.uint8).argsort(stable=True)[: max(1, int(after_any.sum()))].expand(len(after), -1)
        return order.to(self.hidden.device), after.gather(1, order).to(self.hidden.device)

    def _check_whole_prompt(self, observable: str) -> None:
        if not self.is_whole_prompt:
            raise TokenPruneError(
                f"it reads {observable}, which depends on the question. Its property query_aware must be True"
            )


def build_segments(
    indices: Sequence[Sequence[int]],
    ordinals: Sequence[int],
    modalities: Sequence[str],
    grids: Sequence[Grid | None],
    device: torch.device,
) -> Segments:
    """Return the segments of one request.

    Args:
        indices: Indices of each segment's tokens in this step.
        ordinals: Index of each segment in the prompt.
        grids: (frames, height, width) of each segment, or None if it is not known.
    """
    counts = [len(segment) for segment in indices]
    longest = max(counts)
    # Padding repeats the first index.
    rows = [[*segment, *[segment[0]] * (longest - len(segment))] for segment in indices]
    position = torch.tensor(rows, device="cpu")
    mask = torch.arange(longest, device="cpu") < torch.tensor(counts, device="cpu")[:, None]
    segments = Segments([0] * len(counts), list(ordinals), counts, position, mask, list(grids), list(modalities))
    return segments.to(device)


def choose(
    method: Pruner, segments: Segments, keep: list[int], source: RequestSource, last: int | None = None
) -> Tensor:
    """Return the mask of the kept tokens, shape (segments, tokens), bool.

    Args:
        keep: Number of kept tokens of each segment.
        source: Values that the method may read.
        last: Index of the prompt's last token in this step. If it is a visual token, it is kept.

    Raises:
        TokenPruneError: If the method merges tokens, or does not keep the required number.
    """
    with torch.no_grad():
        selection = method.select(VisualTokens(segments, keep, source))
    if selection.assign is not None:
        raise TokenPruneError("it merges tokens, but inside the language model tokens can only be dropped")
    kept = check_keep(selection, segments, method, keep)
    return kept if last is None else keep_row_ends(Selection(kept), segments, keep, [(0, last)]).keep


def probe(method: Pruner) -> None:
    """Run a method on random states.

    Raises:
        TokenPruneError: If it reads an observable that is not available, or does not keep the required number.
    """
    if missing := list_unserved(method.needs, Backend.VLLM_IN_LLM):
        available = ", ".join(list_served(Backend.VLLM_IN_LLM))
        raise TokenPruneError(f"it needs {', '.join(missing)}, but vLLM's layers provide only {available}")
    indices = [list(range(2, 18)), list(range(20, 29))]
    rehearse(method, indices, [5, 4], normal(1, 40, 16, generator=torch.Generator("cpu").manual_seed(0)), (2, 1, 8))


def rehearse(
    method: Pruner, indices: list[list[int]], keep: list[int], hidden: Tensor, heads: tuple[int, int, int],
    norm: Norm = torch.nn.functional.normalize,
) -> None:  # fmt: skip
    """Select tokens of images in a random prompt.

    Args:
        indices: Indices of each image's tokens in the prompt.
        keep: Number of kept tokens of each image.
        hidden: Hidden states at the cut, shape (1, tokens, channels).
        heads: Number of query heads, number of key heads, and width of a head.
    """
    generator = torch.Generator("cpu").manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return normal(*shape, generator=generator).to(hidden)

    query, key, value = (draw(1, count, hidden.shape[1], heads[2]) for count in (heads[0], heads[1], heads[1]))
    observed = Observation(query, key, None, heads[2] ** -0.5, value=value)
    visual = [index for image in indices for index in image]
    layer_input = LayerInput(draw(*hidden.shape))
    source = RequestSource(hidden, method.needs, norm, observed, method.query_aware, visual, layer_input)
    ordinals, num_images = list(range(len(indices))), len(indices)
    segments = build_segments(indices, ordinals, ["image"] * num_images, [None] * num_images, hidden.device)
    choose(method, segments, keep, source)
