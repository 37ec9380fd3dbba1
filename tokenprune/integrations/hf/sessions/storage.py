# SPDX-License-Identifier: Apache-2.0
"""Save and load sessions: tensors as safetensors, and everything else as JSON in the metadata."""

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
from tokenprune.integrations.hf.sessions.positions import count_axes
from tokenprune.integrations.hf.sessions.stream import Progress, Stream
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.selection.files import describe_error

logger = logging.getLogger(__name__)

_KEY, _SCHEMA = "tokenprune.session", 2


def save(stream: Stream, path: str | Path, settings: dict[str, Any]) -> None:
    """Write a stream to a file atomically.

    Args:
        stream: The stream.
        path: Path of the safetensors file.
        settings: Settings of the session, as JSON values.

    Raises:
        ConfigError: If the file cannot be written.
    """
    tensors, memory = {}, stream.memory
    for index, layer in enumerate(memory.cache.layers):
        if layer.is_initialized:
            tensors[f"keys.{index}"], tensors[f"values.{index}"] = layer.keys, layer.values
    shared = all(table is memory.tables[0] for table in memory.tables)
    for row, table in enumerate(memory.tables[:1] if shared else memory.tables):
        tensors[f"table.{row}"] = table
    metadata = {
        "schema": _SCHEMA,
        "fingerprint": compute_fingerprint(stream.model),
        "transformers": transformers.__version__,
        "settings": settings,
        "progress": dataclasses.asdict(stream.progress),
        "visual": memory.visual,
        "lengths": [layer.cumulative_length for layer in memory.sliding],
    }
    path = Path(path)
    temporary = path.with_name(path.name + ".new")
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, {_KEY: json.dumps(metadata)})
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {describe_error(error)}") from error


def load(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata and tensors (on the host) of a session file, or raise ConfigError."""
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {describe_error(error)}") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("settings"), dict):
        raise ConfigError(f"{path} is not a session file. Session.save writes one.")
    if metadata.get("schema") != _SCHEMA:
        raise ConfigError(
            f"{path} has schema {metadata.get('schema')!r}, and this version reads {_SCHEMA}. Update tokenprune."
        )
    return metadata, tensors


def restore(stream: Stream, metadata: dict[str, Any], tensors: dict[str, Tensor], name: str) -> None:
    """Restore a saved stream into an empty one.

    Args:
        stream: An empty stream.
        metadata: Metadata of the file.
        tensors: Tensors of the file.
        name: Name of the file, for errors.

    Raises:
        ConfigError: If the file belongs to another model or is corrupt.
    """
    if metadata.get("fingerprint") != compute_fingerprint(stream.model):
        raise ConfigError(f"{name} is a session of another model or dtype. Load the model that it was saved with.")
    if metadata.get("transformers") != transformers.__version__:
        logger.warning("%s was saved with transformers %s: answers may differ", name, metadata.get("transformers"))
    memory = Memory(stream.adapter.text_config, count_axes(stream.adapter), stream.placement[0])
    try:
        progress = Progress(**metadata["progress"])
        if len(metadata["progress"]) != len(dataclasses.fields(Progress)):
            raise ValueError("fields of the progress are missing")
        _fill(memory, stream, tensors, metadata)
        values = [value for value in dataclasses.astuple(progress) if type(value) is not bool]
        if not all(type(value) is int and value >= 0 for value in values) or type(progress.opened) is not bool:
            raise ValueError("the progress is not valid")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} is corrupt: {' '.join(str(error).split())}") from error
    stream.memory, stream.progress = memory, progress


def _fill(memory: Memory, stream: Stream, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Fill an empty memory, or raise ValueError if the tensors disagree."""
    (device, dtype), config = stream.placement, stream.adapter.text_config
    names = ["table.0"] if "table.1" not in tensors else [f"table.{row}" for row in range(len(memory.full_layers))]
    tables = [tensors[name].to(device) for name in names]
    heads, held = config.num_key_value_heads, tables[0].shape[-1]
    for table in tables:
        shapes = [(len(memory.tables[0]), num_heads, held) for num_heads in (1, heads)]
        if table.dtype != torch.int32 or tuple(table.shape) not in shapes:
            raise ValueError("the tables do not fit the model")
        if ((table[FRAME] >= 0).sum(1) != metadata["visual"]).any():
            raise ValueError("the table sizes disagree")
    memory.tables, memory.visual = tables * (len(memory.full_layers) // len(tables)), metadata["visual"]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for index, layer in enumerate(memory.cache.layers if held else []):
        keys, values = tensors[f"keys.{index}"], tensors[f"values.{index}"]
        count = min(held, keys.shape[2]) if layer.is_sliding else held
        if any(states.shape != (1, heads, count, width) or states.dtype != dtype for states in (keys, values)):
            raise ValueError("the keys and values do not fit the tables")
        layer.update(keys.to(device), values.to(device))
    for layer, length in zip(memory.sliding, metadata["lengths"], strict=True):
        layer.cumulative_length = int(length)
