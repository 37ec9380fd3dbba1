# SPDX-License-Identifier: Apache-2.0
"""Tiny random vision-language models, one per family, and inputs in the format of the families' processors.

A test takes ``FAMILIES["llava"]``, calls ``build()`` for a model and ``make_inputs(...)`` for a batch. The models have
random weights with uneven attention, so masking a visual token clearly changes the logits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from tokenprune.integrations.hf import compat

PAD, BOS, EOS, IMAGE, VIDEO, START, END, BREAK, FAKE, GLOBAL, TILE = range(11)
FIRST_TEXT_ID, VOCAB = 16, 160
HIDDEN, HEAD_DIM, VISION = 64, 16, 32

TEXT = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
)  # fmt: skip
# Qwen's decoders distribute the HEAD_DIM / 2 frequencies over position ids with three axes.
MROPE = dict(rope_type="default", rope_theta=10_000.0)


def tower(model_type: str, image_size: int, **extra: Any) -> dict[str, Any]:
    return dict(
        model_type=model_type, hidden_size=VISION, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        image_size=image_size, patch_size=4, **extra,
    )  # fmt: skip


@dataclass
class InputImage:
    """An image or video: its ids in the prompt, and its inputs for the tower."""

    ids: list[int]
    pixels: dict[str, torch.Tensor]
    video: bool = False  # whether image ids in `ids` are frames of a video

    @property
    def types(self) -> list[int]:
        """Return token types for processors that provide them: 0 text, 1 image, 2 video."""
        return [2 if token == VIDEO else (1 + self.video) * (token == IMAGE) for token in self.ids]

    @property
    def count(self) -> int:
        return sum(token in (IMAGE, VIDEO) for token in self.ids)


class Inputs(dict):
    """Keyword arguments of the model. ``counts`` stores the number of placeholders per row and image.

    A plain ``dict`` copy loses ``counts``.
    """

    counts: list[list[int]]


@dataclass(frozen=True, eq=False)
class Family:
    """A model type. The images of a batch cycle through ``sizes``, so that token counts differ."""

    name: str
    config: dict[str, Any] = field(repr=False)
    image: Callable[[Any, torch.Generator, int], InputImage]  # (size, generator, images in this row)
    sizes: tuple[Any, ...]
    decoder: str = "model.language_model"
    video: Callable[[torch.Generator, int | None], InputImage] | None = None  # (generator, frames of 4 tokens or None)
    collate: Callable[[list[list[InputImage]]], dict[str, torch.Tensor]] = field(default=lambda rows: join(rows))
    types: str | None = None  # name under which the processor returns token types
    type_ids: tuple[int, int, int] = (0, 1, 2)  # of text, images and videos
    mixes: bool = True  # whether one batch may hold images and videos
    model_type: str | None = None  # for variants, whose `name` is not the model type
    eager: tuple[str, ...] = ()  # configs of parts that do not support sdpa
    settle: Callable[[PreTrainedModel], None] | None = None  # sets weights that must not be random

    def __post_init__(self) -> None:
        if self.types == "mm_token_type_ids" and compat.is_older_than("5.3"):
            object.__setattr__(self, "types", None)  # no earlier processor provides them

    @property
    def kind(self) -> str:
        return self.model_type or self.name

    def prepare(self, build: Callable[..., PreTrainedModel] | None = None, **batch: Any) -> tuple[Any, Inputs]:
        """Return a model and a batch. build: the fixture of shared models; None builds a new model."""
        return self.build() if build is None else build(self), self.make_inputs(**batch)

    def build(self, attn: str = "sdpa") -> PreTrainedModel:
        config = {"image_token_id": IMAGE, "tie_word_embeddings": False} | copy.deepcopy(self.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            attention = {"text_config": attn, "vision_config": attn} | dict.fromkeys(self.eager, "eager")
            model = AutoModelForImageTextToText.from_config(
                CONFIG_MAPPING[self.kind](**config), attn_implementation=attention if self.eager else attn
            )
            wake(model)
            if self.settle is not None:
                self.settle(model)
        # Disable the end token, so that every row gets all its new tokens.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
        model.generation_config.do_sample = False
        return model.float().eval()

    def make_inputs(
        self,
        rows: int | None = None,
        padding: str | None = "left",
        images: int | Sequence[int] = 1,
        seed: int = 0,
        sizes: Sequence[Any] | None = None,
        video: bool | int | Sequence[int | Sequence[int]] = False,
        only: int | None = None,
    ) -> Inputs:
        """Return a batch for ``model(**inputs)``, by default two rows with one image each.

        ``images`` counts images per row, an int for all rows. ``video`` adds videos before the images: True for a short
        video in row 0, an int for a video of that many frames of 4 tokens, a sequence with such a value for each row,
        or with a list of frame counts for several videos in a row. ``padding=None`` appends text to shorter rows
        instead of padding them. ``only=i`` returns row i without padding. Other ``sizes`` use the unit of the family's
        sizes (see its ``image``).
        """
        images = [images] * (2 if rows is None else rows) if isinstance(images, int) else list(images)
        if rows is not None and len(images) != rows:
            raise ValueError(f"images={images} does not fit rows={rows}")
        if padding not in ("left", "right", None):
            raise ValueError(f"padding={padding!r}")
        sizes = self.sizes if sizes is None else sizes
        videos = list(video) if isinstance(video, Sequence) else [video]
        videos += [False] * (len(images) - len(videos))
        ids, types, photos, used = [], [], [], 0
        for row, count in enumerate(images):
            # Each row has its own generator, so that it does not depend on the batch.
            g = torch.Generator().manual_seed(1000 * seed + row)
            row_images = [self.image(sizes[(used + i) % len(sizes)], g, count) for i in range(count)]
            used += count
            if videos[row]:
                if self.video is None:
                    raise ValueError(f"{self.name} does not support videos here")
                frame_counts = videos[row] if isinstance(videos[row], Sequence) else [videos[row]]
                row_images = [self.video(g, None if frames is True else frames) for frames in frame_counts] + row_images
            prompt = [BOS, *words(3 + row, g)]
            kinds = [0] * len(prompt)
            for i, image in enumerate(row_images):
                between = words(3, g) if i else []
                prompt += [*between, *image.ids]
                kinds += [*[0] * len(between), *image.types]
            ids.append(prompt + words(5 + 6 * row, g))
            types.append(kinds + [0] * (len(ids[-1]) - len(kinds)))
            photos.append(row_images)
        if padding is None:
            g = torch.Generator().manual_seed(1000 * seed + 999)
            ids = [row + words(max(map(len, ids)) - len(row), g) for row in ids]
            types = [kinds + [0] * (len(row) - len(kinds)) for kinds, row in zip(types, ids, strict=True)]
        if only is not None:
            ids, types, photos = [ids[only]], [types[only]], [photos[only]]

        side = "right" if padding is None else padding
        input_ids = pad_sequence([torch.tensor(row) for row in ids], True, PAD, side)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in ids], True, 0, side)
        inputs = Inputs(input_ids=input_ids, attention_mask=mask)
        inputs.counts = [[image.count for image in row] for row in photos]
        if self.types:
            inputs[self.types] = pad_sequence(
                [torch.tensor(self.type_ids)[row] for row in types], True, self.type_ids[0], side
            )
        if any(photos):
            inputs.update(self.collate(photos))
        return inputs

    def visual_mask(self, model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
        """Return the mask of placeholders, shape (batch, length)."""
        ids = inputs["input_ids"]
        return (ids == IMAGE) | (ids == VIDEO)

    def visual_counts(self, model: PreTrainedModel, inputs: Inputs) -> list[list[int]]:
        """Return the number of placeholders of each image of each row, in prompt order."""
        return inputs.counts


def words(n: int, g: torch.Generator) -> list[int]:
    return torch.randint(FIRST_TEXT_ID, VOCAB, (n,), generator=g).tolist()


@torch.no_grad()
def wake(model: PreTrainedModel) -> None:
    """Draw weights large enough that attention is uneven and every input affects the logits."""
    for name, p in model.named_parameters():
        if p.dim() < 2:  # norms (close to one, or zero if the layer adds one), biases, newline and class embeddings
            p.add_(torch.randn_like(p), alpha=0.1)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.add_(0.5)  # normalized queries and keys would otherwise give scores of unit spread
        elif "embed_tokens" in name:
            # Gemma multiplies its embeddings by sqrt(width), but not the visual features.
            scaled = "gemma" in model.config.get_text_config().model_type
            p.normal_(std=HIDDEN**-0.5 if scaled else 1.0)
        else:
            p.normal_(std=1.5 / math.sqrt(p[0].numel()))
    # Give special ids logit zero: a generated placeholder would count as a visual token.
    head = model.get_output_embeddings() or model.language_model.get_output_embeddings()
    head.weight[:FIRST_TEXT_ID] = 0


def join(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    """Concatenate the inputs of all images of the batch, in order."""
    flat = [image.pixels for row in rows for image in row]
    keys = dict.fromkeys(key for pixels in flat for key in pixels)
    return {key: torch.cat([pixels[key] for pixels in flat if key in pixels]) for key in keys}


def noise(*shape: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=g)


# LLaVA-1.5: one square image of 36 tokens.


def llava_image(size: int, g: torch.Generator, _: int) -> InputImage:
    return InputImage([IMAGE] * (size // 4) ** 2, {"pixel_values": noise(1, 3, size, size, g=g)})


# LLaVA-NeXT and OneVision: a base view of 4 x 4 patches, then the tiles at the best resolution, cropped to
# the image's shape, with a newline feature after each row of patches.

PINPOINTS = [[16, 32], [32, 16]]
ANYRES = {(16, 32): 16 + 4 * (8 + 1), (8, 32): 16 + 2 * (8 + 1), (32, 16): 16 + 8 * (4 + 1), (32, 8): 16 + 8 * (2 + 1)}


def anyres_image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    pixels = {"pixel_values": noise(3, 3, 16, 16, g=g), "image_sizes": torch.tensor([size])}
    return InputImage([IMAGE] * ANYRES[size], pixels)


def onevision_image(size: tuple[int, int], g: torch.Generator, in_row: int) -> InputImage:
    if in_row == 1:
        return anyres_image(size, g, in_row)
    # Several images in one prompt have a base view and a newline each, without tiles.
    return InputImage([IMAGE] * 17, {"pixel_values": noise(1, 3, 16, 16, g=g), "image_sizes": torch.tensor([size])})


def onevision_video(g: torch.Generator, frames: int | None) -> InputImage:
    frames = frames or 5
    return InputImage([VIDEO] * (frames * 4 + 1), {"pixel_values_videos": noise(1, frames, 3, 16, 16, g=g)})


def anyres_collate(rows: list[list[InputImage]], count_rows: bool = False) -> dict[str, torch.Tensor]:
    pixels = [image.pixels for row in rows for image in row]
    tiles = [p.pop("pixel_values") for p in pixels if "pixel_values" in p]
    out = join(rows)
    if tiles:
        out["pixel_values"] = pad_sequence(tiles, batch_first=True)
        if count_rows:
            out["batch_num_images"] = torch.tensor([sum(IMAGE in image.ids for image in row) for row in rows])
    return out


# Qwen-VL: patches of all images on one axis, with a grid of each image; 2 x 2 patches make a token.


def grid_image(*patch: int, per_token: int = 4) -> Callable[..., InputImage]:
    """Return an image function for families whose patches are on one axis, with a grid beside them."""

    def image(size: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
        h, w = size
        pixels = {"pixel_values": noise(h * w, *patch, g=g), "image_grid_thw": torch.tensor([[1, h, w]])}
        return InputImage([START, *[IMAGE] * (h * w // per_token), END], pixels)

    return image


qwen_image = grid_image(3 * 2 * 4**2)


def qwen_video(
    g: torch.Generator, frames: int | None, seconds: float | None = None, stamped: bool = False
) -> InputImage:
    t, h, w = (3, 6, 8) if frames is None else (frames, 4, 4)
    pixels = {"pixel_values_videos": noise(t * h * w, 3 * 2 * 4**2, g=g), "video_grid_thw": torch.tensor([[t, h, w]])}
    if seconds is not None:
        pixels["second_per_grid_ts"] = torch.tensor([seconds])
    frame = [VIDEO] * (h * w // 4)
    if stamped:  # Qwen3-VL writes the timestamp in words before each frame and wraps each frame
        return InputImage([token for _ in range(t) for token in [*words(2, g), START, *frame, END]], pixels)
    return InputImage([START, *frame * t, END], pixels)


def qwen_config(section: list[int], vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    return dict(
        text_config={**TEXT, **text, "rope_parameters": {**MROPE, "mrope_section": section}},
        vision_config=dict(depth=4, num_heads=2, patch_size=4, **vision),
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip


# InternVL: tiles and a thumbnail in one run, 16 tokens per tile.


def internvl_image(tiles: int, g: torch.Generator, _: int) -> InputImage:
    return InputImage([START, *[IMAGE] * (16 * tiles), END], {"pixel_values": noise(tiles, 3, 32, 32, g=g)})


# Idefics3 and SmolVLM: tiles in rows and columns, each after a token with its grid position, then the thumbnail.


def idefics_image(grid: tuple[int, int], g: torch.Generator, _: int) -> InputImage:
    r, c = grid
    tile = [FAKE, TILE, *[IMAGE] * 16]
    ids = ([*tile * c, BREAK] * r + [BREAK] if r else []) + [FAKE, GLOBAL, *[IMAGE] * 16, FAKE]
    return InputImage(ids, {"pixel_values": noise(r * c + 1, 3, 32, 32, g=g)})


def idefics_collate(rows: list[list[InputImage]]) -> dict[str, torch.Tensor]:
    # Rows are padded with zero tiles, which the tower removes.
    tiles = [torch.cat([torch.zeros(0, 3, 32, 32), *(p.pixels["pixel_values"] for p in row)]) for row in rows]
    pixels = pad_sequence(tiles, batch_first=True)
    return {"pixel_values": pixels, "pixel_attention_mask": (pixels != 0).any(2).long()}


# Gemma 3: 16 tokens after pooling, between start and end ids and blank lines.


def gemma_image(size: int, g: torch.Generator, _: int) -> InputImage:
    return InputImage([BREAK, START, *[IMAGE] * 16, END, BREAK], {"pixel_values": noise(1, 3, size, size, g=g)})


def _families() -> list[Family]:
    clip = tower("clip_vision_model", 24, projection_dim=VISION)
    siglip = tower("siglip_vision_model", 16, vision_use_head=False)
    grids = ((8, 12), (6, 10), (10, 12), (8, 8))
    shapes = ((16, 32), (32, 8), (8, 32), (32, 16))
    qwen2_vision = dict(embed_dim=VISION, hidden_size=HIDDEN, mlp_ratio=2)
    qwen25_vision = dict(
        hidden_size=VISION, intermediate_size=64, out_hidden_size=HIDDEN, window_size=16, fullatt_block_indexes=[1, 3]
    )
    qwen3_vision = dict(
        hidden_size=VISION, intermediate_size=64, out_hidden_size=HIDDEN, num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1, 2],
    )  # fmt: skip
    idefics = dict(text_config={**TEXT, "model_type": "llama"}, scale_factor=2, pad_token_id=PAD)
    idefics_kwargs = dict(
        image=idefics_image, sizes=((1, 2), (0, 0), (2, 1)), decoder="model.text_model", collate=idefics_collate
    )
    gemma_layers = ["sliding_attention", "full_attention"] * 2
    return [
        Family("llava", dict(text_config={**TEXT, "model_type": "llama"}, vision_config=clip, image_seq_length=36),
               llava_image, (24,)),
        Family("llava_next", dict(text_config={**TEXT, "model_type": "llama"}, vision_config={**clip, "image_size": 16},
                                  image_grid_pinpoints=PINPOINTS, image_seq_length=16),
               anyres_image, shapes, collate=anyres_collate),
        Family("llava_onevision", dict(text_config={**TEXT, "model_type": "qwen2"}, vision_config=siglip,
                                       image_grid_pinpoints=PINPOINTS, video_token_id=VIDEO),
               onevision_image, shapes, video=onevision_video,
               collate=lambda rows: anyres_collate(rows, count_rows=True)),
        Family("qwen2_vl", qwen_config([2, 3, 3], qwen2_vision), qwen_image, grids,
               video=qwen_video, types="mm_token_type_ids"),
        Family("qwen2_5_vl", qwen_config([2, 3, 3], qwen25_vision), qwen_image, grids,
               video=lambda g, frames: qwen_video(g, frames, seconds=0.5), types="mm_token_type_ids"),
        Family("qwen3_vl", qwen_config([4, 2, 2], qwen3_vision, head_dim=HEAD_DIM), qwen_image, grids,
               video=lambda g, frames: qwen_video(g, frames, stamped=True), types="mm_token_type_ids"),
        Family("internvl", dict(text_config={**TEXT, "model_type": "qwen2"}, image_seq_length=16,
                                vision_config={**tower("internvl_vision", 32), "layer_scale_init_value": 1.0}),
               internvl_image, (2, 1, 3)),
        Family("smolvlm", {**idefics, "vision_config": tower("smolvlm_vision", 32)}, **idefics_kwargs),
        Family("idefics3", {**idefics, "vision_config": tower("idefics3_vision", 32)}, **idefics_kwargs),
        # The window is shorter than the prompt, and both kinds of layer occur before and after a cut at layer 2.
        Family("gemma3", dict(text_config={**TEXT, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM,
                                           "sliding_window": 16, "layer_types": gemma_layers},
                              vision_config={**siglip, "image_size": 32}, mm_tokens_per_image=16,
                              boi_token_id=START, eoi_token_id=END),
               gemma_image, (32,), types="token_type_ids"),
    ]  # fmt: skip


# Every method is tested on these families. families/ has the other model types.
FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
