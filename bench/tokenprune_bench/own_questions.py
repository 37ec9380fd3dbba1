# SPDX-License-Identifier: Apache-2.0
"""Questions, images and models of tokenprune-demo, which is installed apart: a run on the user's own needs none."""

from __future__ import annotations

from typing import Any

from tokenprune.startup import require


def demo(module: str) -> Any:
    """Import a module of tokenprune-demo; raises MissingPackageError, which says what to install or to name."""
    return require(
        f"tokenprune_demo.{module}",
        "our own questions are of another package (or name yours with --data, and your model with --model)",
    )
