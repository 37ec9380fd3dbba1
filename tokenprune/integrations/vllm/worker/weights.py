# SPDX-License-Identifier: Apache-2.0
"""Names of weights: load checkpoints saved by transformers 5 into vLLM's models of CLIP and SigLIP towers."""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.model_executor.models.utils import WeightsMapper

# Modules that transformers 5 names `vision_tower.NAME` and vLLM names `vision_tower.vision_model.NAME`.
_NESTED = ("embeddings", "pre_layrnorm", "encoder", "post_layernorm", "head")


def build_mapper(base: Any) -> WeightsMapper:
    """Return the weight mapper of a model class with a nested tower (see `Family`). It accepts both forms of names."""
    # vLLM's mapper runs first. After it all names start with "vision_tower.".
    nested = {f"vision_tower.{name}.": f"vision_tower.vision_model.{name}." for name in _NESTED}
    return base.hf_to_vllm_mapper | WeightsMapper(orig_to_new_prefix=nested)


@cache
def create_renaming_class(base: type) -> type:
    """Return `base` with this mapper and no other changes, under the same name."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "hf_to_vllm_mapper": build_mapper(base)}
    return type(base)(base.__name__, (base,), names)
