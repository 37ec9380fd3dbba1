# SPDX-License-Identifier: Apache-2.0
"""Fit the rate predictor of `dyrate` to a frozen model: no gradient goes through the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

from tokenprune.api import is_patched, patched
from tokenprune.errors import AlreadyPatchedError, OptionError, TokenPruneError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.reduced_cache import get_reduction
from tokenprune.integrations.hf.engine.decode_state import DecodeState
from tokenprune.integrations.hf.families import adapter_for
from tokenprune.methods.decode.dyrate import DyRate
from tokenprune.methods.decode.rate_predictor import RatePredictor
from tokenprune.models.fingerprint import compute_fingerprint

# Weight decay that makes the optimum unique, also where a rate is never the label.
_DECAY = 1e-4


@dataclasses.dataclass
class Fit:
    """Counts of one fit. labels: how many decode steps had each rate as their label; accuracy: of the classifier on
    them, in 0..1."""

    labels: list[int]
    accuracy: float

    def __str__(self) -> str:
        rates = ", ".join(f"{number / len(self.labels):g}: {count}" for number, count in enumerate(self.labels))
        return f"{sum(self.labels)} decode steps; right on {self.accuracy:.1%} of them; steps a rate:\n{rates}"


class FittedRate(NamedTuple):
    """The classifier that `fit_dyrate` fitted, and what the fit saw."""

    predictor: RatePredictor
    fit: Fit

    def __str__(self) -> str:
        return str(self.fit)


def fit_dyrate(
    model: Any,
    samples: Iterable[dict[str, Any]],
    out: str | Path | None = None,
    *,
    keep: float = 0.5,
    layer: int = 3,
    grid: int = 10,
    max_new_tokens: int = 32,
    divergence: float = 0.05,
    progress: Callable[[int], None] | None = None,
) -> FittedRate:
    """Fit the classifier that `dyrate` with rate="predictor" uses, and return it with what the fit saw.

    samples: the model's arguments for prompts with images, as its processor makes them. The model answers each
    greedily, unpruned; the answer is then forced under each rate in turn, from the first decode step on, after a
    prefill cut to `keep`. The label of a step is the highest rate whose next-token distribution is within `divergence`
    (KL, nats, full against pruned) of the full one, or rate 0. The classifier is a multinomial logistic regression on
    the attention masses of each step. Takes `grid` + 1 generations a sample; the same input gives the same file.

    out: file to write. layer, grid: as in `dyrate`. max_new_tokens: longest answer. progress: gets the number of
    samples done. Raises AlreadyPatchedError for a patched model, and TokenPruneError if there is nothing to fit.
    """
    if is_patched(model):
        raise AlreadyPatchedError("the model is patched: call tokenprune.unpatch(model) before fitting to it")
    if not 0 < keep < 1:
        raise OptionError(f"keep={keep!r} must be a share below 1: with keep=1 dyrate prunes nothing")
    if max_new_tokens < 2:
        raise OptionError(f"max_new_tokens={max_new_tokens!r}: the first decode step writes the second token")
    DyRate(layer=layer, grid=grid)  # raises for bad values
    methods = [
        DyRate(rate="schedule", schedule=(number / grid,), layer=layer, grid=grid, k_min=0.0) for number in range(grid)
    ]
    features, labels = [], []
    for done, sample in enumerate(samples, 1):
        masses, classes = _label(model, sample, methods, keep, max_new_tokens, divergence)
        if len(classes):
            features.append(masses)
            labels.append(classes)
        if progress is not None:
            progress(done)
    if not labels:
        raise TokenPruneError(
            "nothing to fit: no sample had an image that keep cuts and an answer of two tokens or more; ask for "
            "longer answers, for example a description"
        )
    x, y = torch.cat(features).flatten(1).double(), torch.cat(labels)
    weight, bias = _regress(x, y, grid)
    predictor = RatePredictor(weight.float(), bias.float(), layer, compute_fingerprint(adapter_for(model).decoder))
    if out is not None:
        predictor.save(out)
    right = (x @ weight.T + bias).argmax(1) == y
    return FittedRate(predictor, Fit(torch.bincount(y, minlength=grid).tolist(), float(right.double().mean())))


@torch.no_grad()
def _label(
    model: Any, sample: dict[str, Any], methods: list[DyRate], keep: float, tokens: int, divergence: float
) -> tuple[Tensor, Tensor]:
    """Return the masses (float32 `[n, H, 4]`) and the labels (long `[n]`) of the decode steps of one sample."""
    options = greedy(tokens)
    none = torch.zeros(0, dtype=torch.long, device="cpu")
    full = model.generate(**sample, **options)
    if len(full.logits) < 2:
        return none, none
    answer = full.sequences[:, full.sequences.shape[1] - len(full.logits) :]
    wanted = torch.stack(full.logits[1:], 1).float().log_softmax(-1)
    labels = torch.zeros(wanted.shape[:2], dtype=torch.long, device=wanted.device)
    state: DecodeState | None = None
    for number, method in enumerate(methods):
        with patched(model, method, keep=keep, guard="off"):
            forced = model.generate(**sample, **options, logits_processor=[Forced(answer)])
        reduction = get_reduction(getattr(forced, compat.CACHE))
        if reduction is None or not isinstance(reduction.decode, DecodeState):
            return none, none  # no image, or one so small that `keep` keeps all of it
        state = reduction.decode
        got = torch.stack(forced.logits[1:], 1).float().log_softmax(-1)
        near = (wanted.exp() * (wanted - got)).nan_to_num(0.0).sum(-1) <= divergence
        labels[near] = number
    assert state is not None  # there is a method for each rate
    # The layers that are observed keep every token: the masses are the same under each rate.
    rows = (state.start < state.visual).to(labels.device)
    used = rows[:, None] & ~ended(answer, model.generation_config.eos_token_id)
    return state.masses[:, 1:][used.to(state.masses.device)].cpu(), labels[used].cpu()


def greedy(tokens: int) -> dict[str, Any]:
    """Return the arguments of `generate` for an answer of up to so many tokens, with the logits of each."""
    fixed = {"do_sample": False, "num_beams": 1, "output_logits": True, "return_dict_in_generate": True}
    return {"max_new_tokens": tokens, **fixed}


def ended(answer: Tensor, eos: int | list[int] | None) -> Tensor:
    """bool `[B, T - 1]`: at which decode steps a row of `[B, T]` tokens has ended already."""
    ends = torch.tensor([eos] if isinstance(eos, int) else eos or [], dtype=torch.long, device=answer.device)
    return torch.isin(answer, ends).cumsum(1)[:, :-1] > 0


def _regress(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return weight `[classes, F]` and bias `[classes]` of the multinomial logistic regression of y on x."""
    weight = torch.zeros(classes, x.shape[1], dtype=x.dtype, requires_grad=True, device="cpu")
    bias = torch.zeros(classes, dtype=x.dtype, requires_grad=True, device="cpu")
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=500, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        value = value + _DECAY * (weight.square().sum() + bias.square().sum())
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach(), bias.detach()


class Forced(LogitsProcessor):
    """Make `generate` write given tokens `[B, T]`."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, self.step : self.step + 1]
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)
