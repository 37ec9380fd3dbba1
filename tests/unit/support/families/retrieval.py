# SPDX-License-Identifier: Apache-2.0
"""Tiny models that return a vector per token, and batches of pages and questions as their processors build them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    CONFIG_MAPPING,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    PreTrainedModel,
)

import zoo
from families import plain
from zoo import IMAGE, Family, InputImage, Inputs

WIDTH = 12  # dimension of each vector


def pad_patches(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    """Pad the patches of each page at the end of its row, as ColQwen2's processor does."""
    flat = [image.pixels for row in rows for image in row]
    grids = torch.cat([pixels["image_grid_thw"] for pixels in flat])
    return {"pixel_values": pad_sequence([pixels["pixel_values"] for pixels in flat], True), "image_grid_thw": grids}


@dataclasses.dataclass(frozen=True, eq=False)
class Retriever:
    """A retrieval model type. inner: the family of its `vlm`."""

    name: str
    config: type
    model: type
    inner: Family

    def build(self, attn: str = "sdpa") -> PreTrainedModel:
        config = CONFIG_MAPPING[self.inner.kind](image_token_id=IMAGE, **self.inner.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model._from_config(
                self.config(vlm_config=config.to_dict(), embedding_dim=WIDTH), attn_implementation=attn
            )
            inner_model = self.inner.build(attn)
            model.get_submodule(self.inside(model)).load_state_dict(inner_model.model.state_dict())
            nn.init.normal_(model.embedding_proj_layer.weight, std=0.3)
            nn.init.normal_(model.embedding_proj_layer.bias, std=0.3)
        return model.float().eval()

    def inside(self, model: PreTrainedModel) -> str:
        """Return the path of the module that merges images into text; older transformers wrap it in a language head."""
        return "vlm.model" if hasattr(model.vlm, "model") else "vlm"

    def pages(self, **options: Any) -> Inputs:
        """Return a batch of pages; see `Family.make_inputs`."""
        return self.inner.make_inputs(**options)

    def questions(self) -> dict[str, torch.Tensor]:
        return dict(self.inner.make_inputs(images=(0, 0)))


def _retrievers() -> list[Retriever]:
    qwen = {name: dataclasses.replace(zoo.FAMILIES[name], types=None, collate=pad_patches)
            for name in ("qwen2_vl", "qwen2_5_vl")}  # fmt: skip
    return [
        Retriever("colpali", ColPaliConfig, ColPaliForRetrieval, plain.FAMILIES["paligemma"]),
        Retriever("colqwen2", ColQwen2Config, ColQwen2ForRetrieval, qwen["qwen2_vl"]),
        Retriever("colqwen2_5", ColQwen2Config, ColQwen2ForRetrieval, qwen["qwen2_5_vl"]),
    ]


RETRIEVERS: dict[str, Retriever] = {retriever.name: retriever for retriever in _retrievers()}
