# SPDX-License-Identifier: Apache-2.0
"""Access to the optional package tokenprune-demo (questions, images and models)."""

from __future__ import annotations

from typing import Any

from tokenprune.errors import require
from tokenprune.models.model_config import SHIPPED


def import_demo(module: str) -> Any:
    """Import a module of tokenprune-demo.

    Raises:
        MissingPackageError: If tokenprune-demo is not installed.
    """
    return require(
        f"tokenprune_demo.{module}",
        "the shipped questions need another package (or pass yours with --data, and your model with --model)",
    )


def get_default_images(model: str | None) -> int:
    """Return the default number of held-out images, videos or prompts. None selects the first model."""
    from tokenprune_bench.plan import DEFAULT_IMAGES  # imports torch, which shell completion must not do

    count: int = _get_table_entry(model, "SAMPLES", DEFAULT_IMAGES)
    return count


def get_default_set(model: str | None) -> str:
    """Return the default question set for a model. None selects the first shipped model."""
    name: str = _get_table_entry(model, "SETS", "images")
    return name


def _get_table_entry(model: str | None, table: str, default: Any) -> Any:
    """Return the model's entry in a table of tokenprune-demo, or the default."""
    if model not in SHIPPED:
        return default
    return getattr(require("tokenprune_demo", f"{model} needs another package"), table).get(model, default)
