# SPDX-License-Identifier: Apache-2.0
"""Checks that need a loaded model, before it is patched, and checks of each call, before anything is cut.

The check of method x family x engine x cache is in `integrations.shared.checks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache

from tokenprune.errors import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import is_offloaded, is_quantized
from tokenprune.integrations.hf.cache.static_cache import ReducedStatic, is_static
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.sequence.masks import sliding_layers
from tokenprune.integrations.shared import checks
from tokenprune.selection.method import Site
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables
from tokenprune.selection.sites.decode import DecodeMethod
from tokenprune.selection.sites.encoder import TowerMethod

# Arguments of a decoder that hold one entry per token and are known to the engine.
_PER_TOKEN = {"inputs_embeds", "input_ids", "attention_mask", "position_ids", *compat.CACHE_NAMES}
# Kinds of cache layers of which tokens can be left out, beside quantized ones.
_KNOWN_LAYERS = {
    cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer, compat.LINEAR_LAYER, compat.EMPTY_LAYER,
}  # fmt: skip
# Where a method reads the attention of the layer before its cut, and that which the layer after it would have.
BEFORE, AFTER = (ObservedAt.LAYER_BEFORE, ObservedAt.UNROTATED), (ObservedAt.NEXT_LAYER,)


# What others put around a module that then runs as before: torch.compile, data parallelism, sharding, checkpointing.
_AROUND = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Places:
    """The places in a model of the modules that a patch put hooks on: what replaces one later runs without them."""

    def note(self, model: Any, hooked: Iterable[Any]) -> None:
        """Note where the modules that were `hooked` stand in `model`."""
        wanted, self._places = {id(module) for module in hooked}, []
        for path, parent in model.named_modules():
            for name, module in parent._modules.items():
                if id(module) in wanted:
                    self._places.append((parent._modules, name, module, f"{path}.{name}"))

    def check(self) -> None:
        """Raise UnsupportedSetupError where another module stands in the place of one."""
        for siblings, name, module, path in self._places:
            now: Any = siblings.get(name)
            if now is not module and not any(getattr(now, one, None) is module for one in _AROUND):
                raise UnsupportedSetupError(
                    f"{path} was replaced by a {type(now).__module__}.{type(now).__name__} after the model was "
                    "patched. Unpatch the model, and patch it again."
                )


def check_methods(steps: Iterable[Step], adapter: Adapter) -> None:
    """Raise an error for a method that is not supported on this family; see `shared.checks`."""
    for step in steps:
        method, acts = step.method, step.acts
        if isinstance(method, TowerMethod):
            acts = not method.is_identity(step.budget)
        checks.check(method, adapter.family, config=adapter.config, acts=acts)


def check_steps(steps: list[Step], adapter: Adapter) -> None:
    """Raise OptionError for cuts that cannot be made in this decoder, or not together."""
    layers = len(adapter.decoder.layers)
    for step in steps:
        step.method.check_model(adapter.decoder)
        if step.method.site is not Site.PRE_LLM and not 1 <= step.layer < layers:
            raise OptionError(
                f"{step.method.name}: layer={step.layer} is out of range: this decoder has {layers} layers. Choose a "
                f"layer from 1 to {layers - 1}."
            )
        check_layers(step, adapter)
        if step.budget.video is not None and adapter.family.after_frames is None:
            raise BudgetError(
                f"{step.budget} needs the frames of a video, which are not known for {adapter.config.model_type!r}. "
                "Use keep= or tokens=."
            )
    if len({step.budget.per for step in steps}) > 1:
        raise OptionError("Composed methods have different per=. Give their budgets the same per=.")


def check_layers(step: Step, adapter: Adapter) -> None:
    """Raise OptionError for a cut that this decoder's layers do not allow where it is asked for."""
    method, layer, family = step.method, step.layer, adapter.config.model_type
    attending = [index for index in range(len(adapter.decoder.layers)) if index not in adapter.stateful]
    if select_observables(method.needs, *BEFORE) and layer - 1 in adapter.stateful:
        raise OptionError(
            f"{method.name}: layer={layer} reads the attention of decoder layer {layer - 1}, which has none in "
            f"{family!r}. Choose a layer after one of {attending}."
        )
    if select_observables(method.needs, *AFTER) and layer in adapter.stateful:
        raise OptionError(
            f"{method.name}: layer={layer} reads the attention of that decoder layer, which has none in {family!r}. "
            f"Choose one of {attending}."
        )
    rotary = [one.name for one in select_observables(method.needs) if one.rotary]
    if rotary and not hasattr(adapter.decoder, "rotary_emb"):
        raise OptionError(
            f"{method.name} reads {', '.join(rotary)}, and the decoder of {family!r} has no rotary positions. Use a "
            "method that does not need them."
        )
    if rotary and layer and not gets_rotation(adapter, layer - 1):
        rotated = [index for index in range(len(adapter.decoder.layers)) if gets_rotation(adapter, index)]
        raise OptionError(
            f"{method.name}: layer={layer} reads {', '.join(rotary)} of decoder layer {layer - 1}, which gets no "
            f"rotary positions in {family!r}. Choose a layer after one of {rotated}."
        )
    if adapter.last_cut is not None and layer > adapter.last_cut[0]:
        raise OptionError(
            f"{method.name}: layer={layer} is too late in {family!r}: {adapter.last_cut[1]}. Choose layer "
            f"{adapter.last_cut[0]} or an earlier layer."
        )


