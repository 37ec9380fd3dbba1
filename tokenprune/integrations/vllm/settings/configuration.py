# SPDX-License-Identifier: Apache-2.0
"""The setting of a server, stored in vLLM's ModelConfig, and its checks. `server_config.py` reads the other keys."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from tokenprune.errors import OptionError, UnsupportedModelError, UnsupportedSetupError, shorten
from tokenprune.integrations.shared import checks
from tokenprune.integrations.vllm.settings.keys import KEY, SERVER_KEYS
from tokenprune.integrations.vllm.settings.towers import acts_in_tower, check_tower
from tokenprune.methods.registry import available_methods, method_info
from tokenprune.models.families import SERVED, Family
from tokenprune.selection.observable import Backend
from tokenprune.settings import IN_LLM, SCOPE, Setting

logger = logging.getLogger(__name__)
LAYERS = f"{KEY}_given"  # attribute of a multimodal config: unmerged layers of the setting, and the server keys
WARM_UP = f"{KEY}_warm_up"  # method of vLLM's workers that a reload calls with the new profiles
METRICS_FOLDER = f"{KEY}_seconds"  # attribute of a multimodal config: folder of the workers' metrics


def get_server_setting(model_config: Any) -> dict[str, Any] | None:
    """Return the normalized setting of a server as JSON, or None if the server has none."""
    return getattr(model_config.multimodal_config, KEY, None)


def runs_in_llm(model_config: Any) -> bool:
    """Return True if the server's method acts inside the language model."""
    return bool((get_server_setting(model_config) or {}).get(IN_LLM))


def family_of(model_config: Any) -> Family:
    """Return the family of a model; raise UnsupportedModelError if the plugin does not serve it."""
    architecture = model_config.architecture
    if architecture not in SERVED:
        raise UnsupportedModelError(
            f"{KEY} {checks.describe_unserved_family(architecture)}. Leave the {KEY} setting out to serve the model "
            "unchanged (docs/serving/reference.md lists the served models)."
        )
    return SERVED[architecture]


def check_model(setting: Setting, model_config: Any) -> None:
    """Raise UnsupportedSetupError or OptionError if this model cannot be served with the setting's method."""
    if setting.method is None:
        return
    backend, config = Backend.VLLM_IN_LLM if setting.in_llm else Backend.VLLM, model_config.hf_config
    checks.check(setting.method, family_of(model_config), backend, config=config)
    width = getattr(setting.method, "fitted_width", None)
    if width not in (None, config.get_text_config().hidden_size):
        raise OptionError(
            f"{setting.method.name} was fitted to a model with a hidden size of {width}, not "
            f"{config.get_text_config().hidden_size}. Run `tokenprune fit {setting.method.name}` with this model."
        )
    if acts_in_tower(setting.method) or checks.reads_tower(setting.method):
        check_tower(setting, model_config)


def check_request_setting(setting: Setting, model_config: Any) -> Setting:
    """Return the setting of a request; raise OptionError (HTTP 400) if this model does not support it."""
    try:
        check_model(setting, model_config)
    except UnsupportedSetupError as error:
        raise OptionError(str(error)) from error
    return setting


def split_server_keys(layer: Any) -> tuple[Any, dict[str, Any]]:
    """Split a server's configuration into the setting, or None, and the `SERVER_KEYS`."""
    if not isinstance(layer, Mapping) or not set(layer) & set(SERVER_KEYS):
        return layer, {}
    rest = {key: value for key, value in layer.items() if key not in SERVER_KEYS}
    return rest or None, {key: value for key, value in layer.items() if key in SERVER_KEYS}


def check_spelling(layer: Any) -> None:
    """Raise OptionError for an unknown key that resembles one of `SERVER_KEYS`."""
    for key in layer if isinstance(layer, Mapping) else ():
        if (
            isinstance(key, str)
            and key not in SCOPE
            and (close := difflib.get_close_matches(key, SERVER_KEYS, 1, 0.75))
        ):
            options = (option for name in available_methods() for option in method_info(name).options)
            if key not in options:
                raise OptionError(f"{KEY} has no key {shorten(key)}: did you mean {close[0]!r}?")


def check_key(condition: bool, key: str, expected: str) -> None:
    """Raise OptionError with the `expected` value of a key if `condition` is false."""
    if not condition:
        raise OptionError(f"{KEY}: {key} must be {expected}")


def check_engine(vllm_config: Any, family: Family, original: bool = False) -> None:
    """Raise UnsupportedSetupError for unsupported engine options. original: see `has_original_positions`."""
    lora = vllm_config.lora_config
    if lora is not None and getattr(lora, "enable_tower_connector_lora", False):
        raise UnsupportedSetupError(
            f"{KEY} does not support LoRA on the vision tower, which assumes unpruned prompts. Start without "
            "--enable-tower-connector-lora."
        )
    if vllm_config.compilation_config.compile_mm_encoder:
        raise UnsupportedSetupError(
            f"{KEY} does not support a compiled vision tower, because it reads the tower's attention. Start without "
            "compile_mm_encoder."
        )
    if vllm_config.compilation_config.cudagraph_mm_encoder:
        raise UnsupportedSetupError(
            f"{KEY} does not support CUDA graphs of the vision tower: they bypass the reduction. Start without "
            "cudagraph_mm_encoder."
        )
    if not (family.vllm.mrope or original):
        return
    what = "on a model with M-RoPE" if family.vllm.mrope else 'with "positions": "original"'
    leave = "" if family.vllm.mrope else ", or leave positions out"
    if vllm_config.speculative_config is not None:
        raise UnsupportedSetupError(
            f"{KEY} does not support speculative decoding {what}. Start without --speculative-config{leave}."
        )
    # vLLM does not send the positions of kept tokens from the stage of the vision tower to the other stages.
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise UnsupportedSetupError(
            f"{KEY} does not support pipeline parallelism {what}. Use --tensor-parallel-size instead of "
            f"--pipeline-parallel-size{leave}."
        )
