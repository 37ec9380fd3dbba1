# SPDX-License-Identifier: Apache-2.0
"""Model shapes from published configs, for compiling kernels and predicting costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tower:
    """A vision tower.

    Attributes:
        layers: Number of blocks.
        heads: Number of attention heads.
        width: Hidden size.
        tokens: Tokens of an image, tile or frame.
        images: Images per call.
        packed: Whether the images are concatenated along one axis.
    """

    layers: int
    heads: int
    width: int
    tokens: int
    images: int = 1
    packed: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Decoder:
    """A language model. `inner` is the width of its MLP, `visual` the visual tokens of a typical request."""

    layers: int
    heads: int
    kv_heads: int
    head_width: int
    width: int
    inner: int
    visual: int


@dataclass(frozen=True)
class Model:
    name: str
    tower: Tower
    decoder: Decoder


_CLIP = Tower(24, 16, 1024, 577)
_QWEN2_TOWER = Tower(32, 16, 1280, 4096, packed=True)
_QWEN3_TOWER, _QWEN3_SMALL_TOWER = Tower(27, 16, 1152, 4096, 1, True), Tower(24, 16, 1024, 4096, 1, True)
MODELS = (
    Model("LLaVA-1.5-7B", _CLIP, Decoder(32, 32, 32, 128, 4096, 11008, 576)),
    Model("LLaVA-1.5-13B", _CLIP, Decoder(40, 40, 40, 128, 5120, 13824, 576)),
    Model("LLaVA-NeXT-7B", Tower(24, 16, 1024, 577, 5), Decoder(32, 32, 32, 128, 4096, 11008, 2880)),
    Model("LLaVA-OneVision-0.5B", Tower(26, 16, 1152, 729, 5), Decoder(24, 14, 2, 64, 896, 4864, 3645)),
    Model("LLaVA-OneVision-7B", Tower(26, 16, 1152, 729, 5), Decoder(28, 28, 4, 128, 3584, 18944, 3645)),
    Model("Qwen2-VL-2B", _QWEN2_TOWER, Decoder(28, 12, 2, 128, 1536, 8960, 1024)),
    Model("Qwen2-VL-7B", _QWEN2_TOWER, Decoder(28, 28, 4, 128, 3584, 18944, 1024)),
    Model("Qwen2-VL-72B", _QWEN2_TOWER, Decoder(80, 64, 8, 128, 8192, 29568, 1024)),
    Model("Qwen2.5-VL-3B", _QWEN2_TOWER, Decoder(36, 16, 2, 128, 2048, 11008, 1024)),
    Model("Qwen2.5-VL-7B", _QWEN2_TOWER, Decoder(28, 28, 4, 128, 3584, 18944, 1024)),
    Model(
        "Qwen2.5-VL-7B, 16k video",
        Tower(32, 16, 1280, 1024, 64, packed=True),
        Decoder(28, 28, 4, 128, 3584, 18944, 16384),
    ),
    Model("Qwen2.5-VL-32B", _QWEN2_TOWER, Decoder(64, 40, 8, 128, 5120, 27648, 1024)),
    Model("Qwen3-VL-4B", _QWEN3_SMALL_TOWER, Decoder(36, 32, 8, 128, 2560, 9728, 1024)),
    Model("Qwen3-VL-8B", _QWEN3_TOWER, Decoder(36, 32, 8, 128, 4096, 12288, 1024)),
    Model("InternVL3-8B", Tower(24, 16, 1024, 1025, 7), Decoder(28, 28, 4, 128, 3584, 18944, 1792)),
    Model("Gemma3-4B", Tower(27, 16, 1152, 4096), Decoder(34, 8, 4, 256, 2560, 10240, 256)),
    Model("Gemma3-27B", Tower(27, 16, 1152, 4096), Decoder(62, 32, 16, 128, 5376, 21504, 256)),
    Model("SmolVLM-500M", Tower(12, 12, 768, 1024, 17), Decoder(32, 15, 5, 64, 960, 2560, 1088)),
    Model("SmolVLM-2.2B", Tower(27, 16, 1152, 729, 17), Decoder(24, 32, 32, 64, 2048, 8192, 1377)),
)
