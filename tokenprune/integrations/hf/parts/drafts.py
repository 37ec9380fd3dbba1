# SPDX-License-Identifier: Apache-2.0
"""Keep drafts out of the forward that reads a prompt.

Assisted generation (an assistant model, prompt lookup) has drafts written before the prompt is read, and hands both to
the model at once. Methods would then see a prompt that ends in drafts: the last token that they rank by is a guess, and
budgets and statistics count it. Here the first call of `generate` drafts nothing, which costs one forward of one token;
the answer is then that without help.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.generation import GenerationMixin

from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.shared.attachable import states

if TYPE_CHECKING:
    from transformers.generation import CandidateGenerator

    from tokenprune.integrations.hf.forward.context import Call
    from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs

logger = logging.getLogger("tokenprune")

# Private to transformers; every kind of drafting is made by it.
_MAKES_DRAFTS = "_get_candidate_generator"


class Drafts(Part):
    """Changes what the `generate` of `model`, and of models inside it, gets its drafts from.

    decides: name of a method that acts while decoding, if there is one. It decides by one token after the other, so
    that `generate` gets no drafts at all, and writes the answer token by token.
    """

    def __init__(self, model: nn.Module, decides: str | None = None) -> None:
        super().__init__()
        self.model, self.decides = model, decides
        self.unknown = False  # whether this version of transformers makes drafts elsewhere

    def _attach(self) -> None:
        for module in self.model.modules():
            if not isinstance(module, GenerationMixin):
                continue
            self.unknown = getattr(module, _MAKES_DRAFTS, None) is None
            if not self.unknown:
                self.wrap(module, _MAKES_DRAFTS, partial(partial, self._generator))

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        drafts = states().pop(self, None)
        if not call.has_images:
            return
        if drafts is not None:
            call.notes.append(drafts)
        if self.unknown:
            call.notes.append(
                f"with assisted generation, drafts count as the end of the prompt: this version of transformers has no "
                f"GenerationMixin.{_MAKES_DRAFTS} to keep them out"
            )

    def _generator(self, original: Callable[..., CandidateGenerator], *args: Any, **kwargs: Any) -> CandidateGenerator:
        generator: Any = original(*args, **kwargs)
        if "get_candidates" in vars(generator) and self.decides is None:
            return generator  # another patch, or an assistant of ours, saw to it
        if self.decides is None:
            generator.get_candidates = partial(_first_draft, generator)
        else:
            note = f"{self.decides} decides by one token after the other: drafts of assisted generation are not used"
            logger.warning(note)
            states()[self] = note
            generator.get_candidates = _no_drafts
        return generator


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
