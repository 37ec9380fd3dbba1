# SPDX-License-Identifier: Apache-2.0
"""Checks of a server that drops tokens inside the language model, made before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenprune.base import Method
from tokenprune.errors import UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.vllm.setting.servable import FREE_KV
from tokenprune.integrations.vllm.setting.settings import IN_LLM, ServedSetting

_PLACE = "tokenprune.integrations.vllm.in_llm.scheduler"
SCHEDULERS = {False: f"{_PLACE}.InLLMScheduler", True: f"{_PLACE}.AsyncInLLMScheduler"}
# Attention whose metadata can be made twice for one step; others keep what they planned in buffers of their own.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
# Private parts of vLLM, in the engine's and in the worker's process, with the parameters that are passed or taken.
ENGINE_HOOKS = {
    "vllm.exceptions:VLLMValidationError": "message",
    "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs": (
        "self request num_computed_tokens num_new_tokens encoder_compute_budget"
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "",
    "vllm.v1.core.sched.output:NewRequestData.from_request": "request uses_mrope",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": "self request",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks": "self blocks num_computed_tokens",
}
WORKER_HOOKS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward": "self",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": "self",
    "vllm.v1.worker.block_table:BlockTable.get_device_tensor": "self num_reqs",
    "vllm.v1.worker.utils:AttentionGroup.build_metadata": "self common_attn_metadata",
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs num_actual_tokens "
        "max_query_len max_seq_len block_table_tensor slot_mapping causal is_prefilling"
    ),
    "vllm.forward_context:ForwardContext": "attn_metadata slot_mapping",
    "vllm.model_executor.layers.attention.attention:Attention.forward": "self query key value",
}


# For layers after the cut that free the KV cache of dropped tokens.
KV_HOOKS = {
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": (
        "kvcache_spec_cls manager_class uniform_type_base_spec"
    ),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered": "",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.merge": "specs",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.is_uniform_with_collection": "self kv_cache_specs",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.get_num_blocks_to_allocate": (
        "self request_id num_tokens new_computed_blocks"
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.allocate_new_blocks": (
        "self request_id num_tokens num_tokens_main_model"
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.pop_blocks_for_free": "self request_id",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit": (
        "block_hashes max_length kv_cache_group_ids block_pool kv_cache_spec"
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager._get_num_evictable_blocks": "blocks",
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": "self num_blocks",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": "self block_hash kv_cache_group_ids",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "self request num_new_tokens",
    "vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec": "self vllm_config",
}


def check_engine(vllm_config: Any, setting: ServedSetting, free_kv: bool = False) -> None:
    """Raise UnsupportedSetupError with every option that does not fit, and what to change."""
    model_config = vllm_config.model_config
    method = setting.acting
    problems = [*_of_engine(vllm_config), *_of_batches(vllm_config, method)]
    problems += _of_layer(model_config, method.cut_layer)
    if free_kv:
        problems += _of_groups(vllm_config)
    if problems:
        raise UnsupportedSetupError(f"{IN_LLM} does not go with this server:\n- " + "\n- ".join(problems))


def _of_layer(model_config: Any, layer: int) -> Iterator[str]:
    layers = model_config.hf_text_config.num_hidden_layers
    # Of Qwen3-VL: the tower's features are added to those of as many of the first layers.
    tower = getattr(model_config.hf_config, "vision_config", None)
    first = max(1, len(getattr(tower, "deepstack_visual_indexes", None) or ()))
    if not first <= layer < layers:
        yield f"layer={layer}: choose a layer from {first} to {layers - 1} of this model"


def _of_engine(vllm_config: Any) -> Iterator[str]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if not model.enforce_eager:
        yield "CUDA graphs and torch.compile, which fix the number of tokens of all layers: start with --enforce-eager"
    if vllm_config.use_v2_model_runner:
        yield "the V2 model runner: start with the environment variable VLLM_USE_V2_MODEL_RUNNER=0"
    sizes = ("tensor", "pipeline", "data", "prefill_context", "decode_context")
    if many := [f"--{size.replace('_', '-')}-parallel-size" for size in sizes if _size(parallel, size) > 1]:
        yield f"more than one device: leave out {', '.join(many)}, and start a server for each device"
    if parallel.enable_dbo or parallel.ubatch_size > 0:
        yield "dual batch overlap: leave out --enable-dbo and --ubatch-size"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding: leave out --speculative-config"
    if vllm_config.lora_config is not None:
        yield "LoRA, which counts the tokens of a step once for all layers: merge the adapter into the checkpoint"
    if vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None:
        yield "KV connectors and offloading: leave out --kv-transfer-config and --kv-offloading-size"
    if vllm_config.ec_transfer_config is not None:
        yield "a disaggregated encoder: leave out --ec-transfer-config"
    if cache.kv_sharing_fast_prefill:
        yield "KV sharing: leave out --kv-sharing-fast-prefill"
    if model.enable_prompt_embeds:
        yield "prompts that are given as embeddings: leave out --enable-prompt-embeds"
    if model.runner_type != "generate":
        yield f"--runner {model.runner_type}: only generation is served"
    if scheduler.scheduler_cls not in (None, *SCHEDULERS.values()):
        yield "another scheduler: leave out --scheduler-cls"


def _size(parallel: Any, name: str) -> int:
    return getattr(parallel, f"{name}_parallel_size")


def _of_batches(vllm_config: Any, method: Method) -> Iterator[str]:
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if not method.prefix_cache_safe:
        why = f"{method.name} reads the question after an image"
        instead = "".join(f", or set {option} to {value}" for option, value in method.query_free.items())
        if cache.enable_prefix_caching:
            yield (
                f"prefix caching: {why}, and a cached image is shared by all questions. Start with "
                f"--no-enable-prefix-caching{instead}"
            )
        if scheduler.enable_chunked_prefill:
            yield (
                f"chunked prefill: {why}, so a prompt must not come in parts. Start with --no-enable-chunked-prefill "
                f"and --max-num-batched-tokens of at least --max-model-len{instead}"
            )
        return
    if cache.enable_prefix_caching and cache.prefix_match_unit is not None:
        yield "hits of the prefix cache that end within a block: leave out --prefix-match-unit"
    if scheduler.enable_chunked_prefill and not scheduler.disable_chunked_mm_input:
        yield "images that are computed in parts: start with --disable-chunked-mm-input"
    if scheduler.long_prefill_token_threshold > 0:
        yield "images that are longer than a chunk may be: leave out --long-prefill-token-threshold"


def _of_groups(vllm_config: Any) -> Iterator[str]:
    """Yield the options that do not go with separate KV cache groups before and after the cut."""
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield f"{FREE_KV} with one KV cache group for all layers: leave out --disable-hybrid-kv-cache-manager"
    if vllm_config.model_config.multimodal_config.mm_processor_cache_type == "shm":
        yield f"{FREE_KV} with items that only workers see: leave out --mm-processor-cache-type shm"
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        yield f"{FREE_KV} with events of the KV cache, which tell of whole blocks: leave out --kv-events-config"
    if vllm_config.cache_config.kv_cache_dtype_skip_layers:
        yield f"{FREE_KV} with KV caches of several types: leave out --kv-cache-dtype-skip-layers"


def check_layers(decoder: Any) -> None:
    """Raise UnsupportedModelError if tokens cannot be taken out between the decoder's layers."""
    for number, one in enumerate(decoder.layers):
        attention = getattr(getattr(one, "self_attn", None), "attn", None)
        where = f"layer {number} of {type(decoder).__name__}"
        if attention is None or not hasattr(attention, "layer_name"):
            raise UnsupportedModelError(
                f"{IN_LLM}: {where} has no self_attn.attn; use a method that acts before the language model"
            )
        if attention.sliding_window is not None or attention.kv_sharing_target_layer_name is not None:
            raise UnsupportedModelError(
                f"{IN_LLM}: {where} has a sliding window or shares its KV cache, and tokens are only taken out of full "
                "attention; use a method that acts before the language model"
            )
        if (backend := attention.attn_backend.get_name()) not in BACKENDS:
            raise UnsupportedSetupError(
                f"{IN_LLM} does not go with the attention backend {backend}: start with --attention-backend "
                f"{' or '.join(name for name in BACKENDS if name != 'CPU_ATTN')}"
            )
