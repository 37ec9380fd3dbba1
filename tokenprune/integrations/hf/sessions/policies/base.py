# SPDX-License-Identifier: Apache-2.0
"""The base class of policies, and what a policy sees: the visual entries that a session's cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenprune.errors import SessionError
from tokenprune.selection.options import CallRepr, check_options

PROXY_ATTENTION = "proxy_attention"  # what a policy may need beside keys and values


@dataclass(frozen=True)
class PolicyView:
    """The visual entries of one decoder layer, in the order in which they came; text is not among them.

    keys, values: `[H, n, D]`, of each KV head, as they are cached: keys are rotated. frame, cell, index: long `[H, n]`:
    an entry's frame, counted over the whole stream; its place among the visual tokens of that frame, -1 for tokens that
    wrap a frame; and its place among all tokens that were ever seen. position: long `[A, H, n]`, as the decoder counts
    them, on A axes (3 with M-RoPE, else 1). H is 1 in `frame`, `cell`, `index` and `position` where all heads hold the
    same entries. layer, layers: of the decoder. step: how often the session has compressed. seed: of the session.
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
        """The number of entries, n."""
        return self.keys.shape[1]

    def generator(self) -> torch.Generator:
        """Return a generator on the host that depends on the session's seed and on `step` alone."""
        return torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + self.step)


@dataclass(frozen=True)
class Policy(CallRepr):
    """The base of policies: frozen dataclasses that choose which visual entries of a session's cache stay.

    A policy keeps no state, and sees neither text nor questions. shared: it is asked once, with the view of the first
    layer that can be cut, and all layers and heads keep the same entries; else it is asked for each such layer. needs:
    {"proxy_attention"} for a policy that reads it.
    """

    name: ClassVar[str] = ""
    shared: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def pinned(self) -> int:
        """The visual entries that stay whatever comes; a session needs room for more."""
        return 0

    @property
    def proxy_query(self) -> str | Sequence[int] | None:
        """The question whose attention is read, where it is needed: a text, ids, or None for the chat template's
        tokens between a question and its answer."""
        return None

    def select(self, view: PolicyView, keep: int) -> Tensor:
        """Return the entries that stay: long `[keep]`, or `[H, keep]` where each head keeps its own; ascending.

        keep: how many, at least 1 and below `view.count`.
        """
        raise NotImplementedError


def check_choice(policy: Policy, chosen: Any, view: PolicyView, keep: int) -> None:
    """Raise SessionError for a choice that is not `keep` entries of `view`, ascending."""
    shapes = [(keep,)] if policy.shared else [(keep,), (view.keys.shape[0], keep)]
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.long or tuple(chosen.shape) not in shapes:
        given = f"{chosen.dtype} {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else type(chosen).__name__
        wanted = " or ".join(map(str, shapes))
        raise SessionError(f"the policy {policy.name} returned {given}, and must return long {wanted}")
    ascending = (chosen.diff(dim=-1) > 0).all() & (chosen >= 0).all() & (chosen < view.count).all()
    if not ascending:
        raise SessionError(f"the policy {policy.name} must return places of its view, ascending, each once")
