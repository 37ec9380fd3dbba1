# SPDX-License-Identifier: Apache-2.0
"""How model families hand pictures to their decoder. One adapter covers the common contract; a quirk is an override
here.

The common contract of transformers (>= 5.19): `get_image_features` -> placeholders in `input_ids` -> `masked_scatter`
into `inputs_embeds` -> `language_model(inputs_embeds=..., attention_mask=..., position_ids=..., past_key_values=...)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.hf.layout import Layout
from tokenprune.transfer import sent


class Adapter:
    """The common contract. `families` are the model types that the test suite covers."""

    families: tuple[str, ...] = ("llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl")
    decoder_names: tuple[str, ...] = ("language_model",)
    extra_arguments: frozenset[str] = frozenset()  # per-token arguments of the decoder that take_extras deals with

    # How methods that act on pixels can make fewer tokens: "input" (the processor follows the picture's size), "target"
    # (it
    # makes every picture one size, which can shrink) or None (as many tokens of any picture).
    resizing: str | None = "input"

    # Whether a list of features from the encoder has one entry per picture; if not, runs of placeholders tell them
    # apart.
    features_per_picture = True

    def __init__(self, model: nn.Module) -> None:
        self.config = model.config
        self.base, self.decoder = self._find(model)
        self.text_config = self.decoder.config
        if stateful := set(getattr(self.text_config, "layer_types", None) or ()) - _CUTTABLE_LAYERS:
            raise UnsupportedModelError(
                f"model type {self.config.model_type!r} has decoder layers of kind {', '.join(sorted(stateful))}: only "
                f"layers that keep a key and a value for each token can lose tokens. {how_to_add()}"
            )
        self.placeholders = self._placeholder_ids()

    # -- finding the parts

    def _find(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Return the module that merges pictures into text, and the decoder inside it."""
        # Top down, so that wrappers (a causal LM head, an adapter library) are passed through.
        for base in model.modules():
            for name in self.decoder_names:
                decoder = getattr(base, name, None)
                if isinstance(getattr(decoder, "layers", None), nn.ModuleList) and hasattr(decoder, "norm"):
                    return base, decoder
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {' or '.join(self.decoder_names)} with layers and norm where it is "
            f"expected. {how_to_add()}"
        )

    def _placeholder_ids(self) -> dict[str, int]:
        ids = {}
        for modality in ("image", "video"):
            for name in (f"{modality}_token_id", f"{modality}_token_index"):
                if isinstance(getattr(self.config, name, None), int):
                    ids.setdefault(modality, getattr(self.config, name))
        if not ids:
            raise UnsupportedModelError(
                f"the config of {self.config.model_type!r} names no image_token_id, image_token_index or "
                f"video_token_id. {how_to_add()}"
            )
        return ids

    def attention_of(self, layer: int) -> nn.Module:
        """Return the self-attention module of a decoder layer."""
        for name in ("self_attn", "attention", "attn", "self_attention"):
            if isinstance(module := getattr(self.decoder.layers[layer], name, None), nn.Module):
                return module
        raise UnsupportedModelError(f"decoder layer {layer} of {self.config.model_type!r} has no self-attention module")

    @property
    def attention(self) -> str:
        """Name of the decoder's attention implementation; it may change after the patch."""
        return self.text_config._attn_implementation

    @property
    def unmergeable(self) -> str | None:
        """Why the patches of this family cannot be merged in its tower; None if its visual tokens are its patches."""
        family = self.config.model_type
        if family in _PATCH_TOKENS:
            return None
        return _UNMERGEABLE.get(family, "it is not known what becomes of its patches")

    @property
    def patch_layout(self) -> str | None:
        """How patches of the vision tower become visual tokens; None if this is not known.

        "tiles": each row of the tower is a square tile, and a square of one or more patches makes a token.
        "packed": tiles whose features are reordered, cropped and set apart by newlines (`pack_image_features`).
        "runs": patches of all pictures on one axis, ordered so that consecutive ones make a token.
        """
        return _PATCH_LAYOUTS.get(self.config.model_type)

    # -- reading a call

    def visual_mask(self, call: dict[str, Any]) -> dict[str, Tensor]:
        """Return a bool `[B, L]` mask of placeholders for each modality. `call`: arguments of the base model's
        forward."""
        ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
        if ids is not None:
            return {modality: ids == token for modality, token in self.placeholders.items()}
        table = self.base.get_input_embeddings()
        tokens = {m: sent([token], embeds.device) for m, token in self.placeholders.items()}
        return {m: (embeds == table(token)).all(-1) for m, token in tokens.items()}

    def on_host(self, modality: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `get_image_features` or `get_video_features` with what tells the shapes of pictures
        on the host, so that `grids` and others can read it any number of times."""
        name = f"{modality}_grid_thw"
        sizes = arguments.get(name)
        return arguments if sizes is None else arguments | {name: torch.as_tensor(sizes).cpu()}

    def grids(self, modality: str, arguments: dict[str, Any]) -> list[tuple[int, int, int]] | None:
        """Return (frames, height, width) in tokens of each picture, from the arguments of `get_image_features` or
        `get_video_features`; None where they do not tell."""
        sizes = arguments.get(f"{modality}_grid_thw")
        if sizes is None:
            return None
        merge = getattr(self.config.vision_config, "spatial_merge_size", 1)
        return [(t, h // merge, w // merge) for t, h, w in torch.as_tensor(sizes).tolist()]

    def video_frames(self, arguments: dict[str, Any]) -> list[int] | None:
        """Return how many frames of each video reach the decoder, from the arguments of `get_video_features`; None
        where they do not tell."""
        grids = self.grids("video", arguments)
        if grids is not None:
            return [frames for frames, _, _ in grids]
        pixels = arguments.get("pixel_values_videos", arguments.get("pixel_values"))
        if isinstance(pixels, Tensor) and pixels.ndim == 5:  # [videos, frames, 3, H, W]
            return [pixels.shape[1]] * pixels.shape[0]
        return None

    # -- per-token arguments of the decoder beyond the common ones

    def take_extras(self, kwargs: dict[str, Any], layout: Layout) -> Any:
        """Take per-token arguments that the engine must not pass on unchanged out of the decoder's `kwargs`; what is
        returned is handed to `cut_extras` and `after_layer`. Called once per forward, before any cut."""
        return None

    def cut_extras(self, extras: Any, slots: Tensor, layout: Layout, merge: Any) -> Any:
        """Return `extras` after a cut. slots: long `[B, W']` of the layout before the cut; layout: the one after it;
        merge: a function that merges `[B, W, D]` features like the hidden states were, or None."""
        return extras

    def after_layer(self, extras: Any, layer: int, hidden: Tensor) -> Tensor:
        """Return the output of a decoder layer, with whatever the family adds to it."""
        return hidden


class LlavaAdapter(Adapter):
    """LLaVA-1.5: every picture is made one size."""

    families = ("llava",)
    resizing = "target"


class FixedSizeAdapter(Adapter):
    """InternVL and Gemma 3: every tile, and every picture, becomes the same number of tokens."""

    families = ("internvl", "gemma3")
    resizing = None


class Idefics3Adapter(FixedSizeAdapter):
    """Idefics3 and SmolVLM call their decoder `text_model`. Their tiles are separate runs of placeholders, and nothing
    that reaches the model says which tiles make up a picture: each tile counts as an image."""

    families = ("idefics3", "smolvlm")
    # One tensor for all tiles up to transformers 5.22, from 5.23 on a list with one entry per prompt.
    features_per_picture = False
    decoder_names = ("text_model",)


class DeepstackAdapter(Adapter):
    """Qwen3-VL adds features of several tower layers to the visual tokens after the first decoder layers.

    The decoder would add them by a mask of the full length; with tokens gone, this adapter does it instead, by the same
    function of the model, after each layer.
    """

    families = ("qwen3_vl",)
    extra_arguments = frozenset({"visual_pos_masks"})

    def take_extras(self, kwargs: dict[str, Any], layout: Layout) -> Any:
        mask, features = kwargs.pop("visual_pos_masks", None), kwargs.pop("deepstack_visual_embeds", None)
        if mask is None or not features:
            return None
        # One dense [B, W, D] tensor a layer, zeros at text: it can be cut and merged like the hidden states.
        dense = []
        for feature in features:
            full = feature.new_zeros(*mask.shape, feature.shape[-1])
            dense.append(full.masked_scatter(mask.unsqueeze(-1).to(full.device), feature))
        return mask, dense

    def cut_extras(self, extras: Any, slots: Tensor, layout: Layout, merge: Any) -> Any:
        if extras is None:
            return None
        mask, dense = extras
        mask = mask.gather(1, slots)
        if layout.valid is not None:
            mask = mask & layout.valid
        if merge is not None:
            dense = [merge(feature) for feature in dense]
        index = slots.unsqueeze(-1)
        return mask, [feature.gather(1, index.expand(-1, -1, feature.shape[-1])) for feature in dense]

    def after_layer(self, extras: Any, layer: int, hidden: Tensor) -> Tensor:
        if extras is None or layer >= len(extras[1]):
            return hidden
        mask, dense = extras
        return self.decoder._deepstack_process(hidden, mask, dense[layer][mask])


_ADAPTERS: list[type[Adapter]] = [Adapter, LlavaAdapter, FixedSizeAdapter, Idefics3Adapter, DeepstackAdapter]

# Families that break the contract in ways that no adapter covers yet: cutting their tokens would be silently wrong.
_REASONS = {
    "its pictures enter through cross-attention, not through the sequence": "mllama idefics",
    "its pictures are not in the sequence of a decoder": "florence2 t5gemma2 git",
    "its prefill does not pass through the outer forward": "blip-2 instructblip instructblipvideo kosmos-2",
    "it has no picture features to choose from at the decoder's entry": "chameleon emu3 fuyu",
    "it hands its decoder more than the common contract, and no adapter for that is written yet": (
        "gemma3n gemma4 gemma4_unified ernie4_5_vl_moe granite4_vision kimi_k25 llama4 minimax_m3_vl muse_glimmer "
        "qwen2_5_omni_thinker qwen3_omni_moe_thinker cosmos3_omni cosmos3_edge cohere_compass exaone4_5 "
        "hyperclovax_vision_v2 nemotron_h_omni qwen4_exp glm5_next"
    ),
}
_UNSUPPORTED = {family: reason for reason, families in _REASONS.items() for family in families.split()}
# Families that hand the decoder one feature for each patch of a tower, at most newlines between; or one for each unit
# of 2 x 2 patches that stand together in a packed tower (packed_encoder.py).
_PATCH_TOKENS = {"llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
_UNMERGEABLE = {
    "gemma3": "it averages 4 x 4 patches (or the like) of its grid to a token, behind the tower",
} | {
    family: reason
    for reason, families in {
        "it joins neighbouring patches of its grid to a token (pixel shuffle), so each token holds several patches": (
            "internvl idefics3 smolvlm"
        ),
    }.items()
    for family in families.split()
}
_PATCH_LAYOUTS = {
    family: layout
    for layout, families in {
        "tiles": "llava internvl gemma3 idefics3 smolvlm",
        "packed": "llava_next llava_onevision",
        "runs": "qwen2_vl qwen2_5_vl qwen3_vl",
    }.items()
    for family in families.split()
}
# Layers that keep a key and a value for each token; others (linear attention, convolution, state space) carry a state.
_CUTTABLE_LAYERS = {"full_attention", "sliding_attention"}


def register_adapter(cls: type[Adapter]) -> type[Adapter]:
    """Register an adapter for the model types in its `families`; it is preferred over those registered before."""
    _ADAPTERS.append(cls)
    return cls


def supported_families() -> list[str]:
    """Return the model types that the test suite covers, sorted."""
    return sorted({family for adapter in _ADAPTERS for family in adapter.families})


def how_to_add() -> str:
    return (
        f"Supported and tested: {', '.join(supported_families())}; other models that follow the same contract work "
        "too. To add a family, derive from tokenprune.integrations.hf.adapters.Adapter and decorate the class with "
        "@register_adapter"
    )


def adapter_for(model: nn.Module) -> Adapter:
    """Return an adapter for `model`; raises UnsupportedModelError with what is supported and how to add a family."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model (it has no config.model_type). {how_to_add()}"
        )
    for adapter in reversed(_ADAPTERS):
        if kind in adapter.families:
            return adapter(model)
    if kind in _UNSUPPORTED:
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {_UNSUPPORTED[kind]}. {how_to_add()}")
    return Adapter(model)
