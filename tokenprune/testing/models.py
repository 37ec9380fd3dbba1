# SPDX-License-Identifier: Apache-2.0
"""Check that pruning is right on a model that no table knows: identity, a masked oracle, a step on the cache, undo."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.api import patched, stats
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.testing.rules import require

_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest logit; half precision takes more
_HALF = 3e-2
_RECURRENT = 10  # times as much, where layers compute a step in another way than a prompt
_FORBIDDEN = 1e30  # logits of words that a model forbids itself are larger
_METHOD = "divprune"  # reads no question, so that a longer prompt leaves its choice alone


@dataclass(frozen=True)
class ModelCheck:
    """The result of `check_model`: the visual tokens of all rows, those kept, and the largest differences of logits.

    Differences are shares of the largest logit. oracle: from the masked model; None where a layer carries a state,
    which no mask takes back. step: of a step on the pruned cache from the longer prompt; None where the unpatched model
    itself writes another token than it reads, as with a prefix that sees both ways.
    """

    visual_tokens: int
    kept: int
    oracle: float | None
    step: float | None


@torch.no_grad()
def check_model(model: nn.Module, inputs: Mapping[str, Any], *, keep: float = 0.25) -> ModelCheck:
    """Raise ConformanceError, which is an AssertionError, unless pruning on `model` is right for these inputs.

    inputs: what the model's processor returns for one prompt or several, with images, on the model's device. keep: the
    share of visual tokens that stay. The model takes sdpa or eager attention, and float32 for a sharp answer.

    Four checks. `keep=1.0` gives the same logits to the last bit. With less, logits at tokens that stay are those of
    the unpatched model in which nothing attends to the others, within rounding. A step on the pruned cache gives what
    the longer prompt gives. Unpatched, the model is what it was. Of ColPali and its kin vectors are compared, and no
    step.

    Raises OptionError for a model in training, and what `tokenprune.patch` raises for one that it refuses.
    """
    from tokenprune.integrations.hf.families import adapter_for  # transformers, which checks of methods do not need

    if model.training:
        raise OptionError("check_model compares forwards of a model in evaluation: call model.eval()")
    adapter, oracle = adapter_for(model), None
    unpruned = _said(model(**inputs))
    require(torch.equal(_said(model(**inputs)), unpruned), "two forwards of the unpatched model differ")
    limit = _ROUNDING.get(unpruned.dtype, _HALF)
    steps = not adapter.family.vectors and _step(model, inputs) <= limit
    with patched(model, _METHOD, keep=1.0):
        require(torch.equal(_said(model(**inputs)), unpruned), "keep=1.0 changes logits")
    with patched(model, _METHOD, keep=keep, record=True):
        pruned, statistics = _said(model(**inputs)), stats(model)
        require(statistics.visual_tokens_in > 0, "no visual token was found: are there images among the inputs?")
        require(bool(statistics.cuts), f"keep={keep} removed none of {statistics.visual_tokens_in} visual tokens")
        step = _step(model, inputs) if steps else None
    require(torch.equal(_said(model(**inputs)), unpruned), "after unpatch the model gives other logits than before")
    tolerance_factor = _RECURRENT if adapter.stateful else 1
    require(
        step is None or step <= tolerance_factor * limit,
        f"a step on the pruned cache differs from the longer prompt by {step}",
    )
    kept = torch.zeros(unpruned.shape[:2], dtype=torch.bool, device=unpruned.device)
    for row, positions in enumerate(statistics.cuts[0].kept):
        kept[row, positions] = True
    if not adapter.stateful:
        with _masked(adapter.decoder.layers, kept):
            expected = _said(model(**inputs))
        oracle = _apart(pruned[kept], expected[kept])
        require(
            oracle <= limit,
            f"tokens that stay differ from the masked model by {oracle}",
        )
    require(not bool(pruned[kept].isnan().any()), "logits of tokens that stay are NaN")
    return ModelCheck(statistics.visual_tokens_in, statistics.visual_tokens_out, oracle, step)


def _said(output: Any) -> Tensor:
    """Return the logits of an output, or the vectors of a model that retrieves."""
    values: Tensor = output.embeddings if hasattr(output, "embeddings") else output.logits
    return values


def _apart(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a share of the largest value; infinity for NaN."""
    actual, expected = actual.float(), expected.float()
    is_allowed = expected.abs() < _FORBIDDEN
    scale = expected[is_allowed].abs().max().clamp(min=1.0)
    return float(((actual - expected)[is_allowed].abs() / scale).nan_to_num(nan=float("inf")).max())


def _step(model: Any, inputs: Mapping[str, Any]) -> float:
    """Return how far the second token of `generate` is from a forward of the prompt with the first one after it."""
    greedy = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    out = model.generate(**inputs, **greedy, output_logits=True, return_dict_in_generate=True)
    first, shape = out.sequences[:, -2:-1], inputs["input_ids"].shape
    longer = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == shape:
            added = {"input_ids": first, "attention_mask": torch.ones_like(first)}.get(name, torch.zeros_like(first))
            longer[name] = torch.cat([value, added.to(value.dtype)], 1)
    return _apart(out.logits[1], _said(model(**longer))[:, -1])


@contextmanager
def _masked(layers: Sequence[nn.Module], kept: Tensor) -> Iterator[None]:
    """Within, nothing attends to tokens that are not in `kept`, bool `[B, L]`, but they to themselves."""
    hooks = []
    for layer in layers:
        names = list(inspect.signature(layer.forward).parameters)
        hooks.append(layer.register_forward_pre_hook(partial(_mask, kept, names), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mask(
    kept: Tensor, names: Sequence[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    arguments = dict(zip(names, args, strict=False)) | kwargs
    mask, length = arguments.get("attention_mask"), kept.shape[1]
    if "attention_mask" not in names or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 4)):
        raise UnsupportedSetupError(
            "the masked model needs a mask of pairs in each decoder layer: load the model with "
            'attn_implementation="sdpa" or "eager"'
        )
    if mask is None:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=kept.device).tril()
    is_dropped = ~kept[:, None, None] & ~torch.eye(length, dtype=torch.bool, device=kept.device)
    hidden = mask & ~is_dropped if mask.dtype == torch.bool else mask.masked_fill(is_dropped, torch.finfo(mask.dtype).min)
    if (index := names.index("attention_mask")) < len(args):
        return (*args[:index], hidden, *args[index + 1 :]), kwargs
    return args, kwargs | {"attention_mask": hidden}  # what is recorded of a layer is found by place
