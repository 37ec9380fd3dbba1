# SPDX-License-Identifier: Apache-2.0
"""Default adapter for vision-language models of transformers.

The default adapter serves models that follow the contract of transformers (>= 5.0): `get_image_features` returns
features, `masked_scatter` writes them over the placeholders of `input_ids` in `inputs_embeds`, and
`language_model(inputs_embeds=..., attention_mask=..., position_ids=..., cache=...)` runs the decoder.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import read_keys
from tokenprune.integrations.hf.families.registry import suggest_families
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.token_state import Layout
from tokenprune.integrations.hf.sequence.masks import find_sliding_layers
from tokenprune.integrations.shared.towers.patch_grid import PatchSource
from tokenprune.kernels.transfer import to_device
from tokenprune.models.families import PIXELS_ONLY, get_config_family

# Layers that cache a key and a value per token.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
_STATIC = {"full_attention", "sliding_attention"}  # attention layers that support a pruned static cache
# Layers that carry a state from token to token (linear attention, state space, convolution). Dropped tokens do not
# enter the state.
STATEFUL = {"linear_attention", "conv", "mamba"}
_POINTWISE = {"mlp", "moe"}  # layers that process each token separately


class Adapter(PatchSource):
    """Default adapter, used for every model type without a registered adapter.

    Data about the model type is in `family`, a row of the family table that is adjusted to this model. Behaviour is in
    the methods. The adapter of a family with different code overrides some of them.

    Args:
        model: Model to patch, or a wrapper of it.

    Attributes:
        model: The transformers model inside wrappers.
        base: Module that merges images into text.
        decoder: Decoder inside `base`.
        config: Config of the model.
        text_config: Config of the decoder.
        family: Row of the family table for this model.
        sliding: Decoder layers with a sliding window.
        stateful: Decoder layers without keys.
        placeholders: Placeholder id of each modality.

    Raises:
        UnsupportedModelError: If no decoder is found, or the model has unknown kinds of layers or no placeholder ids.

    Examples:
        >>> from tokenprune.models.families import Family
        >>> from tokenprune.integrations.hf.families import Adapter, register_adapter
        >>> @register_adapter(Family("my_model_type", square="always"))
        ... class MyAdapter(Adapter):
        ...     def grids(self, modality, arguments):
        ...         sizes = arguments.get("image_grid_hw")
        ...         return None if sizes is None else [(1, height // 2, width // 2) for height, width in sizes.tolist()]
    """

    # Typed as Any, because the classes of these modules and configs do not share the attributes that are read.
    model: Any
    base: Any
    decoder: Any
    config: Any
    text_config: Any

    # Constants that subclasses set together with the methods that they override.
    extra_arguments: ClassVar[frozenset[str]] = frozenset()  # decoder arguments that `take_extras` handles
    adds_after_layers: ClassVar[bool] = False  # True if `after_layer` changes the output of layers
    shares_keys: ClassVar[bool] = False  # True if some layers attend to the keys of other layers (`key_count`)
    caches_keys: ClassVar[bool] = True  # True if the cache holds keys as attention reads them (`cached_keys`)
    # The last decoder layer that supports a cut at its input, and the reason. None if all layers do.
    last_cut: tuple[int, str] | None = None

    def __init__(self, model: nn.Module) -> None:
        # The patch is stored in the model itself, because wrappers (PEFT) may be added and removed.
        self.model = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
        self.config = self.model.config
        self.family = get_config_family(self.config)
        self.base, self.decoder = self._find(self.model)
        self.text_config = self.decoder.config
        self.sliding = find_sliding_layers(self.text_config)
        kinds = getattr(self.text_config, "layer_types", None) or ()
        unknown = set(kinds) - _ATTENDING - STATEFUL - _POINTWISE
        if unknown and self.family.name not in PIXELS_ONLY:
            raise UnsupportedModelError(
                f"Model type {self.config.model_type!r} has decoder layers of an unknown kind: "
                f"{', '.join(sorted(unknown))}. {suggest_families(self.config.model_type)}"
            )
        self.stateful = frozenset(index for index, kind in enumerate(kinds) if kind not in _ATTENDING)
        self.placeholders = get_placeholder_ids(self.config)
        if not self.placeholders:
            raise UnsupportedModelError(
                f"The config of {self.config.model_type!r} has none of image_token_id, image_token_index and "
                f"video_token_id. {suggest_families(self.config.model_type)}"
            )
        row = self.family
        videos: Any = "none" if "video" not in self.placeholders else "frames" if row.has_known_frames else "whole"
        static = row.static_cache and self.caches_keys and not self.shares_keys and set(kinds) <= _STATIC
        self.family = replace(row, videos=videos, stateful=bool(self.stateful), static_cache=static)

    # -- modules

    def _find(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Return the module that merges images into text, and the decoder inside it."""
        names, norm, uncut = self.family.decoder_names, self.family.norm_name, self.family.name in PIXELS_ONLY
        # Top down, to pass through wrappers (a causal LM head, PEFT).
        for base in model.modules():
            for name in names:
                try:
                    decoder = attrgetter(name)(base)
                except AttributeError:
                    continue
                if isinstance(getattr(decoder, "layers", None), nn.ModuleList) and (uncut or hasattr(decoder, norm)):
                    return base, decoder
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {' or '.join(names)} with layers and {norm}. "
            f"{suggest_families(getattr(model.config, 'model_type', ''))}"
        )

    def get_attention(self, layer: int) -> nn.Module:
        """Return the self-attention module of a decoder layer."""
        return _find_layer_module(self, layer, "self_attn attention attn self_attention mixer", "self-attention module")

    def get_attention_and_mlp(self, layer: int) -> tuple[nn.Module, nn.Module]:
        """Return the self-attention module and the MLP (or mixture of experts) of a decoder layer."""
        return self.get_attention(layer), _find_layer_module(
            self, layer, "mlp feed_forward block_sparse_moe ffn", "known MLP"
        )

    @property
    def attention(self) -> str:
        """Name of the decoder's attention implementation. It may change after the patch."""
        return self.text_config._attn_implementation

    # -- reading a call

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the engine reads, from the arguments of the base model's forward."""
        return arguments

    def visual_mask(self, call: dict[str, Any]) -> dict[str, Tensor]:
        """Find the placeholders of each modality.

        Args:
            call: Arguments of the base model's forward.

        Returns:
            A mask for each modality, bool `[B, L]`.
        """
        ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
        if ids is not None:
            return {modality: ids == token for modality, token in self.placeholders.items()}
        assert embeds is not None  # the forward requires ids or embeddings
        table = self.base.get_input_embeddings()
        tokens = {m: to_device([token], embeds.device) for m, token in self.placeholders.items()}
        return {m: (embeds == table(token)).all(-1) for m, token in tokens.items()}

    def modality(self, modality: str, arguments: dict[str, Any], call: dict[str, Any]) -> str:
        """Return the modality of an encoder call.

        Args:
            modality: Modality in the name of the called function, `get_{modality}_features`.
            arguments: Arguments of the encoder call.
            call: Arguments of the forward that makes the encoder call.
        """
        return modality

    def runs_per_image(self, ids: list[int], runs: list[tuple[int, int]]) -> list[int]:
        """Return the number of placeholder runs of each image in a row. Only used for families with `square="runs"`.

        Args:
            ids: Token ids of the row, including padding.
            runs: Start and end of each contiguous run of placeholders.
        """
        return [1] * len(runs)

    def video_frames(self, arguments: dict[str, Any]) -> list[int] | None:
        """Return the number of frames of each video at the decoder, or None if unknown.

        Args:
            arguments: Arguments of `get_video_features`.
        """
        grids = self.grids("video", arguments)
        if grids is not None:
            return [frames for frames, _, _ in grids]
        pixels = arguments.get("pixel_values_videos", arguments.get("pixel_values"))
        if isinstance(pixels, Tensor) and pixels.ndim == 5:  # [videos, frames, 3, H, W]
            return [pixels.shape[1]] * pixels.shape[0]
        return None

    def embeds(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the decoder's arguments with `inputs_embeds` instead of token ids and images."""
        return kwargs

    def positions(self, mask: Any, past: int) -> Tensor | None:
        """Return the position ids that the decoder computes by default.

        Args:
            mask: Attention mask of the call, or None.
            past: Number of cached tokens.

        Returns:
            Position ids, long `[1 or B, L]`, or None if they are past, past + 1, and so on.
        """
        return None

    def masks(self, embeds: Tensor, mask: Tensor | None, cache: Any, config: Any = None) -> Any:
        """Return the masks that the decoder would create for the uncut sequence, in a form that it accepts.

        Args:
            embeds: Input embeddings, `[B, L, D]`.
            mask: Attention mask of the call, or None.
            cache: Key/value cache, or None.
            config: Config that replaces `text_config`. It selects the attention implementation.
        """
        return compat.create_masks(config or self.text_config, embeds, mask, cache)

    # -- additional per-token arguments of the decoder

    def take_extras(self, kwargs: dict[str, Any], layout: Layout) -> Any:
        """Remove the per-token arguments of the family from the decoder's arguments, and return them.

        Called once per forward, before the first cut, if `extra_arguments` is not empty. `cut_extras`, `before_layer`
        and `after_layer` receive the result.

        Args:
            kwargs: Arguments of the decoder, modified by this method.
            layout: Layout of the uncut batch.
        """
        return None

    def cut_extras(self, extras: Any, slots: Tensor, layout: Layout, merge: Any) -> Any:
        """Return the extras after a cut.

        Args:
            extras: Result of `take_extras` or of the previous cut.
            slots: Kept slots of the layout before the cut, long `[B, W']`.
            layout: Layout after the cut.
            merge: Function that merges `[B, W, D]` features in the same way as the hidden states, or None.
        """
        return extras

    def return_extras(self, extras: Any) -> dict[str, Any]:
        """Return the extras as arguments of the decoder, used if all cuts are at its entry. Empty if not supported."""
        return {}

    def before_layer(self, extras: Any, layer: int, hidden: Tensor) -> Tensor:
        """Add features of the family to the input of a decoder layer, before a cut."""
        return hidden

    def after_layer(self, extras: Any, layer: int, hidden: Tensor) -> Tensor:
        """Add features of the family to the output of a decoder layer."""
        return hidden

    # -- hidden states between layers

    def flatten(self, hidden: Tensor) -> Tensor:
        """Reshape the hidden states between two layers to `[B, W, D']` for a cut."""
        return hidden

    def unflatten(self, flat: Tensor, like: Tensor) -> Tensor:
        """Undo `flatten` after a cut. `like` is the input of `flatten`."""
        return flat

    def get_method_states(self, extras: Any, layer: int, flat: Tensor) -> Tensor:
        """Return the hidden states that methods read at a cut, `[B, W, D]`, from the result of `flatten`."""
        return flat

    # -- layers that read the keys of other layers

    def key_count(self, layer: int, kwargs: dict[str, Any]) -> int | None:
        """Return the number of keys of another layer that a layer attends to, or None if it has separate keys.

        Args:
            layer: Index of the decoder layer.
            kwargs: Arguments of the layer.
        """
        return None

    def cached_keys(self, layer: int, cache: Any) -> Tensor:
        """Return the cached keys of a layer as its attention function reads them, `[B, Hkv, K, Dh]`."""
        return read_keys(cache, layer)

    # -- additional parts

    def parts(self) -> list[Part]:
        """Return additional parts that the family needs in a patched model."""
        return []


def _find_layer_module(adapter: Adapter, layer: int, names: str, kind: str) -> nn.Module:
    """Return the first submodule of a decoder layer with one of the space-separated `names`."""
    for name in names.split():
        if isinstance(module := getattr(adapter.decoder.layers[layer], name, None), nn.Module):
            return module
    raise UnsupportedModelError(
        f"Decoder layer {layer} of {adapter.config.model_type!r} has no {kind}. docs/extend/add-a-family.md shows how "
        "to write an adapter."
    )


def embed_ids(base: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replace `input_ids` in `kwargs` by `inputs_embeds`, computed with the input embeddings of `base`."""
    if kwargs.get("input_ids") is None or kwargs.get("inputs_embeds") is not None:
        return kwargs
    rest = {name: value for name, value in kwargs.items() if name != "input_ids"}
    return rest | {"inputs_embeds": base.get_input_embeddings()(kwargs["input_ids"])}


def get_placeholder_ids(config: Any) -> dict[str, int]:
    """Return the placeholder id of each modality in a model's config."""
    ids: dict[str, int] = {}
    for modality in ("image", "video"):
        for name in (f"{modality}_token_id", f"{modality}_token_index"):
            if isinstance(getattr(config, name, None), int):
                ids.setdefault(modality, getattr(config, name))
    return ids
