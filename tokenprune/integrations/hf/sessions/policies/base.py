# SPDX-License-Identifier: Apache-2.0
"""Base class of session policies, and their view of the visual entries in a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenprune.errors import SessionError
from tokenprune.selection.options import CallRepr, check_options

PROXY_ATTENTION = "proxy_attention"  # an optional input of a policy, see `Policy.needs`


@dataclass(frozen=True)
class PolicyView:
    """Visual entries of one decoder layer, in the order of the stream. Text is not included.

    The `heads` dimension of `frame`, `cell`, `index` and `position` is 1 if all heads hold the same entries.

    Args:
        keys: Cached (rotated) keys, shape (heads, entries, width).
        values: Cached values, shape (heads, entries, width).
        frame: Frame of each entry in the stream, shape (heads, entries), int64.
        cell: Index within the frame, -1 for tokens that wrap a frame, shape (heads, entries), int64.
        index: Index among all tokens of the stream, shape (heads, entries), int64.
        position: Position ids, shape (axes, heads, entries), int64. 3 axes with M-RoPE, otherwise 1.
        layer: Index of the layer.
        layers: Number of decoder layers.
        step: Number of earlier compressions.
        seed: Seed of the session.
        proxy_attention: Attention of the proxy question, shape (query heads, entries), float32, if the policy needs it.

    Examples:
        >>> index = torch.arange(6)[None]
        >>> view = PolicyView(
        ...     keys=torch.randn(2, 6, 4), values=torch.randn(2, 6, 4), frame=index // 3, cell=index % 3, index=index,
        ...     position=index[None], layer=0, layers=1, step=0, seed=0,
        ... )
        >>> tokenprune.sessions.policy("window", sink=1).select(view, keep=3)
        tensor([0, 4, 5])
    """

    keys: Tensor
    values: Tensor
    frame: Tensor
    cell: Tensor
    index: Tensor
    position: Tensor
    layer: int
    layers: int
    step: int
    seed: int
    proxy_attention: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of entries."""
        return self.keys.shape[1]

    def generator(self) -> torch.Generator:
        """Return a random generator on the host that depends only on `seed` and `step`."""
        return torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + self.step)


@dataclass(frozen=True)
class Policy(CallRepr):
    """Base class of policies, which select the visual entries of a session's cache to keep.

    A policy is a stateless frozen dataclass. It does not see text or questions.

    Attributes:
        name: Registered name.
        shared: Whether all layers and heads keep the entries that the policy selects for the first layer with full
            attention. Otherwise the policy selects for each of these layers.
        needs: {"proxy_attention"} for a policy that reads `PolicyView.proxy_attention`.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Earliest(Policy):
        ...     shared = True
        ...
        ...     def select(self, view, keep):
        ...         return torch.arange(keep)
        >>> Earliest().pinned
        0
    """

    name: ClassVar[str] = ""
    shared: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def pinned(self) -> int:
        """Number of visual entries that are never dropped. The memory of a session must be larger."""
        return 0

    @property
    def proxy_query(self) -> str | Sequence[int] | None:
        """Proxy question for `proxy_attention`: text or token ids.

        None uses the tokens of the chat template between question and answer.
        """
        return None

    def select(self, view: PolicyView, keep: int) -> Tensor:
        """Select the entries to keep.

        Args:
            view: Visual entries of a layer.
            keep: Number of entries to keep, at least 1 and less than `view.count`.

        Returns:
            Ascending indices, shape (keep,) or (heads, keep), int64.
        """
        raise NotImplementedError


def check_choice(policy: Policy, chosen: Any, view: PolicyView, keep: int) -> None:
    """Raise SessionError unless `chosen` has `keep` ascending indices of `view`."""
    shapes = [(keep,)] if policy.shared else [(keep,), (view.keys.shape[0], keep)]
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.long or tuple(chosen.shape) not in shapes:
        result = f"{chosen.dtype} {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else type(chosen).__name__
        expected = " or ".join(map(str, shapes))
        raise SessionError(f"the policy {policy.name} returned {result}, and must return torch.int64 {expected}")
    ascending = (chosen.diff(dim=-1) > 0).all() & (chosen >= 0).all() & (chosen < view.count).all()
    if not ascending:
        raise SessionError(f"the policy {policy.name} must return ascending, unique indices of its view")
