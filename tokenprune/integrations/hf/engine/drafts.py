# SPDX-License-Identifier: Apache-2.0
"""Have drafts of assisted generation kept out of the forward that reads a prompt; `hf.engine.draft_prompts` does
so, and is loaded with the first draft."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.generation import GenerationMixin

from tokenprune.integrations.hf.engine.draft_prompts import hold_back
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.shared.attachable import get_thread_states

if TYPE_CHECKING:
    from transformers.generation import CandidateGenerator

    from tokenprune.integrations.hf.forward.call import Call
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
        drafts = get_thread_states().pop(self, None)
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
        if self.decides is not None:
            note = f"{self.decides} decides by one token after the other: drafts of assisted generation are not used"
            logger.warning(note)
            get_thread_states()[self] = note
        hold_back(generator, always=self.decides is not None)
        return generator
