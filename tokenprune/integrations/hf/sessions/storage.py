# SPDX-License-Identifier: Apache-2.0
"""A session in a file: keys, values and tables as safetensors, and numbers as JSON in its metadata."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenprune.errors import ConfigError
from tokenprune.integrations.hf.sessions.memory import FRAME, Memory
from tokenprune.integrations.hf.sessions.positions import axes
from tokenprune.integrations.hf.sessions.stream import Progress, Stream
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.selection.files import describe_error

logger = logging.getLogger(__name__)

_KEY, _SCHEMA = "tokenprune.session", 2


def save(stream: Stream, path: str | Path, settings: dict[str, Any]) -> None:
    """Write a stream, as a whole or not at all; raises ConfigError where that cannot be. settings: those of the
    session, for JSON."""
    tensors, memory = {}, stream.memory
    for index, layer in enumerate(memory.cache.layers):
        if layer.is_initialized:
            tensors[f"keys.{index}"], tensors[f"values.{index}"] = layer.keys, layer.values
    shared = all(table is memory.tables[0] for table in memory.tables)
    for place, table in enumerate(memory.tables[:1] if shared else memory.tables):
        tensors[f"table.{place}"] = table
    facts = {
        "schema": _SCHEMA,
        "fingerprint": compute_fingerprint(stream.model),
        "transformers": transformers.__version__,
        "settings": settings,
        "progress": dataclasses.asdict(stream.progress),
        "visual": memory.visual,
        "lengths": [layer.cumulative_length for layer in memory.sliding],
    }
    path = Path(path)
    draft = path.with_name(path.name + ".new")
    try:
        save_file({name: one.contiguous() for name, one in tensors.items()}, draft, {_KEY: json.dumps(facts)})
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {describe_error(error)}") from error


def load(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return facts and tensors (on the host) of a file that `save` wrote; raises ConfigError for any other."""
    try:
        with safe_open(path, "pt") as opened:
            facts = json.loads((opened.metadata() or {}).get(_KEY, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no dict
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {describe_error(error)}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("settings"), dict):
        raise ConfigError(f"{path} holds no session: Session.save writes one")
    if facts.get("schema") != _SCHEMA:
        raise ConfigError(
            f"{path} has another schema than {_SCHEMA}, which this version of tokenprune reads: update it"
        )
    return facts, tensors


def fill(stream: Stream, facts: dict[str, Any], tensors: dict[str, Tensor], name: str) -> None:
    """Have an empty stream go on where the one in a file was; raises ConfigError for a file of another model, or one
    that is damaged."""
    if facts.get("fingerprint") != compute_fingerprint(stream.model):
        raise ConfigError(
            f"{name} is of a session with another model, or with this one in another dtype: load that one"
        )
    if facts.get("transformers") != transformers.__version__:
        logger.warning("%s was saved with transformers %s: answers may differ", name, facts.get("transformers"))
    memory = Memory(stream.adapter.text_config, axes(stream.adapter), stream.place[0])
    try:
        progress = Progress(**facts["progress"])
        if len(facts["progress"]) != len(dataclasses.fields(Progress)):
            raise ValueError("numbers are missing")
        _fill(memory, stream, tensors, facts)
        numbers = [value for value in dataclasses.astuple(progress) if type(value) is not bool]
        if not all(type(value) is int and value >= 0 for value in numbers) or type(progress.opened) is not bool:
            raise ValueError("its numbers are none")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} is damaged: {' '.join(str(error).split())}") from error
    stream.memory, stream.progress = memory, progress


def _fill(memory: Memory, stream: Stream, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Put tensors into an empty memory; raises ValueError where they do not fit each other."""
    (device, dtype), config = stream.place, stream.adapter.text_config
    names = ["table.0"] if "table.1" not in tensors else [f"table.{place}" for place in range(len(memory.full))]
    tables = [tensors[name].to(device) for name in names]
    heads, held = config.num_key_value_heads, tables[0].shape[-1]
    for table in tables:
        shapes = [(len(memory.tables[0]), number, held) for number in (1, heads)]
        if table.dtype != torch.int32 or tuple(table.shape) not in shapes:
            raise ValueError("its tables do not fit the model")
        if ((table[FRAME] >= 0).sum(1) != facts["visual"]).any():
            raise ValueError("its tables do not count what they hold")
    memory.tables, memory.visual = tables * (len(memory.full) // len(tables)), facts["visual"]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for index, layer in enumerate(memory.cache.layers if held else []):
        keys, values = tensors[f"keys.{index}"], tensors[f"values.{index}"]
        count = min(held, keys.shape[2]) if layer.is_sliding else held
        if any(one.shape != (1, heads, count, width) or one.dtype != dtype for one in (keys, values)):
            raise ValueError("its keys and values do not fit its tables")
        layer.update(keys.to(device), values.to(device))
    for layer, length in zip(memory.sliding, facts["lengths"], strict=True):
        layer.cumulative_length = int(length)
