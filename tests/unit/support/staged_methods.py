# SPDX-License-Identifier: Apache-2.0
"""Methods of several stages for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tokenprune
from families.special import FAMILIES as SPECIAL
from families.special import STATEFUL
from oracle import close, generate_logits, survivors
from pruned import hide_dropped
from tokenprune import Budget, Method, Pruner, Selection, Site, VisualTokens
from zoo import FAMILIES, Family

Choose = Callable[[VisualTokens], Tensor | Selection]

BATCHES: dict[str, dict[str, Any]] = {
    "one image": {"only": 0},
    "ragged": {"images": (2, 1)},
    "ragged right": {"images": (1, 3), "padding": "right"},
    "text beside": {"images": (0, 2)},
}

# These include position ids with one and three axes, layers that add features to visual tokens, masks built by the
# model, recurrent layers, sliding windows, and inputs for each layer.
MANY = FAMILIES | SPECIAL

KINDS = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma3n", "llama4", "lfm2_vl"]


@dataclass(frozen=True)
class Stage(Pruner):
    """Keeps the tokens that `choose` returns at `layer`."""

    name: ClassVar[str] = "staged"
    site: ClassVar[Site] = Site.IN_LLM
    layer: int = 1
    choose: Choose = field(default=lambda tokens: tokens.mask, compare=False)
    chooses_count: ClassVar[bool] = False

    def select(self, tokens: VisualTokens) -> Selection:
        chosen = self.choose(tokens)
        return chosen if isinstance(chosen, Selection) else Selection(chosen & tokens.mask)


@dataclass(frozen=True)
class ByContent(Stage):
    chooses_count: ClassVar[bool] = True


@dataclass(frozen=True)
class Staged(Pruner):
    """Consists of stages, which all get `budget`, or the entries of `budgets`."""

    name: ClassVar[str] = "staged"
    site: ClassVar[Site] = Site.IN_LLM
    parts: Sequence[Stage] = ()
    budgets: Sequence[Budget] | None = None

    @property
    def layer(self) -> int:
        return self.parts[0].layer

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        return list(zip(self.parts, self.budgets or [budget] * len(self.parts), strict=True))


@torch.no_grad()
def check(
    family: Family, model: Any, method: Any, inputs: Any, keep: Any = 0.5, steps: int = 3, **options: Any
) -> list:
    """Check that a patched run equals the unpatched model with masks. Return the cuts."""
    length = inputs["input_ids"].shape[1]
    if family.name in STATEFUL and not inputs["attention_mask"][:, -1].all():
        pytest.skip("a state takes in padding behind a prompt before the answer, patched or not")
    with tokenprune.patched(model, method, keep=keep, record=True, **options):
        logits = model(**inputs).logits
        cuts = tokenprune.stats(model).cuts
        step_logits, tokens, _ = generate_logits(model, inputs, steps)
        assert [cut.kept for cut in tokenprune.stats(model).cuts] == [cut.kept for cut in cuts]
    with hide_dropped(family, model, cuts, length):
        expected = model(**inputs).logits
        expected_steps, _, _ = generate_logits(model, inputs, steps, tokens=tokens)
    alive = survivors(cuts[-1], length) if cuts else inputs["attention_mask"].bool()
    close(logits[alive], expected[alive])
    ends_with_text = inputs["attention_mask"][:, -1].bool()
    close(step_logits[ends_with_text], expected_steps[ends_with_text])
    close(step_logits[:, 1:], expected_steps[:, 1:])
    return cuts


def visual_left(family: Family, model: Any, inputs: Any, cut: Any) -> list[int]:
    """Return the number of visual tokens of each row that survive a cut."""
    visual = family.visual_mask(model, inputs)
    return (survivors(cut, visual.shape[1]) & visual).sum(1).tolist()


def every(step: int, offset: int = 0) -> Choose:
    return lambda tokens: (torch.arange(tokens.mask.shape[1]) % step == offset).expand_as(tokens.mask)


kind = pytest.mark.parametrize("family", [MANY[name] for name in KINDS], ids=KINDS)

batch = pytest.mark.parametrize("batch", BATCHES)
