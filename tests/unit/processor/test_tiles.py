# SPDX-License-Identifier: Apache-2.0
"""Which tiles make up an image, where only the prompt tells."""

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


def split(rows: int, columns: int, newlines: tuple[int, ...] = (BREAK,)) -> list[int]:
    """The ids of an image in tiles; each has an id of its own, and the last row ends with `newlines` and another."""
    tiles = [[FAKE, 60 + index, IMAGE, IMAGE] for index in range(rows * columns)]
    lines = [[*itertools.chain(*tiles[row * columns : (row + 1) * columns]), BREAK] for row in range(rows)]
    return [*itertools.chain(*lines), *newlines, *ONE]


ONE = [FAKE, GLOBAL, IMAGE, IMAGE, FAKE]


def runs_of(ids: list[int]) -> list[tuple[int, int]]:
    groups = itertools.groupby(range(len(ids)), key=lambda place: ids[place] == IMAGE)
    places = [list(group) for is_image, group in groups if is_image]
    return [(of[0], of[-1] + 1) for of in places]


@each(
    ("ids", "want"),
    [
        (TEXT + ONE + TEXT, [1]),
        (TEXT + split(2, 3) + TEXT, [7]),
        (split(2, 3), [7]),
        (split(1, 2, newlines=()), [3]),  # both newlines are one id
        (split(2, 2) + split(1, 3), [5, 4]),
        (ONE + ONE + split(1, 2) + ONE, [1, 1, 3, 1]),
        (split(2, 2) + TEXT + ONE + [BREAK] + split(3, 1), [5, 1, 4]),
        (ONE + TEXT[:1] + ONE, [1, 1]),
        ([IMAGE, IMAGE, *TEXT, IMAGE, IMAGE], [1, 1]),  # by hand, without what stands around
        ([*TEXT, IMAGE, IMAGE, *TEXT, IMAGE, IMAGE, *TEXT], [1, 1]),
        (split(2, 2)[:-1], [1] * 5),  # cut by a tokenizer: the last image is not closed
        (split(2, 1) + split(2, 2)[:-1], [3, *[1] * 5]),
        (split(2, 2)[:-7] + TEXT + ONE, [1, 1, 1, 1, 1]),
        ([*split(1, 2)[:-6], FAKE], [1] * 2),  # no whole view: nothing closes the tiles
        ([], []),
    ],
)
def test_tiles_of_an_image_are_told_by_the_prompt(ids: list[int], want: list[int]) -> None:
    assert Idefics3Adapter.runs_per_image(None, ids, runs_of(ids)) == want


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_number_of_tokens_is_of_an_image_not_of_a_tile(name: str, build) -> None:
    """Images of 3, 1 and 5 tiles of 16 tokens, the first two in one row of a batch with padding on the left."""
    model, inputs = FAMILIES[name].prepare(build, images=(2, 1), sizes=((1, 2), (0, 0), (2, 2)))
    tokenprune.patch(model, method="uniform", keep=12, record=True)
    try:
        model(**inputs)
        stats = tokenprune.stats(model)
    finally:
        tokenprune.unpatch(model)
    visual = [(ids == IMAGE).nonzero().flatten().tolist() for ids in inputs["input_ids"]]
    kept = [[sum(place in row for place in image) for image in images] for row, images in zip(
        stats.cuts[0].kept, [[visual[0][:48], visual[0][48:]], [visual[1]]], strict=True)]  # fmt: skip
    assert kept == [[12, 12], [12]] and stats.notes == []


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_do_not_tell_of_tiles_and_it_is_said(name: str, build) -> None:
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
def test_the_prompts_of_a_real_processor(text: str) -> None:
    """One image in two tiles beside each other and a whole view, one with the whole view alone, and the other way."""
    marks = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    names = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *marks]
    tokenizer = special_tokenizer(**{f"mark_{index}_token": name for index, name in enumerate(names)})
    photos = Idefics3ImageProcessor(max_image_size={"longest_edge": 16}, size={"longest_edge": 32})
    processor = Idefics3Processor(photos, tokenizer, image_seq_len=4)
    wide, small = photo(16, 32), photo(16, 16)
    for images, splits in (([wide, photo(32, 32)], True), ([small, wide], False)):
        made = processor(images=[images], text=[text], do_image_splitting=splits)
        (ids,) = made["input_ids"]
        image = tokenizer.convert_tokens_to_ids("<image>")
        groups = itertools.groupby(range(len(ids)), key=lambda place, ids=ids: ids[place] == image)
        runs = [(of[0], of[-1] + 1) for is_image, group in groups if (of := list(group)) and is_image]
        assert Idefics3Adapter.runs_per_image(None, ids, runs) == ([3, 5] if splits else [1, 1])
