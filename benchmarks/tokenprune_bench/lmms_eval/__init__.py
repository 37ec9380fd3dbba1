# SPDX-License-Identifier: Apache-2.0
"""A model of lmms-eval: `--model tokenprune --model_args base=llava_hf,method=dart,keep=0.25,pretrained=...`.

`manifest` is the entry point (`lmms_eval.models`). Only `model.py` imports lmms-eval. Importing this package imports
neither torch nor lmms-eval. `get_tasks_folder()` is the folder for `--include_path` (docs/measure/lmms-eval.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenprune.errors import require
from tokenprune.models.torch_import import set_passive_threads

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest


def get_tasks_folder() -> Path:
    """Return the folder of our tasks. It is part of tokenprune-demo."""
    return (
        Path(require("tokenprune_demo", "the tasks for lmms-eval need tokenprune-demo").__file__).parent / "lmms_tasks"
    )


def manifest() -> ModelManifest:
    """Return the manifest that lmms-eval registers. lmms-eval passes the base only when it creates the model."""
    from lmms_eval.models.registry_v2 import ModelManifest

    set_passive_threads()
    return ModelManifest(
        model_id="tokenprune",
        simple_class_path=f"{__name__}.model.TokenPrune",
        chat_class_path=f"{__name__}.model.TokenPruneChat",
    )
