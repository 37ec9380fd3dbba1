# SPDX-License-Identifier: Apache-2.0
"""Dropping units in towers with one row per image or tile, against the unpatched tower with masked columns."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES as MORE
from merging_models import layers_of, tower_of
from oracle import close, reduced, survivors
from tests.unit.methods.test_towerdrop import naive, seen_by
from tests.unit.tower.test_encoder import with_features
from tokenprune import OptionError, Site, UnsupportedSetupError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.attachable import change_output
from tower_attention import attending_by
from zoo import FAMILIES

SCORES = ("diverse", "change", "norm")
# A class token and a token per patch; neither; both and squares; squares.
NAMES = ("llava", "paligemma", "internvl", "gemma3", "smolvlm")
KEEP = 0.4


def family_of(name: str) -> Any:
    return MORE.get(name) or FAMILIES[name]


def encode(model: Any, inputs: Any) -> Any:
    given = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask") if name in inputs}
    return model.model.get_image_features(**given)


def squares(model: Any, patches: int) -> list[list[int]]:
    """Return the patches of each unit, counted from the first patch."""
    adapter = get_adapter(model)
    side, height = adapter.family.get_unit_side(adapter.config), math.isqrt(patches)
    return [
        [(side * row + r) * height + side * column + c for r in range(side) for c in range(side)]
        for row in range(height // side)
        for column in range(height // side)
    ]


@contextmanager
def masked(model: Any, seen: Tensor, first: int, real: Tensor | None = None) -> Iterator[None]:
    """Mask tokens in the tower within the context.

    Args:
        seen: Mask of the visible tokens from the block at `first` on, shape (tiles, tokens), bool.
        real: Mask of the visible tokens before that block. None for all tokens.
    """
    real = torch.ones_like(seen) if real is None else real
    before = {id(module) for block in layers_of(tower_of(model))[:first] for module in block.modules()}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        allowed = (real if id(module) in before else seen)[:, None, None]
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        logits = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed, -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    configs = {id(m.config): m.config for m in tower_of(model).modules() if hasattr(m, "config")}.values()
    with attending_by(attention, configs):
        yield


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_tower_matches_tower_masked_from_each_block(name: str, score: str, build) -> None:
    family = family_of(name)
    model = build(family)
    inputs, entered = family.make_inputs(images=(2, 1)), []
    blocks = layers_of(tower_of(model))
    handles = [block.register_forward_pre_hook(lambda m, args: entered.append(args[0])) for block in blocks]
    encode(model, inputs)
    for handle in handles:
        handle.remove()
    ahead = entered[0].shape[1] % 2
    units = squares(model, entered[0].shape[1] - ahead)
    side, most = math.isqrt(len(units)), round(KEEP * len(units))
    read = len(blocks) - (name == "llava")  # the last block is not read
    for layer in range(score == "change", read):
        states = [x[:, ahead:][:, units].flatten(0, 1) for x in entered]
        shown = seen_by(score, states, layer).view(len(entered[0]), side, side, -1)
        kept = torch.cat([naive(score, one[None], most) for one in shown]).flatten(1)
        with tokenprune.patched(model, "towerdrop", keep=KEEP, layer=layer, score=score, guard="off"):
            got = encode(model, inputs)
        left = len(kept) * (ahead + most * len(units[0]))
        assert get_record(got).block_tokens == [entered[0][..., 0].numel()] * layer + [left] * (len(blocks) - layer)
        assert torch.equal(torch.cat([g[-len(units) :] for g in get_record(got).groups]).view_as(kept) >= 0, kept)
        columns = torch.zeros(len(kept), entered[0].shape[1] - ahead, dtype=torch.bool)
        columns[:, torch.tensor(units).flatten()] = kept.repeat_interleave(len(units[0]), dim=1)
        with masked(model, torch.cat([columns.new_ones(len(kept), ahead), columns], dim=1), layer):
            want = encode(model, inputs)
        mine, theirs = (torch.cat(list(one.pooler_output)).flatten(0, -2).view(*kept.shape, -1) for one in (got, want))
        close(mine[kept], theirs[kept])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_decoder_matches_masked_decoder(name: str, build) -> None:
    family = family_of(name)
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, "towerdrop", keep=KEEP, layer=1, record=True, guard="off"):
        got, stats = model(**inputs).logits, tokenprune.stats(model)
        output = encode(model, inputs)
    (cut,) = stats.cuts
    assert (cut.site, cut.method, cut.sources) == (Site.IN_ENCODER, "towerdrop", None)
    length = inputs["input_ids"].shape[1]
    alive = survivors(cut, length)
    with with_features(model, output), reduced(family, model, stats.cuts, length):
        close(got[alive], model(**inputs).logits[alive])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_keeping_all_is_bit_equal(name: str, build) -> None:
    family = family_of(name)
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    want = model(**inputs).logits
    for keep in (1.0, 10**4):
        with tokenprune.patched(model, "towerdrop", keep=keep, layer=1, guard="off"):
            assert torch.equal(model(**inputs).logits, want)


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
    with pytest.raises(
        OptionError, match="block 2 is out of range"
    ):  # the tower's last block, which LLaVA does not read
        tokenprune.patch(build(FAMILIES["llava"]), "towerdrop", layer=2)


def restored(y: Tensor, h: Tensor, stays: Tensor, neighbours: int) -> Tensor:
    """Return all tokens of a tile. A dropped token moves from `h` by the mean change of its nearest kept tokens `y`."""
    full, kept = h.clone(), h[stays]
    full[stays] = y
    for place in (~stays).nonzero().flatten().tolist():
        near = sorted(range(len(kept)), key=lambda one: float((kept[one] - h[place]).norm()))[:neighbours]
        full[place] = h[place] + (y - kept)[near].mean(0)
    return full


@pytest.mark.parametrize("stabilise", [0, 1, 7])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_restored_units_match_loop_over_tiles(name: str, stabilise: int, build) -> None:
    """Use the unpatched blocks per tile. While all units attend, the MLP's output for dropped units is not used."""
    family = family_of(name)
    model = copy.deepcopy(build(family))
    inputs, seen = family.make_inputs(images=(2, 1)), []
    blocks = layers_of(tower_of(model))
    encoder = tower_of(model).encoder
    while len(blocks) < 4:
        (encoder.layer if hasattr(encoder, "layer") else encoder.layers).append(copy.deepcopy(blocks[0]))
        blocks = layers_of(tower_of(model))
    read = len(blocks) - (name == "llava")
    handles = [
        block.register_forward_pre_hook(lambda m, *given: seen.append(given), with_kwargs=True) for block in blocks
    ]
    encode(model, inputs)
    for handle in handles:
        handle.remove()
    entered = [args[0] for args, _ in seen]
    ahead, (tiles, count) = entered[0].shape[1] % 2, entered[0].shape[:2]
    units = squares(model, count - ahead)
    most = max(1, round(KEEP * len(units)))
    stays = torch.zeros(tiles, count, dtype=torch.bool)
    stays[:, :ahead] = True
    for tile, change in enumerate((entered[1] - entered[0])[:, ahead:].norm(dim=-1)):
        score = [float(change[unit].mean()) for unit in units]
        for unit in sorted(range(len(units)), key=score.__getitem__)[-most:]:
            stays[tile, ahead + torch.tensor(units[unit])] = True
    states, full = [], list(entered[1])
    for index, block in enumerate(blocks[1:], start=1):
        for tile, h in enumerate(entered[1]):
            attended = full[tile] if index < min(1 + stabilise, read) else full[tile][stays[tile]]
            y = block(attended[None], *seen[index][0][1:], **seen[index][1])
            y = (y[0] if isinstance(y, tuple) else y)[0]
            full[tile] = restored(y if len(y) < count else y[stays[tile]], h, stays[tile], 3)
        states.append(torch.stack(full))
        if index == read - 1:
            break
    with tokenprune.patched(model, "ipcv", keep=KEEP, layer=1, stabilise=stabilise, neighbours=3, guard="off"):
        got = encode(model, inputs)
        model(**inputs)
        stats = tokenprune.stats(model)
    whole, left = tiles * count, int(stays.sum())
    assert left < whole and stats.visual_tokens_out == stats.visual_tokens_in and stats.cuts == []
    given = [whole if index < 1 + stabilise or index >= read else left for index in range(len(blocks))]
    assert get_record(got).block_tokens == given == stats.encoder_tokens_per_layer
    handles = [
        block.register_forward_hook(lambda m, args, out, x=x: change_output(lambda _: x, out), prepend=True)
        for block, x in zip(blocks[1:], states, strict=False)
    ]
    want = encode(model, inputs)
    for handle in handles:
        handle.remove()
    for mine, theirs in zip(got.pooler_output, want.pooler_output, strict=True):
        close(mine, theirs)
