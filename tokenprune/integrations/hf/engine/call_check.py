# SPDX-License-Identifier: Apache-2.0
"""Checks of each call: errors for unsupported inputs, and notes on calls that prune less than expected."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import is_offloaded, is_quantized
from tokenprune.integrations.hf.cache.static_cache import ReducedStatic, is_static
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part
from tokenprune.integrations.hf.forward.plan import Plan, Step
from tokenprune.integrations.hf.sequence.masks import find_sliding_layers
from tokenprune.integrations.hf.sequence.packing import BORDER_ARGUMENTS, explain_restart, find_borders
from tokenprune.integrations.hf.sequence.segments import count_features
from tokenprune.integrations.shared import checks
from tokenprune.integrations.shared.attachable import get_thread_states
from tokenprune.selection.method import Method, Site
from tokenprune.selection.observable_registry import select_observables
from tokenprune.selection.sites.decode import DecodeMethod

logger = logging.getLogger("tokenprune")

# Extra arguments of a decoder that `check_arguments` skips.
_SKIPPED = {"input_ids"}
# Cache layers that support dropping tokens. Quantized layers support it, too.
_KNOWN_LAYERS = {
    cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer, compat.LINEAR_LAYER, compat.EMPTY_LAYER,
}  # fmt: skip


class CallCheck(Part):
    """Checks the inputs of each call. A note is written to the statistics of every call, and logged once.

    Args:
        adapter: Adapter of the model.
        methods: Methods that select tokens at the decoder.
    """

    def __init__(self, adapter: Adapter, methods: Sequence[Method]) -> None:
        super().__init__()
        self.adapter = adapter
        self.reading = [method.name for method in methods if method.query_aware]
        self.absolute = [
            method.name for method in methods if any(read.absolute for read in select_observables(method.needs))
        ]
        self.logged: set[str] = set()

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        rows, length = inputs.embeds.shape[:2]
        if call.has_images:
            self._note_step(call, (rows, length))
            self._note_padding(call, inputs)
        elif length > 1 and not call.past and not call.outputs and call.arguments.get("input_ids") is None:
            self._note(
                call,
                "The prompt consists of embeddings without pixels, so no tokens were pruned. Pass pixel_values with "
                "input_ids, or with embeddings of placeholders.",
            )

    def on_plan(self, call: Call, plan: Plan) -> Plan:
        if not (plan.cuts or call.maskless or call.merged is not None):
            return plan
        arguments, prompt = call.arguments, call.prompt
        if not prompt.has_sample_numbers and all(arguments.get(name) is None for name in BORDER_ARGUMENTS):
            return plan
        mrope = hasattr(self.adapter.base, "get_rope_index")
        if (reason := find_borders(arguments, prompt.has_sample_numbers, prompt.position_ids, mrope)) is not None:
            raise UnsupportedSetupError(
                f"A row holds several samples (by {reason}), and a cut would treat them as one. Give each sample its "
                "own row with padding (packing=False, padding_free=False, no DataCollatorWithFlattening)."
            )
        if (reason := explain_restart(arguments, prompt.padding, prompt.position_ids)) is not None:
            self._note(
                call,
                f"position_ids restart inside a row, but the row counts as one sample, because {reason}. Give each "
                "sample its own row.",
            )
        return plan

    def _note_step(self, call: Call, shape: tuple[int, int]) -> None:
        """Note that methods select tokens again in each step if `generate` runs without a cache.

        Such a step has one token more than the previous call of the thread.
        """
        if not self.reading or call.arguments.get("use_cache") is not False:
            return
        rows, length = shape
        if get_thread_states().get(self) == (rows, length - 1):
            names = " and ".join(self.reading)
            self._note(
                call,
                f"Without a cache {names} selects tokens again in each step, by the last generated token. The answer "
                "may differ from use_cache=True.",
            )
        get_thread_states()[self] = shape

    def _note_padding(self, call: Call, inputs: DecoderInputs) -> None:
        """Note a left-padded prompt without position ids, if a method reads values that depend on positions."""
        if not self.absolute or inputs.positions is not None or call.past or call.prompt.is_real[:, 0].all():
            return
        if self.adapter.positions(inputs.mask, call.past) is None:
            names = " and ".join(dict.fromkeys(self.absolute))
            self._note(
                call,
                f"{names} reads values that depend on position ids, which count the left padding here. The selection "
                "may differ from unpadded rows. Pass position_ids, or call generate().",
            )

    def _note(self, call: Call, note: str) -> None:
        call.notes.append(note)
        if note not in self.logged:
            self.logged.add(note)
            logger.warning(note)


class ChunkedPrefillCheck(Part):
    """Raises UnsupportedSetupError if a forward receives fewer features than `generate` encoded.

    With `prefill_chunk_size`, `generate` encodes the images first and then passes the prompt in chunks. transformers
    5.19 passes no features, and 5.23 passes the features of each chunk. Methods select from complete images.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter
        self.encoded_ahead = False  # whether a thread ever encoded images outside of a forward

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        output = encode(encoding)
        if self.current() is None:  # `generate` encodes images before the forward
            self.encoded_ahead = True
            get_thread_states().setdefault(self, {})[encoding.modality] = weakref.ref(output)
        return output

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        waiting = get_thread_states().pop(self, None) if self.encoded_ahead else None
        if waiting is None:
            return
        pending = {modality: output for modality, ref in waiting.items() if (output := ref()) is not None}
        passed = call.arguments.get("mm_encoder_outputs") or {}
        if call.outputs and not passed:
            return  # a different prompt, called with pixels
        masks = self.adapter.visual_mask(call.arguments) if pending else {}
        if pending and not call.outputs and not any(bool(mask.any()) for mask in masks.values()):
            get_thread_states()[self] = waiting  # a chunk of text before the images
            return
        for modality, output in pending.items():
            if modality in call.outputs:
                received, encoded = count_features(call.outputs[modality]), count_features(output)
                lost = received is not None and encoded is not None and received < encoded
            else:
                lost = modality in masks and bool(masks[modality].any())
            if lost:
                raise UnsupportedSetupError(
                    "A chunk of the prompt has placeholders without image features, because prefill_chunk_size is set. "
                    "Call generate() without prefill_chunk_size."
                )


