# SPDX-License-Identifier: Apache-2.0
"""Reading the config of a model, with the defaults of its family, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenprune.errors import TokenPruneError
from tokenprune.startup import require, torch_hidden

# Models of tokenprune-demo; the first is the default of commands.
SHIPPED = ("demo_vlm", "demo_qwen", "demo_video", "demo_smol")


def shipped_folder(model: str | Path) -> Path | None:
    """Return the folder with the config of a model that tokenprune-demo brings, None for any other.

    Raises MissingPackageError.
    """
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is a model of another package").MODELS[str(model)]


def shipped_checkpoint(model: str | Path) -> Path | None:
    """Return the folder with the whole checkpoint of such a model, None for any other. Raises MissingPackageError."""
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is a model of another package").checkpoint(str(model))


def sentence_tokens(model: str | Path) -> int | None:
    """Return the most tokens of an answer of a model that ships and answers in sentences, None for any other.

    Raises MissingPackageError.
    """
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is a model of another package").SENTENCES.get(str(model))


def read_model_config(model: str | Path) -> Any:
    """Return the config of a model on disk or in the hub's cache, or of one that ships; raises TokenPruneError where it
    cannot be read."""
    source = shipped_folder(model) or model
    with torch_hidden():
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(str(source))
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TokenPruneError(f"cannot read the config of {model}: {reason}") from error
