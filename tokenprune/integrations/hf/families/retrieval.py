# SPDX-License-Identifier: Apache-2.0
"""Models that return a vector for each token of a page or a question (ColPali, ColQwen2).

They hold an ordinary model as `vlm`, on which everything acts. What its holder makes of the zeros that stand for
dropped tokens are vectors like any other, so that they are taken out after it.
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
from tokenprune.integrations.hf.families.base import ADAPTERS, Adapter, register_adapter
from tokenprune.integrations.hf.forward.call import find_module_frame, is_running
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.shared.attachable import get_thread_states, refuse_replica
from tokenprune.statistics import Stats

# Models that nothing holds: the walk over all objects takes a quarter of a second, and a model is patched many times.
_alone: WeakSet[nn.Module] = WeakSet()


def find_outer_model(model: nn.Module) -> nn.Module:
    """Return the retrieval model that holds `model` in its `vlm`, and `model` itself where there is none.

    A module does not know what holds it, and what the outer model makes of dropped tokens does not show inside. Raises
    UnsupportedModelError for models of colpali-engine, which go on with what is left as if nothing had been dropped.
    """
    if hasattr(model, "custom_text_proj"):
        raise UnsupportedModelError(
            f"{type(model).__name__} makes a vector of every token itself, of dropped ones too: load the checkpoint in "
            "transformers' format (vidore/colpali-v1.3-hf, vidore/colqwen2-v1.0-hf) as ColPaliForRetrieval or "
            "ColQwen2ForRetrieval"
        )
    # Without its code there is no such model; older versions of transformers have a language head in `vlm`.
    if model in _alone or not any(".modeling_col" in name for name in sys.modules):
        return model
    models = (one for one in gc.get_objects() if issubclass(type(one), PreTrainedModel))
    inside = ((one, getattr(one, "_modules", {}).get("vlm")) for one in models)
    holder = next((one for one, vlm in inside if vlm and model in (vlm, vlm._modules.get("model"))), model)
    if holder is model and isinstance(model, nn.Module):
        _alone.add(model)
    return holder


def vectors(output: Any) -> list[Tensor]:
    """Return the vectors of each page or question of a batch, `[n, D]` each: those that a store keeps, and that the
    processor's `score_retrieval` takes.

    output: of ColPali or ColQwen2, patched or not. Zero rows are left out: dropped tokens and padding, which would
    count as vectors wherever all similarities are negative. Raises OptionError for an output without embeddings.
    """
    embeddings = getattr(output, "embeddings", None)
    if not isinstance(embeddings, Tensor):
        raise OptionError(f"{type(output).__name__} has no embeddings: pass the output of ColPali or ColQwen2")
    kept = getattr(output, "kept", None)
    kept = (embeddings != 0).any(-1) if kept is None else kept
    return [row[real] for row, real in zip(embeddings, kept, strict=True)]


@register_adapter("colpali", "colqwen2")
class RetrievalAdapter(Adapter):
    """The adapter of the model inside, with facts of its type."""

    def __init__(self, model: nn.Module) -> None:
        holder: Any = next(one for one in model.modules() if isinstance(getattr(one, "vlm", None), nn.Module))
        kind = holder.vlm.config.model_type
        if ADAPTERS.get(kind, Adapter) is not Adapter:
            raise UnsupportedModelError(
                f"{type(holder).__name__} around a model of type {kind!r} is not supported: that needs an adapter of "
                "its own, and this one serves types of the common contract (paligemma, qwen2_vl, qwen2_5_vl)"
            )
        super().__init__(holder.vlm)
        self.family = replace(self.family, name=holder.config.model_type, vectors=True)
        self.holder = holder
        self.pages = Pages(self)

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        ahead = self.pages.ahead()
        if ahead is None or ahead.ids is None or arguments.get("input_ids") is not None:
            return arguments
        encoded = {} if ahead.encoded is None else {"mm_encoder_outputs": {"image": ahead.encoded}}
        return arguments | {"input_ids": ahead.ids} | encoded  # ColQwen2 hands on embeddings alone, of questions too

    def parts(self) -> list[Part]:
        return [self.pages]


@dataclass
class Ahead:
    """A call of the holder. ids: of its prompt. encoded: what `get_image_features` returned ahead of the model inside.
    kept: bool `[B, L]`, the tokens that are left after that; None before. frame: of the holder's call."""

    ids: Tensor | None
    mask: Tensor | None
    frame: FrameType
    encoded: Any = None
    kept: Tensor | None = None


