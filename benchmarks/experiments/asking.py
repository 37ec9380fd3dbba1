# SPDX-License-Identifier: Apache-2.0
"""What measurements on the shipped model's questions share: ask them all, say how many were right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor

from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.significance import wilson
from tokenprune_bench.suite import Bench


@register("replay", site=Site.PRE_LLM, paper="none (a measurement)")
@dataclasses.dataclass(frozen=True)
class Replay(Pruner):
    """Keep the visual tokens that are set from outside."""

    kept: ClassVar[Tensor]

    def select(self, tokens: Any) -> Selection:
        return Selection(self.kept & tokens.mask)

    def resolve_count(self, count: int, keep: int) -> int:
        return count - 1  # anything but all: the selection decides


def ask(
    bench: Bench,
    subject: Model,
    changed: Callable[[Any], AbstractContextManager],
    look: Callable[[int], None] = lambda rows: None,
) -> str:
    """Return one 0 or 1 for each question of `bench`, in order.

    changed: from a batch's inputs to a context in which the model answers it; look: called in it, with the rows.
    """
    right = ""
    for numbers in bench.batches(None):
        batch = [bench.examples[number] for number in numbers]
        inputs = subject.inputs([example.image for example in batch], [one.question for one in batch])
        with changed(inputs):
            answers = subject.generate(inputs)
            look(len(batch))
        right += "".join(str(int(e.is_right(a.rstrip(".")))) for e, a in zip(batch, answers, strict=True))
    return right


def share(right: str) -> str:
    """Return the share right with its 95 % Wilson interval, as text."""
    low, high = wilson(right.count("1"), len(right))
    return f"{right.count('1') / len(right):.1%} [{low:.1%}, {high:.1%}]"
