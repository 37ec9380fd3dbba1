# SPDX-License-Identifier: Apache-2.0
"""Rules for methods that choose among visual tokens."""

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
from tokenprune.selection.tokens import VisualTokens
from tokenprune.testing.rules import require
from tokenprune.testing.view import visual_tokens

_COUNTS = ([24], [24, 17, 9, 1], [13, 30])
_SHARES = (0.04, 0.25, 0.6, 1.0)
_TEXT = 7


@dataclass(frozen=True)
class _Case:
    """Tokens that a method is tried on. given: observables by name; text: those of the text after each image."""

    counts: list[int]
    keep: list[int]
    given: dict[str, Any]
    text: dict[str, Tensor]

    def view(self, method: Pruner, carry: Mapping[str, Any]) -> VisualTokens:
        """Return what `method` may see, of what it declared. carry: what earlier stages remember."""
        given = {name: one for name, one in self.given.items() if get_observable(name).is_declared(method.needs)}
        hidden, text = given.pop("hidden"), self.text if method.query_aware else {}
        text = {name: one for name, one in text.items() if get_observable(f"text.{name}").is_declared(method.needs)}
        return visual_tokens(hidden, self.counts, keep=self.keep, text=text or None, carry=carry, **given)

    def alone(self, segment: int) -> _Case:
        """Return one segment without its padding."""
        count = self.counts[segment]

        def cut(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return {layer: cut(name, one) for layer, one in value.items()}
            if is_dataclass(value) and not isinstance(value, type):  # of tensors `[S]` or `[S, N]`
                parts = {n: x[segment : segment + 1] for n, x in vars(value).items() if isinstance(x, Tensor)}
                return replace(value, **{n: x if x.ndim == 1 else x[:, :count] for n, x in parts.items()})
            if isinstance(value, tuple):
                return tuple(cut(name, one) for one in value)
            one, axis = value[segment : segment + 1], _axis(name)
            return one.narrow(axis, 0, count) if isinstance(one, Tensor) and axis >= 0 else one

        given = {name: cut(name, value) for name, value in self.given.items()}
        own = slice(segment, segment + 1)
        text = {
            name: tuple(one[own] for one in value) if isinstance(value, tuple) else value[own]
            for name, value in self.text.items()
        }
        return _Case([count], [self.keep[segment]], given, text)

    def mapped(self, change: Callable[[Tensor, int], Tensor]) -> _Case:
        """Return the case with each float tensor of visual tokens changed. change: of it, and its axis of tokens."""

        def of(value: Any, axis: int) -> Any:
            if isinstance(value, Mapping):
                return {layer: of(one, axis) for layer, one in value.items()}
            if isinstance(value, tuple):
                return tuple(of(one, axis) for one in value)
            by_token = isinstance(value, Tensor) and value.is_floating_point() and axis >= 0
            return change(value, axis) if by_token else value

        return replace(self, given={name: of(value, _axis(name)) for name, value in self.given.items()})


def _axis(name: str) -> int:
    """Return which axis of an observable is that of the visual tokens; -1 where it has none."""
    return get_observable(name).axes.find("N")


def check_choices(stages: Sequence[Pruner]) -> None:
    """Raise ConformanceError if what the last of a method's `stages` chooses among visual tokens breaks a rule; those
    before it are asked first, for what they remember."""
    method = stages[-1]
    if not method.query_aware:
        _check_blind(method)
    for number, counts in enumerate(_COUNTS):
        for share in _SHARES:
            case = _case(stages, counts, share, seed=number)
            keep = _kept(stages, case, f"of {counts} tokens")
            again = _kept(stages, case, f"of {counts} tokens, the second time")
            require(torch.equal(keep, again), "it chooses other tokens the second time: draw by tokens.generator(...)")
            _check_rows(stages, case, keep)
            _check_padding(stages, case, keep)
    case = _case(stages, [24, 17, 9, 1], 0.25, seed=7)
    for dtype in (torch.float16, torch.bfloat16):
        _kept(stages, case.mapped(partial(_to, dtype)), f"in {str(dtype).removeprefix('torch.')}")
    _check_nan(stages, case)
    _check_untouched(stages, case)


def _case(stages: Sequence[Pruner], counts: list[int], share: float, seed: int) -> _Case:
    method, generator = stages[-1], torch.Generator("cpu").manual_seed(seed)
    needs = frozenset().union(*(stage.needs for stage in stages))
    layers = list(dict.fromkeys(layer for stage in stages for layer in stage.encoder_layers))
    sizes = Sizes(tuple(counts), _TEXT, width=40, heads=2)
    given, text = {}, {}
    for name in available_observables():
        seen = get_observable(name)
        if not seen.is_declared(needs) or (seen.where is ObservedAt.CUT and name != "hidden"):
            continue
        if seen.by_layer:
            given[name] = {layer: seen.example(sizes, generator) for layer in layers}
        else:
            given[name] = seen.example(sizes, generator)
        of_text = seen.text_example(sizes, generator)
        if of_text is not None:
            text[seen.text_name] = of_text
    wanted = [min(n, max(1, round(share * n))) for n in counts]
    keep = [min(n, max(1, method.resolve_count(n, one))) for n, one in zip(counts, wanted, strict=True)]
    return _Case(counts, keep, given, text)


def _kept(stages: Sequence[Pruner], case: _Case, when: str) -> Tensor:
    """Return what a method keeps, bool `[S, N]`, checked."""
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
    require(not bool((keep & ~tokens.mask).any()), f"{when}: it keeps padding; look at tokens.mask")
    counts = keep.sum(1).tolist()
    if method.chooses_count:
        fine = all(method.min_tokens <= count <= most for count, most in zip(counts, case.counts, strict=True))
        require(fine, f"{when} it keeps {counts}, and fewer than {method.min_tokens} of an image is not allowed")
    else:
        require(counts == case.keep, f"{when} it keeps {counts}, and its budget is {case.keep}; look at tokens.keep")
    said = selection.counts
    require(said is None or list(said) == counts, f"{when}: Selection.counts says {said}, and it keeps {counts}")
    if selection.assign is not None:
        _check_merge(method, selection, tokens, when)
    return keep


def _to(dtype: torch.dtype, x: Tensor, axis: int) -> Tensor:
    return x.to(dtype)


def _check_merge(method: Pruner, selection: Selection, tokens: VisualTokens, when: str) -> None:
    require(method.merges, f"{when}: it merges tokens; say merges=True in @register(...)")
    assign, places = selection.assign, torch.arange(tokens.mask.shape[1], device="cpu")
    assert assign is not None  # the caller looks
    require(assign.dtype == torch.long and assign.shape == tokens.mask.shape, f"{when}: assign must be long [S, N]")
    target = assign.masked_fill(~tokens.mask, -1)
    inside = bool(((target >= -1) & (target < len(places))).all())
    require(
        inside and bool(((target < 0) | selection.keep.gather(1, target.clamp(min=0))).all()),
        f"{when}: assign must hold -1 or the index of a token that is kept",
    )
    itself = (target == places) | ~selection.keep
    require(bool(itself.all()), f"{when}: a token that is kept must be assigned to itself")


def _check_rows(stages: Sequence[Pruner], case: _Case, keep: Tensor) -> None:
    for segment, count in enumerate(case.counts):
        alone = _kept(stages, case.alone(segment), f"of one image of {count} tokens")
        require(
            torch.equal(alone[0], keep[segment, :count]),
            f"image {segment} of a batch of {case.counts} tokens keeps other tokens than alone",
        )


def _check_padding(stages: Sequence[Pruner], case: _Case, keep: Tensor) -> None:
    mask = torch.arange(max(case.counts), device="cpu") < torch.tensor(case.counts, device="cpu")[:, None]

    def filled(value: Tensor, axis: int) -> Tensor:
        shape = [len(mask), *(mask.shape[1] if a == axis else 1 for a in range(1, value.ndim))]
        return value.masked_fill(~mask.view(shape), 1e4)

    other = _kept(stages, case.mapped(filled), "with other values at padding")
    require(torch.equal(other, keep), "what stands at padding changes its choice; look at tokens.mask")


def _check_nan(stages: Sequence[Pruner], case: _Case) -> None:
    def broken(value: Tensor, axis: int) -> Tensor:
        return value.index_fill(axis, torch.tensor([3], device="cpu"), torch.nan)

    _kept(stages, case.mapped(broken), "with NaN at a token")


def _check_untouched(stages: Sequence[Pruner], case: _Case) -> None:
    copy = case.mapped(lambda x, axis: x.clone())
    _kept(stages, copy, "")
    for name, value in case.given.items():
        if isinstance(value, Tensor):
            require(torch.equal(value, copy.given[name]), f"it changes {name}, which it may only read")


def _check_blind(method: Pruner) -> None:
    """Raise if a method that is not query_aware reads the text: it was given none, and may not read the attention of
    the prompt's end."""
    asks = [name for name in sorted(method.needs) if get_observable(name).whole]
    require(not asks, f"it reads {', '.join(asks)}, which the question changes: its property query_aware must be True")
