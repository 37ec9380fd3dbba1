# SPDX-License-Identifier: Apache-2.0
"""Small models, held-out questions, and drawn images and videos for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path

from tokenprune.models.model_config import SHIPPED

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
MODELS = {name: _HERE / "models" / name for name in SHIPPED}
# Maximum answer length of models that answer in a sentence ending with the answer. Other models answer in one word.
SENTENCES = {"demo_smol": 24}
# Default number of held-out images of a benchmark, for slow models.
SAMPLES = {"demo_smol": 12}
# Default question set of a benchmark, if it is not the held-out images.
SETS = {"demo_video": "small-videos"}


def checkpoint(name: str) -> Path:
    """Return the checkpoint folder of a model. The checkpoint of demo_smol is built on first use.

    Raises:
        MissingPackageError: If the decoder of demo_smol is not installed.

    Examples:
        >>> checkpoint("demo_vlm").name
        'demo_vlm'
    """
    if name == "demo_smol":
        from tokenprune_demo import smol

        return smol.checkpoint()
    return MODELS[name]