def check_call(steps: Iterable[Step], adapter: Adapter, inputs: DecoderInputs, in_blocks: bool = False) -> None:
    """Raise UnsupportedSetupError if `steps` cannot cut this call of the decoder.

    Args:
        steps: Steps of the patch.
        adapter: Adapter of the model.
        inputs: Inputs of the decoder.
        in_blocks: Whether some layers use block attention.
    """
    cache = inputs.cache
    if isinstance(cache, Cache):
        check_cache(cache)
        if is_static(cache):
            check_static(cache, steps, adapter, in_blocks)
    for step in steps:
        if isinstance(step.method, DecodeMethod):
            check_decoding(step.method, adapter.text_config, cache, len(inputs.embeds))
    if any(step.layer for step in steps) and compat.reruns_hooks(adapter.decoder):
        raise UnsupportedSetupError(
            "Gradient checkpointing runs decoder layers and their hooks a second time, without the state of the cut. "
            "Call model.gradient_checkpointing_disable(), or use a PRE_LLM method or transformers 5.23 or later."
        )
    check_arguments(adapter, inputs)


def check_cache(cache: Cache) -> None:
    """Raise UnsupportedSetupError if tokens cannot be dropped from this kind of cache."""
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
            "Pruning with a static cache of sliding layers only is not supported, because such a cache does not "
            "expose its capacity. Use a dynamic cache."
        )
    past = int(cache.get_seq_length())
    filled = past and any(past >= layer.max_cache_len for layer in sliding)
    if filled and not isinstance(cache, ReducedStatic):
        raise UnsupportedSetupError(
            "Images of a later turn cannot be pruned, because the sliding layers of the static cache are full. Put the "
            "images into the first turn, or use a dynamic cache."
        )
    if compat.NEEDS_CACHE_POSITION:
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


def check_arguments(adapter: Adapter, inputs: DecoderInputs) -> None:
    """Raise UnsupportedSetupError if the decoder got a per-token argument that its adapter does not cut."""
    shape = inputs.embeds.shape[:2]
    for name in inputs.extras.keys() - _SKIPPED - adapter.extra_arguments - adapter.family.entry_tokens.keys():
        value = inputs.extras[name]
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == shape:
            raise UnsupportedSetupError(
                f"The decoder of {adapter.config.model_type!r} got the per-token argument {name!r}, which its adapter "
                "cannot cut. Override take_extras in an adapter for this family."
            )


def check_decoding(method: DecodeMethod, config: Any, cache: Any, batch: int) -> None:
    """Raise UnsupportedSetupError if a method cannot evict keys from this cache.

    Quantized and offloaded caches do not store plain keys. A sliding window hides the length of each row.
    """
    if method.mode != "evict":
        return
    sliding = any(layer >= method.layer for layer in find_sliding_layers(config))
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
