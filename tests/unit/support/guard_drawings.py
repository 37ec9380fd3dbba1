# SPDX-License-Identifier: Apache-2.0
"""Drawn pages and scenes, and their share of text."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from tokenprune.integrations.hf.guard.images import compute_text_shares, split_blocks


def page(side: int = 336, letters: int = 12, paper: str = "white", ink: str = "black") -> Image.Image:
    image = Image.new("RGB", (side, side), paper)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=letters)
    for line in range(int(side / letters / 1.5)):
        text = f"{line} The invoice of July for 13 lazy dogs, total 45.60 " * 3
        draw.text((8, 5 + 1.5 * line * letters), text, ink, font)
    return image


def scene(kind: str, side: int = 336) -> Image.Image:
    rng, y = np.random.default_rng(0), np.linspace(0, 1, side)
    if kind == "noise":
        values = rng.integers(0, 256, (side, side))
    elif kind == "stripes":
        values = 255 * (np.arange(side) // 4 % 2)[None].repeat(side, 0)
    elif kind == "hills":
        values = 128 + 120 * np.sin(9 * y)[:, None] * np.cos(7 * y)[None] + rng.normal(0, 3, (side, side))
    elif kind == "blocks":  # large uniform shapes
        values = np.kron(rng.integers(0, 256, (8, 8)), np.ones((side // 8, side // 8)))
    else:
        values = np.full((side, side), 90)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")


def planes(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1) / 255


def measured(pixels: torch.Tensor) -> float:
    blocks = split_blocks(pixels[None])[0]
    return float(compute_text_shares(blocks, torch.zeros(len(blocks), dtype=torch.long), 1))
