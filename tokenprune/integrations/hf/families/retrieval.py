# SPDX-License-Identifier: Apache-2.0
"""Retrieval models that return one vector per token of a page or a question (ColPali, ColQwen2).

The outer model has a vision-language model as `vlm`, and the patch acts on this inner model. The outer model would turn
dropped tokens (zero rows) into arbitrary vectors, so the vectors of dropped tokens are set to zero after its forward.
"""

from __future__ import annotations

import gc
import inspect
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenprune.errors import OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.hf.families.base import Adapter
from tokenprune.integrations.hf.families.registry import ADAPTERS, register_adapter
from tokenprune.integrations.hf.forward.call import find_module_frame, is_running
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.shared.attachable import get_thread_states, refuse_replica
from tokenprune.statistics import Stats

# Models without an outer model. Cached, because the search over all objects takes 0.25 s.
_without_outer_model: WeakSet[nn.Module] = WeakSet()


def find_outer_model(model: nn.Module) -> nn.Module:
    """Return the retrieval model that has `model` as its `vlm`, or `model` itself if none exists.

    A module has no reference to its parent, so all live objects are searched.

    Raises:
        UnsupportedModelError: If the model is from colpali-engine, which would return vectors for dropped tokens.
    """
    if hasattr(model, "custom_text_proj"):
        raise UnsupportedModelError(
            f"{type(model).__name__} of colpali-engine is not supported. Load the checkpoint in transformers' format, "
            "for example vidore/colpali-v1.3-hf or vidore/colqwen2-v1.0-hf."
        )
    # Search only if the code of a retrieval model is loaded. Older transformers have a language model head in `vlm`.
    is_loaded = any(".modeling_col" in name for name in sys.modules)
    if not is_loaded or not isinstance(model, nn.Module) or model in _without_outer_model:
        return model
    models = (value for value in gc.get_objects() if issubclass(type(value), PreTrainedModel))
    inner_models = ((outer, getattr(outer, "_modules", {}).get("vlm")) for outer in models)
    outer = next((outer for outer, vlm in inner_models if vlm and model in (vlm, vlm._modules.get("model"))), model)
    if outer is model:
        _without_outer_model.add(model)
    return outer


def vectors(output: Any) -> list[Tensor]:
    """Return the vectors of each page or question of a batch, without dropped tokens and padding.

    The result can be stored, or passed to `score_retrieval` of the processor. Zero rows must be removed before scoring,
    because a zero row wins if all similarities are negative.

    Args:
        output: Output of ColPali or ColQwen2, patched or unpatched.

    Returns:
        One tensor of shape (vectors, D) per row of the batch.

    Raises:
        OptionError: If the output has no embeddings.

    Examples:
        >>> from types import SimpleNamespace
        >>> embeddings = torch.tensor([[[0.0, 0.0], [0.6, 0.8], [1.0, 0.0]]])
        >>> [page.shape[0] for page in vectors(SimpleNamespace(embeddings=embeddings))]
        [2]
    """
    embeddings = getattr(output, "embeddings", None)
    if not isinstance(embeddings, Tensor):
        raise OptionError(f"{type(output).__name__} has no embeddings. Pass the output of ColPali or ColQwen2.")
    kept = getattr(output, "kept", None)
    kept = (embeddings != 0).any(-1) if kept is None else kept
    return [row[mask] for row, mask in zip(embeddings, kept, strict=True)]


@register_adapter("colpali", "colqwen2")
class RetrievalAdapter(Adapter):
    """ColPali and ColQwen2. `base` and `decoder` are modules of the inner model, `outer` is the retrieval model."""

    def __init__(self, model: nn.Module) -> None:
        outer: Any = next(module for module in model.modules() if isinstance(getattr(module, "vlm", None), nn.Module))
        kind = outer.vlm.config.model_type
        if ADAPTERS.get(kind, Adapter) is not Adapter:
            raise UnsupportedModelError(
                f"{type(outer).__name__} around a model of type {kind!r} is not supported. The supported inner types "
                "are paligemma, qwen2_vl and qwen2_5_vl."
            )
        super().__init__(outer.vlm)
        self.family = replace(self.family, name=outer.config.model_type, vectors=True)
        self.outer = outer
        self.pages = VectorMasking(self)

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        outer_call = self.pages.get_outer_call()
        if outer_call is None or outer_call.ids is None or arguments.get("input_ids") is not None:
            return arguments
        encoded = {} if outer_call.encoded is None else {"mm_encoder_outputs": {"image": outer_call.encoded}}
        return arguments | {"input_ids": outer_call.ids} | encoded  # ColQwen2 passes only embeddings

    def parts(self) -> list[Part]:
        return [self.pages]


