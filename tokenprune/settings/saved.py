# SPDX-License-Identifier: Apache-2.0
"""Read and write configuration files such as `tokenprune.json`, the output of `tokenprune tune`.

A file contains {"schema": 1, "setting": {"method": ..., "keep": ..., option: ...}, "tuned": {...}, "guard": "auto"}, or
only a setting, optionally with "guard". The vLLM plugin reads the same settings. See `tokenprune.settings`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenprune.errors import ConfigError, shorten
from tokenprune.selection.files import File, describe_error
from tokenprune.settings import Setting
from tokenprune.settings.keys import LIMIT

logger = logging.getLogger(__name__)

SCHEMA = 1
_GUARDS = ("warn", "auto", "off")
_MAX_BYTES = 2**20  # size of a file
_SHAPE = f'{{"method": "divprune", "keep": 0.25}}, or {{"schema": {SCHEMA}, "setting": {{...}}, "tuned": {{...}}}}'


def check_tuned_model(setting: Setting, model: Any) -> None:
    """Log a warning if the setting was tuned on a different model."""
    tuned_model = setting.tuned.get("model") or {}
    if "fingerprint" not in tuned_model:
        return
    from tokenprune.models.fingerprint import compute_fingerprint

    if compute_fingerprint(model) != tuned_model["fingerprint"]:
        logger.warning(
            "tokenprune: %s was tuned on %s, which differs from this %s in weights or dtype. Its accuracy estimate may "
            "not hold. Run `tokenprune tune` again.",
            setting.where,
            tuned_model.get("name", "a model"),
            type(model).__name__,
        )


def read_config(source: str | Path | Mapping[str, Any] | Setting) -> Setting:
    """Read and check a configuration: a file, its content as a dict, or a setting.

    Raises:
        ConfigError: If the file cannot be read, or its structure is invalid.
        OptionError: If the setting is invalid. Also UnknownMethodError and BudgetError.

    Examples:
        >>> setting = tokenprune.read_config({"method": "divprune", "keep": 0.25})
        >>> setting.name, setting.keep
        ('divprune', 0.25)
    """
    if isinstance(source, Setting):
        return source
    if isinstance(source, Mapping):
        return _check(source, "config")
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"config must be a path or a dict, not {type(source)}")
    try:
        file = File.read(source, _MAX_BYTES)
        content = json.loads(file.content)  # detects UTF-8 and UTF-16, with and without a byte order mark
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {describe_error(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is damaged or not UTF-8. Save it as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is damaged: it is not JSON. Run `tokenprune tune` again.") from error
    return _check(content, Path(source).name)


def _check(content: Any, name: str) -> Setting:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name} is not a configuration. Expected {_SHAPE}.")
    if any(key in content for key in ("method", "off", LIMIT)):  # only a setting
        only_setting = {key: value for key, value in content.items() if key != "guard"}
        guard = {key: content[key] for key in content if key == "guard"}
        content = {"schema": SCHEMA, "setting": only_setting, **guard}
    if "schema" not in content:
        raise ConfigError(f"{name} is not a configuration. Expected {_SHAPE}.")
    schema = content["schema"]
    if schema != SCHEMA or isinstance(schema, bool):
        raise ConfigError(
            f"{name} has schema {shorten(schema)}, but this version of tokenprune reads schema {SCHEMA}. Update "
            "tokenprune, or run `tokenprune tune` again."
        )
    value, tuned = content.get("setting"), content.get("tuned", {})
    if not isinstance(value, Mapping) or not isinstance(tuned, Mapping):
        raise ConfigError(f"{name} is invalid: setting and tuned must be objects.")
    if unknown := sorted(map(str, set(content) - {"schema", "setting", "tuned", "guard"})):
        raise ConfigError(f"{name} has unknown keys {', '.join(unknown)}. Options belong in setting.")
    model = tuned.get("model") or {}
    if not isinstance(model, Mapping):
        raise ConfigError(f"{name} is invalid: model in tuned must be an object, not {shorten(model)}.")
    for key in ("fingerprint", "type", "name"):
        if not isinstance(model.get(key, ""), str):
            raise ConfigError(f"{name} is invalid: {key} of the model must be a string, not {shorten(model[key])}.")
    guard = content.get("guard")
    if "guard" in content and guard not in _GUARDS:
        raise ConfigError(f"{name}: guard must be one of {', '.join(_GUARDS)}, not {shorten(guard)}.")
    setting = replace(Setting.from_json(value, name), tuned=dict(tuned), guard=guard)
    if not setting.off:
        setting.steps()
    return setting


def write_config(path: str | Path, setting: Setting) -> None:
    """Write a configuration file, replacing an existing file atomically.

    Raises:
        ConfigError: If the file cannot be written.

    Examples:
        >>> tokenprune.write_config("tokenprune.json", tokenprune.Setting.from_text("divprune", keep=0.25))
        >>> tokenprune.read_config("tokenprune.json").to_json()
        {'method': 'divprune', 'keep': 0.25}
    """
    path = Path(path)
    content: dict[str, Any] = {"schema": SCHEMA, "setting": setting.to_json()}
    content |= {"tuned": setting.tuned} if setting.tuned else {}
    content |= {"guard": setting.guard} if setting.guard else {}
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


__all__ = ["SCHEMA", "check_tuned_model", "read_config", "write_config"]
