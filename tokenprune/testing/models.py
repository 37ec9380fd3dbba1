# SPDX-License-Identifier: Apache-2.0
"""Check that pruning is correct on any model: identity, a masked oracle, a decoding step, and unpatching."""

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

_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-8}  # tolerance as a share of the largest logit
_HALF_ROUNDING = 3e-2
_RECURRENT = 10  # tolerance factor for layers that compute a step differently from a prompt
_FORBIDDEN = 1e30  # larger logits are suppressed tokens
_METHOD = "divprune"  # does not read the question, so a longer prompt does not change its selection


@dataclass(frozen=True)
class ModelCheck:
    """Result of `check_model`. Differences are shares of the largest logit.

    Attributes:
        visual_tokens: Visual tokens in all rows.
        kept: Visual tokens kept in all rows.
        oracle: Largest difference from the masked model. None for models with stateful layers, which cannot mask
            tokens.
        step: Largest difference of a decoding step from the longer prompt. None if the unpatched model also differs,
            such as a model with a bidirectional prefix.

    Example:
        >>> from tokenprune.testing import ModelCheck, check_model
        >>> result = check_model(model, inputs, keep=0.25)
        >>> isinstance(result, ModelCheck), result.kept / result.visual_tokens
        (True, 0.25)
        >>> result.oracle < 1e-4 and result.step < 1e-4  # within the rounding of float32
        True
    """

    visual_tokens: int
    kept: int
    oracle: float | None
    step: float | None


@torch.no_grad()
def check_model(model: nn.Module, inputs: Mapping[str, Any], *, keep: float = 0.25) -> ModelCheck:
    """Raise ConformanceError (an AssertionError) unless pruning is correct on `model` for `inputs`.

    The checks are:

    1. Logits with `keep=1.0` are bit-equal to the unpatched model.
    2. Logits of kept tokens equal those of the unpatched model with the dropped tokens masked, within rounding.
    3. A decoding step on the pruned cache equals the longer prompt.
    4. Logits after unpatching are bit-equal to the logits before.

    Retrieval models (ColPali) compare vectors, and skip the third check.

    Args:
        model: A model in evaluation mode with sdpa or eager attention. Use float32 for small tolerances.
        inputs: Processor outputs for one or several prompts with images, on the device of the model.
        keep: Share of visual tokens to keep.

    Returns:
        Token counts and largest differences.

    Raises:
        ConformanceError: If a check fails.
        OptionError: If the model is in training mode.
        TokenPruneError: If `tokenprune.patch` does not support the model.

    Examples:
        >>> from tokenprune.testing import check_model
        >>> result = check_model(model, inputs, keep=0.5)
        >>> result.visual_tokens, result.kept
        (256, 128)
    """
    from tokenprune.integrations.hf.families import get_adapter  # imports transformers, which method checks do not need

    if model.training:
        raise OptionError("The model is in training mode. Call model.eval() first.")
    adapter, oracle = get_adapter(model), None
    unpruned = _get_logits(model(**inputs))
    require(torch.equal(_get_logits(model(**inputs)), unpruned), "two forwards of the unpatched model differ")
    limit = _ROUNDING.get(unpruned.dtype, _HALF_ROUNDING)
    steps = not adapter.family.vectors and _step_difference(model, inputs) <= limit
    with patched(model, _METHOD, keep=1.0):
        require(torch.equal(_get_logits(model(**inputs)), unpruned), "keep=1.0 changes logits")
    with patched(model, _METHOD, keep=keep, record=True):
        pruned, statistics = _get_logits(model(**inputs)), stats(model)
        require(statistics.visual_tokens_in > 0, "no visual tokens found. Pass inputs with images.")
        require(bool(statistics.cuts), f"keep={keep} dropped none of {statistics.visual_tokens_in} visual tokens")
        step = _step_difference(model, inputs) if steps else None
    require(torch.equal(_get_logits(model(**inputs)), unpruned), "after unpatch the logits differ from before")
    tolerance_factor = _RECURRENT if adapter.stateful else 1
    require(
        step is None or step <= tolerance_factor * limit,
        f"a step on the pruned cache differs from the longer prompt by {step}",
    )
    kept = torch.zeros(unpruned.shape[:2], dtype=torch.bool, device=unpruned.device)
    for row, positions in enumerate(statistics.cuts[0].kept):
        kept[row, positions] = True
    if not adapter.stateful:
        with _mask_dropped(adapter.decoder.layers, kept):
            expected = _get_logits(model(**inputs))
        oracle = _compute_largest_difference(pruned[kept], expected[kept])
        require(
            oracle <= limit,
            f"logits of kept tokens differ from the masked model by {oracle}",
        )
    require(not bool(pruned[kept].isnan().any()), "logits of kept tokens are NaN")
    return ModelCheck(statistics.visual_tokens_in, statistics.visual_tokens_out, oracle, step)


def _get_logits(output: Any) -> Tensor:
    """Return the logits of an output, or the vectors of a retrieval model."""
    values: Tensor = output.embeddings if hasattr(output, "embeddings") else output.logits
    return values


def _compute_largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value or of 1; infinity for NaN.

    Logits of suppressed tokens are ignored.
    """
    actual, expected = actual.float(), expected.float()
    is_allowed = expected.abs() < _FORBIDDEN
    scale = expected[is_allowed].abs().max().clamp(min=1.0)
    return float(((actual - expected)[is_allowed].abs() / scale).nan_to_num(nan=float("inf")).max())


def _step_difference(model: Any, inputs: Mapping[str, Any]) -> float:
    """Return the difference of a decoding step from a forward of the longer prompt, at the second generated token."""
    greedy = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    out = model.generate(**inputs, **greedy, output_logits=True, return_dict_in_generate=True)
    first, shape = out.sequences[:, -2:-1], inputs["input_ids"].shape
    longer = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == shape:
            added = {"input_ids": first, "attention_mask": torch.ones_like(first)}.get(name, torch.zeros_like(first))
            longer[name] = torch.cat([value, added.to(value.dtype)], 1)
    return _compute_largest_difference(out.logits[1], _get_logits(model(**longer))[:, -1])


@contextmanager
def _mask_dropped(layers: Sequence[nn.Module], kept: Tensor) -> Iterator[None]:
    """Mask tokens outside of `kept` (bool `[B, L]`) in all layers. No other token attends to a masked token."""
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
            'check_model needs 4-D attention masks. Load the model with attn_implementation="sdpa" or "eager".'
        )
    if mask is None:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=kept.device).tril()
    is_dropped = ~kept[:, None, None] & ~torch.eye(length, dtype=torch.bool, device=kept.device)
    hidden = (
        mask & ~is_dropped if mask.dtype == torch.bool else mask.masked_fill(is_dropped, torch.finfo(mask.dtype).min)
    )
    if (index := names.index("attention_mask")) < len(args):
        return (*args[:index], hidden, *args[index + 1 :]), kwargs
    return args, kwargs | {"attention_mask": hidden}  # recorded layer arguments are positional
