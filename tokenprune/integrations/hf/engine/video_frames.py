# SPDX-License-Identifier: Apache-2.0
"""Checks for methods that compare the frames of a video."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tokenprune.errors import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.plan import Plan, Step
from tokenprune.selection import observable_registry as registry


def compares_frames(step: Step) -> bool:
    """Return True if the method of a step reads the frame of each visual token."""
    return step.acts and registry.compares_frames(step.method)


class VideoFrames(Part):
    """Checks the calls of methods that compare the frames of a video. These methods keep all tokens of images.

    Videos whose number of tokens per frame is unknown are rejected.

    Args:
        adapter: Adapter of the model.
        steps: All cuts of the patch, in order.
        merges: Names of methods that merge tokens in the tower.

    Raises:
        BudgetError: If a video has no single budget.
        OptionError: If another method drops or merges tokens before a method that compares frames.
    """

    def __init__(self, adapter: Adapter, steps: Sequence[Step], merges: Sequence[str]) -> None:
        super().__init__()
        self.family = adapter.config.model_type
        comparing = [step for step in steps if compares_frames(step)]
        self.names = list(dict.fromkeys(step.method.name for step in comparing))
        # Later stages of such a method keep all tokens of images, too.
        self.owners = {step.owner for step in comparing}
        for index, step in enumerate(steps):
            if not compares_frames(step):
                continue
            name = step.method.name
            if step.budget.per != "image":
                advice = (
                    "Use either keep= or Budget.per_second(...)."
                    if step.budget.video is not None
                    else f'Use per="image" instead of per={step.budget.per!r}.'
                )
                raise BudgetError(f"{name} compares the frames of a video, so a video needs a single budget. {advice}")
            if before := [*merges, *(earlier.method.name for earlier in steps[:index] if earlier.acts)]:
                raise OptionError(
                    f"{name} compares the frames of a video token by token, and {before[0]} drops some of the tokens "
                    f"before. Leave {before[0]} out, or run it after {name}."
                )

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        """Reject a video with unknown frames, and note that images keep all tokens."""
        if not call.has_images:
            return
        images = [modality == "image" for modality in call.state.segments.modality]
        frames = call.state.segments.frames
        if unknown := [i for i, image in enumerate(images) if not image and frames[i] is None]:
            count = call.state.segments.counts[unknown[0]]
            raise UnsupportedSetupError(
                f"{self.names[0]} compares the frames of a video, and the frames of a {self.family!r} video with "
                f'{count} tokens are unknown. Pass its pixels to the patched model, or use a method such as "divprune".'
            )
        if any(images):
            for name in self.names:
                call.notes.append(f"{name}: images keep all tokens, because it compares the frames of videos")

    def on_plan(self, call: Call, plan: Plan) -> Plan:
        images = [modality == "image" for modality in call.state.segments.modality]
        return plan.with_floor(partial(self._keep_images, images)) if any(images) else plan

    def _keep_images(
        self, images: Sequence[bool], step: Step, arrived: Sequence[int], kept: Sequence[int]
    ) -> list[int]:
        if step.owner not in self.owners:
            return list(kept)
        return [before if image else after for before, after, image in zip(arrived, kept, images, strict=True)]
