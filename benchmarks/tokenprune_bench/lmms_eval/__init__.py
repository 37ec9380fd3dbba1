# SPDX-License-Identifier: Apache-2.0
"""A model of lmms-eval: `--model tokenprune --model_args base=llava_hf,method=dart,keep=0.25,pretrained=...`.

`manifest` is the entry point (`lmms_eval.models`). Nothing but `model.py` imports lmms-eval, and importing this package
imports neither torch nor lmms-eval. `tasks_folder()` is the folder for `--include_path`; see docs/measure/lmms-eval.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenprune.errors import require
from tokenprune.models.torch_import import set_passive_threads

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest


def tasks_folder() -> Path:
    """Return the folder of our tasks, which ships with their questions in tokenprune-demo."""
    return (
        Path(require("tokenprune_demo", "our tasks for lmms-eval are of another package").__file__).parent
        / "lmms_tasks"
    )


def manifest() -> ModelManifest:
    """Return what lmms-eval registers: which base is meant, it only tells when it makes the model."""
    from lmms_eval.models.registry_v2 import ModelManifest

    set_passive_threads()
    return ModelManifest(
        model_id="tokenprune",
        simple_class_path=f"{__name__}.model.TokenPrune",
        chat_class_path=f"{__name__}.model.TokenPruneChat",
    )
