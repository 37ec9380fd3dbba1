# SPDX-License-Identifier: Apache-2.0
"""Conformance check of session policies on random cache entries, without a model."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tokenprune.errors import ConformanceError, SessionError
from tokenprune.integrations.hf.sessions.policies.base import PROXY_ATTENTION, Policy, PolicyView, check_choice
from tokenprune.integrations.hf.sessions.policies.registry import policy as registered
from tokenprune.kernels.host_random import normal, uniform
from tokenprune.testing.rules import check_dataclass, prefix_errors, require, resolve_instance

_HEADS, _GROUP, _WIDTH = 2, 3, 8
_SHARES = (0.0, 0.25, 0.7, 1.0)  # shares of the entries that can be kept
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_policy(policy: str | Policy | type[Policy]) -> None:
    """Raise ConformanceError (an AssertionError) if a policy breaks a rule of the policy interface.

    A policy must be a frozen dataclass with a docstring and a name. It must:

    - return exactly `keep` indices, long and ascending, for all heads or for each head;
    - support one or many frames, text around frames, heads with different entries, one or three position axes,
      float32, float16 and bfloat16, and NaN values;
    - select the same entries when called again, for any global seed and any calls between;
    - modify no input.

    Args:
        policy: A registered name, a class (checked with default options) or an instance.

    Raises:
        ConformanceError: If the policy breaks a rule.

    Examples:
        >>> from tokenprune.testing import check_policy
        >>> check_policy("window")
    """
    instance = resolve_instance(policy, Policy, registered)
    with prefix_errors(instance.name or type(instance).__name__):
        _check_class(instance)
        for view in _build_views(instance):
            for share in _SHARES:
                keep = 1 + round(share * (view.count - 2))
                _check_view(instance, view, keep)


def _check_class(policy: Policy) -> None:
    check_dataclass(policy, "register_policy")
    unknown = sorted(set(policy.needs) - {PROXY_ATTENTION})
    require(not unknown, f"it needs {unknown}, but only {PROXY_ATTENTION!r} is available")
    require(type(policy.pinned) is int and policy.pinned >= 0, f"pinned={policy.pinned!r} must be an int >= 0")


def _check_view(policy: Policy, view: PolicyView, keep: int) -> None:
    before = {name: value.clone() for name, value in vars(view).items() if isinstance(value, Tensor)}
    chosen = _select_checked(policy, view, keep)
    changed = [
        name
        for name, value in before.items()
        if not torch.equal(_replace_nan(value), _replace_nan(getattr(view, name)))
    ]
    require(not changed, f"it modifies its input {', '.join(changed)}")
    _select_checked(policy, _build_view(policy, frames=3, seed=7), 5)
    for seed in (1, 2):
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            same = torch.equal(_select_checked(policy, view, keep), chosen)
        require(same, "it selects other entries when called again. Keep no state, and use only view.generator().")


def _select_checked(policy: Policy, view: PolicyView, keep: int) -> Tensor:
    chosen = policy.select(view, keep)
    try:
        check_choice(policy, chosen, view, keep)
    except SessionError as error:
        raise ConformanceError(f"with {view.count} entries and keep={keep}: {error}") from error
    return chosen


def _replace_nan(values: Tensor) -> Tensor:
    return values.nan_to_num() if values.is_floating_point() else values


def _build_views(policy: Policy) -> list[PolicyView]:
    views = [_build_view(policy, frames=frames, wrapped=wrapped, dtype=dtype)
             for frames in (1, 6) for wrapped in (False, True) for dtype in _DTYPES]  # fmt: skip
    views += [
        _build_view(policy, axes=3),
        _make_ragged(_build_view(policy, frames=8)),
        _make_ragged(_build_view(policy, frames=8, axes=3)),
    ]
    for name in ("keys", "values"):
        view = _build_view(policy)
        getattr(view, name)[0, 5:7] = torch.nan
        views.append(view)
    return views


def _build_view(
    policy: Policy, frames: int = 6, axes: int = 1, wrapped: bool = False, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PolicyView:  # fmt: skip
    """Return the entries of frames with 5 cells. `wrapped` adds a text token before and after each frame."""
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


def _make_ragged(view: PolicyView) -> PolicyView:
    """Return the view after a compression: each head holds different entries, and the same number of them."""
    g = torch.Generator("cpu").manual_seed(1)
    few = view.count * 2 // 3
    indices = torch.stack(
        [torch.randperm(view.count, generator=g, device="cpu")[:few].sort().values for _ in range(_HEADS)]
    )

    def take(values: Tensor) -> Tensor:
        return values.expand(*values.shape[:-2], _HEADS, -1).gather(-1, indices.expand(*values.shape[:-2], -1, -1))

    deep, rows = indices[..., None].expand(-1, -1, _WIDTH), view.proxy_attention
    return dataclasses.replace(
        view, keys=view.keys.gather(1, deep), values=view.values.gather(1, deep), frame=take(view.frame),
        cell=take(view.cell), index=take(view.index), position=take(view.position),
        proxy_attention=None if rows is None else rows.gather(1, indices.repeat_interleave(_GROUP, 0)),
    )  # fmt: skip
