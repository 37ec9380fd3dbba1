# SPDX-License-Identifier: Apache-2.0
"""Compare a method's selections on GPU and CPU from the same values.

Two runs of a model round differently, and one near tie at an early pick of a greedy method changes all later picks. The
number of different tokens therefore does not measure the selection. Here the CPU selects again from the values that the
method read on the GPU, and these values are compared with those of the CPU's run.
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
    """Values that the methods of a forward read.

    Attributes:
        hidden: Hidden states of each cut, on the CPU.
        differ: Number of tokens that the CPU selects differently from the same values, over all cuts.
    """

    hidden: list[Tensor] = field(default_factory=list)
    differ: int = 0

    def off(self, other: Looked) -> float:
        """Return the relative distance of the first cut's hidden states from another run's, 0 without a cut."""
        if not self.hidden:
            return 0.0
        mine, theirs = self.hidden[0].float(), other.hidden[0].float()
        return float((mine - theirs).norm() / theirs.norm())


@contextmanager
def looking(again: bool = False) -> Iterator[Looked]:
    """Record the values that methods read inside. With `again`, the CPU also selects from them."""
    looked = Looked()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def choose(call: Any, step: Any, *rest: Any) -> Any:
            cls = type(step.method)
            select = cls.select

            def both(self: Any, tokens: VisualTokens) -> Any:
                looked.hidden.append(tokens.hidden.cpu())
                copied = on_cpu(self, tokens) if again else None
                mine = select(self, tokens)
                if copied is not None:
                    looked.differ += int((mine.keep.cpu() ^ select(self, copied).keep).sum())
                return mine

            with patch.object(cls, "select", both):
                return original(call, step, *rest)

        return choose

    name = "select_tokens"
    with patch.object(engine, name, noting(engine.select_tokens)), patch.object(cuts, name, noting(cuts.select_tokens)):
        yield looked


def on_cpu(method: Any, tokens: VisualTokens) -> VisualTokens:
    """Return the tokens, with all observables that the method may read, on the CPU."""
    visual: dict[str, Any] = {}
    text: dict[str, Any] = {}
    with suppress(TokenPruneError):  # prompts without text
        text = {"mask": _cpu(tokens.text.mask)}
    for observable in map(find_observable, available_observables()):
        if not observable.is_declared(method.needs):
            continue
        with suppress(AttributeError, NotImplementedError):  # observables of the text only
            value = getattr(tokens, observable.name)
            visual[observable.name] = _cpu(
                {layer: value(layer) for layer in method.encoder_layers} if observable.by_layer else value
            )
        if text:
            with suppress(AttributeError, NotImplementedError):  # observables that the text lacks
                text[observable.text_name] = _cpu(getattr(tokens.text, observable.text_name))
    device = tokens.hidden.device
    source = TensorSource(visual, text, lambda hidden: tokens.final_norm(hidden.to(device)).cpu())
    source.carry.update({name: _cpu(value) for name, value in tokens.carry.items()})
    return VisualTokens(tokens.segments.to(torch.device("cpu")), tokens.keep, source)


def _cpu(value: Any) -> Any:
    if is_dataclass(value):
        return replace(value, **{name: _cpu(part) for name, part in vars(value).items()})
    return tree_map_only(Tensor, partial(Tensor.cpu), value)
