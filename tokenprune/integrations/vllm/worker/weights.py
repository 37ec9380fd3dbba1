# SPDX-License-Identifier: Apache-2.0
"""Names of weights: checkpoints that transformers 5 saved, read by vLLM's models of CLIP and SigLIP towers."""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.model_executor.models.utils import WeightsMapper

# Of a tower as transformers 5 names it: what stands in `vision_tower.vision_model` of vLLM's model.
_NESTED = ("embeddings", "pre_layrnorm", "encoder", "post_layernorm", "head")


def build_mapper(base: Any) -> WeightsMapper:
    """Return vLLM's mapper of a model class with a nested tower (see `Family`), which takes both forms of names."""
    # After vLLM's own, which bring all names to begin with "vision_tower.".
    nested = {f"vision_tower.{name}.": f"vision_tower.vision_model.{name}." for name in _NESTED}
    return base.hf_to_vllm_mapper | WeightsMapper(orig_to_new_prefix=nested)


@cache
def create_renaming_class(base: type) -> type:
    """Return `base` with this mapper and nothing else, under the same name."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "hf_to_vllm_mapper": build_mapper(base)}
    return type(base)(base.__name__, (base,), names)
