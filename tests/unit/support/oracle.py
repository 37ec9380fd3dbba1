# SPDX-License-Identifier: Apache-2.0
"""The masked oracle: an unpatched model computes the output of a pruned model, independently of the library.

No tokens are removed. From the layer of a cut on, the columns of dropped tokens are masked for every query, in prefill
and in every decode step (a cut made at a decode step masks from that step on). All forms of masks are supported.
Merging cuts also replace each kept token by the mean of its sources before that layer. The kept tokens come from
`stats(model).cuts` of the patched run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from hooks import removed_after
from tokenprune.integrations.hf import compat
from zoo import Family


def survivors(cut: Any, length: int) -> Tensor:
    """Return a bool mask `[B, length]` of the positions that survive a cut."""
    alive = torch.zeros(len(cut.kept), length, dtype=torch.bool)
    for row, positions in enumerate(cut.kept):
        alive[row, positions] = True
    return alive


@contextmanager
def reduced(family: Family, model: PreTrainedModel, cuts: Sequence[Any], length: int) -> Iterator[PreTrainedModel]:
    """Within this context, the unpatched `model` computes its output after `cuts` of a prompt of `length` tokens.

    A batch larger than the cut batch contains beams: each row is repeated, with its copies side by side.
    """
    decoder = model.get_submodule(family.decoder)
    handles = [decoder.register_forward_pre_hook(lambda m, a, k: _merge_deepstack(cuts, a, k), with_kwargs=True)]
    entered, by_ids = [0], [False]

    def enter_decoder(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        # Gemma 4's last layers use `logits_to_keep`.
        kwargs = {name: value for name, value in kwargs.items() if name != "logits_to_keep"}
        cache = compat.get_cache(kwargs)
        entered[0] = 0 if cache is None else int(cache.get_seq_length())
        # For a decoder that embeds ids, tokens are merged at the input of its first layer.
        by_ids[0] = kwargs.get("inputs_embeds") is None
        if not entered[0] and not by_ids[0]:
            for cut in cuts:
                if cut.layer == 0 and cut.sources is not None:
                    kwargs = kwargs | {
                        "inputs_embeds": merge_sources(kwargs["inputs_embeds"], cut.sources, cut.weights)
                    }
        return args, kwargs

    handles.append(decoder.register_forward_pre_hook(enter_decoder, with_kwargs=True))
    for index, layer in enumerate(decoder.layers):
        before = [cut for cut in cuts if cut.layer <= index]
        if not before:
            continue
        merges = [cut for cut in before if cut.layer == index and cut.sources is not None]

        def enter(module: Any, args: tuple, kwargs: dict, index=index, before=before, merges=merges) -> tuple:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            cache = compat.get_cache(kwargs)
            past = entered[0]
            step = past + hidden.shape[-2] - length if past else 0
            # Among the cuts of one method at one layer, the latest determines the kept tokens.
            active = {(cut.layer, cut.method): cut for cut in before if cut.step <= step}
            alive = torch.stack([survivors(cut, length) for cut in active.values()]).all(0)
            if not past and (index or by_ids[0]):  # only the prompt has tokens to merge
                for cut in merges:
                    hidden = merge_sources(hidden, cut.sources, cut.weights)
            mask = mask_dropped(kwargs.get("attention_mask"), alive, hidden, cache, index, decoder.config, past)
            return (hidden, *args[1:]), kwargs | {"attention_mask": mask}

        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
    with removed_after(handles):
        yield model


def seen_before(cache: Any, layer: int) -> int:
    """Return the number of tokens that a layer received in earlier calls, including those a sliding window dropped."""
    if cache is None or layer >= len(cache.layers):
        return 0
    return int(cache.layers[layer].get_seq_length())


def mask_dropped(
    mask: Tensor | None, alive: Tensor, hidden: Tensor, cache: Any, layer: int, config: Any, past: int | None = None
) -> Tensor:
    """Return a 4-D mask like `mask` that also masks the columns of dropped tokens.

    past: number of tokens of earlier calls, for layers without a cache.
    """
    batch, queries = hidden.shape[-3:-1]
    past = seen_before(cache, layer) if past is None else past
    assert mask is None or mask.ndim == 4, "the oracle supports only the masks of sdpa and eager attention, and None"
    num_cached = 0
    if past and mask is None:
        # A layer that shares keys with another layer lacks a cache, or its cache lacks keys (transformers 5.23). A
        # quantized cache stores only its latest keys in full precision.
        layer_cache = cache.layers[layer] if layer < len(cache.layers) else None
        stored = None if hasattr(layer_cache, "_quantized_keys") else getattr(layer_cache, "keys", None)
        num_cached = past if stored is None else stored.shape[-2]
    keys = queries + num_cached if mask is None else mask.shape[-1]
    alive = alive.repeat_interleave(batch // alive.shape[0], dim=0)
    alive = torch.cat([alive, alive.new_ones(batch, past + queries - alive.shape[1])], 1)  # generated tokens
    dropped = ~alive[:, None, None, past + queries - keys :]
    diagonal = torch.arange(queries)[:, None] + (keys - queries) == torch.arange(keys)
    # A dropped token still attends to itself, because a row without any column would be NaN.
    dropped = dropped & ~diagonal
    if mask is None:
        causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        allowed = causal & ~dropped
        if config._attn_implementation == "sdpa":
            return allowed
        return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    if mask.dtype == torch.bool:
        return mask & ~dropped
    return mask.masked_fill(dropped, torch.finfo(mask.dtype).min)


def merge_sources(
    hidden: Tensor, sources: list[dict[int, list[int]]], weights: list[dict[int, list[float]]] | None = None
) -> Tensor:
    out = hidden.clone()
    for row, groups in enumerate(sources):
        for target, members in groups.items():
            weight = torch.ones(len(members)) if weights is None else torch.tensor(weights[row][target])
            out[row, target] = (hidden[row, members] * weight[:, None]).sum(0) / weight.sum()
    return out


def _merge_deepstack(cuts: Sequence[Any], args: tuple, kwargs: dict) -> tuple:
    """Merge the features that the decoder adds after its first layers, by the cuts made before that."""
    mask, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if mask is not None and features:
        changed = []
        for layer, feature in enumerate(features):
            dense = feature.new_zeros(*mask.shape, feature.shape[-1])
            dense[mask] = feature
            for cut in cuts:
                if cut.sources is not None and cut.layer <= layer:
                    dense = merge_sources(dense, cut.sources, cut.weights)
            changed.append(dense[mask])
        kwargs = kwargs | {"deepstack_visual_embeds": changed}
    if kwargs.get("deepstack_features"):
        # These features are added before their layer, so a cut at that layer merges them in the hidden states.
        mask, changed = kwargs["vision_mask"].squeeze(-1), {}
        for layer, feature in kwargs["deepstack_features"].items():
            dense = feature.new_zeros(*mask.shape, feature.shape[-1])
            dense[mask] = feature
            for cut in cuts:
                if cut.sources is not None and (cut.layer < layer or cut.layer == 0):
                    dense = merge_sources(dense, cut.sources, cut.weights)
            changed[layer] = dense[mask]
        kwargs = kwargs | {"deepstack_features": changed}
    return args, kwargs


class Force(LogitsProcessor):
    """Makes `generate` write given tokens; `output_logits` still shows the logits of the model."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, self.step : self.step + 1]
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


@torch.no_grad()
def generate_logits(
    model: PreTrainedModel, inputs: dict, steps: int, tokens: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor, Any]:
    """Return the logits `[B, steps, V]`, the written tokens, and the output. `tokens` forces the written tokens."""
    extra = {} if tokens is None else {"logits_processor": [Force(tokens)]}
    out = model.generate(
        **inputs, max_new_tokens=steps, output_logits=True, return_dict_in_generate=True, **extra, **kwargs
    )
    return torch.stack(out.logits, 1), out.sequences[:, -steps:], out


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Check equality within `tolerance` times the largest logit, since the zoo's weights and logits are large. Logits
    of forbidden words, which equal the dtype's minimum, must match and do not count for the scale."""
    forbidden = expected == torch.finfo(expected.dtype).min
    assert torch.equal(actual == torch.finfo(actual.dtype).min, forbidden)
    actual, expected = actual.masked_fill(forbidden, 0), expected.masked_fill(forbidden, 0)
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=0)
