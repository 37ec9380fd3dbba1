# SPDX-License-Identifier: Apache-2.0
"""Configure a server that drops tokens inside the language model, check its requests, and attach to its model."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.compat import missing_hooks, require_hooks
from tokenprune.integrations.vllm.in_llm import limits
from tokenprune.integrations.vllm.settings.configuration import get_server_setting
from tokenprune.integrations.vllm.settings.items import get_method
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.server_config import get_server_config
from tokenprune.selection.method import Pruner
from tokenprune.settings import IN_LLM, Setting


class RefusedRequestError(VLLMValidationError, OptionError):
    """A request that this server cannot answer. vLLM returns it as HTTP 400."""


def configure(vllm_config: Any) -> None:
    """Check the configuration of a server and set its scheduler."""
    setting, free_kv = _read_setting(vllm_config)
    if free_kv:
        require_hooks(missing_hooks("free_kv"))
    limits.check_engine(vllm_config, setting, free_kv)
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = limits.SCHEDULERS[bool(scheduler.async_scheduling)]


def _read_setting(vllm_config: Any) -> tuple[Setting, bool]:
    """Return the server's setting, and whether layers after the cut free the KV cache of dropped tokens."""
    model_config = vllm_config.model_config
    return parse_setting(get_server_setting(model_config)), get_server_config(model_config).free_kv


def check_request(params: Any) -> None:
    """Raise RefusedRequestError if a request wants log-probabilities of the prompt.

    Args:
        params: A request, or its sampling parameters.
    """
    if getattr(params, "prompt_logprobs", None) is not None:
        refused: Any = RefusedRequestError  # vLLM's error takes the parameter
        raise refused(
            f"{IN_LLM} drops prompt tokens before the last layer, so prompt log-probabilities are not available. "
            "Leave out prompt_logprobs (or echo with logprobs).",
            parameter="prompt_logprobs",
        )


def attach(model: Any, vllm_config: Any) -> Any:
    """Attach the hooks to a new model, and return the object that the runner calls before each pass."""
    setting, free_kv = _read_setting(vllm_config)
    require_hooks(missing_hooks("in_llm_worker"))
    limits.check_engine(vllm_config, setting, free_kv)
    if vllm_config.scheduler_config.scheduler_cls not in limits.SCHEDULERS.values():
        raise UnsupportedSetupError(f"{IN_LLM} needs its own scheduler. Leave out --scheduler-cls.")
    from tokenprune.integrations.vllm.in_llm import runner
    from tokenprune.integrations.vllm.in_llm.reducer import Reducer, get_decoder

    decoder, method = get_decoder(model), get_method(setting)
    assert isinstance(method, Pruner)
    limits.check_layers(decoder)
    if free_kv:
        from tokenprune.integrations.vllm.in_llm.kv_cache import declare_cut

        declare_cut(decoder, method.cut_layer)
    runner.wrap_forward()
    return runner.InLLM(model, Reducer(decoder, method), vllm_config.cache_config.enable_prefix_caching)
