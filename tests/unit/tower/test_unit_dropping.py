# SPDX-License-Identifier: Apache-2.0
"""Dropping units before a packed tower, against the unpatched tower with the columns of dropped units masked."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenprune
from families import FAMILIES
from module_calls import record_inputs
from oracle import close
from packed_towers import BATCHES, DIFFERENT, NAMES, UNIT, check_kept_units, drawn, kept_by, tensors_of, tower_of
from tokenprune import OptionError, Site
from tokenprune.integrations.hf.sequence.record import get_record
from tower_features import check_decoder, encode, run_patched


@pytest.mark.parametrize(("name", "keep"), [*((name, None) for name in NAMES), *((name, 0.4) for name in DIFFERENT)])
@torch.no_grad()
def test_tower_on_kept_units_matches_masked_tower(name: str, keep: float | None, build) -> None:
    family = FAMILIES[name]
    model, method = build(family), tokenprune.method("pixelprune")
    batches = [family.make_inputs(images=(2, 1))]
    batches += [family.make_inputs(images=(0, 0), video=True)] if family.video else []
    for inputs in map(drawn, batches):
        limit = (lambda units: 10**6) if keep is None else lambda units: max(1, round(keep * units))
        expected_kept = kept_by(method, inputs, limit)
        with tokenprune.patched(model, method, keep=keep):
            got = encode(model, inputs)
        for modality, images in expected_kept.items():
            kept = torch.cat(images)
            assert 1 < int(kept.sum()) < len(kept)
            assert all(map(torch.equal, get_record(got[modality]).kept, images))
            check_kept_units(model, inputs, modality, got[modality], images)
            for features in tensors_of(got[modality]):
                dropped = features[~kept]
                assert torch.equal(dropped, dropped[:1].expand_as(dropped))  # the output for zeros


def count_rows(args: tuple, kwargs: dict[str, Any]) -> int:
    return len(args[0])


def read_borders(args: tuple, kwargs: dict[str, Any]) -> list[int]:
    return kwargs["cu_seqlens"].tolist()


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_blocks_and_merger_run_only_on_kept_units(name: str, attn: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family, attn), drawn(family.make_inputs(images=(2, 1)))
    tower = tower_of(model)
    kept = kept_by(tokenprune.method("pixelprune"), inputs)["image"]
    with (
        tokenprune.patched(model, "pixelprune"),
        record_inputs(*(block.mlp for block in tower.blocks), tower.merger, note=count_rows) as rows,
        record_inputs(*(block.attn for block in tower.blocks), note=read_borders) as pieces,
    ):
        model(**inputs)
        stats = tokenprune.stats(model)
    counts = [UNIT * int(image.sum()) for image in kept]
    merged = sum(counts) // UNIT if name == "glm4v" else sum(counts)
    assert rows == [sum(counts)] * len(tower.blocks) + [merged]
    assert stats.encoder_tokens_per_layer == [sum(counts)] * len(tower.blocks)
    assert stats.visual_tokens_out == sum(counts) // UNIT
    borders = [0, *torch.tensor(counts).cumsum(0).tolist()]
    for index, piece in enumerate(pieces):
        assert piece[-1] == sum(counts) and all(a < b for a, b in pairwise(piece))
        assert piece == borders or (hasattr(tower, "window_size") and index not in tower.fullatt_block_indexes)


@torch.no_grad()
def test_empty_window_is_removed(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), drawn(family.make_inputs(only=0))
    inputs["pixel_values"] = torch.full_like(inputs["pixel_values"], 0.5)
    inputs["pixel_values"][-1] = 1.0  # the first and the last unit are kept
    with (
        tokenprune.patched(model, "pixelprune"),
        record_inputs(tower_of(model).blocks[0].attn, note=read_borders) as borders,
    ):
        model(**inputs)
    assert borders == [[0, UNIT, 2 * UNIT]]


@pytest.mark.parametrize(
    ("batch", "method"),
    [*((batch, "pixelprune") for batch in BATCHES), ("ragged", ["pixelprune", "pool", "dart"]),
     ("video", ["pixelprune", "fastv"])],
)  # fmt: skip
@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_decoder_matches_masked_decoder(name: str, batch: str, method: Any, build) -> None:
    family = FAMILIES[name]
    if batch == "video" and not family.mixes:
        inputs = drawn(family.make_inputs(images=(0, 0), video=True))
    else:
        inputs = drawn(family.make_inputs(**BATCHES[batch]))
    model = build(family)
    run = run_patched(model, inputs, method, 0.6)
    cut = run.step_cuts[0]
    assert (cut.site, cut.layer, cut.method, cut.sources) == (Site.IN_ENCODER, 0, "pixelprune", None)
    check_decoder(family, model, inputs, run)


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_kept_tokens_keep_their_positions(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), drawn(family.make_inputs(images=(2, 1)))
    model(**inputs)  # rope_deltas are stored on the model
    decoder, get_positions = model.get_submodule(family.decoder), lambda args, kwargs: kwargs["position_ids"]
    with tokenprune.patched(model, "pixelprune", record=True), record_inputs(decoder, note=get_positions) as pruned:
        model(**inputs)
        kept = tokenprune.stats(model).cuts[-1].kept
    with record_inputs(decoder, note=get_positions) as unpruned:
        model(**inputs)
    for row, positions in enumerate(kept):
        assert torch.equal(pruned[0][:, row, -len(positions) :], unpruned[0][:, row, positions])


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_selection_does_not_depend_on_other_images(name: str, build) -> None:
    family, start = FAMILIES[name], 0
    model, inputs = build(family), drawn(family.make_inputs(images=(2, 2), sizes=((8, 12), (8, 12), (6, 10))))
    first = inputs["image_grid_thw"][0].prod()
    inputs["pixel_values"][first : 2 * first] = inputs["pixel_values"][:first]
    with tokenprune.patched(model, "pixelprune", keep=0.4):
        batch = encode(model, inputs)["image"]
        kept = get_record(batch).kept
        assert torch.equal(kept[0], kept[1])
        for image, grid in enumerate(inputs["image_grid_thw"]):
            pixels = inputs["pixel_values"][start : start + grid.prod()]
            alone = encode(model, {"pixel_values": pixels, "image_grid_thw": grid[None]})["image"]
            assert torch.equal(kept[image], get_record(alone).kept[0])
            close(tensors_of(batch)[0].split([len(units) for units in kept])[image], tensors_of(alone)[0], 1e-6)
            start += grid.prod()


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_images_without_repetition_are_unchanged(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    want = model(**inputs).logits
    with tokenprune.patched(model, "pixelprune"):
        assert torch.equal(model(**inputs).logits, want)
        assert tokenprune.stats(model).visual_tokens_out == sum(map(sum, inputs.counts))
        assert tokenprune.stats(model).cuts == []
    inputs = drawn(inputs)
    want = model(**inputs).logits
    with tokenprune.patched(model, "pixelprune", keep=1.0):
        assert torch.equal(model(**inputs).logits, want)
    with tokenprune.patched(model, "pixelprune", keep=10**4):  # more units than any image has
        assert not torch.equal(model(**inputs).logits, want)


@torch.no_grad()
def test_colours_match_the_processor(build) -> None:
    """A threshold refers to colours in 0..1, for any normalization of the processor."""
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs(only=0)
    mean, std = [0.3, 0.4, 0.5], [0.1, 0.2, 0.4]
    _, h, w = inputs["image_grid_thw"][0].tolist()
    ramp = torch.arange(h * w // UNIT).repeat_interleave(UNIT)[:, None, None] * 0.01
    shape = (h * w, 3, inputs["pixel_values"].shape[1] // 3)
    normalised = (ramp.expand(shape) - torch.tensor(mean)[:, None]) / torch.tensor(std)[:, None]
    inputs["pixel_values"] = normalised.flatten(1)
    processor = SimpleNamespace(image_processor=SimpleNamespace(image_mean=mean, image_std=std))
    kept = []
    for threshold in (0.009, 0.011):
        method = tokenprune.method("pixelprune", threshold=threshold, anchored=False)
        with tokenprune.patched(model, method, processor=processor):
            kept.append(int(get_record(encode(model, inputs)["image"]).kept[0].sum()))
    # Neighbours in a row differ by one step, rows by a row's length: the first unit of each row is kept.
    assert kept == [h * w // UNIT, h // 2]
    with pytest.raises(OptionError, match=r"threshold=0.02 is a distance of color values.*Pass processor="):
        tokenprune.patch(model, "pixelprune", threshold=0.02)
