# SPDX-License-Identifier: Apache-2.0
"""Serve methods that compare the frames of a video, or refuse a patch or a call."""

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
    """Return whether a step runs a method that reads which frame of a video tokens are of."""
    return step.acts and registry.compares_frames(step.method)


class VideoFrames(Part):
    """Leaves images to such methods as they are, and says so; a video whose frames are not known is refused.

    steps: all cuts of the patch, in order. merges: names of the methods that merge tokens before them.
    Raises BudgetError, OptionError or UnsupportedSetupError for what does not go together with frames.
    """

    def __init__(self, adapter: Adapter, steps: Sequence[Step], merges: Sequence[str]) -> None:
        super().__init__()
        self.family = adapter.config.model_type
        comparing = [step for step in steps if compares_frames(step)]
        self.names = list(dict.fromkeys(step.method.name for step in comparing))
        # A later stage of such a method leaves images alone too, whatever it reads itself.
        self.owners = {step.owner for step in comparing}
        for index, step in enumerate(steps):
            if not compares_frames(step):
                continue
            name = step.method.name
            if step.budget.per != "image":
                instead = (
                    "keep= or Budget.per_second(...) alone"
                    if step.budget.video is not None
                    else f'per="image" in place of per={step.budget.per!r}'
                )
                raise BudgetError(
                    f"{name} compares the frames of a video, so the whole video has one budget: say {instead}"
                )
            if before := [*merges, *(one.method.name for one in steps[:index] if one.acts)]:
                raise OptionError(
                    f"{name} compares the frames of a video token by token, and {before[0]} removes some of them "
                    f"before; leave {before[0]} out, or let it act after {name}"
                )

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        """Refuse a video whose frames nothing tells, and note images."""
        if not call.has_images:
            return
        images = [modality == "image" for modality in call.state.segments.modality]
        frames = call.state.segments.frames
        if unknown := [i for i, image in enumerate(images) if not image and frames[i] is None]:
            count = call.state.segments.counts[unknown[0]]
            raise UnsupportedSetupError(
                f"{self.names[0]} compares the frames of a video, and nothing tells which of the {count} tokens of "
                f"this one of {self.family!r} are a frame: pass its pixels to the patched model. Frames that the "
                "processor dropped, or joined, leave numbers that do not split; then use a method that compares no "
                "frames, such as divprune"
            )
        if any(images):
            for name in self.names:
                call.notes.append(f"{name}: images keep all tokens, because it compares the frames of videos")

    def on_plan(self, call: Call, plan: Plan) -> Plan:
        images = [modality == "image" for modality in call.state.segments.modality]
        return plan.with_floor(partial(self._keep_images, images)) if any(images) else plan

    def _keep_images(
        self, images: Sequence[bool], step: Step, arrived: Sequence[int], wanted: Sequence[int]
    ) -> list[int]:
        if step.owner not in self.owners:
            return list(wanted)
        return [count if image else number for count, number, image in zip(arrived, wanted, images, strict=True)]
