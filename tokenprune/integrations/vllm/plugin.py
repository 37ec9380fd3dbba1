# SPDX-License-Identifier: Apache-2.0
"""Entry point that vLLM calls in each of its processes to load the plugin."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared.attachable import swap_class
from tokenprune.integrations.vllm import compat
from tokenprune.models.families import SERVED

logger = logging.getLogger(__name__)
# Modules whose functions start a server or another command of vLLM.
_COMMANDS = ("vllm.entrypoints.launchers.", "vllm.entrypoints.cli.")


def register() -> None:
    """Make vLLM support the key `tokenprune`. Calling it again has no effect."""
    from vllm.config import ModelConfig, VllmConfig

    if compat.is_wrapped(ModelConfig.__post_init__):
        return
    from tokenprune.integrations.vllm.frontend.request import use_gateway

    use_gateway(_import_gateway_policy)
    problems = compat.missing_hooks("weights", "setting")
    compat.call_after(ModelConfig, "__post_init__", functools.partial(_configure_model, problems))
    if not compat.missing_hooks("weights"):
        _register_models(prunes=not problems)
    if problems:
        # A server without a setting runs as before; one with a setting is refused, see _configure_model.
        logger.debug("tokenprune does not fit this vLLM: %s", "; ".join(problems))
        return
    from vllm.config.multimodal import MultiModalConfig
    from vllm.multimodal.registry import MultiModalRegistry
    from vllm.sampling_params import SamplingParams

    compat.call_after(VllmConfig, "__post_init__", _configure_engine)
    compat.call_after(SamplingParams, "verify", _check_sampling_params)
    compat.call_after(MultiModalConfig, "is_multimodal_pruning_enabled", _returns_positions)
    compat.call_after(MultiModalRegistry, "create_processor", _add_mixin)


def _import_gateway_policy() -> Any:
    from tokenprune.integrations.vllm.gateway.policy import ServePolicy

    return ServePolicy


def _register_models(prunes: bool) -> None:
    """Replace vLLM's model classes by ours. Without `prunes` they only read checkpoints of transformers 5."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture, family in SERVED.items():
        if architecture in ModelRegistry.models and (prunes or family.vllm.nested):
            original = ModelRegistry.models[architecture]
            ModelRegistry.models[architecture] = _wrap_model(architecture, original, prunes)


def _configure_model(problems: list[str], result: Any, model_config: Any, *_: Any, **__: Any) -> Any:
    from tokenprune.integrations.vllm.frontend.worker_metrics import create_worker_folder
    from tokenprune.integrations.vllm.settings.configure import configure
    from tokenprune.integrations.vllm.settings.keys import KEY
    from tokenprune.integrations.vllm.settings.server_config import needs_gateway

    kwargs = getattr(model_config.multimodal_config, "mm_processor_kwargs", None) or {}
    _announce()
    if KEY not in kwargs and getattr(model_config.hf_config, KEY, None) is None:
        return result
    with _exit_in_commands():
        compat.require_hooks(problems)
        compat.check_version()
        configure(model_config)
        if needs_gateway(model_config):
            from tokenprune.integrations.vllm.gateway.reload import attach

            attach(model_config)
    create_worker_folder(model_config)
    _sync_caches()
    _decode_small()
    return result


@contextmanager
def _exit_in_commands() -> Iterator[None]:
    """Exit with a one-line message on an error about the setting, if a command of vLLM runs.

    Programs that use `LLM(...)` receive the error itself.
    """
    try:
        yield
    except TokenPruneError as error:
        frame: FrameType | None = sys._getframe()
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(_COMMANDS):
            frame = frame.f_back
        if frame is None:
            raise
        text = " ".join(str(error).split())
        raise SystemExit(text if text.startswith("tokenprune") else f"tokenprune: {text}") from None


def _announce() -> None:
    """Make engines log the plugin's state, with or without a setting, if this vLLM has the hooks."""
    if not compat.missing_hooks("start"):
        from tokenprune.integrations.vllm.frontend.announce import announce

        compat.on_start(announce)


