# SPDX-License-Identifier: Apache-2.0
"""Read and check the setting of a server when vLLM makes its ModelConfig."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.integrations.vllm.settings.configuration import (
    LAYERS,
    check_model,
    check_spelling,
    family_of,
    split_server_keys,
)
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.position_checks import configure_positions
from tokenprune.integrations.vllm.settings.server_config import ServerConfig, set_server_config
from tokenprune.settings import Setting
from tokenprune.settings.saved import read_config

logger = logging.getLogger(__name__)


def _read(layer: Any, model_config: Any) -> Any:
    """Return the setting in the file that a server's setting names, as a text or as {"config": file}: one that
    `tokenprune tune` wrote. Anything else is returned as it is. Raises ConfigError or OptionError."""
    named = layer.get("config") if isinstance(layer, Mapping) else layer if isinstance(layer, str) else None
    if named is None:
        return layer
    if isinstance(layer, Mapping) and len(layer) > 1:
        others = ", ".join(sorted(set(layer) - {"config"}))
        raise OptionError(f"{KEY}: config names a file with a whole setting: leave out {others}")
    setting = read_config(named)
    if setting.guard == "auto":
        raise OptionError(
            f"{named} is meant with the guard, which the plugin has not: give a higher keep in its place, as "
            '`tokenprune recommend` prints it for vLLM, and take "guard" out'
        )
    tuned_on, served = (setting.tuned.get("model") or {}).get("type"), model_config.hf_config.model_type
    if tuned_on not in (None, served):
        logger.warning("%s was tuned on %s, not on %s: what it promises was not measured here", named, tuned_on, served)
    return setting.to_json()


def configure(model_config: Any) -> None:
    """Find the setting of a server that starts, in its `--mm-processor-kwargs` or in the checkpoint's config, and
    check all that can be checked before a model is loaded."""
    multimodal = model_config.multimodal_config
    checkpoint = getattr(model_config.hf_config, KEY, None)
    kwargs = dict((multimodal.mm_processor_kwargs if multimodal is not None else None) or {})
    given = [split_server_keys(layer) for layer in (checkpoint, kwargs.pop(KEY, None)) if layer is not None]
    if not given:
        return
    if multimodal is None:
        raise UnsupportedModelError(f"{KEY} is set, but {model_config.model} takes no images: leave the setting out")
    layers = [_read(layer, model_config) for layer, _ in given if layer is not None]
    family = family_of(model_config)
    for layer in layers:
        check_spelling(layer)
    beside = {key: value for _, one in given for key, value in one.items()}
    read = make_reader(model_config, layers)
    setting = read()
    config = ServerConfig.from_json(beside, setting, read)
    if multimodal.video_pruning_rate:
        raise OptionError(
            f"video_pruning_rate and {KEY} both prune videos: leave one of them out "
            f'({{"{KEY}": {{"off": true}}}} needs no video_pruning_rate either)'
        )
    configure_positions(config.positions, model_config, family, bool(setting.in_llm))
    # Not in mm_processor_kwargs any more: a model's own processor does not know the key.
    multimodal.mm_processor_kwargs = kwargs or None
    setattr(multimodal, KEY, setting.to_json())
    setattr(multimodal, LAYERS, (layers, beside))
    set_server_config(model_config, config)


def make_reader(model_config: Any, layers: list[Any]) -> Callable[..., Setting]:
    """Return a function that makes the setting of a server, or of one of its profiles over it, of these layers."""

    def read(*profile: Any) -> Setting:
        setting = parse_setting(*layers, *(_read(layer, model_config) for layer in profile))
        check_model(setting, model_config)
        return setting

    return read
