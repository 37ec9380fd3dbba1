# SPDX-License-Identifier: Apache-2.0
"""Reading the config of a model, with the defaults of its family, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenprune.errors import TokenPruneError
from tokenprune.startup import torch_hidden

SHIPPED_MODELS = {name: Path(__file__).parent.parent / "assets" / name for name in ("demo_vlm", "demo_qwen")}


def read_model_config(model: str | Path) -> Any:
    """Return the config of a model on disk or in the hub's cache, or of one that ships; raises TokenPruneError where it
    cannot be read."""
    source = SHIPPED_MODELS.get(str(model), model)
    with torch_hidden():
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(str(source))
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TokenPruneError(f"cannot read the config of {model}: {reason}") from error