def _sync_caches() -> None:
    """Synchronize the front end's cache with the engine's, if the installed vLLM has the hooks."""
    if problems := compat.missing_hooks("cache"):
        logger.warning(
            "after a refused request, the next request with its image may fail once with HTTP 500, because this vLLM "
            "lacks %s",
            "; ".join(problems),
        )
        return
    from tokenprune.integrations.vllm.frontend.sender_cache import sync_sender_caches

    sync_sender_caches()


def _decode_small() -> None:
    """Decode images at the scale that a request's budget needs, if the installed vLLM has the hooks."""
    if problems := compat.missing_hooks("media"):
        logger.warning("images are decoded at full size, because this vLLM lacks %s", "; ".join(problems))
        return
    from tokenprune.integrations.vllm.frontend.media import install_connector

    install_connector()


def _configure_engine(result: Any, vllm_config: Any) -> Any:
    from tokenprune.integrations.vllm.settings.configuration import (
        check_engine,
        family_of,
        get_server_setting,
        runs_in_llm,
    )
    from tokenprune.integrations.vllm.settings.position_checks import has_original_positions

    model_config = vllm_config.model_config
    if model_config is None or get_server_setting(model_config) is None:
        return result
    with _exit_in_commands():
        check_engine(vllm_config, family_of(model_config), has_original_positions(model_config))
        if runs_in_llm(model_config):
            from tokenprune.integrations.vllm.in_llm.attach import configure

            compat.require_hooks(compat.missing_hooks("in_llm_engine"))
            configure(vllm_config)
    return result


def _check_sampling_params(result: Any, params: Any, model_config: Any, *_: Any, **__: Any) -> Any:
    from tokenprune.integrations.vllm.settings.configuration import get_server_setting

    if get_server_setting(model_config) is not None:
        from tokenprune.integrations.vllm.frontend.request import get_policy

        get_policy(model_config).check_parameters(params)
    return result


def _returns_positions(result: bool, multimodal_config: Any) -> bool:
    """Return True if the model returns positions with its embeddings (`supports_multimodal_pruning`)."""
    from tokenprune.integrations.vllm.settings.keys import KEY

    return result or getattr(multimodal_config, KEY, None) is not None


def _add_mixin(processor: Any, registry: Any, *_: Any, **__: Any) -> Any:
    from tokenprune.integrations.vllm.frontend.processor import make_reducing_class
    from tokenprune.integrations.vllm.settings.configuration import get_server_setting

    try:
        # Swap the class of the object, because a function of vLLM selects the class. Nothing undoes it.
        kind: Any = type(processor)
        swap_class(processor, make_reducing_class(kind))
    except TypeError:  # a processor with another layout, of a model that the plugin does not serve
        if get_server_setting(processor.info.ctx.model_config) is not None:
            raise
    else:
        processor.check_pixels()
        _remember(processor.info)
    return processor


def _remember(info: Any) -> None:
    """Pass the model's processor to the media connector, if there is one."""
    if (media := sys.modules.get("tokenprune.integrations.vllm.frontend.media")) is not None:
        media.set_info(info)


def _wrap_model(architecture: str, original: Any, prunes: bool) -> Any:
    """Return an entry for vLLM's model registry that replaces `original`. Nothing is imported yet."""
    from vllm.model_executor.models.registry import _BaseRegisteredModel

    @dataclass(frozen=True)
    class RegisteredModel(_BaseRegisteredModel):
        architecture: str
        original: Any
        prunes: bool

        def inspect_model_cls(self) -> Any:
            return self.original.inspect_model_cls()

        def load_model_cls(self) -> type:
            base = self.original.load_model_cls()
            if not self.prunes:
                from tokenprune.integrations.vllm.worker.weights import create_renaming_class

                return create_renaming_class(base)
            from tokenprune.integrations.vllm.worker.models import create_reducing_class

            return create_reducing_class(base, SERVED[self.architecture])

    return RegisteredModel(architecture, original, prunes)
