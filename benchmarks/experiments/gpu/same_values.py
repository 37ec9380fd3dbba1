# SPDX-License-Identifier: Apache-2.0
"""Compare what a method chooses on the GPU and on the CPU from the same values.

Two runs of a model round otherwise, and one near tie at an early pick changes all later ones of a method that goes on
from what it took: how many tokens differ in the end says nothing of the choice. So the CPU chooses again from what the
method looked at on the GPU; and what it looked at is compared with the CPU's own run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.engine import cuts, engine
from tokenprune.selection.observable_registry import available_observables, find_observable
from tokenprune.selection.tensors import TensorSource
from tokenprune.selection.tokens import VisualTokens


@dataclass
class Looked:
    """Values that the methods of a forward looked at. hidden: of each cut's tokens, on the CPU; differ: the tokens that
    the CPU chooses otherwise from the same values, of all cuts."""

    hidden: list[Tensor] = field(default_factory=list)
    differ: int = 0

    def off(self, other: Looked) -> float:
        """Return how far the tokens of the first cut are from another run's, as a share of their length; 0 without."""
        if not self.hidden:
            return 0.0
        mine, theirs = self.hidden[0].float(), other.hidden[0].float()
        return float((mine - theirs).norm() / theirs.norm())


@contextmanager
def looking(again: bool = False) -> Iterator[Looked]:
    """Note what methods look at within. again: let the CPU choose from it, too."""
    found = Looked()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def choose(call: Any, step: Any, *rest: Any) -> Any:
            cls = type(step.method)
            select = cls.select

            def both(self: Any, tokens: VisualTokens) -> Any:
                found.hidden.append(tokens.hidden.cpu())
                copied = on_cpu(self, tokens) if again else None
                mine = select(self, tokens)
                if copied is not None:
                    found.differ += int((mine.keep.cpu() ^ select(self, copied).keep).sum())
                return mine

            with patch.object(cls, "select", both):
                return original(call, step, *rest)

        return choose

    name = "select_tokens"
    with patch.object(engine, name, noting(engine.select_tokens)), patch.object(cuts, name, noting(cuts.select_tokens)):
        yield found


def on_cpu(method: Any, tokens: VisualTokens) -> VisualTokens:
    """Return the tokens with all that the method may read of them and of the text, on the CPU."""
    visual: dict[str, Any] = {}
    text: dict[str, Any] = {}
    with suppress(TokenPruneError):  # where there is no text
        text = {"mask": _cpu(tokens.text.mask)}
    for seen in map(find_observable, available_observables()):
        if not seen.is_declared(method.needs):
            continue
        with suppress(AttributeError, NotImplementedError):  # it is of the text alone
            value = getattr(tokens, seen.name)
            visual[seen.name] = _cpu({one: value(one) for one in method.encoder_layers} if seen.by_layer else value)
        if text:
            with suppress(AttributeError, NotImplementedError):  # the text has none
                text[seen.text_name] = _cpu(getattr(tokens.text, seen.text_name))
    device = tokens.hidden.device
    source = TensorSource(visual, text, lambda hidden: tokens.final_norm(hidden.to(device)).cpu())
    source.carry.update({name: _cpu(value) for name, value in tokens.carry.items()})
    return VisualTokens(tokens.segments.to(torch.device("cpu")), tokens.keep, source)


def _cpu(value: Any) -> Any:
    if is_dataclass(value):
        return replace(value, **{name: _cpu(part) for name, part in vars(value).items()})
    return tree_map_only(Tensor, partial(Tensor.cpu), value)
