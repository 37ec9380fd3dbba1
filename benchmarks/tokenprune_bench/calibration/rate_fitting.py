# SPDX-License-Identifier: Apache-2.0
"""Fit the rate predictor of `dyrate` to a frozen model, without gradients of the model."""

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
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.methods.decode.dyrate import DyRate
from tokenprune.methods.decode.rate_predictor import RatePredictor
from tokenprune.models.fingerprint import compute_fingerprint

# The weight decay makes the optimum unique, also if a rate is never the label.
_DECAY = 1e-4


@dataclasses.dataclass
class Fit:
    """Statistics of a fit.

    Attributes:
        labels: Number of decode steps per rate label.
        accuracy: Accuracy of the classifier on these steps, in [0, 1].
    """

    labels: list[int]
    accuracy: float

    def __str__(self) -> str:
        rates = ", ".join(f"{index / len(self.labels):g}: {count}" for index, count in enumerate(self.labels))
        return f"{sum(self.labels)} decode steps; {self.accuracy:.1%} correct; steps per rate:\n{rates}"


class FittedRate(NamedTuple):
    """The classifier fitted by `fit_dyrate`, and the statistics of the fit."""

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
    """Fit the classifier of `dyrate` with rate="predictor".

    The model answers each sample greedily, unpruned. The answer is then forced under each rate, from the first decode
    step on, after a prefill cut to `keep`. The label of a step is the highest rate with a next-token distribution
    within `divergence` of the unpruned one, or 0. The classifier is a multinomial logistic regression on the attention
    masses of each step. The fit takes `grid` + 1 generations per sample and is deterministic.

    Args:
        model: An unpatched model.
        samples: Model arguments of prompts with images, as the processor returns them.
        out: File to write.
        keep: Share of the visual tokens to keep in prefill.
        layer: As in `dyrate`.
        grid: As in `dyrate`.
        max_new_tokens: Maximum length of an answer.
        divergence: Largest KL divergence (nats, unpruned against pruned).
        progress: Called with the number of finished samples.

    Returns:
        The classifier and the statistics of the fit.

    Raises:
        AlreadyPatchedError: If the model is patched.
        TokenPruneError: If no sample has an image that `keep` cuts and an answer of two tokens.
    """
    if is_patched(model):
        raise AlreadyPatchedError("The model is patched. Call tokenprune.unpatch(model) before fitting.")
    if not 0 < keep < 1:
        raise OptionError(f"keep={keep!r} is not valid. Pass a share between 0 and 1.")
    if max_new_tokens < 2:
        raise OptionError(f"max_new_tokens={max_new_tokens!r} is too small. Pass at least 2.")
    DyRate(layer=layer, grid=grid)  # raises for bad values
    methods = [
        DyRate(rate="schedule", schedule=(index / grid,), layer=layer, grid=grid, k_min=0.0) for index in range(grid)
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
            "Cannot fit: no sample has an image that keep cuts and an answer of two or more tokens. Ask for longer "
            "answers, such as a description."
        )
    x, y = torch.cat(features).flatten(1).double(), torch.cat(labels)
    weight, bias = _regress(x, y, grid)
    predictor = RatePredictor(weight.float(), bias.float(), layer, compute_fingerprint(get_adapter(model).decoder))
    if out is not None:
        predictor.save(out)
    right = (x @ weight.T + bias).argmax(1) == y
    return FittedRate(predictor, Fit(torch.bincount(y, minlength=grid).tolist(), float(right.double().mean())))


@torch.no_grad()
def _label(
    model: Any, sample: dict[str, Any], methods: list[DyRate], keep: float, tokens: int, divergence: float
) -> tuple[Tensor, Tensor]:
    """Return attention masses, float32, shape (steps, heads, 4), and labels, int64, shape (steps,), of one sample."""
    options = build_greedy_options(tokens)
    none = torch.zeros(0, dtype=torch.long, device="cpu")
    full = model.generate(**sample, **options)
    if len(full.logits) < 2:
        return none, none
    answer = full.sequences[:, full.sequences.shape[1] - len(full.logits) :]
    reference = torch.stack(full.logits[1:], 1).float().log_softmax(-1)
    labels = torch.zeros(reference.shape[:2], dtype=torch.long, device=reference.device)
    state: DecodeState | None = None
    for index, method in enumerate(methods):
        with patched(model, method, keep=keep, guard="off"):
            forced = model.generate(**sample, **options, logits_processor=[ForcedTokens(answer)])
        reduction = get_reduction(getattr(forced, compat.CACHE))
        if reduction is None or not isinstance(reduction.decode, DecodeState):
            return none, none  # no image, or `keep` keeps all of its tokens
        state = reduction.decode
        pruned = torch.stack(forced.logits[1:], 1).float().log_softmax(-1)
        is_close = (reference.exp() * (reference - pruned)).nan_to_num(0.0).sum(-1) <= divergence
        labels[is_close] = index
    assert state is not None  # there is a method for each rate
    # The observed layers keep all tokens, so the masses are equal under each rate.
    rows = (state.start < state.visual).to(labels.device)
    used = rows[:, None] & ~mark_ended(answer, model.generation_config.eos_token_id)
    return state.masses[:, 1:][used.to(state.masses.device)].cpu(), labels[used].cpu()


def build_greedy_options(tokens: int) -> dict[str, Any]:
    """Return `generate` arguments for a greedy answer of at most `tokens` tokens, with logits."""
    fixed = {"do_sample": False, "num_beams": 1, "output_logits": True, "return_dict_in_generate": True}
    return {"max_new_tokens": tokens, **fixed}


def mark_ended(answer: Tensor, eos: int | list[int] | None) -> Tensor:
    """Return a mask of decode steps after the end of a row, bool, shape (batch, tokens - 1)."""
    ends = torch.tensor([eos] if isinstance(eos, int) else eos or [], dtype=torch.long, device=answer.device)
    return torch.isin(answer, ends).cumsum(1)[:, :-1] > 0


def _regress(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Fit a multinomial logistic regression. Return weights (classes, features) and biases (classes,)."""
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


class ForcedTokens(LogitsProcessor):
    """Make `generate` write given tokens, shape (batch, tokens)."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, self.step : self.step + 1]
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)