@dataclass
class OuterCall:
    """A running call of the outer model.

    Attributes:
        ids: Token ids of the prompt.
        mask: Attention mask.
        frame: Stack frame of the forward, to detect an interrupted call.
        encoded: Output of `get_image_features`, if it was called before the inner model.
        kept: Tokens kept by the inner model, bool `[B, L]`. None before its forward, or if no token was dropped.
    """

    ids: Tensor | None
    mask: Tensor | None
    frame: FrameType
    encoded: Any = None
    kept: Tensor | None = None


class VectorMasking(Part):
    """Sets the vectors of dropped tokens to zero in the outer model's output, and adds the mask `kept` to it."""

    def __init__(self, adapter: RetrievalAdapter) -> None:
        super().__init__()
        self.base, self.outer = adapter.base, adapter.outer
        self._parameters = list(inspect.signature(self.outer.forward).parameters)

    def get_outer_call(self) -> OuterCall | None:
        """Return this thread's call of the outer model, or None outside of a call."""
        outer_call: OuterCall | None = get_thread_states().get(self)
        if outer_call is not None and not is_running(outer_call.frame):
            del get_thread_states()[self]  # the call was interrupted
            return None
        return outer_call

    def _attach(self) -> None:
        self.hook(self.outer.register_forward_pre_hook, self._enter, with_kwargs=True)
        # Registered before the engine's hook, which ends the call.
        self.hook_in_call(self.base.register_forward_hook, self._leave_inner)
        self.hook(self.outer.register_forward_hook, self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        refuse_replica(module, self.outer)
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        outer_call = OuterCall(arguments.get("input_ids"), arguments.get("attention_mask"), find_module_frame())
        get_thread_states()[self] = outer_call
        grids, pixels = arguments.get("image_grid_thw"), arguments.get("pixel_values")
        if grids is None or pixels is None or arguments.get("inputs_embeds") is not None:
            return (), arguments
        # ColQwen2 calls the tower directly. Parts of a patch act around `get_image_features`, so call it here instead.
        valid = torch.arange(pixels.shape[1], device=grids.device) < grids[:, 1:].prod(-1, keepdim=True)
        outer_call.encoded = self.base.get_image_features(pixels[valid], grids)
        embeds = self.base.get_input_embeddings()(outer_call.ids)
        mask = (outer_call.ids == self.base.config.image_token_id).unsqueeze(-1)
        features = torch.cat(list(outer_call.encoded.pooler_output)).to(embeds)
        return (), arguments | {"inputs_embeds": embeds.masked_scatter(mask, features), "pixel_values": None}

    def _leave_inner(self, module: nn.Module, args: tuple, output: Any) -> None:
        outer_call, call = self.get_outer_call(), self.current()
        if outer_call is None or call is None or not call.active or (layout := call.state.layout).is_uncut:
            return
        outer_call.kept = layout.inverse >= 0
        if call.has_images:
            counts = sum(call.prompt.tokens_per_row), sum(layout.tokens_per_row)
            call.trace.stats.defer(partial(_add_vector_note, *counts))

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        outer_call = get_thread_states().pop(self, None)
        if outer_call is None or output is None:
            return None
        embeddings, kept = output[0] if isinstance(output, tuple) else output.embeddings, outer_call.kept
        if kept is not None:
            if kept.shape != embeddings.shape[:2]:
                raise UnsupportedSetupError("A row of the batch has several pages. Pass one page per row.")
            embeddings = embeddings.masked_fill(~kept.to(embeddings.device).unsqueeze(-1), 0)
        else:
            kept = (
                embeddings.new_ones(embeddings.shape[:2]).bool() if outer_call.mask is None else outer_call.mask.bool()
            )
        if isinstance(output, tuple):
            return (embeddings, *output[1:])
        output["embeddings"], output["kept"] = embeddings, kept
        return output


def _add_vector_note(num_before: int, num_kept: int, stats: Stats) -> None:
    stats.notes.append(f"vectors: {num_kept} of {num_before} kept, including text")
