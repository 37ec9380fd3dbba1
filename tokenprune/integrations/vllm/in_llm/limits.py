# SPDX-License-Identifier: Apache-2.0
"""Checks of a server that drops tokens inside the language model, before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenprune.errors import UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.vllm.settings.items import get_method
from tokenprune.integrations.vllm.settings.keys import FREE_KV
from tokenprune.selection.method import Method
from tokenprune.settings import IN_LLM, Setting

_MODULE = "tokenprune.integrations.vllm.in_llm.scheduler"
SCHEDULERS = {False: f"{_MODULE}.InLLMScheduler", True: f"{_MODULE}.AsyncInLLMScheduler"}
# Backends whose metadata can be built twice per step. Other backends store their plan in shared buffers.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def check_engine(vllm_config: Any, setting: Setting, free_kv: bool = False) -> None:
    """Raise UnsupportedSetupError with every option that is not supported, and the remedy."""
    model_config = vllm_config.model_config
    method = get_method(setting)
    problems = [*_check_engine(vllm_config), *_check_batches(vllm_config, method)]
    problems += _check_layer(model_config, method.cut_layer)
    if free_kv:
        problems += _check_groups(vllm_config)
    if problems:
        raise UnsupportedSetupError(f"{IN_LLM} does not support:\n- " + "\n- ".join(problems))


def _check_layer(model_config: Any, layer: int) -> Iterator[str]:
    layers = model_config.hf_text_config.num_hidden_layers
    # Qwen3-VL adds features of the tower to the hidden states of the first layers.
    tower = getattr(model_config.hf_config, "vision_config", None)
    first = max(1, len(getattr(tower, "deepstack_visual_indexes", None) or ()))
    if not first <= layer < layers:
        yield f"layer={layer} for this model: choose a layer from {first} to {layers - 1}"


def _check_engine(vllm_config: Any) -> Iterator[str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    sizes = ("tensor", "pipeline", "data", "prefill_context", "decode_context")
    parallel_options = [f"--{size.replace('_', '-')}-parallel-size" for size in sizes if _get_size(parallel, size) > 1]
    return _select_true({
        "CUDA graphs and torch.compile: start with --enforce-eager":
            not model.enforce_eager,
        "the V2 model runner: start with the environment variable VLLM_USE_V2_MODEL_RUNNER=0":
            vllm_config.use_v2_model_runner,
        f"several devices: leave out {', '.join(parallel_options)}, and start a server per device": parallel_options,
        "dual batch overlap: leave out --enable-dbo and --ubatch-size": parallel.enable_dbo or parallel.ubatch_size > 0,
        "speculative decoding: leave out --speculative-config": vllm_config.speculative_config is not None,
        "LoRA: merge the adapter into the checkpoint":
            vllm_config.lora_config is not None,
        "KV connectors and offloading: leave out --kv-transfer-config and --kv-offloading-size":
            vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None,
        "a disaggregated encoder: leave out --ec-transfer-config": vllm_config.ec_transfer_config is not None,
        "KV sharing: leave out --kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "prompts as embeddings: leave out --enable-prompt-embeds": model.enable_prompt_embeds,
        f"--runner {model.runner_type}: use --runner generate": model.runner_type != "generate",
        "another scheduler: leave out --scheduler-cls": scheduler.scheduler_cls not in (None, *SCHEDULERS.values()),
    })  # fmt: skip


def _select_true(problems: dict[str, Any]) -> Iterator[str]:
    return (text for text, applies in problems.items() if applies)


def _get_size(parallel: Any, name: str) -> int:
    return getattr(parallel, f"{name}_parallel_size")


def _check_batches(vllm_config: Any, method: Method) -> Iterator[str]:
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if not method.prefix_cache_safe:
        reason = f"{method.name} reads the question after an image"
        remedy = "".join(f", or set {option} to {value}" for option, value in method.query_free.items())
        if cache.enable_prefix_caching:
            yield (
                f"prefix caching: {reason}, and all questions share a cached image. Start with "
                f"--no-enable-prefix-caching{remedy}"
            )
        if scheduler.enable_chunked_prefill:
            yield (
                f"chunked prefill: {reason}, so it needs the whole prompt. Start with --no-enable-chunked-prefill "
                f"and --max-num-batched-tokens of at least --max-model-len{remedy}"
            )
        return
    splits_images = scheduler.enable_chunked_prefill and not scheduler.disable_chunked_mm_input
    yield from _select_true({
        "prefix cache hits that end within a block: leave out --prefix-match-unit":
            cache.enable_prefix_caching and cache.prefix_match_unit is not None,
        "images split over steps: start with --disable-chunked-mm-input": splits_images,
        "images longer than a chunk: leave out --long-prefill-token-threshold":
            scheduler.long_prefill_token_threshold > 0,
    })  # fmt: skip


def _check_groups(vllm_config: Any) -> Iterator[str]:
    """Yield the options that are not supported with separate KV cache groups before and after the cut."""
    events, multimodal = vllm_config.kv_events_config, vllm_config.model_config.multimodal_config
    return _select_true({
        f"{FREE_KV} with one KV cache group for all layers: leave out --disable-hybrid-kv-cache-manager":
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        f"{FREE_KV} with a processor cache in shared memory: leave out --mm-processor-cache-type shm":
            multimodal.mm_processor_cache_type == "shm",
        f"{FREE_KV} with KV cache events: leave out --kv-events-config":
            events is not None and events.enable_kv_cache_events,
        f"{FREE_KV} with KV caches of several dtypes: leave out --kv-cache-dtype-skip-layers":
            vllm_config.cache_config.kv_cache_dtype_skip_layers,
    })  # fmt: skip


def check_layers(decoder: Any) -> None:
    """Raise an error if tokens cannot be dropped between the layers of a decoder.

    Raises:
        UnsupportedModelError: If a layer does not have full attention.
        UnsupportedSetupError: If the attention backend is not supported.
    """
    for index, layer in enumerate(decoder.layers):
        attention = getattr(getattr(layer, "self_attn", None), "attn", None)
        name = f"layer {index} of {type(decoder).__name__}"
        if attention is None or not hasattr(attention, "layer_name"):
            raise UnsupportedModelError(
                f"{IN_LLM}: {name} lacks self_attn.attn. Use a method that acts before the language model."
            )
        if attention.sliding_window is not None or attention.kv_sharing_target_layer_name is not None:
            raise UnsupportedModelError(
                f"{IN_LLM}: {name} has a sliding window or shares its KV cache. Use a method that acts before the "
                "language model."
            )
        if (backend := attention.attn_backend.get_name()) not in BACKENDS:
            raise UnsupportedSetupError(
                f"{IN_LLM} does not support the attention backend {backend}. Start with --attention-backend "
                f"{' or '.join(name for name in BACKENDS if name != 'CPU_ATTN')}."
            )
