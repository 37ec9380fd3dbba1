# SPDX-License-Identifier: Apache-2.0
"""`max_visual_tokens=` selects the largest setting of a processor within the budget. No image exceeds the budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor

from each import each
from processors import COUNTED, photo
from tokenprune import BudgetError, UnsupportedSetupError, count_visual_tokens, patch_processor, unpatch_processor
from tokenprune.models.token_counts import find_rule

# (processor, settings, budget, image size, expected tokens, selected setting)
TILES = {"crop_to_patches": True, "max_patches": 6}  # 4 tokens per tile
SQUARES = {"size": {"longest_edge": 64}}  # 16 pixels and 4 tokens per tile
GLM = {"size": {"shortest_edge": 2 * 64, "longest_edge": 512 * 128}}
ROWS: list[tuple[str, dict, int, tuple[int, int], int, dict]] = [
    ("GotOcr2ImageProcessor", TILES, 4, (200, 200), 4, {"max_patches": 1}),
    ("GotOcr2ImageProcessor", TILES, 11, (200, 400), 4, {"max_patches": 1}),
    ("GotOcr2ImageProcessor", TILES, 12, (200, 400), 12, {"max_patches": 2}),
    ("GotOcr2ImageProcessor", TILES, 23, (200, 800), 20, {"max_patches": 4}),
    ("GotOcr2ImageProcessor", TILES, 900, (200, 400), 12, {}),
    ("Idefics3ImageProcessor", SQUARES, 4, (200, 200), 4, {"size": {"longest_edge": 16}}),
    ("Idefics3ImageProcessor", SQUARES, 39, (200, 200), 20, {"size": {"longest_edge": 32}}),
    ("Idefics3ImageProcessor", SQUARES, 40, (200, 200), 40, {"size": {"longest_edge": 48}}),
    ("SmolVLMImageProcessor", SQUARES, 20, (200, 200), 20, {"size": {"longest_edge": 32}}),
    ("SmolVLMImageProcessor", SQUARES, 68, (100, 200), 36, {"size": {"longest_edge": 64}}),
    ("Gemma4ImageProcessor", {}, 70, (90, 120), 63, {"max_soft_tokens": 70}),
    ("Gemma4ImageProcessor", {}, 265, (90, 120), 130, {"max_soft_tokens": 140}),
    ("Gemma4ImageProcessor", {}, 280, (90, 120), 266, {"max_soft_tokens": 280}),
    ("Gemma4ImageProcessor", {}, 9999, (90, 120), 266, {}),
    ("Glm4vImageProcessor", GLM, 64, (300, 300), 64, {"size": {"shortest_edge": 2 * 64, "longest_edge": 64 * 128}}),
    ("Glm46VImageProcessor", GLM, 99, (300, 300), 81, {"size": {"shortest_edge": 2 * 64, "longest_edge": 99 * 128}}),
    ("GlmgaImageProcessor", GLM, 3, (150, 300), 2, {"size": {"shortest_edge": 128, "longest_edge": 3 * 128}}),
    ("Siglip2ImageProcessor", {}, 64, (200, 200), 64, {"max_num_patches": 64}),
    ("Lfm2VlImageProcessor", {}, 9, (90, 90), 9, {"max_image_tokens": 9, "min_image_tokens": 1, "max_tiles": 1}),
    ("Lfm2VlImageProcessor", {}, 48, (90, 180), 42, {"max_tiles": 2}),
    ("DeepseekOcr2ImageProcessor", {}, 410, (100, 100), 410, {"max_patches": 1, "min_patches": 1}),
    ("DeepseekOcr2ImageProcessor", {}, 437, (100, 300), 428, {"max_patches": 4}),
]


def list_pixels(output: Any) -> list[torch.Tensor]:
    """Return all pixels of a processor's output as flat tensors."""
    value, tensors = output["pixel_values"], []
    stack = [value, output.get("pixel_values_local", [])]
    while stack:
        entry = stack.pop()
        if isinstance(entry, (list, tuple)):
            stack += entry
        else:
            tensors.append(torch.as_tensor(np.asarray(entry)).flatten())
    return tensors


@each("row", ROWS)
def test_the_largest_setting_within_the_budget(row: Any) -> None:
    name, settings, budget, size, tokens, kwargs = row
    case = COUNTED[name]
    processor, plain, image = case.make(**settings), case.make(**settings), photo(*size)
    num_unpatched = count_visual_tokens(plain, *size)
    patch_processor(processor, max_visual_tokens=budget)
    array = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    num_tokens = case.real(processor, array)
    assert num_tokens == tokens <= budget, num_unpatched
    unpatched = getattr(plain, "image_processor", plain)
    if name == "Lfm2VlImageProcessor" and budget == 9:
        kwargs = kwargs | {"do_image_splitting": False, "min_tiles": 1}
    patched, expected = getattr(processor, "image_processor", processor)(array), unpatched(array, **kwargs)
    assert all(map(torch.equal, list_pixels(patched), list_pixels(expected)))
    unpatch_processor(processor)
    assert case.real(processor, array) == case.real(plain, array)


@each("name", [name for name in COUNTED if find_rule(COUNTED[name].make()).limit])  # type: ignore[union-attr]
def test_no_image_exceeds_any_budget(name: str) -> None:
    """Each shape stays within the budget, or is refused because it is too long."""
    case = COUNTED[name]
    rows = [row for row in ROWS if row[0] == name]
    assert rows, "add a row"
    processor = case.make(**rows[-1][1])
    accepted = refused = 0
    for budget in (1, 2, 3, 5, 9, 17, 33, 64, 70, 120, 300, 1200):
        try:
            patch_processor(processor, max_visual_tokens=budget)
        except BudgetError as error:
            assert "is too small for" in str(error)
            refused += 1
            continue
        for size in ((30, 30), (40, 170), (170, 40), (8, 200), (200, 200), (3, 7)):
            array = torch.zeros(3, *size, dtype=torch.uint8)
            try:
                tokens = case.real(processor, array)
            except BudgetError as error:
                assert max(size) > 4 * min(size), error
                continue
            assert tokens <= budget, (budget, size)
            accepted += 1
        unpatch_processor(processor)
    assert accepted


def test_images_of_a_call_share_a_setting() -> None:
    case = COUNTED["Idefics3ImageProcessor"]
    processor = patch_processor(case.make(**SQUARES), max_visual_tokens=39)
    square, wide = torch.zeros(3, 200, 200, dtype=torch.uint8), torch.zeros(3, 50, 200, dtype=torch.uint8)
    separate, both = processor([[wide]])["pixel_values"][0], processor([[square, wide]])["pixel_values"][0]
    assert len(separate) == 4 + 1  # 20 tokens, as unpatched
    assert len(both) == (4 + 1) + (2 + 1)


def test_shares_are_refused_for_fixed_counts() -> None:
    for make in (COUNTED["GotOcr2ImageProcessor"].make, Siglip2ImageProcessor):
        with pytest.raises(UnsupportedSetupError, match="has no effect"):
            patch_processor(make(), "downsample", keep=0.5)


def test_a_budget_below_the_smallest_setting_is_refused_when_patching() -> None:
    processor = COUNTED["Gemma4ImageProcessor"].make()
    with pytest.raises(BudgetError, match=r"max_visual_tokens=69 is too small for .*at least 70 tokens"):
        patch_processor(processor, max_visual_tokens=69)
    assert type(processor).__name__ == "Gemma4ImageProcessor" and "_tokenprune_patch" not in vars(type(processor))
