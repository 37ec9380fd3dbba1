# SPDX-License-Identifier: Apache-2.0
"""Fit the weights of heads of `hawk`, from what a model's own answers lose without each head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.api import is_patched
from tokenprune.errors import AlreadyPatchedError, OptionError, TokenPruneError
from tokenprune.integrations.hf.families import adapter_for
from tokenprune.methods.pre_llm.hawk import Hawk, HeadWeights
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune_bench.calibration.rate_fitting import Forced, ended, greedy


@torch.no_grad()
def fit_hawk(
    model: Any,
    samples: Iterable[dict[str, Any]],
    out: str | Path | None = None,
    *,
    max_new_tokens: int = 16,
    progress: Callable[[int], None] | None = None,
) -> HeadWeights:
    """Return how much each attention head matters to a model's answers, which `hawk` weighs the first layer's heads by.

    The model answers each sample greedily. A head's weight is how much the log-likelihood of that answer falls without
    what the head of this index adds in all layers, mean over the samples, less that of the head whose loss costs least;
    the weights sum to 1. That is our measure: the authors take the accuracy on benchmarks. As many passes as heads.
    samples, out, progress: see `fit_d2pruner`. max_new_tokens: of an answer. Raises AlreadyPatchedError for a patched
    model, OptionError for a decoder that `hawk` cannot act in, and TokenPruneError if there is no sample.
    """
    if is_patched(model):
        raise AlreadyPatchedError("the model is patched: call tokenprune.unpatch(model) before fitting to it")
    if max_new_tokens < 1:
        raise OptionError(f"fitting hawk: max_new_tokens={max_new_tokens} must be an int >= 1")
    decoder = adapter_for(model).decoder
    Hawk().check_model(decoder)
    attention = decoder.layers[0].self_attn
    heads, options = attention.q_proj.out_features // attention.head_dim, greedy(max_new_tokens)
    drops: list[Tensor] = []
    for done, sample in enumerate(samples, 1):
        full = model.generate(**sample, **options)
        answer = full.sequences[:, full.sequences.shape[1] - len(full.logits) :]
        base = _likelihood(full.logits, answer, model.generation_config.eos_token_id)
        without = []
        for head in range(heads):
            with _without(decoder, head):
                forced = model.generate(**sample, **options, logits_processor=[Forced(answer)])
            without.append(_likelihood(forced.logits, answer, model.generation_config.eos_token_id))
        drops.append((base - torch.stack(without, 1)).cpu())
        if progress is not None:
            progress(done)
    if not drops:
        raise TokenPruneError("nothing to fit: there was no sample")
    drop = torch.cat(drops).mean(0)
    weight = drop - drop.min()
    # Where no head matters more than another, all weigh the same.
    weight = weight / weight.sum() if weight.sum() > 0 else torch.full_like(weight, 1 / heads)
    fitted = HeadWeights(weight.float(), 0, compute_fingerprint(decoder))
    if out is not None:
        fitted.save(out)
    return fitted


def _likelihood(logits: tuple[Tensor, ...], answer: Tensor, eos: int | list[int] | None) -> Tensor:
    """float64 `[B]`: the log-likelihood of each row's answer, long `[B, T]`, with its end. logits: T of `[B, V]`."""
    likely = torch.stack(logits, 1).double().log_softmax(-1).gather(2, answer.unsqueeze(2)).squeeze(2)
    over = torch.nn.functional.pad(ended(answer, eos), (1, 0), value=False)
    return likely.masked_fill(over, 0).sum(1)


@contextmanager
def _without(decoder: nn.Module, head: int) -> Iterator[None]:
    """Have no layer of the decoder add what the head of this index found."""

    def silence(projection: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found = given[0].clone()
        found[..., head * size : (head + 1) * size] = 0
        return found, *given[1:]

    hooks = []
    for layer in decoder.layers:  # type: ignore[union-attr]
        attention: Any = getattr(layer, "self_attn", None)
        if hasattr(attention, "o_proj"):
            size = attention.head_dim
            hooks.append(attention.o_proj.register_forward_pre_hook(silence))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
