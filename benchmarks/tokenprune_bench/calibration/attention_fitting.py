# SPDX-License-Identifier: Apache-2.0
"""Fit the files of `d2pruner` and `fitprune` from a model's attention to images, without labels or gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenprune.api import is_patched, patched
from tokenprune.budgets import Budget
from tokenprune.errors import AlreadyPatchedError, OptionError, TokenPruneError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.methods.in_llm.d2pruner import AttentionPrior, D2Pruner, resize_table
from tokenprune.methods.in_llm.fitprune import Recipe
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_STEPS = 50  # steps of the attention loss from 0 to 1


@dataclass(frozen=True)
class Looker(Pruner):
    """Pass the tokens at `layer` to `note` and keep all tokens."""

    name: ClassVar[str] = "looker"
    site: ClassVar[Site] = Site.IN_LLM
    chooses_count: ClassVar[bool] = True

    layer: int
    note: Callable[[VisualTokens, int], None] = field(compare=False)
    reads: frozenset[str] = frozenset()

    @property
    def needs(self) -> frozenset[str]:
        return self.reads

    @property
    def query_aware(self) -> bool:
        return True

    def select(self, tokens: VisualTokens) -> Selection:
        self.note(tokens, self.layer)
        return Selection(tokens.mask, counts=tokens.counts)


@dataclass(frozen=True)
class Lookers(Pruner):
    """Observe several layers as one method."""

    name: ClassVar[str] = "looker"
    site: ClassVar[Site] = Site.IN_LLM

    parts: tuple[Looker, ...]

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        return [(part, budget) for part in self.parts]


def fit_d2pruner(
    model: Any,
    samples: Iterable[dict[str, Any]],
    out: str | Path | None = None,
    *,
    layer: int = 2,
    progress: Callable[[int], None] | None = None,
) -> AttentionPrior:
    """Fit the attention prior of `d2pruner`: the mean attention of the last prompt token to each image position.

    The prior has the grid of the first image. Maps of other grids are resized to it. Images without a known grid are
    left out.

    Args:
        model: An unpatched model.
        samples: Model arguments of prompts with images and a generic question, as the processor returns them.
        out: File to write.
        layer: Decoder layer to observe, as in `d2pruner`.
        progress: Called with the number of finished samples.

    Returns:
        The fitted prior.

    Raises:
        AlreadyPatchedError: If the model is patched.
        TokenPruneError: If no image has a known grid.

    Examples:
        >>> prior = fit_d2pruner(model, [inputs])
        >>> prior.table.shape
        torch.Size([16, 16])
    """
    D2Pruner(layer=layer)  # raises for bad values
    maps: list[Tensor] = []

    def note(tokens: VisualTokens, _: int) -> None:
        attention = tokens.last_row_attention.mean(1)
        for row, (count, grid) in enumerate(zip(tokens.counts, tokens.grids, strict=True)):
            if grid is not None:
                attention_map = attention[row, :count].view(grid).mean(0).cpu()
                shape = maps[0].shape if maps else attention_map.shape
                maps.append(resize_table(attention_map, shape[0] * shape[1], (1, *shape)).view(shape))

    _look(model, samples, [Looker(layer, note, frozenset({"last_row_attention"}))], progress)
    if not maps:
        raise TokenPruneError("Cannot fit: no sample has an image with a known token grid.")
    prior = AttentionPrior(torch.stack(maps).mean(0), layer, compute_fingerprint(get_adapter(model).decoder))
    if out is not None:
        prior.save(out)
    return prior


def fit_fitprune(
    model: Any,
    samples: Iterable[dict[str, Any]],
    out: str | Path | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> Recipe:
    """Fit the recipe of `fitprune`: the share of visual tokens that each decoder layer needs.

    For each share of attention to lose, in steps of 1/50, a layer drops the tokens that are both among the least
    attended by the image and among the least attended by the following text. Each of the two sets may lose that share
    of attention. Later layers continue with the remaining tokens.

    Args:
        model: An unpatched model.
        samples: Model arguments of prompts with images, as the processor returns them.
        out: File to write.
        progress: Called with the number of finished samples.

    Returns:
        The fitted recipe.

    Raises:
        AlreadyPatchedError: If the model is patched.
        TokenPruneError: If no sample has an image.

    Examples:
        >>> recipe = fit_fitprune(model, [inputs])
        >>> recipe.table.shape
        torch.Size([51, 6])
    """
    decoder = get_adapter(model).decoder
    layers = len(decoder.layers)
    maxima: list[list[Tensor]] = []  # per image and layer, shape (2, tokens)

    def note(tokens: VisualTokens, layer: int) -> None:
        if layer == 1:
            maxima.extend([] for _ in tokens.counts)
        batch = maxima[-len(tokens.counts) :]
        for image, row, count in zip(batch, tokens.head_maxima.cpu(), tokens.counts, strict=True):
            image.append(row[:, :count].double())

    parts = [Looker(layer, note, frozenset({"head_maxima"})) for layer in range(1, layers)]
    _look(model, samples, parts, progress)
    if not maxima:
        raise TokenPruneError("Cannot fit: no sample has an image.")
    rows = [
        torch.tensor([compute_kept_shares(image, step / _STEPS) for image in maxima], dtype=torch.float64, device="cpu")
        .mean(0)
        .float()
        for step in range(_STEPS + 1)
    ]
    recipe = Recipe(torch.stack(rows), 0, compute_fingerprint(decoder))
    if out is not None:
        recipe.save(out)
    return recipe


def compute_kept_shares(attention: Sequence[Tensor], loss: float) -> list[float]:
    """Return the share of the image tokens that each layer keeps if it may lose `loss` of the attention.

    Args:
        attention: For each layer but the last, attention by the image and by the text, float64, shape (2, tokens).
        loss: Share of the attention to lose.
    """
    count = attention[0].shape[1]
    alive = torch.ones(count, dtype=torch.bool, device="cpu")
    shares = [1.0]
    for layer in attention:
        dropped = torch.ones(count, dtype=torch.bool, device="cpu")
        for row in layer:
            order = row.masked_fill(~alive, torch.inf).argsort(stable=True)[: int(alive.sum())]
            remaining = row[alive].sum() - row[order].cumsum(0)
            num_dropped = int((remaining >= row.sum() * (1 - loss) - 1e-12).cumprod(0).sum())
            candidates = torch.zeros(count, dtype=torch.bool, device="cpu")
            candidates[order[:num_dropped]] = True
            dropped &= candidates
        alive = alive & ~dropped
        shares.append(float(alive.sum()) / count)
    return shares


@torch.no_grad()
def _look(
    model: Any, samples: Iterable[dict[str, Any]], parts: Sequence[Looker], progress: Callable[[int], None] | None
) -> None:
    if is_patched(model):
        raise AlreadyPatchedError("The model is patched. Call tokenprune.unpatch(model) before fitting.")
    layers = len(get_adapter(model).decoder.layers)
    if parts[-1].layer >= layers:
        raise OptionError(f"layer={parts[-1].layer} is out of range: this decoder has {layers} layers")
    with patched(model, Lookers(tuple(parts)), keep=0.5, guard="off"):
        for done, sample in enumerate(samples, 1):
            model(**sample)
            if progress is not None:
                progress(done)
