# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL, whose language model does not run on a CPU: values of vLLM's tower match plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenprune
from conftest import Engine
from front_end import config
from paper_checkpoints import PAPERS
from tokenprune.errors import UnsupportedSetupError

VSCAN = {"method": "vscan", "keep": 0.4, "stage2": False}
GRIDS = [(4, 6), (6, 4), (8, 2)]  # patches of each image
HEADS, LAYERS = 2, 3


class Stub(nn.Module):
    """The parts of a model that a reader needs."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        from vllm.model_executor.models.moonvit import MoonVitPretrainedModel

        self.config = SimpleNamespace(model_type="kimi_vl", vision_config=vision)
        self.vision_tower = MoonVitPretrainedModel(vision, prefix="vision_tower")


@pytest.fixture(scope="module")
def stub(start: Callable[..., Engine]) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.transformers_utils.configs.moonvit import MoonViTConfig

    engine = start("llava")  # vLLM's layers need its process groups
    vision = MoonViTConfig(
        patch_size=14, init_pos_emb_height=8, init_pos_emb_width=8, num_attention_heads=HEADS,
        num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=96,
    )  # fmt: skip
    with set_current_vllm_config(engine.llm.llm_engine.vllm_config), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Stub(vision).float().eval()
        for p in model.parameters():
            p.data.normal_(std=1.2 / math.sqrt(p[0].numel())) if p.dim() > 1 else p.data.normal_(1.0, 0.1)
        for module in model.modules():
            if hasattr(module, "quant_method"):  # as the loader does
                module.quant_method.process_weights_after_loading(module)
        yield model


@torch.no_grad()
def compute_received_attention(tower: Any, pixels: Tensor, grid: tuple[int, int]) -> list[Tensor]:
    """Return the received attention of one image's patches in each block, shape (patches, heads)."""
    from vllm.model_executor.models.moonvit import apply_rope

    attention = []

    def record(block: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        x = block.norm0(args[0])
        query, key, _ = block.wqkv(x)[0].view(len(x), 3, HEADS, -1).unbind(1)
        query, key = apply_rope(query, key, kwargs["rope_freqs_cis"])
        logits = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        attention.append(logits.softmax(-1).mean(1).T)

    handles = [block.register_forward_pre_hook(record, with_kwargs=True) for block in tower.encoder.blocks]
    tower(pixels, torch.tensor([grid]))
    for handle in handles:
        handle.remove()
    return attention


@torch.no_grad()
def test_tower_values_match_loops(stub: Any) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    from tokenprune.integrations.vllm.worker.tower import TowerReader

    sizes = [height * width for height, width in GRIDS]
    pixels = torch.randn(sum(sizes), 3, 14, 14, generator=torch.Generator().manual_seed(1))
    kwargs = {"pixel_values": pixels, "image_grid_hws": torch.tensor(GRIDS)}
    method, reader = tokenprune.method("vscan", stage2=False), TowerReader(stub)
    with reader.observe([method], kwargs, "image") as captured, set_current_vllm_config(VllmConfig()):
        features = [output.flatten(1) for output in stub.vision_tower(pixels, torch.tensor(GRIDS))]
    for index, (grid, image_pixels) in enumerate(zip(GRIDS, pixels.split(sizes), strict=True)):
        encoded = reader.get_values(method, captured, index, features, kwargs, "image")
        blocks = compute_received_attention(stub.vision_tower, image_pixels, grid)
        assert len(encoded.values) == 2
        for (_, layer), values in encoded.values.items():
            block = blocks[math.ceil(layer * LAYERS) - 1 if isinstance(layer, float) else layer]
            squares = [
                [(2 * row + i) * grid[1] + 2 * column + j for i in range(2) for j in range(2)]
                for row in range(grid[0] // 2) for column in range(grid[1] // 2)
            ]  # fmt: skip
            expected = torch.stack([block[square].mean(0) for square in squares])
            torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)
        rows = encoded.tokens.cells[:, 1].max() + 1, encoded.tokens.cells[:, 2].max() + 1
        assert rows == (grid[0] // 2, grid[1] // 2)


def test_server_accepts_methods_that_read_the_tower(tmp_path: Any) -> None:
    (paper,) = (candidate for candidate in PAPERS if candidate.kind == "kimi_vl")
    folder = paper.write(tmp_path)
    model_config = config(folder, VSCAN, trust_remote_code=True)
    assert model_config.multimodal_config.tokenprune["method"] == "vscan"
    with pytest.raises(UnsupportedSetupError, match=r"merges inside the vision tower.*after the tower"):
        config(folder, {"method": "tome", "keep": 0.5}, trust_remote_code=True)
