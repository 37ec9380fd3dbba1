# SPDX-License-Identifier: Apache-2.0
"""Adapters of families whose decoder has additional inputs, masks, caches or streams."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import read_keys, read_values
from tokenprune.integrations.hf.families.base import Adapter, embed_ids
from tokenprune.integrations.hf.families.registry import register_adapter
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.token_state import Layout, gather_tokens


@register_adapter("gemma4", "gemma4_unified")
class SharedKeysAdapter(Adapter):
    """Gemma 4, and base of Gemma 3n. Each layer gets a slice of `per_layer_inputs`.

    The last layers attend to the keys of earlier layers. Tokens can be dropped only before the first of those earlier
    layers.
    """

    shares_keys = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        layers = range(len(self.decoder.layers))
        sources = [layer for layer in layers if getattr(self.get_attention(layer), "store_full_length_kv", False)]
        shared = [layer for layer in layers if self._shares_keys(layer)]
        if shared and sources:
            self.last_cut = min(sources), f"layers {shared[0]} to {shared[-1]} attend to the keys of layers {sources}"

    def _shares_keys(self, layer: int) -> bool:
        return getattr(self.get_attention(layer), "is_kv_shared_layer", False)

    def key_count(self, layer: int, kwargs: dict[str, Any]) -> int | None:
        if not self._shares_keys(layer):
            return None
        keys, _ = kwargs["shared_kv_states"][self._get_source(layer)]
        return keys.shape[-2]

    def _get_source(self, layer: int) -> Any:
        """Return the entry of `shared_kv_states` that a layer reads."""
        return self.get_attention(layer).layer_type


@register_adapter("gemma3n")
class Gemma3nAdapter(SharedKeysAdapter):
    """Gemma 3n. It has several streams of hidden states, `[streams, B, L, D]`, and methods read the active stream."""

    def _get_source(self, layer: int) -> Any:
        # A layer index up to transformers 5.19, and a layer type in later versions.
        attention = self.get_attention(layer)
        return getattr(attention, "kv_shared_layer_index", attention.layer_type)

    def flatten(self, hidden: Tensor) -> Tensor:
        return hidden.permute(1, 2, 0, 3).flatten(2)

    def unflatten(self, flat: Tensor, like: Tensor) -> Tensor:
        return flat.unflatten(2, (like.shape[0], like.shape[3])).permute(2, 0, 1, 3).contiguous()

    def get_method_states(self, extras: Any, layer: int, flat: Tensor) -> Tensor:
        if layer == 0:
            return flat  # embeddings, before the decoder creates the streams
        width, stream = self.text_config.hidden_size, self.text_config.altup_active_idx
        return flat[..., stream * width : (stream + 1) * width]


@register_adapter("llama4")
class Llama4Adapter(Adapter):
    """Llama 4. Some layers use chunked attention. Layers without rotary embedding scale queries by the token index.

    Separators between tiles are text tokens, so each tile counts as an image.
    """

    def masks(self, embeds: Tensor, mask: Tensor | None, cache: Any, config: Any = None) -> dict[str, Any]:
        # create_masks_for_generate of transformers 5.19 fails for chunked attention.
        arguments = (config or self.text_config, embeds, mask, cache)
        return {
            "full_attention": compat.create_mask("causal_mask", *arguments),
            "chunked_attention": compat.create_mask("chunked_causal_mask", *arguments),
        }

    def parts(self) -> list[Part]:
        return [QueryScales(self)] if self.text_config.attn_temperature_tuning else []


class QueryScales(Part):
    """Restores the query scales of the unpruned prompt in Llama 4's layers without rotary embedding.

    These layers compute scales from the index of each token in their input, which is wrong after a cut.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter

    def _attach(self) -> None:
        for layer in range(len(self.adapter.decoder.layers)):
            attention: Any = self.adapter.get_attention(layer)
            if not attention.use_rope:
                # In these layers, queries are only multiplied by their scale, so the projection can be rescaled.
                self.hook_in_call(attention.q_proj.register_forward_hook, partial(self._rescale, attention))

    def _rescale(self, attention: Any, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        call = self.current()
        if call is None or not call.active:
            return None
        layout = call.state.layout
        if layout.width == layout.length and layout.valid is None:
            return None
        if compat.reruns_layers(self.adapter.decoder):
            raise UnsupportedSetupError(
                "Gradient checkpointing runs the layers of llama4 a second time, without the positions of the kept "
                "tokens. Call model.gradient_checkpointing_disable()."
            )
        cut_index = torch.arange(layout.width, device=output.device)
        uncut_index = layout.index.to(output.device)
        scales = [
            torch.log1p(torch.floor((call.past + index.float() + 1.0) / attention.floor_scale)) * attention.attn_scale
            + 1.0
            for index in (uncut_index, cut_index)
        ]
        return output * (scales[0] / scales[1]).unsqueeze(-1).to(output.dtype)


@register_adapter("chameleon")
class ChameleonAdapter(Adapter):
    """Chameleon. Its decoder takes ids and pixels and merges them, so it is also the base module.

    Image tokens are ids of the vocabulary, as in Emu 3.
    """

    def _find(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        _, decoder = super()._find(model)
        return decoder, decoder

    def embeds(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        pixels, encoded = kwargs.get("pixel_values"), kwargs.get("mm_encoder_outputs")
        if pixels is not None and encoded is not None:
            return kwargs  # the model raises an error
        if pixels is not None:
            encoded = {"image": self.base.get_image_features(pixels, return_dict=True)}
        ids, kwargs = kwargs.get("input_ids"), embed_ids(self.base, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("pixel_values", "mm_encoder_outputs")}
        if not encoded or encoded.get("image") is None:
            return kwargs
        embeds, features = kwargs["inputs_embeds"], encoded["image"].pooler_output
        mask = self.base.get_placeholder_mask(ids, inputs_embeds=embeds, image_features=features)
        return kwargs | {"inputs_embeds": embeds.masked_scatter(mask, features)}


@register_adapter("ernie4_5_vl_moe")
class ErnieAdapter(Adapter):
    """Ernie 4.5 VL. Each layer routes text and image tokens to different experts, by a per-token type argument."""

    def grids(self, modality: str, arguments: dict[str, Any]) -> list[tuple[int, int, int]] | None:
        grids = super().grids(modality, arguments)
        if grids is None or modality == "image":
            return grids
        merge = self.config.vision_config.temporal_merge_size
        return [(max(1, frames // merge), height, width) for frames, height, width in grids]


@register_adapter("granite4_vision")
class GraniteAdapter(Adapter):
    """Granite 4 Vision. Image embeddings are zeros at the entry, and image features are added before some layers."""

    extra_arguments = frozenset({"vision_mask"})

    def take_extras(self, kwargs: dict[str, Any], layout: Layout) -> Any:
        mask, features = kwargs.pop("vision_mask", None), kwargs.pop("deepstack_features", None)
        if mask is None or not features:
            return None
        # One dense [B, W, D] tensor per layer with zeros at text, to be cut and merged like the hidden states.
        dense = {}
        for layer, feature in features.items():
            zeros = feature.new_zeros(*mask.shape[:2], feature.shape[-1])
            dense[layer] = zeros.masked_scatter(mask.to(zeros.device), feature)
        return mask, dense

    def cut_extras(self, extras: Any, slots: Tensor, layout: Layout, merge: Any) -> Any:
        if extras is None:
            return None
        mask, dense = extras
        mask = gather_tokens(mask, slots, 1)
        if layout.valid is not None:
            mask = mask & layout.valid.unsqueeze(-1)
        if merge is not None:
            dense = {layer: merge(feature) for layer, feature in dense.items()}
        return mask, {layer: gather_tokens(feature, slots, 1) for layer, feature in dense.items()}

    def return_extras(self, extras: Any) -> dict[str, Any]:
        mask, dense = extras
        features = {layer: feature[mask[..., 0]] for layer, feature in dense.items()}
        return {"vision_mask": mask, "deepstack_features": features}

    def get_method_states(self, extras: Any, layer: int, flat: Tensor) -> Tensor:
        # At the decoder's entry, the first added features represent the image tokens.
        return flat if layer or not extras else flat + extras[1][min(extras[1])]

    def before_layer(self, extras: Any, layer: int, hidden: Tensor) -> Tensor:
        dense = extras[1]
        return hidden if layer not in dense else hidden + dense[layer].to(hidden.device, hidden.dtype)


@register_adapter("kimi_k25")
class LatentAdapter(Adapter):
    """Kimi K2.5. Its decoder caches latents and computes the keys from them."""

    caches_keys = False

    def grids(self, modality: str, arguments: dict[str, Any]) -> list[tuple[int, int, int]] | None:
        sizes, (height, width) = arguments.get(f"{modality}_grid_thw"), self.config.vision_config.merge_kernel_size
        # The frames of a video are averaged.
        return None if sizes is None else [(1, h // height, w // width) for _, h, w in sizes.tolist()]

    def cached_keys(self, layer: int, cache: Any) -> Tensor:
        attention: Any = self.get_attention(layer)
        return attention.expand_kv(read_keys(cache, layer), read_values(cache, layer))[0]


@register_adapter("nemotron_h_omni")
class NemotronAdapter(Adapter):
    """Nemotron-H Omni. Its decoder has state-space, attention and mixture-of-experts layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if rate := getattr(self.base, "video_pruning_rate", 0):
            raise UnsupportedModelError(
                f"The model already prunes its videos (video_pruning_rate={rate}). Set model.video_pruning_rate = 0 "
                "before patching."
            )

    def grids(self, modality: str, arguments: dict[str, Any]) -> list[tuple[int, int, int]] | None:
        sizes = arguments.get("image_grid_hw")
        return None if sizes is None else [(1, height // 2, width // 2) for height, width in sizes.tolist()]

    def masks(self, embeds: Tensor, mask: Tensor | None, cache: Any, config: Any = None) -> dict[str, Any]:
        # create_masks_for_generate does not support mixture-of-experts layers.
        arguments = (config or self.text_config, embeds, mask, cache)
        return {
            "full_attention": compat.create_mask("causal_mask", *arguments),
            "linear_attention": compat.create_mask("recurrent_attention_mask", *arguments),
        }
