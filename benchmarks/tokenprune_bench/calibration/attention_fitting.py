# SPDX-License-Identifier: Apache-2.0
"""Fit the files of `d2pruner` and `fitprune`, from a model's attention to images, without labels or gradients."""

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
from tokenprune.integrations.hf.families import adapter_for
from tokenprune.methods.in_llm.d2pruner import AttentionPrior, D2Pruner, resize_table
from tokenprune.methods.in_llm.fitprune import Recipe
from tokenprune.models.fingerprint import fingerprint
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_STEPS = 50  # of how much attention may be lost, from none to all


@dataclass(frozen=True)
class _Looker(Pruner):
    """Hand the tokens at `layer` to `note`, and remove nothing."""

    name: ClassVar[str] = "looker"
    site: ClassVar[Site] = Site.IN_LLM
    by_content_count: ClassVar[bool] = True

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
class _Lookers(Pruner):
    """Look at several layers, as one method."""

    name: ClassVar[str] = "looker"
    site: ClassVar[Site] = Site.IN_LLM

    parts: tuple[_Looker, ...]

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
    """Return what the last token of a prompt attends to whatever an image shows, which `d2pruner` divides by.

    samples: the model's arguments for prompts with images, as its processor makes them, with a question that asks for
    nothing in particular. The prior has the grid of the first image; those of others are stretched to it, and images
    whose grid is not known are left out. out: file to write. layer: as in `d2pruner`. progress: gets the number of
    samples done. Raises AlreadyPatchedError for a patched model, and TokenPruneError if no image has a grid.
    """
    D2Pruner(layer=layer)  # raises for bad values
    maps: list[Tensor] = []

    def note(tokens: VisualTokens, _: int) -> None:
        attention = tokens.last_row_attention.mean(1)
        for row, (count, grid) in enumerate(zip(tokens.counts, tokens.grids, strict=True)):
            if grid is not None:
                own = attention[row, :count].view(grid).mean(0).cpu()
                like = maps[0].shape if maps else own.shape
                maps.append(resize_table(own, like[0] * like[1], (1, *like)).view(like))

    _look(model, samples, [_Looker(layer, note, frozenset({"last_row_attention"}))], progress)
    if not maps:
        raise TokenPruneError("nothing to fit: no sample had an image whose grid of tokens is known")
    prior = AttentionPrior(torch.stack(maps).mean(0), layer, fingerprint(adapter_for(model).decoder))
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
    """Return how many visual tokens each decoder layer can do without, which `fitprune` follows.

    For each share of attention that may be lost, in steps of a fiftieth, those tokens of a layer can go that are both
    among the least attended to by the image and among the least attended to by the text after it, as many of each as
    lose that share; later layers go on with the others. samples, out, progress: see `fit_d2pruner`. Raises
    AlreadyPatchedError for a patched model, and TokenPruneError if no sample has an image.
    """
    decoder = adapter_for(model).decoder
    layers = len(decoder.layers)
    found: list[list[Tensor]] = []  # of each image, of each layer: `[2, n]`

    def note(tokens: VisualTokens, layer: int) -> None:
        if layer == 1:
            found.extend([] for _ in tokens.counts)
        for one, row, count in zip(found[-len(tokens.counts) :], tokens.head_maxima.cpu(), tokens.counts, strict=True):
            one.append(row[:, :count].double())

    parts = [_Looker(layer, note, frozenset({"head_maxima"})) for layer in range(1, layers)]
    _look(model, samples, parts, progress)
    if not found:
        raise TokenPruneError("nothing to fit: no sample had an image")
    rows = [
        torch.tensor([left_over(one, step / _STEPS) for one in found], dtype=torch.float64, device="cpu")
        .mean(0)
        .float()
        for step in range(_STEPS + 1)
    ]
    recipe = Recipe(torch.stack(rows), 0, fingerprint(decoder))
    if out is not None:
        recipe.save(out)
    return recipe


def left_over(attention: Sequence[Tensor], loss: float) -> list[float]:
    """Return which share of an image's n tokens each layer sees if each may lose `loss` of the attention to them.

    attention: of each layer but the last, float64 `[2, n]`, by the image and by the text.
    """
    count = attention[0].shape[1]
    alive = torch.ones(count, dtype=torch.bool, device="cpu")
    left = [1.0]
    for layer in attention:
        gone = torch.ones(count, dtype=torch.bool, device="cpu")
        for row in layer:
            order = row.masked_fill(~alive, torch.inf).argsort(stable=True)[: int(alive.sum())]
            behind = row[alive].sum() - row[order].cumsum(0)
            number = int((behind >= row.sum() * (1 - loss) - 1e-12).cumprod(0).sum())
            least = torch.zeros(count, dtype=torch.bool, device="cpu")
            least[order[:number]] = True
            gone &= least
        alive = alive & ~gone
        left.append(float(alive.sum()) / count)
    return left


@torch.no_grad()
def _look(
    model: Any, samples: Iterable[dict[str, Any]], parts: Sequence[_Looker], progress: Callable[[int], None] | None
) -> None:
    if is_patched(model):
        raise AlreadyPatchedError("the model is patched: call tokenprune.unpatch(model) before fitting to it")
    layers = len(adapter_for(model).decoder.layers)
    if parts[-1].layer >= layers:
        raise OptionError(f"layer={parts[-1].layer} is out of range: this decoder has {layers} layers")
    with patched(model, _Lookers(tuple(parts)), keep=0.5, guard="off"):
        for done, sample in enumerate(samples, 1):
            model(**sample)
            if progress is not None:
                progress(done)
