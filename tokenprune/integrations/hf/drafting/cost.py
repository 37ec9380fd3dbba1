# SPDX-License-Identifier: Apache-2.0
"""Estimate the speed-up of a draft from the configs of both models."""

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
    """Bytes that a decoding step reads from memory. They determine its time for a single prompt.

    The bytes include weights (with the output head), keys and values.

    Args:
        target: Bytes of a step of the target.
        draft: Bytes of a step of the draft.

    Examples:
        >>> cost = tokenprune.DraftCost(target=1.0, draft=0.1)
        >>> round(cost.speedup(0.8, drafts=4), 2)
        2.4
    """

    target: float
    draft: float

    @classmethod
    def from_configs(
        cls,
        config: Any,
        draft: Any = None,
        methods: Sequence[Method] = (),
        budgets: Sequence[Budget] = (),
        *,
        tokens: int,
        text: int = TEXT,
        bytes_per_value: float = 2.0,
        bytes_per_weight: float | None = None,
    ) -> DraftCost:
        """Compute the costs from the configs of two models.

        Args:
            config: Config of the target.
            draft: Config of a smaller draft. None: the draft shares the weights of the target.
            methods: Methods of the draft. Empty: the draft is not patched.
            budgets: Budget of each method.
            tokens: Number of visual tokens of the prompt.
            text: Number of text tokens of the prompt and the answer.
            bytes_per_value: Bytes of a key or value element, 2 for bfloat16.
            bytes_per_weight: Bytes of a weight. None: `bytes_per_value`.

        Raises:
            OptionError: If a number is not valid.
            UnsupportedModelError: If a model is a mixture of experts.

        Examples:
            >>> half = tokenprune.Budget(keep=0.5)
            >>> methods = [tokenprune.method("divprune")]
            >>> cost = tokenprune.DraftCost.from_configs(model.config, None, methods, [half], tokens=576)
            >>> cost.c < 1
            True
        """
        if tokens < 1 or text < 0 or bytes_per_value <= 0 or (bytes_per_weight is not None and bytes_per_weight <= 0):
            raise OptionError(
                f"tokens={tokens}, text={text} or the bytes are out of range. Pass tokens >= 1, text >= 0, bytes > 0."
            )
        bytes_per_weight = bytes_per_value if bytes_per_weight is None else bytes_per_weight
        load = Load((), tokens, text)
        costs = []
        for model_config, is_draft in ((config, False), (config if draft is None else draft, True)):
            model, num_weights = _build_cost_model(model_config)
            cost = model.predict(load, methods, budgets) if is_draft else model.compute_cost(load)
            costs.append(bytes_per_weight * num_weights + bytes_per_value * cost.cache)
        return cls(*costs)

    @property
    def c(self) -> float:
        """Cost of a draft step relative to a target step. The target verifies all drafts of a round in one step."""
        return self.draft / self.target

    def speedup(self, acceptance: float, drafts: int) -> float:
        """Return the speed-up of decoding: (1 - a^(g+1)) / ((1 - a) (g c + 1)).

        Args:
            acceptance: Probability a that a draft token is accepted, in [0, 1].
            drafts: Number g of draft tokens per round.

        Source:
            Leviathan et al. (arXiv 2211.17192), theorem 3.8.
        """
        if not 0 <= acceptance <= 1 or drafts < 1:
            raise OptionError(f"acceptance={acceptance} must be in [0, 1], and drafts={drafts} at least 1")
        return sum(acceptance**i for i in range(drafts + 1)) / (drafts * self.c + 1)

    def break_even(self, drafts: int) -> float | None:
        """Return the smallest acceptance with a speed-up for `drafts` tokens per round, or None if there is none."""
        if self.speedup(1.0, drafts) <= 1:
            return None
        low, high = 0.0, 1.0
        while high - low > 1e-6:  # the speed-up grows with acceptance
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle, drafts) > 1 else (middle, high)
        return high


def _build_cost_model(config: Any) -> tuple[CostModel, int]:
    """Return the cost model of a decoder, and the number of weights that a step reads (without input embeddings)."""
    text = config.get_text_config()
    if any((getattr(text, name, None) or 0) > 1 for name in _EXPERTS):
        raise UnsupportedModelError(
            f"{config.model_type!r} is a mixture of experts, so its cost depends on the tokens. Measure a run instead."
        )
    shape = DecoderShape.from_config(text)
    return CostModel(shape), shape.num_weights + text.vocab_size * text.hidden_size
