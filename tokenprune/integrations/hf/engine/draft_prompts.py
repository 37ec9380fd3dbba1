# SPDX-License-Identifier: Apache-2.0
"""Keep drafts out of the forward that reads a prompt.

Assisted generation (an assistant model, prompt lookup) has drafts written before the prompt is read, and hands both to
the model at once. Methods would then see a prompt that ends in drafts: the last token that they rank by is a guess, and
budgets and statistics count it. Here the first call of `generate` drafts nothing, which costs one forward of one token;
the answer is then that without help.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers.generation import CandidateGenerator


def hold_back(generator: Any, always: bool) -> None:
    """Have a generator of drafts propose nothing after a prompt; always: nor later."""
    if always:
        generator.get_candidates = _no_drafts
    elif "get_candidates" not in vars(generator):  # else another patch, or an assistant of ours, saw to it
        generator.get_candidates = partial(_first_draft, generator)


def _no_drafts(input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    return input_ids, None


def _first_draft(generator: Any, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    """Stands in for `generator.get_candidates` once: propose nothing after the prompt `input_ids`, long `[1, L]`."""
    del generator.get_candidates
    # It is run all the same, as short as it can be: its own cache and positions start at the prompt.
    number = getattr(generator, "num_assistant_tokens", None)
    if number is not None:
        generator.num_assistant_tokens = 1
    try:
        drafted, _ = generator.get_candidates(input_ids, **kwargs)
    finally:
        if number is not None:
            generator.num_assistant_tokens = number
    if drafted.shape[1] > input_ids.shape[1]:
        generator.update_candidate_strategy = partial(_forget_draft, generator)
    return input_ids, None


def _forget_draft(generator: CandidateGenerator, *args: Any, **kwargs: Any) -> None:
    """Stands in for `generator.update_candidate_strategy` once: where nothing was proposed, it says nothing of drafts
    that nothing was accepted."""
    del generator.update_candidate_strategy
    # How sure an assistant was of each draft, to be matched with those accepted.
    getattr(generator, "probs", []).clear()
