# SPDX-License-Identifier: Apache-2.0
"""The adapter for model families that hand images to their decoder in the common way; exceptions override its members.

The common contract of transformers (>= 5.0): `get_image_features` -> placeholders in `input_ids` -> `masked_scatter`
into `inputs_embeds` -> `language_model(inputs_embeds=..., attention_mask=..., position_ids=..., cache=...)`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import read_keys
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.token_state import Layout
from tokenprune.integrations.hf.sequence.masks import find_sliding_layers
from tokenprune.integrations.shared.towers.patch_grid import PatchSource
from tokenprune.kernels.transfer import to_device
from tokenprune.models.families import FAMILIES, PIXELS_ONLY, SUPPORTED, Family, get_config_family, get_family

# Layers that keep a key and a value for each token.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
_STATIC = {"full_attention", "sliding_attention"}  # those that can hold fewer tokens in a static cache
# Layers that carry a state from token to token (linear attention, state space, convolution), or look at one token at a
# time. Their state is built from the tokens that reach them, as if there had never been others.
STATEFUL = {"linear_attention", "conv", "mamba"}
_POINTWISE = {"mlp", "moe"}


class Adapter(PatchSource):
    """The common contract; it serves every model type for which no other adapter is registered.

    Facts are in its row, `family`: that of the model's type, as this very model has it. Behaviour is in its methods,
    which the adapter of a family that differs overrides.
    """

    # Modules and configs of many classes, which share no type that has what is read of them.
    model: Any
    base: Any
    decoder: Any
    config: Any
    text_config: Any

    # Facts that go with the methods that a subclass overrides.
    extra_arguments: ClassVar[frozenset[str]] = frozenset()  # decoder arguments that `take_extras` handles
    adds_after_layers: ClassVar[bool] = False  # `after_layer` changes the output of layers
    shares_keys: ClassVar[bool] = False  # some layers attend to the keys of other layers, see `key_count`
    caches_keys: ClassVar[bool] = True  # the cache holds keys in the form that attention reads, see `cached_keys`
    # The last decoder layer at whose input tokens can leave, and the reason; None if any layer is possible.
    last_cut: tuple[int, str] | None = None

    def __init__(self, model: nn.Module) -> None:
        # Wrappers (an adapter library) come and go; what is said of the patch stands in the model itself.
        self.model = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), model)
        self.config = self.model.config
        self.family = get_config_family(self.config)
        self.base, self.decoder = self._find(self.model)
        self.text_config = self.decoder.config
        self.sliding = find_sliding_layers(self.text_config)  # the decoder layers that attend in a window
        kinds = getattr(self.text_config, "layer_types", None) or ()
        unknown = set(kinds) - _ATTENDING - STATEFUL - _POINTWISE
        if unknown and self.family.name not in PIXELS_ONLY:
            raise UnsupportedModelError(
                f"model type {self.config.model_type!r} has decoder layers of kind {', '.join(sorted(unknown))}: it is "
                f"not known what they do with tokens that are gone. {suggest_families(self.config.model_type)}"
            )
        # Layers without keys: those that carry a state, and those that see one token at a time.
        self.stateful = frozenset(index for index, kind in enumerate(kinds) if kind not in _ATTENDING)
        self.placeholders = get_placeholder_ids(self.config)
        if not self.placeholders:
            raise UnsupportedModelError(
                f"the config of {self.config.model_type!r} names no image_token_id, image_token_index or "
                f"video_token_id. {suggest_families(self.config.model_type)}"
            )
        row = self.family
        videos: Any = "none" if "video" not in self.placeholders else "frames" if row.has_known_frames else "whole"
        static = row.static_cache and self.caches_keys and not self.shares_keys and set(kinds) <= _STATIC
        self.family = replace(row, videos=videos, stateful=bool(self.stateful), static_cache=static)

    # -- finding the parts

    def _find(self, model: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Return the module that merges images into text, and the decoder inside it."""
        names, norm, uncut = self.family.decoder_names, self.family.norm_name, self.family.name in PIXELS_ONLY
        # Top down, so that wrappers (a causal LM head, an adapter library) are passed through.
        for base in model.modules():
            for name in names:
                try:
                    decoder = attrgetter(name)(base)
                except AttributeError:
                    continue
                if isinstance(getattr(decoder, "layers", None), nn.ModuleList) and (uncut or hasattr(decoder, norm)):
                    return base, decoder
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {' or '.join(names)} with layers and {norm} where it is expected. "
            f"{suggest_families(getattr(model.config, 'model_type', ''))}"
        )

    def get_attention(self, layer: int) -> nn.Module:
        """Return the self-attention module of a decoder layer."""
        return _layer_module(self, layer, "self_attn attention attn self_attention mixer", "self-attention module")

    def get_attention_and_mlp(self, layer: int) -> tuple[nn.Module, nn.Module]:
        """Return the self-attention module and the MLP, or what stands in its place, of a decoder layer."""
        return self.get_attention(layer), _layer_module(
            self, layer, "mlp feed_forward block_sparse_moe ffn", "known MLP"
        )

    @property
    def attention(self) -> str:
        """Name of the decoder's attention implementation; it may change after the patch."""
        return self.text_config._attn_implementation

    # -- reading a call

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what the engine reads of the base model's forward, from the arguments that it was called with."""
        return arguments

    def visual_mask(self, call: dict[str, Any]) -> dict[str, Tensor]:
        """Return a bool `[B, L]` mask of placeholders for each modality. `call`: arguments of the base model's
        forward."""
        ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
        if ids is not None:
            return {modality: ids == token for modality, token in self.placeholders.items()}
        assert embeds is not None  # the decoder's forward asks for one of the two
        table = self.base.get_input_embeddings()
        tokens = {m: to_device([token], embeds.device) for m, token in self.placeholders.items()}
        return {m: (embeds == table(token)).all(-1) for m, token in tokens.items()}

    def modality(self, modality: str, arguments: dict[str, Any], call: dict[str, Any]) -> str:
        """Return what is encoded by a `get_{modality}_features` with `arguments`, within a forward with `call`."""
        return modality

    def runs_per_image(self, ids: list[int], runs: list[tuple[int, int]]) -> list[int]:
        """Return how many runs of placeholders each image of a row consists of, in their order. Asked where
        the row has `square="runs"`.

        ids: of the row's prompt, padding among them. runs: (first, last + 1) of each unbroken run of placeholders.
        """
        return [1] * len(runs)

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

    def embeds(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the decoder's `kwargs` with `inputs_embeds` in the place of ids, and of images, if it takes such."""
        return kwargs

    def positions(self, mask: Any, past: int) -> Tensor | None:
        """Return the positions (long `[1 or B, L]`) that the decoder would make itself for a call with this attention
        mask after `past` tokens; None where it would count them from `past` on."""
        return None

    def masks(self, embeds: Tensor, mask: Tensor | None, cache: Any, config: Any = None) -> Any:
        """Return the masks that the decoder would make itself for the whole sequence, in a form that it takes.

        config: in the place of the decoder's own, from which transformers learns the attention implementation.
        """
        return compat.create_masks(config or self.text_config, embeds, mask, cache)

    # -- per-token arguments of the decoder beyond the common ones

    def take_extras(self, kwargs: dict[str, Any], layout: Layout) -> Any:
        """Take per-token arguments that the engine must not pass on unchanged out of the decoder's `kwargs`; what is
        returned is handed to `cut_extras` and `after_layer`. Called once per forward, before any cut, if
        `extra_arguments` names some."""
        return None

    def cut_extras(self, extras: Any, slots: Tensor, layout: Layout, merge: Any) -> Any:
        """Return `extras` after a cut. slots: long `[B, W']` of the layout before the cut; layout: the one after it;
        merge: a function that merges `[B, W, D]` features like the hidden states were, or None."""
        return extras

    def return_extras(self, extras: Any) -> dict[str, Any]:
        """Return `extras` as arguments of the decoder, which adds them itself if no layer cuts; empty if it cannot."""
        return {}

    def before_layer(self, extras: Any, layer: int, hidden: Tensor) -> Tensor:
        """Return the input of a decoder layer, before a cut at it, with whatever the family adds to it."""
        return hidden

    def after_layer(self, extras: Any, layer: int, hidden: Tensor) -> Tensor:
        """Return the output of a decoder layer, with whatever the family adds to it."""
        return hidden

    # -- hidden states between layers

    def flatten(self, hidden: Tensor) -> Tensor:
        """Return the hidden states between two layers as `[B, W, D']`, to be cut."""
        return hidden

    def unflatten(self, flat: Tensor, like: Tensor) -> Tensor:
        """Undo `flatten` after a cut. like: the input of `flatten`."""
        return flat

    def get_method_states(self, extras: Any, layer: int, flat: Tensor) -> Tensor:
        """Return what methods see as the hidden states at a cut at `layer`, `[B, W, D]`. flat: see `flatten`."""
        return flat

    # -- layers that read the keys of other layers

    def key_count(self, layer: int, kwargs: dict[str, Any]) -> int | None:
        """Return how many keys a layer called with `kwargs` attends to; None if it keeps keys of its own."""
        return None

    def cached_keys(self, layer: int, cache: Any) -> Tensor:
        """Return the keys that a layer's cache holds, `[B, Hkv, K, Dh]`, as its attention function gets them."""
        return read_keys(cache, layer)

    # -- more that has to be put right in a patched model

    def parts(self) -> list[Part]:
        """Return what else has to be attached to the model wherever tokens are cut."""
        return []


def _layer_module(adapter: Adapter, layer: int, names: str, kind: str) -> nn.Module:
    """Return the first module of a decoder layer that has one of the names."""
    for name in names.split():
        if isinstance(module := getattr(adapter.decoder.layers[layer], name, None), nn.Module):
            return module
    raise UnsupportedModelError(f"decoder layer {layer} of {adapter.config.model_type!r} has no {kind}")


def embed_ids(base: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` with `inputs_embeds` in place of `input_ids`, from the input embeddings of `base`."""
    if kwargs.get("input_ids") is None or kwargs.get("inputs_embeds") is not None:
        return kwargs
    rest = {name: value for name, value in kwargs.items() if name != "input_ids"}
    return rest | {"inputs_embeds": base.get_input_embeddings()(kwargs["input_ids"])}


def get_placeholder_ids(config: Any) -> dict[str, int]:
    """Return the ids of placeholders in a model's config, by modality."""
    ids: dict[str, int] = {}
    for modality in ("image", "video"):
        for name in (f"{modality}_token_id", f"{modality}_token_index"):
            if isinstance(getattr(config, name, None), int):
                ids.setdefault(modality, getattr(config, name))
    return ids


ADAPTERS: dict[str, type[Adapter]] = {}
_A = TypeVar("_A", bound=Adapter)


def register_adapter(*families: str | Family) -> Callable[[type[_A]], type[_A]]:
    """Register an adapter for model types; it takes the place of one that was registered before.

    families: names of model types, or rows for those that the table of families lacks, or has otherwise.
    """

    def register(cls: type[_A]) -> type[_A]:
        rows = [one if isinstance(one, Family) else get_family(one) for one in families]
        FAMILIES.update((row.name, row) for row in rows)
        ADAPTERS.update((row.name, cls) for row in rows)
        return cls

    return register


def list_supported_families() -> list[str]:
    """Return the model types that are known to work, sorted: those that the test suite covers (`SUPPORTED`), and those
    for which adapters are registered."""
    return sorted({*SUPPORTED, *ADAPTERS})


def suggest_families(model_type: str = "") -> str:
    """Return a sentence that names the supported types closest to `model_type`, and the page about adding one."""
    close = difflib.get_close_matches(model_type, list_supported_families(), n=3, cutoff=0.0) if model_type else []
    nearest = f"The closest supported types are {', '.join(map(repr, close))}; " if close else ""
    return (
        f"{nearest}docs/reference/families.md lists all types, and docs/extend/add-a-family.md shows how to add a type."
    )
