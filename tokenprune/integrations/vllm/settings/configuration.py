# SPDX-License-Identifier: Apache-2.0
"""A server's own setting: found when vLLM makes its ModelConfig, checked there, and kept beside its config.

`server_config.py` reads the keys beside the reduction, `BESIDE`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from tokenprune.errors import OptionError, UnsupportedModelError, UnsupportedSetupError, shorten
from tokenprune.integrations.shared import checks
from tokenprune.integrations.vllm.settings.servable import BESIDE
from tokenprune.integrations.vllm.settings.settings import IN_LLM, KEY, ServedSetting
from tokenprune.integrations.vllm.settings.towers import acts_in_tower, check_tower
from tokenprune.methods.registry import available_methods, method_info
from tokenprune.models.families import SERVED, Family
from tokenprune.selection.observable import Backend
from tokenprune.settings import SCOPE

logger = logging.getLogger(__name__)
GIVEN = f"{KEY}_given"  # the layers of the setting, and the keys beside them, as they were given
WARM_UP = f"{KEY}_warm_up"  # method of vLLM's workers that a reload calls with the new profiles
SECONDS = f"{KEY}_seconds"  # attribute of a multimodal config: the folder with the selection times of the workers


def configured(model_config: Any) -> dict[str, Any] | None:
    """Return the server's setting, or None if it has none."""
    return getattr(model_config.multimodal_config, KEY, None)


def in_llm(model_config: Any) -> bool:
    """Return True if the server's setting acts inside the language model."""
    return bool((configured(model_config) or {}).get(IN_LLM))


def family_of(model_config: Any) -> Family:
    """Return the family of a model; raises UnsupportedModelError with those that there are."""
    architecture = model_config.architecture
    if architecture not in SERVED:
        raise UnsupportedModelError(
            f"{KEY} {checks.describe_unserved_family(architecture)}. Leave the {KEY} setting out to serve the model "
            "unchanged (docs/serving/reference.md lists the served models)."
        )
    return SERVED[architecture]


def check_model(setting: ServedSetting, model_config: Any) -> None:
    """Raise UnsupportedSetupError or OptionError for a method that this model cannot be served with."""
    if setting.method is None:
        return
    backend, config = Backend.VLLM_IN_LLM if setting.in_llm else Backend.VLLM, model_config.hf_config
    checks.check(setting.method, family_of(model_config), backend, config=config)
    if acts_in_tower(setting.method) or checks.reads_tower(setting.method):
        check_tower(setting, model_config)


def checked(setting: ServedSetting, model_config: Any) -> ServedSetting:
    """Return a request's setting. Raises a TokenPruneError that is a ValueError for one that this model cannot be
    served with: the server goes on, and the client reads why."""
    try:
        check_model(setting, model_config)
    except UnsupportedSetupError as error:
        raise OptionError(str(error)) from error
    return setting


def split(layer: Any) -> tuple[Any, dict[str, Any]]:
    """Split a server's setting into the reduction, None if it names none, and the keys of `BESIDE`."""
    if not isinstance(layer, Mapping) or not set(layer) & set(BESIDE):
        return layer, {}
    rest = {key: value for key, value in layer.items() if key not in BESIDE}
    return rest or None, {key: value for key, value in layer.items() if key in BESIDE}


def check_spelling(layer: Any) -> None:
    """Raise OptionError for a key of a server's setting that resembles one of ours and is no option of any method."""
    for key in layer if isinstance(layer, Mapping) else ():
        if isinstance(key, str) and key not in SCOPE and (close := difflib.get_close_matches(key, BESIDE, 1, 0.75)):
            options = (option for name in available_methods() for option in method_info(name).options)
            if key not in options:
                raise OptionError(f"{KEY} has no key {shorten(key)}: did you mean {close[0]!r}?")


def check_key(condition: bool, key: str, wanted: str) -> None:
    """Raise OptionError with what a key must be, unless it is."""
    if not condition:
        raise OptionError(f"{KEY}: {key} must be {wanted}")


def check_engine(vllm_config: Any, family: Family, original: bool = False) -> None:
    """Raise UnsupportedSetupError for options of the engine that do not go with a setting. original: True if a model
    with one axis of positions keeps those of the full prompt."""
    lora = vllm_config.lora_config
    if lora is not None and getattr(lora, "enable_tower_connector_lora", False):
        raise UnsupportedSetupError(
            f"{KEY} does not go with LoRA on the vision tower, which counts the tower's tokens by those of the prompt: "
            "start without --enable-tower-connector-lora"
        )
    if vllm_config.compilation_config.compile_mm_encoder:
        raise UnsupportedSetupError(
            f"{KEY} does not go with a compiled vision tower, whose attention it cannot read: start without "
            "compile_mm_encoder"
        )
    if not (family.vllm.mrope or original):
        return
    what = "on a model with M-RoPE" if family.vllm.mrope else 'with "positions": "original"'
    leave = "" if family.vllm.mrope else ", or leave positions out"
    if vllm_config.speculative_config is not None:
        raise UnsupportedSetupError(
            f"{KEY} does not go with speculative decoding {what}: start without --speculative-config{leave}"
        )
    # Where kept tokens stand is known to the stage that runs the vision tower; vLLM does not tell the others.
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise UnsupportedSetupError(
            f"{KEY} does not go with pipeline parallelism {what}, whose later stages do not hear where kept tokens "
            f"stand: use --tensor-parallel-size instead of --pipeline-parallel-size{leave}"
        )