class Pages(Part):
    """Stands around the model that returns vectors: rows of dropped tokens become zeros, and `output.kept` says which
    are real."""

    def __init__(self, adapter: RetrievalAdapter) -> None:
        super().__init__()
        self.base, self.holder = adapter.base, adapter.holder
        self._parameters = list(inspect.signature(self.holder.forward).parameters)

    def ahead(self) -> Ahead | None:
        """Return this thread's call of the holder; None outside of one."""
        ahead: Ahead | None = get_thread_states().get(self)
        if ahead is not None and not is_running(ahead.frame):
            del get_thread_states()[self]  # the call was interrupted
            return None
        return ahead

    def _attach(self) -> None:
        self.hook(self.holder.register_forward_pre_hook, self._enter, with_kwargs=True)
        # Ahead of the engine's own hook, which ends the call.
        self.hook_in_call(self.base.register_forward_hook, self._leave_inside)
        self.hook(self.holder.register_forward_hook, self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        refuse_replica(module, self.holder)
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        ahead = Ahead(given.get("input_ids"), given.get("attention_mask"), find_module_frame())
        get_thread_states()[self] = ahead
        grids, pixels = given.get("image_grid_thw"), given.get("pixel_values")
        if grids is None or pixels is None or given.get("inputs_embeds") is not None:
            return (), given
        # ColQwen2 would call the tower itself, past `get_image_features`, around which all parts of a patch act.
        real = torch.arange(pixels.shape[1], device=grids.device) < grids[:, 1:].prod(-1, keepdim=True)
        ahead.encoded = self.base.get_image_features(pixels[real], grids)
        embeds = self.base.get_input_embeddings()(ahead.ids)
        places = (ahead.ids == self.base.config.image_token_id).unsqueeze(-1)
        features = torch.cat(list(ahead.encoded.pooler_output)).to(embeds)
        return (), given | {"inputs_embeds": embeds.masked_scatter(places, features), "pixel_values": None}

    def _leave_inside(self, module: nn.Module, args: tuple, output: Any) -> None:
        ahead, call = self.ahead(), self.current()
        if ahead is None or call is None or not call.active or (layout := call.state.layout).is_uncut:
            return
        ahead.kept = layout.inverse >= 0
        if call.has_images:
            counts = sum(call.prompt.tokens_per_row), sum(layout.tokens_per_row)
            call.trace.stats.defer(partial(_note_vectors, *counts))

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        ahead = get_thread_states().pop(self, None)
        if ahead is None or output is None:
            return None
        embeddings, kept = output[0] if isinstance(output, tuple) else output.embeddings, ahead.kept
        if kept is not None:
            if kept.shape != embeddings.shape[:2]:
                raise UnsupportedSetupError("a row holds several pages: give each a row of its own")
            embeddings = embeddings.masked_fill(~kept.to(embeddings.device).unsqueeze(-1), 0)
        else:
            kept = embeddings.new_ones(embeddings.shape[:2]).bool() if ahead.mask is None else ahead.mask.bool()
        if isinstance(output, tuple):
            return (embeddings, *output[1:])
        output["embeddings"], output["kept"] = embeddings, kept
        return output


def _note_vectors(full: int, kept: int, stats: Stats) -> None:
    stats.notes.append(f"vectors: {kept} of {full} are left, those of text among them")