def gets_rotation(adapter: Adapter, layer: int) -> bool:
    """Return whether the config gives a decoder layer rotary positions: some models skip layers."""
    thetas = getattr(adapter.text_config, "layer_rope_theta", None)
    if thetas is not None:
        return bool(thetas[layer])
    kinds, parameters = (getattr(adapter.text_config, name, None) for name in ("layer_types", "rope_parameters"))
    if not kinds or not parameters or kinds[layer] not in parameters:
        return True
    return parameters[kinds[layer]] is not None


def check_call(steps: Iterable[Step], adapter: Adapter, kwargs: dict[str, Any], in_blocks: bool = False) -> None:
    """Raise UnsupportedSetupError if a decoder that is called with `kwargs` cannot be cut by `steps`.

    in_blocks: whether some of its layers attend in blocks.
    """
    cache = compat.cache_in(kwargs)
    if isinstance(cache, Cache):
        check_cache(cache)
        if is_static(cache):
            check_static(cache, steps, adapter, in_blocks)
    for step in steps:
        if isinstance(step.method, DecodeMethod):
            check_decoding(step.method, adapter.text_config, cache, len(kwargs["inputs_embeds"]))
    if compat.reruns_hooks(adapter.decoder) and any(step.layer for step in steps):
        raise UnsupportedSetupError(
            "Gradient checkpointing runs decoder layers and their hooks a second time, without the state of the cut. "
            "Call model.gradient_checkpointing_disable(), or use a PRE_LLM method or transformers 5.23 or later."
        )
    check_arguments(adapter, kwargs)


def check_cache(cache: Cache) -> None:
    """Raise UnsupportedSetupError if tokens cannot be left out of this kind of cache."""
    for layer in getattr(cache, "layers", []):
        if type(layer) not in _KNOWN_LAYERS and not is_quantized(layer):
            kind = type(layer).__name__
            raise UnsupportedSetupError(
                f"Pruning with cache layers of kind {kind} is not supported. Use a DynamicCache, or unpatch the model."
            )


def check_static(cache: Cache, steps: Iterable[Step], adapter: Adapter, in_blocks: bool) -> None:
    """Raise UnsupportedSetupError if a decoder with this static cache cannot be cut by `steps`."""
    sliding: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    if sliding and len(sliding) == len(cache.layers):
        raise UnsupportedSetupError(
            "Pruning with a static cache of sliding layers only is not supported, because the cache does not tell its "
            "capacity. Use a dynamic cache."
        )
    past = int(cache.get_seq_length())
    filled = past and any(past >= layer.max_cache_len for layer in sliding)
    if filled and not isinstance(cache, ReducedStatic):
        raise UnsupportedSetupError(
            "Images of a later turn cannot be pruned, because the sliding layers of the static cache are full. Put the "
            "images into the first turn, or use a dynamic cache."
        )
    if compat.COUNTS_OUTSIDE:
        raise UnsupportedSetupError(
            f"Pruning with a static cache is not supported in transformers {compat.VERSION}. Use a dynamic cache, or "
            "transformers 5.4 or later."
        )
    for step in steps:
        checks.check_cache(step.method.site, adapter.family, checks.STATIC, step.method.name)
    checks.check_cache(Site.ATTENTION if in_blocks else Site.PRE_LLM, adapter.family, checks.STATIC)
    if (attention := adapter.attention) not in ("sdpa", "eager"):
        raise UnsupportedSetupError(
            f"Pruning with a static cache and attn_implementation={attention!r} is not supported. Use a dynamic cache, "
            'or load the model with "sdpa".'
        )


def check_arguments(adapter: Adapter, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedSetupError if the decoder got an argument with an entry for each token that its adapter does not
    cut."""
    shape = kwargs["inputs_embeds"].shape[:2]
    for name in kwargs.keys() - _PER_TOKEN - adapter.extra_arguments - adapter.family.entry_tokens.keys():
        value = kwargs[name]
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == shape:
            raise UnsupportedSetupError(
                f"The decoder of {adapter.config.model_type!r} got the per-token argument {name!r}, which its adapter "
                "cannot cut. Override take_extras in an adapter for this family."
            )


def check_decoding(method: DecodeMethod, config: Any, cache: Any, batch: int) -> None:
    """Raise UnsupportedSetupError where a method would take keys out of a cache that does not hold them as they are, or
    where a sliding window hides how long each row is."""
    if method.mode != "evict":
        return
    sliding = any(layer >= method.layer for layer in sliding_layers(config))
    if sliding and batch > 1 and "flash" in config._attn_implementation:
        raise UnsupportedSetupError(
            f"{method.name}: mode='evict' does not support several rows with sliding-window layers and flash "
            "attention. Use mode='mask', one row at a time, or sdpa."
        )
    quantized = any(is_quantized(layer) for layer in getattr(cache, "layers", ()))
    if quantized or is_offloaded(cache):
        kind = "a quantized" if quantized else "an offloaded"
        raise UnsupportedSetupError(
            f"{method.name}: mode='evict' removes keys from the cache, which is not supported for {kind} cache. Use "
            "mode='mask', or a dynamic cache."
        )
