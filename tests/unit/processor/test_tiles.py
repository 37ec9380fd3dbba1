# SPDX-License-Identifier: Apache-2.0
"""Find the tiles of each image from the prompt."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

import tokenprune
from each import each
from processors import photo, special_tokenizer
from tokenprune.integrations.hf.families.plain import Idefics3Adapter
from zoo import BREAK, FAKE, FAMILIES, GLOBAL, IMAGE

NAMES = ["idefics3", "smolvlm"]
TEXT = [40, 41, 42]


def build_tiled_ids(rows: int, columns: int, newlines: tuple[int, ...] = (BREAK,)) -> list[int]:
    """Return the ids of a tiled image. Each tile has its own marker id, and the last row ends with `newlines`."""
    tiles = [[FAKE, 60 + index, IMAGE, IMAGE] for index in range(rows * columns)]
    lines = [[*itertools.chain(*tiles[row * columns : (row + 1) * columns]), BREAK] for row in range(rows)]
    return [*itertools.chain(*lines), *newlines, *UNTILED]


UNTILED = [FAKE, GLOBAL, IMAGE, IMAGE, FAKE]


def find_image_runs(ids: list[int]) -> list[tuple[int, int]]:
    groups = itertools.groupby(range(len(ids)), key=lambda index: ids[index] == IMAGE)
    runs = [list(group) for is_image, group in groups if is_image]
    return [(run[0], run[-1] + 1) for run in runs]


@each(
    ("ids", "expected"),
    [
        (TEXT + UNTILED + TEXT, [1]),
        (TEXT + build_tiled_ids(2, 3) + TEXT, [7]),
        (build_tiled_ids(2, 3), [7]),
        (build_tiled_ids(1, 2, newlines=()), [3]),  # both newlines are one id
        (build_tiled_ids(2, 2) + build_tiled_ids(1, 3), [5, 4]),
        (UNTILED + UNTILED + build_tiled_ids(1, 2) + UNTILED, [1, 1, 3, 1]),
        (build_tiled_ids(2, 2) + TEXT + UNTILED + [BREAK] + build_tiled_ids(3, 1), [5, 1, 4]),
        (UNTILED + TEXT[:1] + UNTILED, [1, 1]),
        ([IMAGE, IMAGE, *TEXT, IMAGE, IMAGE], [1, 1]),  # without marker tokens
        ([*TEXT, IMAGE, IMAGE, *TEXT, IMAGE, IMAGE, *TEXT], [1, 1]),
        (build_tiled_ids(2, 2)[:-1], [1] * 5),  # truncated by a tokenizer: the last image is incomplete
        (build_tiled_ids(2, 1) + build_tiled_ids(2, 2)[:-1], [3, *[1] * 5]),
        (build_tiled_ids(2, 2)[:-7] + TEXT + UNTILED, [1, 1, 1, 1, 1]),
        ([*build_tiled_ids(1, 2)[:-6], FAKE], [1] * 2),  # without a global view, the end of the tiles is unknown
        ([], []),
    ],
)
def test_runs_per_image(ids: list[int], expected: list[int]) -> None:
    assert Idefics3Adapter.runs_per_image(None, ids, find_image_runs(ids)) == expected


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_token_count_applies_to_an_image_with_all_tiles(name: str, build) -> None:
    """Images of 3, 1 and 5 tiles with 16 tokens each. The first two share a row that has padding on the left."""
    model, inputs = FAMILIES[name].prepare(build, images=(2, 1), sizes=((1, 2), (0, 0), (2, 2)))
    tokenprune.patch(model, method="uniform", keep=12, record=True)
    try:
        model(**inputs)
        stats = tokenprune.stats(model)
    finally:
        tokenprune.unpatch(model)
    visual = [(ids == IMAGE).nonzero().flatten().tolist() for ids in inputs["input_ids"]]
    kept = [[sum(index in row for index in image) for image in images] for row, images in zip(
        stats.cuts[0].kept, [[visual[0][:48], visual[0][48:]], [visual[1]]], strict=True)]  # fmt: skip
    assert kept == [[12, 12], [12]] and stats.notes == []


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_inputs_embeds_give_a_note_about_tiles(name: str, build) -> None:
    model, inputs = FAMILIES[name].prepare(build, only=0)
    tiles = inputs.counts[0][0] // 16
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    tokenprune.patch(model, method="uniform", keep=3)
    try:
        model(**inputs)
        stats = tokenprune.stats(model)
    finally:
        tokenprune.unpatch(model)
    assert stats.visual_tokens_out == 3 * tiles and tiles > 1
    assert ["tiles" in note for note in stats.notes] == [True]


@pytest.mark.parametrize("text", ["<image>Read both.<image> Now.", "<image><image>", "See\n<image>\n<image>\n"])
def test_prompts_of_a_real_processor(text: str) -> None:
    """Prompts with a tiled and an untiled image, in both orders."""
    marks = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    names = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *marks]
    tokenizer = special_tokenizer(**{f"mark_{index}_token": name for index, name in enumerate(names)})
    photos = Idefics3ImageProcessor(max_image_size={"longest_edge": 16}, size={"longest_edge": 32})
    processor = Idefics3Processor(photos, tokenizer, image_seq_len=4)
    wide, small = photo(16, 32), photo(16, 16)
    for images, splits in (([wide, photo(32, 32)], True), ([small, wide], False)):
        inputs = processor(images=[images], text=[text], do_image_splitting=splits)
        (ids,) = inputs["input_ids"]
        image = tokenizer.convert_tokens_to_ids("<image>")
        groups = itertools.groupby(range(len(ids)), key=lambda index, ids=ids: ids[index] == image)
        runs = [(run[0], run[-1] + 1) for is_image, group in groups if (run := list(group)) and is_image]
        assert Idefics3Adapter.runs_per_image(None, ids, runs) == ([3, 5] if splits else [1, 1])
