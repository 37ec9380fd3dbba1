# SPDX-License-Identifier: Apache-2.0
"""Part that keeps drafts of assisted generation out of the forward that reads a prompt (see `draft_prompts`)."""

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
    from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs

logger = logging.getLogger("tokenprune")

# A private method of transformers that creates the generator of every kind of drafts.
_MAKES_DRAFTS = "_get_candidate_generator"


class Drafts(Part):
    """Wraps the candidate generators of assisted generation, so that drafts start after the forward of the prompt.

    Args:
        model: The patched model.
        decides: Name of a method that drops tokens during decoding, or None. With such a method, drafts are never used,
            because it reads one token at a time.
    """

    def __init__(self, model: nn.Module, decides: str | None = None) -> None:
        super().__init__()
        self.decides = decides
        self.generating = [module for module in model.modules() if isinstance(module, GenerationMixin)]
        # True if this version of transformers creates drafts elsewhere.
        self.unknown = any(getattr(module, _MAKES_DRAFTS, None) is None for module in self.generating)
        if decides is not None or self.unknown:
            self.before_decoder = self._add_notes

    def _attach(self) -> None:
        for module in self.generating:
            if getattr(module, _MAKES_DRAFTS, None) is not None:
                self.wrap(module, _MAKES_DRAFTS, partial(partial, self._make_generator))

    def _add_notes(self, call: Call, inputs: DecoderInputs) -> None:
        drafts = get_thread_states().pop(self, None)
        if not call.has_images:
            return
        if drafts is not None:
            call.notes.append(drafts)
        if self.unknown:
            call.notes.append(
                "With assisted generation, drafts count as the end of the prompt, because this version of transformers "
                f"lacks GenerationMixin.{_MAKES_DRAFTS}."
            )

    def _make_generator(
        self, original: Callable[..., CandidateGenerator], *args: Any, **kwargs: Any
    ) -> CandidateGenerator:
        generator: Any = original(*args, **kwargs)
        if self.decides is not None:
            note = f"{self.decides} reads one token after the other, so drafts of assisted generation are not used."
            logger.warning(note)
            get_thread_states()[self] = note
        hold_back(generator, always=self.decides is not None)
        return generator
