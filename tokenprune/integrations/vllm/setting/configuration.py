# SPDX-License-Identifier: Apache-2.0
"""A server's own setting: found when vLLM makes its ModelConfig, checked there, and kept beside its config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tokenprune import abilities
from tokenprune.config import read_config
from tokenprune.errors import OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.families import SERVED, Family
from tokenprune.integrations.vllm.setting.offer import Offer, check_spelling, split
from tokenprune.integrations.vllm.setting.position_checks import arrange
from tokenprune.integrations.vllm.setting.settings import IN_LLM, KEY, ServedSetting
from tokenprune.integrations.vllm.setting.towers import check_tower, drops_units, merges_in_tower
from tokenprune.view.observable import Backend

logger = logging.getLogger(__name__)
_OFFER = f"{KEY}_offer"
_GIVEN = f"{KEY}_given"  # the layers of the setting, and the keys beside them, as they were given
SECONDS = f"{KEY}_seconds"  # attribute of a multimodal config: the folder with the selection times of the workers


def configured(model_config: Any) -> dict[str, Any] | None:
    """Return the server's setting, or None if it has none."""
    return getattr(model_config.multimodal_config, KEY, None)


def offered(model_config: Any) -> Offer:
    """Return what a server with a setting offers to requests."""
    return getattr(model_config.multimodal_config, _OFFER)


def in_llm(model_config: Any) -> bool:
    """Return True if the server's setting acts inside the language model."""
    return bool((configured(model_config) or {}).get(IN_LLM))


def family_of(model_config: Any) -> Family:
    """Return the family of a model; raises UnsupportedModelError with those that there are."""
    architecture = model_config.architecture
    if architecture not in SERVED:
        raise UnsupportedModelError(
            f"{KEY} {abilities.unserved_family(architecture)}. It serves {', '.join(SERVED)}. Leave the {KEY} setting "
            "out to serve the model as it is"
        )
    return SERVED[architecture]


def check_model(setting: ServedSetting, model_config: Any) -> None:
    """Raise UnsupportedSetupError or OptionError for a method that this model cannot be served with."""
    if setting.method is None:
        return
    backend, config = Backend.VLLM_IN_LLM if setting.in_llm else Backend.VLLM, model_config.hf_config
    abilities.check(setting.method, family_of(model_config), backend, config=config)
    if merges_in_tower(setting.method) or drops_units(setting.method) or abilities.reads_tower(setting.method):
        check_tower(setting, model_config)


def in_force(asked: Any, offer: Offer, model_config: Any) -> ServedSetting:
    """Return the setting in force for a request's value of our key. Raises a TokenPruneError that is a ValueError, for
    one that this model cannot be served with, too: the server goes on, and the client reads why."""
    setting = offer.setting(asked)
    try:
        check_model(setting, model_config)
    except UnsupportedSetupError as error:
        raise OptionError(str(error)) from error
    return setting


def _read(layer: Any, model_config: Any) -> Any:
    """Return the setting in the file that a server's setting names, as a text or as {"config": file}: one that
    `tokenprune tune` wrote. Anything else is returned as it is. Raises ConfigError or OptionError."""
    named = layer.get("config") if isinstance(layer, Mapping) else layer if isinstance(layer, str) else None
    if named is None:
        return layer
    if isinstance(layer, Mapping) and len(layer) > 1:
        others = ", ".join(sorted(set(layer) - {"config"}))
        raise OptionError(f"{KEY}: config names a file with a whole setting: leave out {others}")
    config = read_config(named)
    if config.guard == "auto":
        raise OptionError(
            f"{named} is meant with the guard, which the plugin has not: give a higher keep in its place, as "
            '`tokenprune recommend` prints it for vLLM, and take "guard" out'
        )
    tuned_on, served = (config.tuned.get("model") or {}).get("type"), model_config.hf_config.model_type
    if tuned_on not in (None, served):
        logger.warning("%s was tuned on %s, not on %s: what it promises was not measured here", named, tuned_on, served)
    return config.setting


def configure(model_config: Any) -> None:
    """Find the setting of a server that starts, in its `--mm-processor-kwargs` or in the checkpoint's config, and
    check all that can be checked before a model is loaded."""
    multimodal = model_config.multimodal_config
    checkpoint = getattr(model_config.hf_config, KEY, None)
    kwargs = dict((multimodal.mm_processor_kwargs if multimodal is not None else None) or {})
    given = [split(layer) for layer in (checkpoint, kwargs.pop(KEY, None)) if layer is not None]
    if not given:
        return
    if multimodal is None:
        raise UnsupportedModelError(f"{KEY} is set, but {model_config.model} takes no images: leave the setting out")
    layers = [_read(layer, model_config) for layer, _ in given if layer is not None]
    family = family_of(model_config)
    for layer in layers:
        check_spelling(layer)
    beside = {key: value for _, one in given for key, value in one.items()}
    setting, offer = _whole(model_config, layers, beside)
    if multimodal.video_pruning_rate:
        raise OptionError(
            f"video_pruning_rate and {KEY} both prune videos: leave one of them out "
            f'({{"{KEY}": {{"off": true}}}} needs no video_pruning_rate either)'
        )
    arrange(offer.positions, model_config, family, setting.in_llm)
    # Not in mm_processor_kwargs any more: a model's own processor does not know the key.
    multimodal.mm_processor_kwargs = kwargs or None
    setattr(multimodal, KEY, setting.as_dict())
    setattr(multimodal, _GIVEN, (layers, beside))
    replace_offer(model_config, offer)


def _whole(model_config: Any, layers: list[Any], beside: dict[str, Any]) -> tuple[ServedSetting, Offer]:
    """Return a server's own setting, and what it offers beside it."""

    def whole(*profile: Any) -> ServedSetting:
        setting = ServedSetting.of(*layers, *(_read(layer, model_config) for layer in profile))
        check_model(setting, model_config)
        return setting

    setting = whole()
    return setting, Offer.of(beside, setting, whole)


def read_again(model_config: Any) -> Offer:
    """Return what a server would offer by the file of its setting as it is now; nothing is changed. Raises a
    TokenPruneError."""
    layers, beside = getattr(model_config.multimodal_config, _GIVEN)
    return _whole(model_config, layers, beside)[1]


def replace_offer(model_config: Any, offer: Offer) -> None:
    """Let a server offer this from now on, in this process."""
    setattr(model_config.multimodal_config, _OFFER, offer)


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
