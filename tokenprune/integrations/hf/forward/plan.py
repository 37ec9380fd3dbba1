# SPDX-License-Identifier: Apache-2.0
"""Find the visual tokens of a prompt, and plan the number of tokens that each cut keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.budgets.video import Clip
from tokenprune.integrations.hf.forward.prompt_info import PromptInfo
from tokenprune.integrations.hf.sequence.segments import RunsPerImage, VideoTiming, build_encoding_key, find_segments
from tokenprune.kernels.transfer import FIFOCache
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.models.families import Family
from tokenprune.selection.apply import limit_budget
from tokenprune.selection.method import Method
from tokenprune.selection.segments import Segments, square_grid


@dataclass(frozen=True)
class Step:
    """One cut of a patch: a stage of a method, with its budget, at the input of a decoder layer (0: the entry).

    Attributes:
        owner: Index of the method in the patch. Stages of one method share it.
        method_budget: Budget of the method, or None if it has a single stage.
    """

    method: Method
    budget: Budget
    owner: int = 0
    method_budget: Budget | None = None

    @cached_property
    def layer(self) -> int:
        return self.method.cut_layer

    @cached_property
    def acts(self) -> bool:
        """True if the stage runs, because it may drop tokens or stores values for a later stage."""
        if not self.budget.is_identity():
            return True
        return self.method.chooses_count and not (self.method_budget or self.budget).is_identity()


# (step, tokens of each segment that arrive, tokens that it would keep) -> tokens that it keeps.
Floor = Callable[[Step, Sequence[int], Sequence[int]], list[int]]


@dataclass(frozen=True)
class Stage:
    """Plan of one step. Lists have an entry for each segment.

    Attributes:
        arrived: Number of tokens that reach the step.
        requested: Number of tokens in the budget of the step.
        kept: Number of tokens that the step keeps.
    """

    step: Step
    arrived: list[int]
    requested: list[int]
    kept: list[int]


@dataclass(frozen=True)
class Plan:
    """The cuts of a call, and the number of tokens that each cut keeps.

    Lists have an entry for each segment of the prompt, including segments whose tokens are all dropped (0 tokens). A
    method may keep another number of tokens than planned. `plan_step` then plans the later steps again.

    Attributes:
        rows, ordinals, clips: See `Segments`.
        text: Number of text tokens of each row.
        arrived: Number of tokens that reach the first step.
        floors: Functions that may raise the number of tokens that a step keeps (see `Floor`).
        stages: The planned steps.
    """

    shape: DecoderShape
    rows: list[int]
    ordinals: list[int]
    text: list[int]
    arrived: list[int]
    clips: list[Clip | None]
    floors: tuple[Floor, ...] = ()
    stages: tuple[Stage, ...] = ()

    @cached_property
    def cuts(self) -> frozenset[int]:
        """Layers with a cut at their input."""
        cutting = (stage for stage in self.stages if stage.kept != stage.arrived or stage.step.method.chooses_count)
        return frozenset(stage.step.layer for stage in cutting)

    @property
    def kept(self) -> list[int]:
        """The number of tokens of each segment after the last stage."""
        return self.stages[-1].kept if self.stages else self.arrived

    def match_counts(self, segments: Segments) -> list[int]:
        """Return the number of tokens of each segment of the prompt. segments: the segments after earlier cuts."""
        counts = dict(zip(zip(segments.row, segments.ordinal, strict=True), segments.counts, strict=True))
        return [counts.get(key, 0) for key in zip(self.rows, self.ordinals, strict=True)]

    def _find_original_tokens(self, step: Step, arrived: list[int]) -> list[int]:
        """Return the tokens that reach the first stage of the method of `step`: `arrived` if `step` is that stage."""
        for stage in self.stages:
            if stage.step.owner == step.owner:
                return stage.arrived
        return arrived

    def plan_step(self, step: Step, arrived: list[int]) -> Stage:
        """Plan `step` for `arrived` tokens of each segment.

        Each row is planned separately, so that a batch gives the same result as its rows.
        """
        for stage in self.stages:
            if stage.step is step and stage.arrived == arrived:
                return stage  # as planned
        original = self._find_original_tokens(step, arrived)
        requested = [0] * len(arrived)
        alive = [index for index, count in enumerate(arrived) if count]
        for row in dict.fromkeys(self.rows[index] for index in alive):
            members = [index for index in alive if self.rows[index] == row]
            counts = [arrived[index] for index in members]
            if step.budget.video is not None:
                shares = step.budget.resolve_videos(counts, [self.clips[index] for index in members])
            else:
                shares = step.budget.resolve(
                    counts,
                    layer=step.layer,
                    shape=self.shape,
                    text_tokens=self.text[row],
                    original=[original[index] for index in members],
                )
            for index, share in zip(members, shares, strict=True):
                requested[index] = limit_budget(step.method, arrived[index], share)
        kept = requested
        for floor in self.floors:
            kept = floor(step, arrived, kept)
        return Stage(step, arrived, requested, kept)

    def with_steps(self, steps: Iterable[Step]) -> Plan:
        """Return the plan with more steps at the end."""
        plan = self
        for step in steps:
            plan = replace(plan, stages=(*plan.stages, plan.plan_step(step, plan.kept)))
        return plan

    def with_floor(self, floor: Floor) -> Plan:
        """Return the plan of the same steps with an additional floor, which is applied last."""
        return replace(self, floors=(*self.floors, floor), stages=()).with_steps(stage.step for stage in self.stages)


def plan_cuts(
    steps: Iterable[Step], shape: DecoderShape, segments: Segments, arrived: list[int], tokens: list[int]
) -> Plan:
    """Plan the cuts of a call.

    Args:
        steps: The steps, in order.
        shape: Shape of the decoder.
        segments: Segments of the prompt.
        arrived: Tokens of each segment that reach the first step.
        tokens: Tokens of each row, without padding.
    """
    text = list(tokens)
    for row, count in zip(segments.row, segments.counts, strict=True):
        text[row] -= count
    plan = Plan(shape, segments.row, segments.ordinal, text, arrived, segments.clips)
    return plan.with_steps(step for step in steps if step.acts)


# (token ids of a row, (first, last + 1) of each run of placeholders) -> number of runs of each image.
ReadRuns = Callable[[list[int], list[tuple[int, int]]], list[int]]


class Planner:
    """Finds the segments of prompts and plans their cuts. Prompts of the same shape share the results.

    Args:
        family: The model's row in the table of families.
        config: Config of the model.
        runs_per_image: See `Adapter.runs_per_image`.
        shape: Shape of the decoder.
        steps: The cuts, by layer.
    """

    def __init__(
        self, family: Family, config: Any, runs_per_image: ReadRuns, shape: DecoderShape, steps: Sequence[Step]
    ) -> None:
        self.family, self.config, self.runs_per_image = family, config, runs_per_image
        self.shape, self.steps = shape, steps
        self.per = steps[0].budget.per if steps else "image"
        self._has_video_budget = any(step.budget.video is not None for step in steps)
        self._segments = FIFOCache()
        self._plans = FIFOCache()

    def _image_grid(self, count: int) -> tuple[int, int, int] | None:
        """Return (1, height, width) of an image of `count` tokens if the family's images are square."""
        return square_grid(count) if self.family.is_square(count, self.config) else None

    def _find_row_runs(self, ids: Tensor, row: int, runs: list[tuple[int, int]]) -> list[int]:
        return self.runs_per_image(ids[row].tolist(), runs)

    def find_segments(
        self, prompt: PromptInfo, outputs: dict[str, Any], arguments: dict[str, Any], device: torch.device
    ) -> tuple[Segments | None, list[str]]:
        """Return the segments of a prompt, and notes for the statistics. The segments are None without visual tokens.

        Args:
            outputs: Output of the encoder for each modality.
            arguments: Arguments of the base model's forward.
            device: Device of the segments' tensors.
        """
        family, notes = self.family, list[str]()
        outputs = outputs if family.features_per_image else {}
        runs: RunsPerImage | None = None
        if family.square == "runs" and prompt.input_ids is not None:
            runs = partial(self._find_row_runs, prompt.input_ids)
        elif family.square == "runs":
            notes.append(
                "The prompt consists of embeddings, so its tiles are not grouped into images. Each tile is an image."
            )
        timing = VideoTiming.from_arguments(arguments, self.config) if self._has_video_budget else None
        # The key has the stream, because memory of cached tensors is reused in the order of one stream.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        key = (prompt, build_encoding_key(outputs), device, stream, *(timing.seconds if timing else ()))
        find = partial(find_segments, prompt.placeholders, outputs, self.per, device, family.step_within_image, runs)
        segments = self._segments.get(key, partial(find, self._image_grid, family.after_video, timing))
        if segments is not None and self._has_video_budget and "image" in segments.modality:
            budgets = [step.budget for step in self.steps if step.budget.video and step.budget.keep is None]
            notes += [f"Images keep all tokens, because {budget} is for videos." for budget in budgets]
        return segments, notes

    def plan(self, segments: Segments, prompt: PromptInfo, counts: list[int]) -> Plan:
        """Plan the cuts of a prompt. counts: Tokens of each segment that reach the first cut."""
        make = partial(plan_cuts, self.steps, self.shape, segments, counts, prompt.tokens_per_row)
        return self._plans.get((segments, prompt, *counts), make)
