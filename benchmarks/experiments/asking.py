# SPDX-License-Identifier: Apache-2.0
"""Ask the questions of a shipped model and count the right answers. Imported by the other experiments."""

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
    """Keep the visual tokens of the mask `kept`, which the caller sets."""

    kept: ClassVar[Tensor]

    def select(self, tokens: Any) -> Selection:
        return Selection(self.kept & tokens.mask)

    def resolve_count(self, count: int, keep: int) -> int:
        return count - 1  # fewer than all, so that `select` runs


def ask(
    bench: Bench,
    subject: Model,
    changed: Callable[[Any], AbstractContextManager],
    look: Callable[[int], None] = lambda rows: None,
) -> str:
    """Return a string with "1" for a right and "0" for a wrong answer, in the order of the questions of `bench`.

    Args:
        changed: Return a context manager for a batch's inputs. The model answers inside the context.
        look: Function of the batch size, called inside the context after the answers.
    """
    right = ""
    for indices in bench.batches(None):
        batch = [bench.examples[index] for index in indices]
        inputs = subject.inputs([example.image for example in batch], [example.question for example in batch])
        with changed(inputs):
            answers = subject.generate(inputs)
            look(len(batch))
        right += "".join(str(int(e.is_right(a.rstrip(".")))) for e, a in zip(batch, answers, strict=True))
    return right


def share(right: str) -> str:
    """Format the share of right answers with its 95 % Wilson interval."""
    low, high = wilson(right.count("1"), len(right))
    return f"{right.count('1') / len(right):.1%} [{low:.1%}, {high:.1%}]"
