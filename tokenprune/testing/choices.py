# SPDX-License-Identifier: Apache-2.0
"""Rules of methods that select visual tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from tokenprune.errors import ConformanceError, TokenPruneError
from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import available_observables, get_observable
from tokenprune.selection.segments import Sizes
from tokenprune.selection.tensors import visual_tokens
from tokenprune.selection.tokens import VisualTokens
from tokenprune.testing.rules import require

_COUNTS = ([24], [24, 17, 9, 1], [13, 30])
_SHARES = (0.04, 0.25, 0.6, 1.0)
_TEXT = 7


@dataclass(frozen=True)
class _Case:
    """Tokens that a method is checked with.

    Args:
        counts: Number of tokens per image.
        keep: Budget of each image.
        observables: Values by observable name.
        text: Text after each image, by observable name.
    """

    counts: list[int]
    keep: list[int]
    observables: dict[str, Any]
    text: dict[str, Tensor]

    def view(self, method: Pruner, carry: Mapping[str, Any]) -> VisualTokens:
        """Return the input of `method`, limited to its declared observables."""
        visible = {
            name: value for name, value in self.observables.items() if get_observable(name).is_declared(method.needs)
        }
        hidden, text = visible.pop("hidden"), self.text if method.query_aware else {}
        text = {name: value for name, value in text.items() if get_observable(f"text.{name}").is_declared(method.needs)}
        return visual_tokens(hidden, self.counts, keep=self.keep, text=text or None, carry=carry, **visible)

    def alone(self, segment: int) -> _Case:
        """Return one segment without padding."""
        count = self.counts[segment]

        def cut(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return {layer: cut(name, item) for layer, item in value.items()}
            if is_dataclass(value) and not isinstance(value, type):  # of tensors `[S]` or `[S, N]`
                parts = {n: x[segment : segment + 1] for n, x in vars(value).items() if isinstance(x, Tensor)}
                return replace(value, **{n: x if x.ndim == 1 else x[:, :count] for n, x in parts.items()})
            if isinstance(value, tuple):
                return tuple(cut(name, item) for item in value)
            item, axis = value[segment : segment + 1], _get_token_axis(name)
            return item.narrow(axis, 0, count) if isinstance(item, Tensor) and axis >= 0 else item

        cut_observables = {name: cut(name, value) for name, value in self.observables.items()}
        row = slice(segment, segment + 1)
        text = {
            name: tuple(item[row] for item in value) if isinstance(value, tuple) else value[row]
            for name, value in self.text.items()
        }
        return _Case([count], [self.keep[segment]], cut_observables, text)

    def mapped(self, change: Callable[[Tensor, int], Tensor]) -> _Case:
        """Return a case with `change(tensor, token_axis)` applied to each float tensor of visual tokens."""

        def apply(value: Any, axis: int) -> Any:
            if isinstance(value, Mapping):
                return {layer: apply(item, axis) for layer, item in value.items()}
            if isinstance(value, tuple):
                return tuple(apply(item, axis) for item in value)
            by_token = isinstance(value, Tensor) and value.is_floating_point() and axis >= 0
            return change(value, axis) if by_token else value

        return replace(
            self, observables={name: apply(value, _get_token_axis(name)) for name, value in self.observables.items()}
        )


def _get_token_axis(name: str) -> int:
    """Return the token axis of an observable; -1 without one."""
    return get_observable(name).axes.find("N")


def check_choices(stages: Sequence[Pruner]) -> None:
    """Raise ConformanceError if the selection of the last stage breaks a rule.

    Earlier stages run first, for the values that they remember.
    """
    method = stages[-1]
    if not method.query_aware:
        _check_query_free(method)
    for case_index, counts in enumerate(_COUNTS):
        for share in _SHARES:
            case = _build_case(stages, counts, share, seed=case_index)
            keep = _select_checked(stages, case, f"of {counts} tokens")
            again = _select_checked(stages, case, f"of {counts} tokens, called again")
            require(torch.equal(keep, again), "it selects other tokens when called again. Use tokens.generator(...).")
            _check_rows(stages, case, keep)
            _check_padding(stages, case, keep)
    case = _build_case(stages, [24, 17, 9, 1], 0.25, seed=7)
    for dtype in (torch.float16, torch.bfloat16):
        _select_checked(stages, case.mapped(partial(_cast, dtype)), f"in {str(dtype).removeprefix('torch.')}")
    _check_nan(stages, case)
    _check_untouched(stages, case)


def _build_case(stages: Sequence[Pruner], counts: list[int], share: float, seed: int) -> _Case:
    method, generator = stages[-1], torch.Generator("cpu").manual_seed(seed)
    needs = frozenset().union(*(stage.needs for stage in stages))
    layers = list(dict.fromkeys(layer for stage in stages for layer in stage.encoder_layers))
    sizes = Sizes(tuple(counts), _TEXT, width=40, heads=2)
    observables, text = {}, {}
    for name in available_observables():
        reading = get_observable(name)
        if not reading.is_declared(needs) or (reading.where is ObservedAt.CUT and name != "hidden"):
            continue
        if reading.by_layer:
            observables[name] = {layer: reading.example(sizes, generator) for layer in layers}
        else:
            observables[name] = reading.example(sizes, generator)
        of_text = reading.text_example(sizes, generator)
        if of_text is not None:
            text[reading.text_name] = of_text
    requested = [min(n, max(1, round(share * n))) for n in counts]
    keep = [min(n, max(1, method.resolve_count(n, count))) for n, count in zip(counts, requested, strict=True)]
    return _Case(counts, keep, observables, text)


def _select_checked(stages: Sequence[Pruner], case: _Case, when: str) -> Tensor:
    """Run the stages, check the last selection, and return its kept tokens, bool `[S, N]`."""
    method, carry = stages[-1], cast(Mapping[str, Any], {})
    try:
        with torch.no_grad():
            for stage in stages:
                tokens = case.view(stage, carry)
                selection, carry = stage.select(tokens), tokens.carry
    except TokenPruneError as error:
        raise ConformanceError(f"{when}: {error}") from error
    require(isinstance(selection, Selection), f"select() must return a Selection, not {type(selection).__name__}")
    keep = selection.keep
    fine = isinstance(keep, Tensor) and keep.dtype == torch.bool and keep.shape == tokens.mask.shape
    require(fine, f"{when}: Selection.keep must be bool [S, N] = {list(tokens.mask.shape)}")
    require(not bool((keep & ~tokens.mask).any()), f"{when}: it keeps padding. Use tokens.mask.")
    counts = keep.sum(1).tolist()
    if method.chooses_count:
        fine = all(method.min_tokens <= count <= limit for count, limit in zip(counts, case.counts, strict=True))
        require(fine, f"{when}: it keeps {counts}, but fewer than {method.min_tokens} per image are not allowed")
    else:
        require(counts == case.keep, f"{when}: it keeps {counts}, but its budget is {case.keep}. Use tokens.keep.")
    stated_counts = selection.counts
    same = stated_counts is None or list(stated_counts) == counts
    require(same, f"{when}: Selection.counts is {stated_counts}, but it keeps {counts}")
    if selection.assign is not None:
        _check_merge(method, selection, tokens, when)
    return keep


def _cast(dtype: torch.dtype, x: Tensor, axis: int) -> Tensor:
    return x.to(dtype)


def _check_merge(method: Pruner, selection: Selection, tokens: VisualTokens, when: str) -> None:
    require(method.merges, f"{when}: it merges tokens. Pass merges=True to @register(...).")
    assign, places = selection.assign, torch.arange(tokens.mask.shape[1], device="cpu")
    assert assign is not None  # checked by the caller
    require(assign.dtype == torch.long and assign.shape == tokens.mask.shape, f"{when}: assign must be long [S, N]")
    target = assign.masked_fill(~tokens.mask, -1)
    inside = bool(((target >= -1) & (target < len(places))).all())
    require(
        inside and bool(((target < 0) | selection.keep.gather(1, target.clamp(min=0))).all()),
        f"{when}: assign must contain -1 or the index of a kept token",
    )
    itself = (target == places) | ~selection.keep
    require(bool(itself.all()), f"{when}: a kept token must be assigned to itself")


def _check_rows(stages: Sequence[Pruner], case: _Case, keep: Tensor) -> None:
    for segment, count in enumerate(case.counts):
        alone = _select_checked(stages, case.alone(segment), f"of one image of {count} tokens")
        require(
            torch.equal(alone[0], keep[segment, :count]),
            f"image {segment} of a batch of {case.counts} tokens keeps other tokens than as a single image",
        )


def _check_padding(stages: Sequence[Pruner], case: _Case, keep: Tensor) -> None:
    mask = torch.arange(max(case.counts), device="cpu") < torch.tensor(case.counts, device="cpu")[:, None]

    def filled(value: Tensor, axis: int) -> Tensor:
        shape = [len(mask), *(mask.shape[1] if a == axis else 1 for a in range(1, value.ndim))]
        return value.masked_fill(~mask.view(shape), 1e4)

    other = _select_checked(stages, case.mapped(filled), "with other values at padding")
    require(torch.equal(other, keep), "values at padding change the selection. Use tokens.mask.")


def _check_nan(stages: Sequence[Pruner], case: _Case) -> None:
    def broken(value: Tensor, axis: int) -> Tensor:
        return value.index_fill(axis, torch.tensor([3], device="cpu"), torch.nan)

    _select_checked(stages, case.mapped(broken), "with NaN at a token")


def _check_untouched(stages: Sequence[Pruner], case: _Case) -> None:
    copy = case.mapped(lambda x, axis: x.clone())
    _select_checked(stages, copy, "")
    for name, value in case.observables.items():
        if isinstance(value, Tensor):
            require(torch.equal(value, copy.observables[name]), f"it modifies its input {name}")


def _check_query_free(method: Pruner) -> None:
    """Raise if a method without `query_aware` reads observables that depend on the question."""
    asks = [name for name in sorted(method.needs) if get_observable(name).needs_full_prompt]
    require(not asks, f"it reads {', '.join(asks)}, which depend on the question. Set query_aware to True.")
