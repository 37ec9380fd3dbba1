# SPDX-License-Identifier: Apache-2.0
"""Dropping units in towers with one row per image or tile, against the unpatched tower with masked columns."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor

import tokenprune
from merging_models import layers_of, tower_of
from module_calls import record_inputs, replace_outputs
from only_kept import only_kept
from oracle import close, reduced
from tests.unit.methods.test_towerdrop import naive, observe_values
from tile_towers import NAMES, check_kept_tiles, family_of, squares
from tokenprune import OptionError, Site, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.attachable import change_output
from tower_features import check_decoder, encode, run_patched
from zoo import FAMILIES

SCORES = ("diverse", "change", "norm")
KEEP = 0.4


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_tower_matches_tower_masked_from_each_block(name: str, score: str, build) -> None:
    family = family_of(name)
    model = build(family)
    inputs, blocks = family.make_inputs(images=(2, 1)), layers_of(tower_of(model))
    with record_inputs(*blocks) as entered:
        encode(model, inputs)
    ahead = entered[0].shape[1] % 2
    units = squares(model, entered[0].shape[1] - ahead)
    side, num_kept = math.isqrt(len(units)), round(KEEP * len(units))
    read = len(blocks) - (name == "llava")  # the last block is not read
    for layer in range(score == "change", read):
        states = [x[:, ahead:][:, units].flatten(0, 1) for x in entered]
        shown = observe_values(score, states, layer).view(len(entered[0]), side, side, -1)
        kept = torch.cat([naive(score, tile[None], num_kept) for tile in shown]).flatten(1)
        with tokenprune.patched(model, "towerdrop", keep=KEEP, layer=layer, score=score, guard="off"):
            got = encode(model, inputs)["image"]
        num_rows = len(kept) * (ahead + num_kept * len(units[0]))
        assert get_record(got).block_tokens == [entered[0][..., 0].numel()] * layer + [num_rows] * (len(blocks) - layer)
        check_kept_tiles(model, inputs, got, kept, units, entered[0].shape[1], layer)


@pytest.mark.parametrize("name", [*NAMES, "lfm2_vl"])
@torch.no_grad()
def test_decoder_matches_masked_decoder(name: str, build) -> None:
    family = family_of(name)
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    run = run_patched(model, inputs, "towerdrop", KEEP, steps=0, layer=1, guard="off")
    (cut,) = run.stats.cuts
    assert (cut.site, cut.method, cut.sources) == (Site.IN_ENCODER, "towerdrop", None)
    check_decoder(family, model, inputs, run, only_kept if name == "lfm2_vl" else reduced)


def test_unsupported_setups_raise(build) -> None:
    for name in ("llava_next", "llava_onevision"):
        with pytest.raises(UnsupportedSetupError, match=r"not adjacent in one sequence.*after the tower"):
            tokenprune.patch(build(FAMILIES[name]), "towerdrop", layer=1)
    smolvlm, pixels = build(FAMILIES["smolvlm"]), torch.randn(1, 1, 3, 32, 32)
    with tokenprune.patched(smolvlm, "towerdrop", layer=1, guard="off"):
        half = torch.ones(1, 1, 32, 32).long()
        half[..., 16:] = 0
        with pytest.raises(UnsupportedSetupError, match="images contain padding patches"):
            smolvlm.model.get_image_features(pixels, half)
    with pytest.raises(UnsupportedSetupError, match="not adjacent in one sequence"):
        tokenprune.patch(build(FAMILIES["llava"]), "towerdrop", score="detail")
    # LLaVA does not read block 2, the tower's last block.
    with pytest.raises(OptionError, match="block 2 is out of range"):
        tokenprune.patch(build(FAMILIES["llava"]), "towerdrop", layer=2)


def restore(y: Tensor, h: Tensor, mask: Tensor, neighbours: int) -> Tensor:
    """Return all tokens of a tile: a dropped token changes by the mean change of its nearest kept tokens.

    Args:
        y: Kept tokens after the block.
        h: All tokens before the block.
    """
    tokens, kept = h.clone(), h[mask]
    tokens[mask] = y
    for token in (~mask).nonzero().flatten().tolist():
        nearest = sorted(range(len(kept)), key=lambda index: float((kept[index] - h[token]).norm()))[:neighbours]
        tokens[token] = h[token] + (y - kept)[nearest].mean(0)
    return tokens


@pytest.mark.parametrize("stabilise", [0, 1, 7])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_restored_units_match_loop_over_tiles(name: str, stabilise: int, build) -> None:
    """Use the unpatched blocks per tile. While all units attend, the MLP's output for dropped units is not used."""
    family = family_of(name)
    model = copy.deepcopy(build(family))
    inputs, blocks = family.make_inputs(images=(2, 1)), layers_of(tower_of(model))
    encoder = tower_of(model).encoder
    while len(blocks) < 4:
        (encoder.layer if hasattr(encoder, "layer") else encoder.layers).append(copy.deepcopy(blocks[0]))
        blocks = layers_of(tower_of(model))
    read = len(blocks) - (name == "llava")
    with record_inputs(*blocks, note=lambda args, kwargs: (args, kwargs)) as calls:
        encode(model, inputs)
    entered = [args[0] for args, _ in calls]
    ahead, (tiles, count) = entered[0].shape[1] % 2, entered[0].shape[:2]
    units = squares(model, count - ahead)
    num_kept = max(1, round(KEEP * len(units)))
    mask = torch.zeros(tiles, count, dtype=torch.bool)
    mask[:, :ahead] = True
    for tile, change in enumerate((entered[1] - entered[0])[:, ahead:].norm(dim=-1)):
        score = [float(change[unit].mean()) for unit in units]
        for unit in sorted(range(len(units)), key=score.__getitem__)[-num_kept:]:
            mask[tile, ahead + torch.tensor(units[unit])] = True
    states, tokens = [], list(entered[1])
    for index, block in enumerate(blocks[1:], start=1):
        for tile, h in enumerate(entered[1]):
            attended = tokens[tile] if index < min(1 + stabilise, read) else tokens[tile][mask[tile]]
            y = block(attended[None], *calls[index][0][1:], **calls[index][1])
            y = (y[0] if isinstance(y, tuple) else y)[0]
            tokens[tile] = restore(y if len(y) < count else y[mask[tile]], h, mask[tile], 3)
        states.append(torch.stack(tokens))
        if index == read - 1:
            break
    with tokenprune.patched(model, "ipcv", keep=KEEP, layer=1, stabilise=stabilise, neighbours=3, guard="off"):
        got = encode(model, inputs)["image"]
        model(**inputs)
        stats = tokenprune.stats(model)
    num_tokens, num_left = tiles * count, int(mask.sum())
    assert num_left < num_tokens and stats.visual_tokens_out == stats.visual_tokens_in and stats.cuts == []
    expected_counts = [
        num_tokens if index < 1 + stabilise or index >= read else num_left for index in range(len(blocks))
    ]
    assert get_record(got).block_tokens == expected_counts == stats.encoder_tokens_per_layer
    pairs = zip(blocks[1:], states, strict=False)
    with replace_outputs({block: partial(change_output, lambda _, x=x: x) for block, x in pairs}):
        want = encode(model, inputs)["image"]
    for actual, expected in zip(got.pooler_output, want.pooler_output, strict=True):
        close(actual, expected)
