# SPDX-License-Identifier: Apache-2.0
"""Let a method choose among one request's tokens inside the language model."""

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
    """Source of a `VisualTokens`: one request's tokens in this step, at the input of the layer of the cut.

    hidden: `[1, W, D]`. observed: query, key and value of the layer before, if the method needs them. whole: True for a
    whole prompt; only then is the text after an image known, and may be read. visual: positions of all visual tokens.
    layer_input: of the layer before, if the method needs it.
    """

    hidden: Tensor
    needs: frozenset[str]
    norm: Norm
    observed: Observation | None
    is_whole_prompt: bool
    visual: list[int] = field(default_factory=list)
    layer_input: LayerInput | None = None

    def read(self, seen: Readable, tokens: VisualView, *layer: int | float) -> Any:
        if seen.whole:
            self._check_whole(seen.name)
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
        self._check_whole("the text after an image")
        is_text = torch.ones(self.width, dtype=torch.bool, device="cpu")
        is_text[self.visual] = False
        places = torch.arange(self.width, device="cpu")
        last = segments.position.masked_fill(~segments.mask, -1).amax(1).cpu()
        after = is_text & (places > last[:, None])
        # The same for all images: what is after any.
        any_of = after.any(0)
        order = (~any_of).to(torch.uint8).argsort(stable=True)[: max(1, int(any_of.sum()))].expand(len(after), -1)
        return order.to(self.hidden.device), after.gather(1, order).to(self.hidden.device)

    def _check_whole(self, what: str) -> None:
        if not self.is_whole_prompt:
            raise TokenPruneError(
                f"it reads {what} and says that its choice does not depend on the question: its property query_aware "
                "has to be True"
            )


def build_segments(
    places: Sequence[Sequence[int]],
    ordinals: Sequence[int],
    modalities: Sequence[str],
    grids: Sequence[Grid | None],
    device: torch.device,
) -> Segments:
    """Return the segments of one request. places: of the tokens of each, in this step. grids: None where not known."""
    counts = [len(of) for of in places]
    longest = max(counts)
    position = torch.tensor([[*of, *[of[0]] * (longest - len(of))] for of in places], device="cpu")
    mask = torch.arange(longest, device="cpu") < torch.tensor(counts, device="cpu")[:, None]
    made = Segments([0] * len(counts), list(ordinals), counts, position, mask, list(grids), list(modalities))
    return made.to(device)


def choose(method: Pruner, segments: Segments, keep: list[int], seen: RequestSource, last: int | None = None) -> Tensor:
    """Return bool `[S, N]`, True for the tokens that go on. Raise TokenPruneError if their numbers are not `keep`.

    last: place of the prompt's last token in this step, which stays if it is a visual one.
    """
    with torch.no_grad():
        selection = method.select(VisualTokens(segments, keep, seen))
    if selection.assign is not None:
        raise TokenPruneError("it merges tokens, and they can only be dropped here")
    stays = check_keep(selection, segments, method, keep)
    return stays if last is None else keep_row_ends(Selection(stays), segments, keep, [(0, last)]).keep


def probe(method: Pruner) -> None:
    """Run `method` on made-up states. Raise TokenPruneError if it reads an observable that is not there, or keeps
    another number of tokens than it was asked for."""
    if absent := list_unserved(method.needs, Backend.VLLM_IN_LLM):
        there = ", ".join(list_served(Backend.VLLM_IN_LLM))
        raise TokenPruneError(f"it needs {', '.join(absent)}, and vLLM's layers give {there}")
    places = [list(range(2, 18)), list(range(20, 29))]
    rehearse(method, places, [5, 4], normal(1, 40, 16, generator=torch.Generator("cpu").manual_seed(0)), (2, 1, 8))


def rehearse(
    method: Pruner, places: list[list[int]], keep: list[int], hidden: Tensor, heads: tuple[int, int, int],
    norm: Norm = torch.nn.functional.normalize,
) -> None:  # fmt: skip
    """Let `method` choose among images at `places` of a made-up prompt.

    hidden: `[1, W, D]`, its tokens at the cut. heads: number of query heads, of key heads, and their width.
    """
    generator = torch.Generator("cpu").manual_seed(1)

    def like(*shape: int) -> Tensor:
        return normal(*shape, generator=generator).to(hidden)

    query, key, value = (like(1, number, hidden.shape[1], heads[2]) for number in (heads[0], heads[1], heads[1]))
    observed = Observation(query, key, None, heads[2] ** -0.5, value=value)
    visual = [place for own in places for place in own]
    entered = LayerInput(like(*hidden.shape))
    seen = RequestSource(hidden, method.needs, norm, observed, method.query_aware, visual, entered)
    ordinals = list(range(len(places)))
    segments = build_segments(places, ordinals, ["image"] * len(places), [None] * len(places), hidden.device)
    choose(method, segments, keep, seen)
