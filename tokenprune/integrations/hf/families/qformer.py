# SPDX-License-Identifier: Apache-2.0
"""BLIP-2 and its kin: the queries of a Q-Former stand in the prompt, and the model merges them itself.

Their `generate` calls the language model's own `generate` with embeddings, so the model's forward is no place to watch:
the base is the language model here, and what the prompt was before the merge is noted one level above it.
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
from tokenprune.integrations.hf.families.base import Adapter, embed_ids, register_adapter
from tokenprune.integrations.hf.forward.call import find_module_frame, is_running
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.sequence.record import start_record
from tokenprune.integrations.shared.attachable import get_thread_states, refuse_replica


@register_adapter("blip-2", "instructblip", "instructblipvideo")
class QFormerAdapter(Adapter):
    """BLIP-2 and InstructBLIP with any decoder as language model; OPT counts positions by the attention mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.prompts = PromptsAhead(self)

    def _find(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        config: Any = model.config
        text = config.text_config
        if text.is_encoder_decoder:
            raise UnsupportedModelError(
                f"model type {config.model_type!r} with a language model of type {text.model_type!r} is not "
                "supported: its images are in an encoder that the decoder reads by cross-attention; a checkpoint "
                "with OPT or Vicuna can be patched"
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
        if prompt is None or embeds is None:  # a call of the language model alone, or a step
            return arguments
        return arguments | self._before_the_merge(prompt, embeds, compat.get_cache(arguments))

    def _before_the_merge(self, prompt: PromptArguments, embeds: Tensor, cache: Any) -> dict[str, Any]:
        """Return ids or embeddings of the call's tokens as they were before the merge, and the images among them."""
        rows, length = embeds.shape[:2]
        modality = "video" if "video" in self.placeholders else "image"
        features = prompt.images(modality)
        given = {name: prompt.arguments.get(name) for name in ("input_ids", "inputs_embeds")}
        whole = {name: value for name, value in given.items() if value is not None}
        if not whole:  # generate() writes placeholders and a start token then
            size, device = (len(features), length), embeds.device
            ids = torch.full(size, self.placeholders[modality], dtype=torch.long, device=device)
            whole = {"input_ids": ids.index_fill(1, ids.new_tensor([length - 1]), -1)}
        batch, width = next(iter(whole.values())).shape[:2]
        # Beams are rows repeated. A later turn brings the whole prompt again, of which the cache holds the beginning.
        copies, start = rows // batch, 0 if width == length else int(cache.get_seq_length())
        call = {n: value[:, start : start + length].repeat_interleave(copies, 0) for n, value in whole.items()}
        number = len(features) * copies
        if width != length:
            number = int(self.visual_mask(call)[modality].sum()) // features.shape[1]
        if number:
            # All images are alike in size, so that it does not matter which one is which.
            output = BaseModelOutputWithPooling(pooler_output=[features[0]] * number)
            start_record(output, None, (self.video_frames(prompt.arguments) or [])[:1] * number)
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
    """The arguments of the current call of the model's `forward` or `generate`.

    features: the last output of its projection, `[images or frames, queries, D]`. frame: of the call of `forward`.
    """

    arguments: dict[str, Any]
    features: Tensor | None = None
    frame: FrameType | None = None

    def images(self, modality: str) -> Tensor:
        """`[images, tokens, D]`; the frames of a video are joined."""
        if self.features is None:
            return self.arguments["mm_encoder_outputs"][modality].pooler_output
        return self.features.reshape(len(self.arguments["pixel_values"]), -1, self.features.shape[-1])


class PromptsAhead(Part):
    """Notes prompts and images for the call of the language model that is to come."""

    def __init__(self, adapter: QFormerAdapter) -> None:
        super().__init__()
        self.outer = adapter.outer
        self._parameters = list(inspect.signature(self.outer.forward).parameters)

    def current_prompt(self) -> PromptArguments | None:
        """Return the prompt of this thread's call of the model; None outside of one."""
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
            self.wrap(self.outer, "generate", partial(WatchedGenerate, during=self.during))

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
        """Within, the model's `generate` runs with `arguments`."""
        options = arguments.get("generate_kwargs", {})
        config = options.get("generation_config") or self.outer.language_model.generation_config
        if options.get("prefill_chunk_size", config.prefill_chunk_size) is not None:
            raise UnsupportedSetupError(
                "transformers cannot split embeddings into chunks, and this model's generate() hands its images to "
                "the language model as such: leave out prefill_chunk_size"
            )
        get_thread_states()[self] = PromptArguments(arguments)
        try:
            yield
        finally:
            get_thread_states().pop(self, None)


class WatchedGenerate:
    """Stands in for a model's `generate`; a class, not a closure, so that a deep copy of the model gets its own."""

    def __init__(self, original: Callable, during: Callable) -> None:
        self.original, self.during = original, during
        self.__signature__ = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.during(self.__signature__.bind(*args, **kwargs).arguments):
            return self.original(*args, **kwargs)
