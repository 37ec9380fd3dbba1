# SPDX-License-Identifier: Apache-2.0
"""Read and check the configuration of a server when vLLM creates its ModelConfig."""

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
    """Replace the name of a `tokenprune tune` file, a string or {"config": file}, by the setting in the file.

    Other layers are returned unchanged. Raises ConfigError or OptionError.
    """
    named = layer.get("config") if isinstance(layer, Mapping) else layer if isinstance(layer, str) else None
    if named is None:
        return layer
    if isinstance(layer, Mapping) and len(layer) > 1:
        others = ", ".join(sorted(set(layer) - {"config"}))
        raise OptionError(f"{KEY}: config names a file with a whole setting. Leave out {others}.")
    setting = read_config(named)
    if setting.guard == "auto":
        raise OptionError(
            f'{named} needs the guard, which vLLM does not support. Remove "guard" and set the higher keep that '
            "`tokenprune recommend` prints for vLLM."
        )
    tuned_on, served = (setting.tuned.get("model") or {}).get("type"), model_config.hf_config.model_type
    if tuned_on not in (None, served):
        logger.warning(
            "%s was tuned on %s, not on %s: its measurements do not apply to this model", named, tuned_on, served
        )
    return setting.to_json()


def configure(model_config: Any) -> None:
    """Read the server's configuration and check everything that can be checked before a model is loaded.

    The configuration comes from the checkpoint's config and from `--mm-processor-kwargs`.
    """
    multimodal = model_config.multimodal_config
    checkpoint = getattr(model_config.hf_config, KEY, None)
    kwargs = dict((multimodal.mm_processor_kwargs if multimodal is not None else None) or {})
    parts = [split_server_keys(layer) for layer in (checkpoint, kwargs.pop(KEY, None)) if layer is not None]
    if not parts:
        return
    if multimodal is None:
        raise UnsupportedModelError(
            f"{KEY} is set, but {model_config.model} does not accept images. Leave the setting out."
        )
    layers = [_read(layer, model_config) for layer, _ in parts if layer is not None]
    family = family_of(model_config)
    for layer in layers:
        check_spelling(layer)
    server_keys = {key: value for _, keys in parts for key, value in keys.items()}
    read = make_reader(model_config, layers)
    setting = read()
    config = ServerConfig.from_json(server_keys, setting, read)
    if multimodal.video_pruning_rate:
        raise OptionError(f"video_pruning_rate and {KEY} both prune videos. Leave one of them out.")
    configure_positions(config.positions, model_config, family, bool(setting.in_llm))
    # Removed from mm_processor_kwargs, because the model's own processor does not know the key.
    multimodal.mm_processor_kwargs = kwargs or None
    setattr(multimodal, KEY, setting.to_json())
    setattr(multimodal, LAYERS, (layers, server_keys))
    set_server_config(model_config, config)


def make_reader(model_config: Any, layers: list[Any]) -> Callable[..., Setting]:
    """Return a function that builds the checked setting of a profile.

    Args:
        model_config: vLLM's config of the model.
        layers: Settings of the checkpoint and of the server, the lowest priority first.

    Returns:
        A function that merges `layers` and, as the last layer, the setting of a profile if passed.
    """

    def read(*profile: Any) -> Setting:
        setting = parse_setting(*layers, *(_read(layer, model_config) for layer in profile))
        check_model(setting, model_config)
        return setting

    return read
