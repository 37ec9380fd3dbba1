# SPDX-License-Identifier: Apache-2.0
"""Check the set-ups in which a decoder can be cut: before a model is patched, and before anything is cut in a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from tokenprune.errors import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import is_offloaded, is_quantized
from tokenprune.integrations.hf.cache.static_cache import ReducedStatic, is_static
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.sequence.masks import sliding_layers
from tokenprune.integrations.shared import abilities
from tokenprune.selection.method import Site
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import observables_of
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
                    f"{path} was replaced since the model was patched, as an adapter or a quantizer does: it is a "
                    f"{type(now).__module__}.{type(now).__name__} now. Unpatch the model, and patch it again after that"
                )


def check_abilities(steps: Iterable[Step], adapter: Adapter) -> None:
    """Raise an error of ours for a method that may not act on this family; see `shared.abilities`."""
    for step in steps:
        method, acts = step.method, step.acts
        if isinstance(method, TowerMethod):
            acts = not method.is_identity(step.budget)
        abilities.check(method, adapter.family, config=adapter.config, acts=acts)


def check_steps(steps: list[Step], adapter: Adapter) -> None:
    """Raise OptionError for cuts that cannot be made in this decoder, or not together."""
    layers = len(adapter.decoder.layers)
    for step in steps:
        step.method.check_model(adapter.decoder)
        if step.method.site is not Site.PRE_LLM and not 1 <= step.layer < layers:
            raise OptionError(
                f"{step.method.name}: layer={step.layer} is out of range: this decoder has {layers} layers, and a "
                f"cut inside it is made at the input of layer 1 to {layers - 1} (the layer before gives the scores)"
            )
        check_layers(step, adapter)
        if step.budget.of_videos and adapter.family.after_frames is None:
            raise BudgetError(
                f"{step.budget} goes by the frames of a video, which are not known of {adapter.config.model_type!r}: "
                "frames that its processor hands over as images have a budget each; say keep= or tokens="
            )
    if len({step.budget.per for step in steps}) > 1:
        raise OptionError("composed methods must share their Budget's per=")


def check_layers(step: Step, adapter: Adapter) -> None:
    """Raise OptionError for a cut that this decoder's layers do not allow where it is asked for."""
    method, layer, family = step.method, step.layer, adapter.config.model_type
    attending = [index for index in range(len(adapter.decoder.layers)) if index not in adapter.stateful]
    if observables_of(method.needs, *BEFORE) and layer - 1 in adapter.stateful:
        raise OptionError(
            f"{method.name}: layer={layer} reads the attention of decoder layer {layer - 1}, which has none in "
            f"{family!r}; choose a layer after one of {attending}"
        )
    if observables_of(method.needs, *AFTER) and layer in adapter.stateful:
        raise OptionError(
            f"{method.name}: layer={layer} reads the attention of that decoder layer, which has none in {family!r}; "
            f"choose one of {attending}"
        )
    rotary = [one.name for one in observables_of(method.needs) if one.rotary]
    if rotary and not hasattr(adapter.decoder, "rotary_emb"):
        raise OptionError(
            f"{method.name}: the decoder of {family!r} has no rotary positions, which {', '.join(rotary)} is made of; "
            "use a method that does not need them"
        )
    if rotary and layer and not gets_rotation(adapter, layer - 1):
        rotated = [index for index in range(len(adapter.decoder.layers)) if gets_rotation(adapter, index)]
        raise OptionError(
            f"{method.name}: layer={layer} reads {', '.join(rotary)} of decoder layer {layer - 1}, which gets no "
            f"rotary positions in {family!r}. Choose a layer after one of {rotated}"
        )
    if adapter.last_cut is not None and layer > adapter.last_cut[0]:
        raise OptionError(
            f"{method.name}: layer={layer} is too late in {family!r}: {adapter.last_cut[1]}; cut at layer "
            f"{adapter.last_cut[0]} or before"
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
            "gradient checkpointing runs decoder layers a second time here, with their hooks and without the state of "
            "the cut between them; call model.gradient_checkpointing_disable(), use a PRE_LLM method (it cuts before "
            "the layers), or a newer transformers (5.23 leaves the hooks out)"
        )
    check_arguments(adapter, kwargs)


