# SPDX-License-Identifier: Apache-2.0
"""The gain of a draft: the cost of one of its steps beside one of the target's, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.method import Method
from tokenprune.settings.cost import TEXT, CostModel, Load

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class DraftCost:
    """The bytes that a step of decoding reads from memory, which is its cost for one prompt at a time.

    target, draft: bytes of weights (output head included) and of keys and values, for a step of each.
    """

    target: float
    draft: float

    @classmethod
    def of_configs(
        cls,
        config: Any,
        draft: Any = None,
        methods: Sequence[Method] = (),
        budgets: Sequence[Budget] = (),
        *,
        tokens: int,
        text: int = TEXT,
        number: float = 2.0,
        weight: float | None = None,
    ) -> DraftCost:
        """Return the cost from the configs of two whole models.

        config, draft: of the target, and of a smaller draft; None: the draft shares the target's weights.
        methods, budgets: what the draft is patched with; none: it sees all that the target sees.
        tokens, text: visual tokens of the prompt, and tokens of text, the answer's among them.
        number: bytes of a number of keys and values, 2 for bfloat16. weight: of a number of weights; None: the same.

        Raises OptionError for counts that no prompt has, UnsupportedModelError for mixtures of experts.
        """
        if tokens < 1 or text < 0 or number <= 0 or (weight is not None and weight <= 0):
            raise OptionError("a prompt has at least one visual token and no fewer than 0 of text; bytes are positive")
        weight = number if weight is None else weight
        load = Load((), tokens, text)
        sides = []
        for one, patched in ((config, False), (config if draft is None else draft, True)):
            closed, weights = _closed(one)
            cost = closed.predict(load, methods, budgets) if patched else closed.compute_cost(load)
            sides.append(weight * weights + number * cost.cache)
        return cls(*sides)

    @property
    def c(self) -> float:
        """One step of the draft over one of the target, which checks several drafts at the price of one step."""
        return self.draft / self.target

    def speedup(self, acceptance: float, drafts: int) -> float:
        """Return how many times faster decoding is with `drafts` tokens drafted a round, each of which is accepted with
        a chance of `acceptance` in [0, 1]: (1 - a^(g+1)) / ((1 - a) (g c + 1)).

        Source: Leviathan et al. (arXiv 2211.17192), theorem 3.8.
        """
        if not 0 <= acceptance <= 1 or drafts < 1:
            raise OptionError("acceptance lies in [0, 1], and a round drafts at least one token")
        return sum(acceptance**i for i in range(drafts + 1)) / (drafts * self.c + 1)

    def break_even(self, drafts: int) -> float | None:
        """Return the acceptance from which on it pays to draft `drafts` tokens a round; None: never."""
        if self.speedup(1.0, drafts) <= 1:
            return None
        low, high = 0.0, 1.0
        while high - low > 1e-6:  # the speed-up grows with acceptance
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle, drafts) > 1 else (middle, high)
        return high


def _closed(config: Any) -> tuple[CostModel, int]:
    """Return the closed forms of a model's decoder, and how many weights a step reads: embeddings are looked up."""
    text = config.get_text_config()
    if any((getattr(text, name, None) or 0) > 1 for name in _EXPERTS):
        raise UnsupportedModelError(
            f"{config.model_type!r} is a mixture of experts: which of them a step reads depends on its tokens. Measure "
            "a run with the assistant instead"
        )
    shape = DecoderShape.from_config(text)
    return CostModel(shape), shape.num_weights + text.vocab_size * text.hidden_size
