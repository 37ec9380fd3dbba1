# SPDX-License-Identifier: Apache-2.0
"""`tokenprune.json`: the setting that `tokenprune tune` found, and what is promised of it.

{"schema": 1, "setting": {"method": ..., "keep": ..., option: ...}, "tuned": {...}}. The setting has the shape that the
vLLM plugin takes; `method` may be a list of names, or of {"method": name, option: ...}, with a list of keeps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenprune.base import Method
from tokenprune.budget import Budget
from tokenprune.errors import BudgetError, ConfigError, OptionError
from tokenprune.registry import build

logger = logging.getLogger(__name__)

SCHEMA = 1
# Of a setting, and no option of a method. The last one says how vLLM shall serve a method; it changes nothing here.
_SCOPE = ("method", "keep", "per", "off", "experimental_in_llm")


@dataclass(frozen=True)
class Config:
    """setting: what to patch with. tuned: what is promised of it, and of which model; {} if nothing is. name: of the
    file, for messages."""

    setting: dict[str, Any]
    tuned: dict[str, Any] = field(default_factory=dict)
    name: str = "config"

    def steps(self) -> tuple[list[Method], list[Budget]]:
        """Return the methods and their budgets; raises UnknownMethodError, OptionError or BudgetError."""
        given = dict(self.setting)
        if given.get("off"):
            raise OptionError(f'{self.name} says {{"off": true}}: there is nothing to patch')
        if "method" not in given:
            raise OptionError(f'{self.name} names no method: {{"method": "divprune", "keep": 0.25}}, for example')
        many = isinstance(given["method"], list)
        entries = given["method"] if many else [given["method"]]
        options = {name: value for name, value in given.items() if name not in _SCOPE}
        if not entries or (options and len(entries) > 1):
            wrong = f"options {', '.join(options)} are ambiguous for several methods" if entries else "no method"
            raise OptionError(
                f'{self.name}: {wrong}: write {{"method": [{{"method": "fastv", "layer": 3}}, "divprune"]}}'
            )
        methods = [_method(entry, options) for entry in entries]
        keeps = given.get("keep", [method.default_keep for method in methods])
        keeps = keeps if isinstance(keeps, list) else [keeps] * len(methods)
        if len(keeps) != len(methods):
            raise BudgetError(f"{self.name}: keep has {len(keeps)} entries for {len(methods)} methods")
        return methods, [Budget(keep=keep, per=given.get("per", "image")) for keep in keeps]

    def check_model(self, model: Any) -> None:
        """Log a warning if the promise was made for another model."""
        promised = self.tuned.get("model") or {}
        if "fingerprint" not in promised:
            return
        from tokenprune.fingerprint import fingerprint

        if fingerprint(model) != promised["fingerprint"]:
            logger.warning(
                "%s was tuned on %s with other weights or another dtype than this %s: what it promises was not "
                "measured on this model; run `tokenprune tune` again",
                self.name,
                promised.get("name", "a model"),
                type(model).__name__,
            )


def _method(entry: Any, options: dict[str, Any]) -> Method:
    if isinstance(entry, Mapping):
        entry, options = entry.get("method"), {name: value for name, value in entry.items() if name != "method"}
    try:
        return build(entry, options)
    except TypeError as error:  # a value of a type that the method itself did not check
        raise OptionError(f"{entry}: {error}") from error


def read_config(source: str | Path | Mapping[str, Any]) -> Config:
    """Read and check a configuration: a file, or its content. Raises ConfigError for what is none."""
    if isinstance(source, Mapping):
        return _checked(source, "config")
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"config must be a file that `tokenprune tune` wrote, or its content, not {type(source)}")
    path = Path(source)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # no JSON, or no text
        raise ConfigError(f"{path} is damaged, it holds no JSON: run `tokenprune tune` again") from error
    return _checked(content, path.name)


def _checked(content: Any, name: str) -> Config:
    if not isinstance(content, Mapping) or "schema" not in content:
        raise ConfigError(f'{name} is no configuration: it needs {{"schema": {SCHEMA}, "setting": {{...}}}}')
    if content["schema"] != SCHEMA:
        raise ConfigError(
            f"{name} has the schema {content['schema']!r}, and this version of tokenprune reads {SCHEMA}: update "
            "tokenprune, or run `tokenprune tune` again"
        )
    setting, tuned = content.get("setting"), content.get("tuned", {})
    if not isinstance(setting, Mapping) or not isinstance(tuned, Mapping):
        raise ConfigError(f"{name} is damaged: setting and tuned must be objects")
    if unknown := sorted(set(content) - {"schema", "setting", "tuned"}):
        raise ConfigError(f"{name} has unknown entries {', '.join(unknown)}: options go into setting")
    config = Config(dict(setting), dict(tuned), name)
    if not config.setting.get("off"):
        config.steps()
    return config


def write_config(path: str | Path, config: Config) -> None:
    """Write a configuration, as a whole or not at all; raises ConfigError where that cannot be."""
    path = Path(path)
    content = {"schema": SCHEMA, "setting": config.setting} | ({"tuned": config.tuned} if config.tuned else {})
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


__all__ = ["SCHEMA", "Config", "read_config", "write_config"]
