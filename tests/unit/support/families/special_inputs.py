# SPDX-License-Identifier: Apache-2.0
"""Images and videos of families that take more inputs than pixels, and their collate functions."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.utils.rnn import pad_sequence

from zoo import (
    ANYRES,
    BREAK,
    END,
    FIRST_TEXT_ID,
    IMAGE,
    START,
    TILE,
    VIDEO,
    InputImage,
    grid_image,
    join,
    noise,
    qwen_video,
)


def stamped_video(g: torch.Generator, frames: int | None) -> InputImage:
    return qwen_video(g, frames, stamped=True)


def gemma4_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    h, w = size
    positions = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"), -1).view(h * w, 2)
    pixels = {"pixel_values": torch.rand(h * w, 3 * 4**2, generator=g), "image_position_ids": positions}
    return InputImage([START, *[IMAGE] * (h * w // 4), END], pixels)


def gemma4_collate(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    flat = [image.pixels for row in rows for image in row]
    return {
        key: pad_sequence([pixels[key] for pixels in flat], True, padding)
        for key, padding in (("pixel_values", 0), ("image_position_ids", -1))
    }


def llama4_image(tiles: int, g: torch.Generator, _: int) -> InputImage:
    """Llama 4: tiles of 16 tokens, each followed by a separator, then the thumbnail."""
    ids = [token for _ in range(tiles) for token in (*[IMAGE] * 16, TILE)]
    return InputImage([START, *ids, *[IMAGE] * 16, END], {"pixel_values": noise(tiles + 1, 3, 32, 32, g=g)})


def lfm2_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    """LFM2-VL: patches of each image on a separate axis; 2 x 2 patches make a token."""
    h, w = size
    pixels = {
        "pixel_values": noise(h * w, 3 * 4**2, g=g),
        "pixel_attention_mask": torch.ones(h * w, dtype=torch.long),
        "spatial_shapes": torch.tensor(size),
    }
    return InputImage([START, *[IMAGE] * (h * w // 4), END], pixels)


def lfm2_collate(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    flat = [image.pixels for row in rows for image in row]
    out = {key: pad_sequence([pixels[key] for pixels in flat], True) for key in flat[0] if key != "spatial_shapes"}
    return out | {"spatial_shapes": torch.stack([pixels["spatial_shapes"] for pixels in flat])}


def gemma3n_image(size: int, g: torch.Generator, _: int) -> InputImage:
    """Gemma 3n: 16 tokens per image from a convolutional tower."""
    return InputImage([START, *[IMAGE] * 16, END], {"pixel_values": noise(1, 3, size, size, g=g)})


def unified_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    """Gemma 4 without a tower: each patch is a token."""
    image = gemma4_image((2 * size[0], 2 * size[1]), g, 0)
    h, w = size
    positions = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"), -1).view(h * w, 2)
    return InputImage(image.ids, {"pixel_values": noise(h * w, 3 * 8**2, g=g), "image_position_ids": positions})


def granite_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    """Granite 4 Vision: LLaVA-NeXT's images; windows of 2 x 2 patches make a token."""
    pixels = {"pixel_values": noise(3, 3, 32, 32, g=g), "image_sizes": torch.tensor([[2 * side for side in size]])}
    return InputImage([IMAGE] * ANYRES[size], pixels)


kimi_image = grid_image(3, 4, 4)  # each patch is a small image


