# SPDX-License-Identifier: Apache-2.0
"""Find the visual tokens of a call, and plan its cuts before the first is made."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.held import HeldTokens
from tokenprune.integrations.hf.forward.part import Part, acting
from tokenprune.integrations.hf.forward.plan import Step, plan_cuts
from tokenprune.integrations.hf.forward.report import Report
from tokenprune.integrations.hf.sequence.segments import RunsPerImage, Tempo, find_segments
from tokenprune.shapes.decoder import DecoderShape


class Planner:
    """Plans the cuts of calls. shape: of the decoder; steps: the cuts, by layer; parts: what else has a say in how many
    tokens stay; record: whether reports keep what was cut."""

    def __init__(
        self, adapter: Adapter, shape: DecoderShape, steps: Sequence[Step], parts: Sequence[Part], record: bool
    ) -> None:
        self.adapter, self.shape, self.steps, self.record = adapter, shape, steps, record
        self._on_plan = acting(part.on_plan for part in parts)
        self.per = steps[0].budget.per if steps else "image"
        self._of_videos = any(step.budget.of_videos for step in steps)

    def find_segments(self, call: Call, embeds: Tensor) -> None:
        """Set `call.held.segments` and `call.report` where the call has visual tokens. embeds: `[B, L, D]`."""
        outputs = call.outputs if self.adapter.family.features_per_image else {}
        step = self.adapter.family.step_within_image
        runs = self._runs_per_image(call) if self.adapter.family.runs_of_tiles else None
        grid_of = self.adapter.image_grid
        behind = self.adapter.family.after_video
        tempo = Tempo(self.adapter.seconds_per_frame(call.arguments), self.adapter.joined) if self._of_videos else None
        found = find_segments(call.host.masks, outputs, self.per, embeds.device, step, runs, grid_of, behind, tempo)
        if found is not None:
            call.has_images, call.held = True, HeldTokens(found, call.held.layout)
            call.report = Report(self.shape, call.held.segments, call.host.tokens_per_row, embeds.shape[1], self.record)
            call.report.stats.notes = call.notes
            if self._of_videos:
                self._note_images(call)

    def _note_images(self, call: Call) -> None:
        for budget in (step.budget for step in self.steps if step.budget.keep is None and step.budget.of_videos):
            if "image" in call.held.segments.modality:
                call.notes.append(f"images keep all tokens: {budget} is for videos")

    def _runs_per_image(self, call: Call) -> RunsPerImage | None:
        if call.host.ids is None:
            call.notes.append(
                "the prompt came as embeddings, which do not tell which tiles make up an image: each tile counts as one"
            )
            return None
        ids = call.host.ids.tolist()
        return lambda row, runs: self.adapter.runs_per_image(ids[row], runs)

    def plan(self, call: Call) -> bool:
        """Plan the cuts of a call, and return whether tokens leave."""
        counts = call.held.segments.counts if call.merged is None else call.merged.counts
        plan = plan_cuts(self.steps, self.shape, call.held.segments, counts, call.host.tokens_per_row)
        for on_plan in self._on_plan:
            plan = on_plan(call, plan)
        call.report.plan = plan
        return bool(plan.cuts) or call.merged is not None
