# SPDX-License-Identifier: Apache-2.0
"""Adapter for BLIP-2 and InstructBLIP, whose visual tokens are the queries of a Q-Former.

Their `generate` merges images into text and calls `generate` of the language model with embeddings. The forward of the
model is not called, so `base` is the language model here. Hooks on the outer model record the prompt before the merge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tokenprune.errors import UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families.base import Adapter, embed_ids
from tokenprune.integrations.hf.families.registry import register_adapter
from tokenprune.integrations.hf.forward.call import find_module_frame, is_running
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.sequence.record import start_record
from tokenprune.integrations.shared.attachable import get_thread_states, refuse_replica


@register_adapter("blip-2", "instructblip", "instructblipvideo")
class QFormerAdapter(Adapter):
    """BLIP-2 and InstructBLIP with a decoder-only language model. OPT computes positions from the attention mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.prompts = PromptRecorder(self)

    def _find(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        config: Any = model.config
        text = config.text_config
        if text.is_encoder_decoder:
            raise UnsupportedModelError(
                f"Model type {config.model_type!r} with a language model of type {text.model_type!r} is not "
                "supported, because its images are in a text encoder. Use a checkpoint with OPT or Vicuna."
            )
        self.learned_positions = text.model_type == "opt"
        if self.learned_positions:
            path = ("language_model.model.decoder",)
            self.family = replace(self.family, decoder_names=path, norm_name="final_layer_norm")
        outer: Any
        outer, decoder = super()._find(model)
        self.outer = outer
        return self.outer.language_model, decoder

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        prompt, embeds = self.prompts.current_prompt(), arguments.get("inputs_embeds")
        if prompt is None or embeds is None:  # a direct call of the language model, or a decoding step
            return arguments
        return arguments | self._restore_prompt(prompt, embeds, compat.get_cache(arguments))

    def _restore_prompt(self, prompt: PromptArguments, embeds: Tensor, cache: Any) -> dict[str, Any]:
        """Return the ids or embeddings of a call before the merge, and its image features as encoder outputs."""
        rows, length = embeds.shape[:2]
        modality = "video" if "video" in self.placeholders else "image"
        features = prompt.get_image_features(modality)
        arguments = {name: prompt.arguments.get(name) for name in ("input_ids", "inputs_embeds")}
        inputs = {name: value for name, value in arguments.items() if value is not None}
        if not inputs:  # without text, generate() writes placeholders and a start token
            size, device = (len(features), length), embeds.device
            ids = torch.full(size, self.placeholders[modality], dtype=torch.long, device=device)
            inputs = {"input_ids": ids.index_fill(1, ids.new_tensor([length - 1]), -1)}
        batch, width = next(iter(inputs.values())).shape[:2]
        # Beams are repeated rows. A later turn passes the complete prompt again, and the cache holds its beginning.
        copies, start = rows // batch, 0 if width == length else int(cache.get_seq_length())
        call = {name: value[:, start : start + length].repeat_interleave(copies, 0) for name, value in inputs.items()}
        num_images = len(features) * copies
        if width != length:
            num_images = int(self.visual_mask(call)[modality].sum()) // features.shape[1]
        if num_images:
            # All images have the same number of features, so the first image can represent the others.
            output = BaseModelOutputWithPooling(pooler_output=[features[0]] * num_images)
            start_record(output, None, (self.video_frames(prompt.arguments) or [])[:1] * num_images)
            call["mm_encoder_outputs"] = {modality: output}
        return call

    def embeds(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return embed_ids(self.base, kwargs)

    def positions(self, mask: Any, past: int) -> Tensor | None:
        if not self.learned_positions or mask is None:
            return super().positions(mask, past)
        return (mask.cumsum(1) * mask - 1).long()[:, past:]

    def parts(self) -> list[Part]:
        return [self.prompts]


@dataclass
class PromptArguments:
    """Arguments of the running call of the outer model's `forward` or `generate`.

    Attributes:
        arguments: Arguments by name.
        features: Last output of the projection, `[images or frames, queries, D]`.
        frame: Stack frame of `forward`, to detect an interrupted call. None for `generate`.
    """

    arguments: dict[str, Any]
    features: Tensor | None = None
    frame: FrameType | None = None

    def get_image_features(self, modality: str) -> Tensor:
        """Return the features of images or videos, `[images, tokens, D]`. The frames of a video are concatenated."""
        if self.features is None:
            return self.arguments["mm_encoder_outputs"][modality].pooler_output
        return self.features.reshape(len(self.arguments["pixel_values"]), -1, self.features.shape[-1])


class PromptRecorder(Part):
    """Records the prompt and the image features of the outer model for the next call of the language model."""

    def __init__(self, adapter: QFormerAdapter) -> None:
        super().__init__()
        self.outer = adapter.outer
        self._parameters = list(inspect.signature(self.outer.forward).parameters)

    def current_prompt(self) -> PromptArguments | None:
        """Return the prompt of this thread's call of the outer model, or None outside of a call."""
        prompt: PromptArguments | None = get_thread_states().get(self)
        if prompt is not None and prompt.frame is not None and not is_running(prompt.frame):
            del get_thread_states()[self]  # the call was interrupted
            return None
        return prompt

    def _attach(self) -> None:
        self.hook(self.outer.register_forward_pre_hook, self._enter, with_kwargs=True)
        self.hook(self.outer.register_forward_hook, self._leave, always_call=True)
        self.hook(self.outer.language_projection.register_forward_hook, self._project)
        if hasattr(self.outer, "generate"):
            self.wrap(self.outer, "generate", partial(RecordedGenerate, during=self.during))

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        refuse_replica(module, self.outer)
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        get_thread_states()[self] = PromptArguments(arguments, frame=find_module_frame())

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        get_thread_states().pop(self, None)

    def _project(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        if (prompt := self.current_prompt()) is not None:
            prompt.features = output

    @contextmanager
    def during(self, arguments: dict[str, Any]) -> Iterator[None]:
        """Make `arguments` the prompt of this thread while the outer model's `generate` runs."""
        options = arguments.get("generate_kwargs", {})
        config = options.get("generation_config") or self.outer.language_model.generation_config
        if options.get("prefill_chunk_size", config.prefill_chunk_size) is not None:
            raise UnsupportedSetupError(
                "prefill_chunk_size is not supported, because generate() of this model passes embeddings to the "
                "language model. Call generate() without prefill_chunk_size."
            )
        get_thread_states()[self] = PromptArguments(arguments)
        try:
            yield
        finally:
            get_thread_states().pop(self, None)


class RecordedGenerate:
    """Wrapper of a model's `generate`. A class instead of a closure, so that a deep copy gets a separate wrapper."""

    def __init__(self, original: Callable, during: Callable) -> None:
        self.original, self.during = original, during
        self.__signature__ = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.during(self.__signature__.bind(*args, **kwargs).arguments):
            return self.original(*args, **kwargs)
