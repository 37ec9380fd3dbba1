# SPDX-License-Identifier: Apache-2.0
"""Keep drafts out of the forward that reads a prompt.

Assisted generation (an assistant model, prompt lookup) drafts tokens before the prompt is read, and passes both to the
model together. Methods would then rank by a drafted token, and budgets and statistics would count it. Therefore the
first call of `generate` drafts no tokens, which costs one forward of one token and keeps the answer equal.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers.generation import CandidateGenerator


def hold_back(generator: Any, always: bool) -> None:
    """Make a generator of drafts propose no tokens after a prompt. always: Also propose no tokens later."""
    if always:
        generator.get_candidates = _skip_drafts
    elif "get_candidates" not in vars(generator):  # otherwise another patch has done it
        generator.get_candidates = partial(_skip_first_draft, generator)


def _skip_drafts(input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    return input_ids, None


def _skip_first_draft(generator: Any, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    """Replace `generator.get_candidates` for one call: propose no tokens after the prompt `input_ids`."""
    del generator.get_candidates
    # The generator still drafts one token, because its own cache and positions start at the prompt.
    num_tokens = getattr(generator, "num_assistant_tokens", None)
    if num_tokens is not None:
        generator.num_assistant_tokens = 1
    try:
        drafted, _ = generator.get_candidates(input_ids, **kwargs)
    finally:
        if num_tokens is not None:
            generator.num_assistant_tokens = num_tokens
    if drafted.shape[1] > input_ids.shape[1]:
        generator.update_candidate_strategy = partial(_forget_draft, generator)
    return input_ids, None


def _forget_draft(generator: CandidateGenerator, *args: Any, **kwargs: Any) -> None:
    """Replace `generator.update_candidate_strategy` for one call, which had no drafts to accept."""
    del generator.update_candidate_strategy
    # Probabilities of the drafts, which transformers would match with accepted tokens.
    getattr(generator, "probs", []).clear()
