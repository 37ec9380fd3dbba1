# SPDX-License-Identifier: Apache-2.0
"""Check that a policy of sessions keeps the word that every policy gives, on made-up entries: no model is needed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tokenprune.errors import ConformanceError, SessionError
from tokenprune.integrations.hf.sessions.policies.base import PROXY_ATTENTION, Policy, PolicyView, check_choice
from tokenprune.integrations.hf.sessions.policies.registry import policy as registered
from tokenprune.kernels.drawn import normal, uniform
from tokenprune.testing.rules import check_dataclass, prefix_errors, require, resolve_instance

_HEADS, _GROUP, _WIDTH = 2, 3, 8
_SHARES = (0.0, 0.25, 0.7, 1.0)  # of what may stay
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_policy(policy: str | Policy | type[Policy]) -> None:
    """Raise ConformanceError, which is an AssertionError, if a policy breaks a rule that all policies keep.

    policy: a registered name, a class (its default options are checked) or an instance.

    It is a frozen dataclass with a docstring and a name, and needs what there is. It returns exactly the places that it
    is to keep, long and ascending, for all heads or for each: of one frame, of many, of tokens that wrap frames, of
    heads that hold other entries, with one axis of positions or three, in float32, float16 and bfloat16, and with a NaN
    among the values. It chooses the same twice, whatever it saw between and whatever the global seed, and changes
    nothing that it reads.
    """
    one = resolve_instance(policy, Policy, registered)
    with prefix_errors(one.name or type(one).__name__):
        _check_class(one)
        for view in _views(one):
            for share in _SHARES:
                keep = 1 + round(share * (view.count - 2))
                _check_view(one, view, keep)


def _check_class(policy: Policy) -> None:
    check_dataclass(policy, "register_policy")
    unknown = sorted(set(policy.needs) - {PROXY_ATTENTION})
    require(not unknown, f"it needs {unknown}: there is only {PROXY_ATTENTION!r}")
    require(type(policy.pinned) is int and policy.pinned >= 0, f"pinned={policy.pinned!r} must be an int >= 0")


def _check_view(policy: Policy, view: PolicyView, keep: int) -> None:
    before = {name: one.clone() for name, one in vars(view).items() if isinstance(one, Tensor)}
    chosen = _chosen(policy, view, keep)
    changed = [name for name, one in before.items() if not torch.equal(_bits(one), _bits(getattr(view, name)))]
    require(not changed, f"it changes {', '.join(changed)}, which it may only read")
    _chosen(policy, _view(policy, frames=3, seed=7), 5)
    for seed in (1, 2):
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            same = torch.equal(_chosen(policy, view, keep), chosen)
        require(
            same, "it chooses otherwise when it is asked again: keep no state, and draw from view.generator() alone"
        )


def _chosen(policy: Policy, view: PolicyView, keep: int) -> Tensor:
    chosen = policy.select(view, keep)
    try:
        check_choice(policy, chosen, view, keep)
    except SessionError as error:
        raise ConformanceError(f"of {view.count} entries, {keep} of which stay: {error}") from error
    return chosen


def _bits(values: Tensor) -> Tensor:
    return values.nan_to_num() if values.is_floating_point() else values


def _views(policy: Policy) -> list[PolicyView]:
    views = [_view(policy, frames=frames, wrapped=wrapped, dtype=dtype)
             for frames in (1, 6) for wrapped in (False, True) for dtype in _DTYPES]  # fmt: skip
    views += [_view(policy, axes=3), _ragged(_view(policy, frames=8)), _ragged(_view(policy, frames=8, axes=3))]
    for name in ("keys", "values"):
        view = _view(policy)
        getattr(view, name)[0, 5:7] = torch.nan
        views.append(view)
    return views


def _view(
    policy: Policy, frames: int = 6, axes: int = 1, wrapped: bool = False, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PolicyView:  # fmt: skip
    """Return the entries of whole frames of 5 cells. wrapped: with a token before and one after each."""
    g = torch.Generator("cpu").manual_seed(seed)
    cells = [-1, 0, 1, 2, 3, 4, -1] if wrapped else [0, 1, 2, 3, 4]
    n = frames * len(cells)
    frame = torch.arange(frames, device="cpu").repeat_interleave(len(cells))[None]
    index = torch.arange(n, device="cpu")[None] + 3 * frame + 4  # text before the frames and between them
    keys, values = normal(2, _HEADS, n, _WIDTH, generator=g).to(dtype)
    attention = uniform(_HEADS * _GROUP, n, generator=g).div(n) if PROXY_ATTENTION in policy.needs else None
    return PolicyView(
        keys, values, frame, torch.tensor(cells, device="cpu").repeat(frames)[None], index, index.expand(axes, 1, -1),
        layer=1, layers=4, step=2, seed=0, proxy_attention=attention,
    )  # fmt: skip


def _ragged(view: PolicyView) -> PolicyView:
    """Return a view as after a compression: each head holds other entries, and as many."""
    g = torch.Generator("cpu").manual_seed(1)
    few = view.count * 2 // 3
    places = torch.stack(
        [torch.randperm(view.count, generator=g, device="cpu")[:few].sort().values for _ in range(_HEADS)]
    )

    def take(values: Tensor) -> Tensor:
        return values.expand(*values.shape[:-2], _HEADS, -1).gather(-1, places.expand(*values.shape[:-2], -1, -1))

    deep, rows = places[..., None].expand(-1, -1, _WIDTH), view.proxy_attention
    return dataclasses.replace(
        view, keys=view.keys.gather(1, deep), values=view.values.gather(1, deep), frame=take(view.frame),
        cell=take(view.cell), index=take(view.index), position=take(view.position),
        proxy_attention=None if rows is None else rows.gather(1, places.repeat_interleave(_GROUP, 0)),
    )  # fmt: skip
