# SPDX-License-Identifier: Apache-2.0
"""Models of a few million parameters, questions that they were not trained on, and drawn images and videos."""

from __future__ import annotations

from pathlib import Path

from tokenprune.models.model_config import SHIPPED

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
MODELS = {name: _HERE / "models" / name for name in SHIPPED}
# Models that answer in a sentence, which ends in the answer, with its most tokens; others say a word.
SENTENCES = {"demo_smol": 24}
# Held-out images that a benchmark asks about by default, of models whose answers take a second.
SAMPLES = {"demo_smol": 12}
# The set that a benchmark asks a model, where it is not the held-out images.
SETS = {"demo_video": "small-videos"}


def checkpoint(name: str) -> Path:
    """Return the folder of a model's checkpoint. That of demo_smol is built the first time: see `tokenprune_demo.smol`.

    Raises MissingPackageError where the decoder of demo_smol is not installed.
    """
    if name == "demo_smol":
        from tokenprune_demo import smol

        return smol.checkpoint()
    return MODELS[name]
