# SPDX-License-Identifier: Apache-2.0
"""A model of lmms-eval: `--model tokenprune --model_args base=llava_hf,method=dart,keep=0.25,pretrained=...`.

`manifest` is the entry point (`lmms_eval.models`). Nothing but `model.py` imports lmms-eval, and importing this package
imports neither torch nor lmms-eval. `TASKS` is the folder for `--include_path`; see docs/lmms-eval.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenprune.startup import calm_threads

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest

TASKS = Path(__file__).parent / "tasks"


def manifest() -> ModelManifest:
    """Return what lmms-eval registers: which base is meant, it only tells when it makes the model."""
    from lmms_eval.models.registry_v2 import ModelManifest

    calm_threads()
    return ModelManifest(
        model_id="tokenprune",
        simple_class_path=f"{__name__}.model.TokenPrune",
        chat_class_path=f"{__name__}.model.TokenPruneChat",
    )
