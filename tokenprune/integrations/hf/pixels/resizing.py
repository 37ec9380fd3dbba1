# SPDX-License-Identifier: Apache-2.0
"""Apply methods on pixels: the processor makes smaller images, and the vision tower accepts them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from tokenprune.budgets import Budget
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.pixels.marker import MARK, refuse_second_patch
from tokenprune.integrations.hf.pixels.prompts import PromptReader, build_class
from tokenprune.integrations.hf.pixels.videos import build_video_class
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.resizing import Resizer
from tokenprune.selection.sites.pixels import ResizeMethod

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call
    from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs

# The question of each image in the current call of the processor, for methods that read it.
_QUESTIONS: ContextVar[list[str] | None] = ContextVar("tokenprune_questions", default=None)


class PixelPatch(Attachable):
    """Makes a processor produce smaller images, and the vision tower accept them. See `Resizer`.

    Args:
        method: Chooses the size of each image.
        budget: Budget of the method.
        processor: The processor.
        adapter: Adapter of the model, or None if only the processor is known.

    Raises:
        OptionError: If the method reads questions and the image token is missing. See also `Resizer`.
    """

    def __init__(self, method: ResizeMethod, budget: Budget, processor: Any, adapter: Adapter | None = None) -> None:
        super().__init__()
        self.resizer = Resizer(method, budget, processor, adapter)
        self.processor, self.adapter, self.counts = processor, adapter, self.resizer.counts
        reads = method.reads_question and not self.resizer.identity
        self.prompts = PromptReader(processor, method.name) if reads else None

    def _attach(self) -> None:
        if self.resizer.image_processor is None:  # possible with keep=1.0
            return
        before = type(self.resizer.image_processor)
        refuse_second_patch(self.processor)
        patch = self

        @functools.wraps(before.preprocess)
        def preprocess(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
            images, kwargs = patch.resizer.resize(images, kwargs, _QUESTIONS.get() or ())
            return before.preprocess(self, images, *args, **kwargs)

        # A subclass of the same name. An attribute of the instance would be printed and saved.
        names = {"preprocess": preprocess, MARK: self, "__module__": before.__module__}
        self.swap_class(self.resizer.image_processor, type(before.__name__, (before,), names))
        if self.resizer.identity:
            return
        method, videos = self.resizer.method, getattr(self.processor, "video_processor", None)
        if method.videos and videos is not None:
            share = self.resizer.share if self.resizer.max_tokens is None else None
            self.swap_class(videos, build_video_class(type(videos), method.name, share))
        if self.prompts is not None:
            self.swap_class(self.processor, build_class(self.processor, partial(self._around, self.prompts), {}))
        if self.resizer.resizing == "target":
            assert self.adapter is not None  # checked by `Resizer`
            tower = self.adapter.base.vision_tower
            self.hook(tower.register_forward_pre_hook, self._interpolate, with_kwargs=True)

    def describe(self) -> str:
        return f"{self.resizer.method.name} ({self.resizer.budget})"

    @contextmanager
    def _around(self, reader: PromptReader, images: Any, text: Any) -> Iterator[tuple[Any, Any]]:
        prompts = reader.prompts(text)
        rows = reader.rows(images, prompts)
        questions = [reader.question(prompt) for prompt, row in zip(prompts, rows, strict=True) for _ in row]
        token = _QUESTIONS.set(questions)
        try:
            yield images, text
        finally:
            _QUESTIONS.reset(token)

    def _interpolate(self, tower: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        pixels = args[0] if args else kwargs["pixel_values"]
        if self.resizer.check_tower_pixels(*pixels.shape[-2:]):
            kwargs = kwargs | {"interpolate_pos_encoding": True}
        return args, kwargs


class FullCounts(Part):
    """Records the number of visual tokens that a prompt would have without methods on pixels.

    Args:
        patches: Pixel patches with `counts`.
    """

    def __init__(self, patches: Sequence[Any]) -> None:
        super().__init__()
        self.patches = patches

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        if not call.has_images:
            return
        rows = [0] * (max(call.state.segments.row) + 1)
        for row, count in zip(call.state.segments.row, call.state.segments.counts, strict=True):
            rows[row] += count
        for patch in self.patches:
            call.trace.stats.visual_tokens_full = patch.counts.find_unpruned(rows)