def minicpm_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    """MiniCPM-V 4.6: patches of all images, which have one size, in a strip; 4 x 4 patches make a token."""
    h, w = size
    pixels = {"pixel_values": noise(1, 3, 4, 4 * h * w, g=g), "target_sizes": torch.tensor([size])}
    return InputImage([START, *[IMAGE] * (h * w // 16), END], pixels)


def minicpm_ocr_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    """MiniCPM-OCR: 2 x 2 patches make a token."""
    image = minicpm_image(size, g, _)
    return dataclasses.replace(image, ids=[START, *[IMAGE] * (size[0] * size[1] // 4), END])


def minicpm_collate(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    flat = [image.pixels for row in rows for image in row]
    return {
        "pixel_values": torch.cat([pixels["pixel_values"] for pixels in flat], -1),
        "target_sizes": torch.cat([pixels["target_sizes"] for pixels in flat]),
    }


def nemotron_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    """Nemotron-H Omni: patches of all images on one axis. No video: transformers 5.19 fails on video features."""
    h, w = size
    pixels = {"pixel_values": noise(h * w, 3 * 4**2, g=g), "image_grid_hw": torch.tensor([size])}
    return InputImage([START, *[IMAGE] * (h * w // 4), END], pixels)


def step_image(crops: int, g: torch.Generator, _: int) -> InputImage:
    """Step 3.7: crops of 4 tokens, then the thumbnail in 16 tokens."""
    pixels = {"pixel_values": noise(1, 3, 64, 64, g=g), "num_local_patches": torch.tensor([crops])}
    if crops:
        pixels["pixel_values_local"] = noise(crops, 3, 32, 32, g=g)
    return InputImage([START, *[IMAGE] * (4 * crops + 16), END], pixels)


def emu_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    """Emu 3: 4 x 4 pixels become one vocabulary id, and each row ends with an extra id."""
    h, w = size
    pixels = torch.zeros(1, 3, 24, 24)
    pixels[..., :h, :w] = noise(1, 3, h, w, g=g)
    return InputImage(
        [START, *[IMAGE] * (h // 4 * (w // 4 + 1)), END], {"pixel_values": pixels, "image_sizes": torch.tensor([size])}
    )


def apertus_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    h, w = size
    pixels = torch.zeros(1, 3, 24, 24)
    pixels[..., :h, :w] = noise(1, 3, h, w, g=g)
    ids = [START, *[IMAGE] * (h // 4 * (w // 4)), END]
    return InputImage(ids, {"pixel_values": pixels, "image_sizes": torch.tensor([size])})


def chameleon_image(size: int, g: torch.Generator, _: int) -> InputImage:
    """Chameleon: all images have one size; 4 x 4 pixels become one code."""
    pixels = noise(1, 3, size // 4, size // 4, g=g).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return InputImage([START, *[IMAGE] * (size // 4) ** 2, END], {"pixel_values": pixels})


ernie_image = grid_image(3 * 4**2)


def ernie_video(g: torch.Generator, frames: int | None) -> InputImage:
    t, h, w = (4, 4, 8) if frames is None else (2 * frames, 4, 4)
    pixels = {"pixel_values_videos": noise(t * h * w, 3 * 4**2, g=g), "video_grid_thw": torch.tensor([[t, h, w]])}
    return InputImage([START, *[VIDEO] * (t // 2 * h * w // 4), END], pixels)


def edge_video(g: torch.Generator, frames: int | None) -> InputImage:
    t, h, w = (3, 6, 8) if frames is None else (frames, 4, 4)
    pixels = {"pixel_values_videos": noise(t * h * w, 3 * 4**2, g=g), "video_grid_thw": torch.tensor([[t, h, w]])}
    return InputImage([token for _ in range(t) for token in [START, *[VIDEO] * (h * w // 4), END]], pixels)


class MolmoImage(InputImage):
    """An image whose start, end and row-break ids also have the image token type."""

    @property
    def types(self) -> list[int]:
        return [int(token in (IMAGE, START, END, BREAK)) for token in self.ids]


def molmo_pooling(rows: int, columns: int, first: int = 0) -> torch.Tensor:
    """Return the 2 x 2 patch indices of each token, for a view that starts at patch `first`."""
    patches = first + torch.arange(4 * rows * columns).view(rows, 2, columns, 2)
    return patches.transpose(1, 2).reshape(-1, 4)


def molmo_rows(rows: int, columns: int) -> list[int]:
    return [START, *[*[IMAGE] * columns, BREAK] * rows, END]


def molmo_image(columns: int, g: torch.Generator, _: int) -> InputImage:
    """Molmo 2: the thumbnail, then a crop with two rows of tokens; crops of 4 x 4 patches are padded on the right."""
    pixels = {
        "pixel_values": noise(2, 16, 48, g=g),
        "image_token_pooling": torch.cat([molmo_pooling(2, 2), molmo_pooling(2, columns, 16)]),
        "image_grids": torch.tensor([[2, 2, 2, columns]]),
    }
    return MolmoImage([*molmo_rows(2, 2), *molmo_rows(2, columns)], pixels)


def molmo_video(g: torch.Generator, frames: int | None) -> InputImage:
    frames = frames or 3
    pixels = {
        "pixel_values_videos": noise(frames, 16, 48, g=g),
        "video_token_pooling": torch.cat([molmo_pooling(2, 2, 16 * frame) for frame in range(frames)]),
        "video_grids": torch.tensor([[frames, 2, 2]]),
    }
    ids = [token for frame in range(frames) for token in (FIRST_TEXT_ID + frame, *molmo_rows(2, 2))]
    return MolmoImage(ids, pixels, video=True)


def molmo_collate(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    """Offset the patch indices of each image by the patches before it in the batch."""
    offset = 0
    for image in (image for row in rows for image in row):
        pooling = image.pixels["video_token_pooling" if image.video else "image_token_pooling"]
        pooling += offset
        offset += 16 * len(image.pixels["pixel_values_videos" if image.video else "pixel_values"])
    return join(rows)