def check_cache(cache: Cache) -> None:
    """Raise UnsupportedSetupError if tokens cannot be left out of this kind of cache."""
    for layer in getattr(cache, "layers", []):
        if type(layer) not in _KNOWN_LAYERS and not is_quantized(layer):
            kind = type(layer).__name__
            known = "dynamic, static or quantized ones" if isinstance(layer, CacheLayerMixin) else "keys and values"
            raise UnsupportedSetupError(
                f"cannot prune with cache layers of kind {kind}: only caches of {known} can hold fewer tokens per "
                "layer; use a DynamicCache, or unpatch the model first"
            )


def check_static(cache: Cache, steps: Iterable[Step], adapter: Adapter, in_blocks: bool) -> None:
    """Raise UnsupportedSetupError if a decoder with this static cache cannot be cut by `steps`."""
    sliding: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    if sliding and len(sliding) == len(cache.layers):
        raise UnsupportedSetupError(
            "cannot prune with a static cache all of whose layers are sliding: it does not know for how many tokens it "
            "was made; leave out cache_implementation, or use a dynamic cache"
        )
    past = int(cache.get_seq_length())
    filled = past and any(past >= layer.max_cache_len for layer in sliding)
    if filled and not isinstance(cache, ReducedStatic):
        raise UnsupportedSetupError(
            "cannot prune the images of a later turn on a static cache whose sliding layers are full already; put "
            "images into the first turn, or use a dynamic cache"
        )
    use, family = abilities.STATIC.instead, adapter.family
    if compat.COUNTS_OUTSIDE:
        raise UnsupportedSetupError(
            f"cannot prune with a static cache in transformers {compat.VERSION}, whose models say by their own count "
            f"where tokens go in it: {use}, or take transformers 5.4 or later"
        )
    for step in steps:
        abilities.check_cache(step.method.site, family, abilities.STATIC, step.method.name)
    abilities.check_cache(Site.ATTENTION if in_blocks else Site.PRE_LLM, family, abilities.STATIC)
    if (attention := adapter.attention) not in ("sdpa", "eager"):
        raise UnsupportedSetupError(
            f"cannot prune with a static cache and attn_implementation={attention!r}: {use}, or load the model with "
            '"sdpa"'
        )


def check_arguments(adapter: Adapter, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedSetupError if the decoder got an argument with an entry for each token that its adapter does not
    cut."""
    shape = kwargs["inputs_embeds"].shape[:2]
    for name in kwargs.keys() - _PER_TOKEN - adapter.extra_arguments - adapter.family.entry_tokens.keys():
        value = kwargs[name]
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == shape:
            raise UnsupportedSetupError(
                f"the decoder of {adapter.config.model_type!r} got the per-token argument {name!r}, which its "
                "adapter does not know how to cut; override take_extras in an adapter for this family"
            )


def check_decoding(method: DecodeMethod, config: Any, cache: Any, batch: int) -> None:
    """Raise UnsupportedSetupError where a method would take keys out of a cache that does not hold them as they are, or
    where a sliding window hides how long each row is."""
    if method.mode != "evict":
        return
    sliding = any(layer >= method.layer for layer in sliding_layers(config))
    if sliding and batch > 1 and "flash" in config._attn_implementation:
        raise UnsupportedSetupError(
            f"{method.name}: mode='evict' with several rows, sliding-window layers and flash attention at once: flash "
            "kernels cannot leave out single slots of a window; use mode='mask', one row at a time, or sdpa"
        )
    quantized = any(is_quantized(layer) for layer in getattr(cache, "layers", ()))
    if quantized or is_offloaded(cache):
        kind = "a quantized" if quantized else "an offloaded"
        raise UnsupportedSetupError(
            f"{method.name}: mode='evict' takes keys out of the cache while decoding, which cannot be done with {kind} "
            "one; use mode='mask', which hides them, or a dynamic cache"
        )
