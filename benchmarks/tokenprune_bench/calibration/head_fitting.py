# SPDX-License-Identifier: Apache-2.0
"""Fit the head weights of `hawk`: the loss of likelihood of a model's own answers without each head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.api import is_patched
from tokenprune.errors import AlreadyPatchedError, OptionError, TokenPruneError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.methods.pre_llm.hawk import Hawk, HeadWeights
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune_bench.calibration.rate_fitting import ForcedTokens, build_greedy_options, mark_ended


@torch.no_grad()
def fit_hawk(
    model: Any,
    samples: Iterable[dict[str, Any]],
    out: str | Path | None = None,
    *,
    max_new_tokens: int = 16,
    progress: Callable[[int], None] | None = None,
) -> HeadWeights:
    """Fit the weight of each attention head, for the first-layer scores of `hawk`.

    The model answers each sample greedily. A head's weight is the mean drop of the answer's log-likelihood if the head
    with this index is silenced in all layers, minus the smallest such drop. The weights sum to 1. The fit runs one pass
    per head and sample.

    Args:
        model: An unpatched model.
        samples: Model arguments of prompts with images, as the processor returns them.
        out: File to write.
        max_new_tokens: Maximum length of an answer.
        progress: Called with the number of finished samples.

    Returns:
        The fitted weights.

    Raises:
        AlreadyPatchedError: If the model is patched.
        OptionError: If `hawk` does not support the decoder.
        TokenPruneError: If there is no sample.

    Differences from the paper:
        - The authors measure benchmark accuracy instead of log-likelihood.
    """
    if is_patched(model):
        raise AlreadyPatchedError("The model is patched. Call tokenprune.unpatch(model) before fitting.")
    if max_new_tokens < 1:
        raise OptionError(f"max_new_tokens={max_new_tokens} is not valid. Pass an int >= 1.")
    decoder = get_adapter(model).decoder
    Hawk().check_model(decoder)
    attention = decoder.layers[0].self_attn
    heads, options = attention.q_proj.out_features // attention.head_dim, build_greedy_options(max_new_tokens)
    drops: list[Tensor] = []
    for done, sample in enumerate(samples, 1):
        full = model.generate(**sample, **options)
        answer = full.sequences[:, full.sequences.shape[1] - len(full.logits) :]
        base = _compute_log_likelihood(full.logits, answer, model.generation_config.eos_token_id)
        without = []
        for head in range(heads):
            with _without(decoder, head):
                forced = model.generate(**sample, **options, logits_processor=[ForcedTokens(answer)])
            without.append(_compute_log_likelihood(forced.logits, answer, model.generation_config.eos_token_id))
        drops.append((base - torch.stack(without, 1)).cpu())
        if progress is not None:
            progress(done)
    if not drops:
        raise TokenPruneError("Cannot fit without samples.")
    drop = torch.cat(drops).mean(0)
    weight = drop - drop.min()
    # If all drops are equal, all heads get the same weight.
    weight = weight / weight.sum() if weight.sum() > 0 else torch.full_like(weight, 1 / heads)
    fitted = HeadWeights(weight.float(), 0, compute_fingerprint(decoder))
    if out is not None:
        fitted.save(out)
    return fitted


def _compute_log_likelihood(logits: tuple[Tensor, ...], answer: Tensor, eos: int | list[int] | None) -> Tensor:
    """Return the log-likelihood of each answer including its end token, float64, shape (batch,).

    Args:
        logits: One (batch, vocabulary) tensor per token.
        answer: Token ids, int64, shape (batch, tokens).
        eos: End token ids.
    """
    likely = torch.stack(logits, 1).double().log_softmax(-1).gather(2, answer.unsqueeze(2)).squeeze(2)
    over = torch.nn.functional.pad(mark_ended(answer, eos), (1, 0), value=False)
    return likely.masked_fill(over, 0).sum(1)


@contextmanager
def _without(decoder: nn.Module, head: int) -> Iterator[None]:
    """Silence the head with this index in all layers."""

    def silence(projection: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = inputs[0].clone()
        outputs[..., head * size : (head + 1) * size] = 0
        return outputs, *inputs[1:]

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
