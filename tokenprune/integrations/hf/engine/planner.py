# SPDX-License-Identifier: Apache-2.0
"""Find the visual tokens of a call, and plan its cuts before the first is made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.part import Part, acting
from tokenprune.integrations.hf.forward.plan import Step, plan_cuts
from tokenprune.integrations.hf.forward.token_state import TokenState
from tokenprune.integrations.hf.forward.trace import Trace
from tokenprune.integrations.hf.sequence.segments import RunsPerImage, Tempo, encoding_key, find_segments
from tokenprune.integrations.shared.towers.patch_grid import find_image_grid
from tokenprune.kernels.transfer import FIFOCache
from tokenprune.models.decoder_shape import DecoderShape


class Planner:
    """Plans the cuts of calls. shape: of the decoder; steps: the cuts, by layer; parts: what else has a say in how many
    tokens stay; record: whether traces keep each cut."""

    def __init__(
        self, adapter: Adapter, shape: DecoderShape, steps: Sequence[Step], parts: Sequence[Part], record: bool
    ) -> None:
        self.adapter, self.shape, self.steps, self.record = adapter, shape, steps, record
        self._on_plan = acting(part.on_plan for part in parts)
        self.per = steps[0].budget.per if steps else "image"
        self._has_video_budget = any(step.budget.video is not None for step in steps)
        self._image_grid = partial(find_image_grid, adapter.family, config=adapter.config)
        self._segments = FIFOCache()
        self._plans = FIFOCache()

    def find_segments(self, call: Call, embeds: Tensor) -> None:
        """Set `call.state.segments` and `call.trace` where the call has visual tokens. embeds: `[B, L, D]`."""
        family, device = self.adapter.family, embeds.device
        outputs = call.outputs if family.features_per_image else {}
        runs = self._runs_per_image(call) if family.square == "runs" else None
        tempo = Tempo.from_arguments(call.arguments, self.adapter.config) if self._has_video_budget else None
        # Tensors are freed, and given away again, in the order of one stream.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        key = (call.prompt, encoding_key(outputs), device, stream, *(tempo.seconds if tempo else ()))
        masks = call.prompt.placeholders
        find = partial(find_segments, masks, outputs, self.per, device, family.step_within_image, runs)
        found = self._segments.get(key, partial(find, self._image_grid, family.after_video, tempo))
        if found is not None:
            call.has_images, call.state = True, TokenState(found, call.state.layout)
            call.trace = Trace(self.shape, found, call.prompt, call.past, embeds.shape[1], self.record)
            call.trace.stats.notes = call.notes
            if self._has_video_budget and "image" in found.modality:
                budgets = [step.budget for step in self.steps if step.budget.video and step.budget.keep is None]
                call.notes += [f"images keep all tokens: {budget} is for videos" for budget in budgets]

    def _runs_per_image(self, call: Call) -> RunsPerImage | None:
        if (ids := call.prompt.input_ids) is None:
            call.notes.append(
                "the prompt came as embeddings, which do not tell which tiles make up an image: each tile counts as one"
            )
            return None
        return lambda row, runs: self.adapter.runs_per_image(ids[row].tolist(), runs)

    def plan(self, call: Call) -> bool:
        """Plan the cuts of a call, and return whether tokens leave."""
        segments, prompt = call.state.segments, call.prompt
        counts = segments.counts if call.merged is None else call.merged[1].counts
        assert counts is not None  # known for selections in a tower
        make = partial(plan_cuts, self.steps, self.shape, segments, counts, prompt.tokens_per_row)
        plan = self._plans.get((segments, prompt, *counts), make)
        for on_plan in self._on_plan:
            plan = on_plan(call, plan)
        call.plan = plan
        return bool(plan.cuts) or call.merged is not None
