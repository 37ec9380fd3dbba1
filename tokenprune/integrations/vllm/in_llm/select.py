# SPDX-License-Identifier: Apache-2.0
"""What a method may see of a request inside the language model, and its choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenprune.base import Method
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.observe import Observation
from tokenprune.integrations.vllm.select import Grid, Norm, exact_keep
from tokenprune.tokens import Segments, VisualTokens, require

# What a decoder's layers can be asked for; the rest of a method's `needs` is not to be had here.
READABLE = frozenset({"keys", "last_row_attention", "received_attention"})


@dataclass(frozen=True)
class Seen:
    """Backs a `VisualTokens`: one request's tokens in this step at the input of the layer of the cut.

    hidden: `[W, D]`. observed: what the layer before attended with, if the method needs it. whole: whether this is the
    whole prompt; only then is what stands behind a picture known, and may be read.
    """

    hidden: Tensor
    norm: Norm
    observed: Observation | None
    whole: bool
    visual: list[int] = field(default_factory=list)

    def gather(self, what: str, position: Tensor, segments: Segments) -> Tensor:
        if what == "hidden":
            return self.hidden[position]
        return require(self.observed, what).keys(self.hidden.shape[0])[0][position]

    def slots(self, position: Tensor, segments: Segments) -> Tensor:
        return position

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def attention(self, kind: str) -> Tensor:
        """float32 `[1, H, W]`."""
        self._check_whole(f"attention ({kind})")
        observed = require(self.observed, f"{kind}_attention")
        width = self.hidden.shape[0]
        if kind == "last_row":
            return observed.rows(torch.tensor([[width - 1]], device=self.hidden.device))[:, :, 0]
        return observed.received(torch.ones(1, width, dtype=torch.bool, device=self.hidden.device))

    def text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        """Positions (long `[S, M]`) and mask of the text tokens behind each segment."""
        self._check_whole("the text behind a picture")
        width = self.hidden.shape[0]
        is_text = torch.ones(width, dtype=torch.bool)
        is_text[self.visual] = False
        places = torch.arange(width)
        last = segments.position.masked_fill(~segments.mask, -1).amax(1).cpu()
        behind = is_text & (places > last[:, None])
        order = (~behind).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(1, int(behind.sum(1).max()))]
        return order.to(self.hidden.device), behind.gather(1, order).to(self.hidden.device)

    def _check_whole(self, what: str) -> None:
        if not self.whole:
            raise TokenPruneError(
                f"it reads {what} and says that its choice does not depend on the question: its property query_aware "
                "has to be True"
            )


def segments_of(
    places: Sequence[Sequence[int]],
    ordinals: Sequence[int],
    modalities: Sequence[str],
    grids: Sequence[Grid | None],
    device: torch.device,
) -> Segments:
    """Return the segments of one request. places: of the tokens of each, in this step. grids: None where not known."""
    counts = [len(of) for of in places]
    longest = max(counts)
    position = torch.tensor([[*of, *[of[0]] * (longest - len(of))] for of in places])
    mask = torch.arange(longest) < torch.tensor(counts)[:, None]
    made = Segments([0] * len(counts), list(ordinals), counts, position, mask, list(grids), list(modalities))
    return made.to(device)


def choose(method: Method, segments: Segments, keep: list[int], seen: Seen) -> Tensor:
    """bool `[S, N]`: which tokens go on; raises TokenPruneError if the method keeps other numbers than `keep`."""
    with torch.no_grad():
        selection = method.select(VisualTokens(segments, keep, seen))
    if selection.assign is not None:
        raise TokenPruneError("it merges tokens, and they can only be dropped here")
    return exact_keep(selection, segments, method, keep)


def probe(method: Method) -> None:
    """Run `method` on made-up states; raises TokenPruneError if it reads what there is not, or keeps other numbers than
    it is asked for."""
    if absent := sorted(method.reads - READABLE):
        raise TokenPruneError(f"it needs {', '.join(absent)}, and vLLM's layers give {', '.join(sorted(READABLE))}")
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 40, 8, generator=generator) for heads in (2, 1))
    observed = Observation(query, key, None, 8**-0.5) if method.reads else None
    hidden = torch.randn(40, 16, generator=generator)
    places = [list(range(2, 18)), list(range(20, 29))]
    seen = Seen(hidden, torch.nn.functional.normalize, observed, method.query_aware, places[0] + places[1])
    segments = segments_of(places, [0, 1], ["image", "image"], [None, None], hidden.device)
    choose(method, segments, [5, 4], seen)
