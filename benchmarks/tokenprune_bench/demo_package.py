# SPDX-License-Identifier: Apache-2.0
"""Questions, images and models of tokenprune-demo, which is installed apart: a run on the user's own needs none."""

from __future__ import annotations

from typing import Any

from tokenprune.errors import require
from tokenprune.models.model_config import SHIPPED


def import_demo(module: str) -> Any:
    """Import a module of tokenprune-demo; raises MissingPackageError, which says what to install or to name."""
    return require(
        f"tokenprune_demo.{module}",
        "our own questions are of another package (or name yours with --data, and your model with --model)",
    )


def get_default_images(model: str | None) -> int:
    """Return the number of held-out images, videos or prompts asked about by default; None: the first model."""
    from tokenprune_bench.plan import DEFAULT_IMAGES  # imports torch, which a command's completion does without

    found: int = _of(model, "SAMPLES", DEFAULT_IMAGES)
    return found


def get_default_set(model: str | None) -> str:
    """Return the set of our own questions that a model is asked by default; None: the first model."""
    found: str = _of(model, "SETS", "images")
    return found


def _of(model: str | None, table: str, default: Any) -> Any:
    """Return what a table of tokenprune-demo says of a model that ships, the default for any other."""
    if model not in SHIPPED:
        return default
    return getattr(require("tokenprune_demo", f"{model} is a model of another package"), table).get(model, default)
