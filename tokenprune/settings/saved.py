# SPDX-License-Identifier: Apache-2.0
"""`tokenprune.json`: the setting that `tokenprune tune` found, and what is promised of it.

{"schema": 1, "setting": {"method": ..., "keep": ..., option: ...}, "tuned": {...}, "guard": "auto"}, or the setting
alone, with a guard beside its method. The setting has the shape that the vLLM plugin takes, see `tokenprune.settings`.
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

logger = logging.getLogger(__name__)

SCHEMA = 1
_GUARDS = ("warn", "auto", "off")
_LARGEST = 2**20  # bytes of a file
_SHAPE = f'{{"method": "divprune", "keep": 0.25}}, or {{"schema": {SCHEMA}, "setting": {{...}}, "tuned": {{...}}}}'


def check_tuned_model(setting: Setting, model: Any) -> None:
    """Log a warning if the setting was tuned on another model."""
    promised = setting.tuned.get("model") or {}
    if "fingerprint" not in promised:
        return
    from tokenprune.models.fingerprint import compute_fingerprint

    if compute_fingerprint(model) != promised["fingerprint"]:
        logger.warning(
            "%s was tuned on %s with other weights or another dtype than this %s: what it promises was not measured "
            "on this model; run `tokenprune tune` again",
            setting.where,
            promised.get("name", "a model"),
            type(model).__name__,
        )


def read_config(source: str | Path | Mapping[str, Any] | Setting) -> Setting:
    """Read and check a configuration: a file, its content, or a setting alone. Raises ConfigError if it is invalid."""
    if isinstance(source, Setting):
        return source
    if isinstance(source, Mapping):
        return _checked(source, "config")
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"config must be a file that `tokenprune tune` wrote, or its content, not {type(source)}")
    try:
        file = File.read(source, _LARGEST)
        content = json.loads(file.content)  # in UTF-8, or as Windows may save it: with a mark in front, in UTF-16
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {describe_error(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is damaged, or no text in UTF-8: save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is damaged, it holds no JSON: run `tokenprune tune` again") from error
    return _checked(content, Path(source).name)


def _checked(content: Any, name: str) -> Setting:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name} is no configuration: it needs {_SHAPE}")
    if "method" in content or "off" in content:  # a setting alone
        alone = {key: value for key, value in content.items() if key != "guard"}
        content = {"schema": SCHEMA, "setting": alone, **{key: content[key] for key in content if key == "guard"}}
    if "schema" not in content:
        raise ConfigError(f"{name} is no configuration: it needs {_SHAPE}")
    schema = content["schema"]
    if schema != SCHEMA or isinstance(schema, bool):
        raise ConfigError(
            f"{name} has the schema {shorten(schema)}, and this version of tokenprune reads {SCHEMA}: update "
            "tokenprune, or run `tokenprune tune` again"
        )
    value, tuned = content.get("setting"), content.get("tuned", {})
    if not isinstance(value, Mapping) or not isinstance(tuned, Mapping):
        raise ConfigError(f"{name} is damaged: setting and tuned must be objects")
    if unknown := sorted(map(str, set(content) - {"schema", "setting", "tuned", "guard"})):
        raise ConfigError(f"{name} has unknown entries {', '.join(unknown)}: options go into setting")
    model = tuned.get("model") or {}
    if not isinstance(model, Mapping):
        raise ConfigError(f"{name} is damaged: model in tuned must be an object, not {shorten(model)}")
    for key in ("fingerprint", "type", "name"):
        if not isinstance(model.get(key, ""), str):
            raise ConfigError(f"{name} is damaged: {key} of the model must be a text, not {shorten(model[key])}")
    guard = content.get("guard")
    if "guard" in content and guard not in _GUARDS:
        raise ConfigError(f"{name}: guard is one of {', '.join(_GUARDS)}, not {shorten(guard)}")
    setting = replace(Setting.from_json(value, name), tuned=dict(tuned), guard=guard)
    if not setting.off:
        setting.steps()
    return setting


def write_config(path: str | Path, setting: Setting) -> None:
    """Write a configuration file. The file is replaced as a whole; raises ConfigError if that fails."""
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
