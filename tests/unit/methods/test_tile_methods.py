# SPDX-License-Identifier: Apache-2.0
"""Methods that share a budget among the tiles of an image by its thumbnail, in families that provide a thumbnail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from anyres_views import Picture
from basics import MODEL_METHODS, TILE_METHODS, pieces
from looking import look
from module_calls import record_outputs
from tests.unit.engine.test_oracle import BATCHES, check_generate, compare_forward
from tokenprune import UnsupportedSetupError
from tokenprune.integrations.shared import checks
from tokenprune.models.families import SUPPORTED
from tokenprune.selection.observable import Backend
from zoo import FAMILIES

TILED = ("llava_next", "llava_onevision")
# Image sizes of the zoo: tiles of 4 x 4 patches of 4 pixels, with padding above and below, or at the sides.
PICTURES = {
    (16, 32): Picture(1, 2), (8, 32): Picture(1, 2, above=1), (32, 16): Picture(2, 1), (32, 8): Picture(2, 1, beside=1)
}  # fmt: skip


def make_looker(layers: tuple[int, ...] = (-1,)) -> tuple[Any, list[Any]]:
    def read(tokens: Any) -> Any:
        return tokens.segments, tokens.tiling, [tokens.encoder_logits(layer) for layer in layers]

    return look(read, ("tiling", "encoder_logits"), layers)


def test_both_methods_are_registered() -> None:
    assert set(TILE_METHODS) == {"hired", "globalcom2"} and not {*TILE_METHODS} & {*MODEL_METHODS}


@pytest.mark.parametrize("name", TILED)
@torch.no_grad()
def test_tiling_of_an_image(name: str, build: Any) -> None:
    family, (method, calls) = FAMILIES[name], make_looker()
    with tokenprune.patched(build(family), method, keep=0.5) as model:
        model(**family.make_inputs(images=(1, 1, 1, 1), sizes=list(PICTURES)))
        model(**family.make_inputs(images=(2,), sizes=[(16, 32), (32, 8)]))
    (_, tiling, _), (segments, both, _) = calls
    for row, picture in enumerate(PICTURES.values()):
        cells = picture.cells
        covers = [picture.block(*cell[1:]) if cell[0] == 0 else 0 for cell in cells]
        assert tiling.covers[row, : len(cells)].tolist() == covers
        height, width = 4 * picture.down - 2 * picture.above, 4 * picture.across - 2 * picture.beside
        assert (tiling.height[row], tiling.width[row]) == (height, width)
        positions = iter((y, x) for y in range(height) for x in range(width))
        expected = [next(positions) if cell[0] > 0 else (0, 0) for cell in cells]
        assert list(zip(tiling.row[row].tolist(), tiling.column[row].tolist(), strict=True))[: len(cells)] == expected
    # LLaVA-OneVision does not cut several images of a prompt into tiles.
    assert both.width.tolist() == ([8, 2] if name == "llava_next" else [0, 0])
    assert len(segments) == 2


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("name", TILED)
@torch.no_grad()
def test_logits_equal_the_tower(name: str, layer: int, build: Any) -> None:
    """Logits of the class token, or their mean over all patches, from queries and keys of the unpatched model."""
    family, (method, calls) = FAMILIES[name], make_looker((layer,))
    model, inputs = build(family), family.make_inputs(images=(1, 1), sizes=[(16, 32), (32, 8)])
    with tokenprune.patched(model, method, keep=0.5):
        model(**inputs)
    ((segments, _, (logits,)),) = calls
    tower = model.model.vision_tower
    block = tower.encoder.layers[0 if layer == 0 else len(tower.encoder.layers) + model.config.vision_feature_layer]
    with record_outputs(block.self_attn.q_proj) as queries, record_outputs(block.self_attn.k_proj) as keys:
        model(**inputs)
    heads = block.self_attn.num_heads
    query, key = (x[0].unflatten(-1, (heads, -1)).transpose(1, 2) for x in (queries, keys))  # [tiles, H, patches, Dh]
    all_logits = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    want = all_logits[:, :, 0, 1:] if name == "llava_next" else all_logits.mean(2)
    first = 0
    for row, picture in enumerate((PICTURES[16, 32], PICTURES[32, 8])):
        for i, (tile, y, x) in enumerate(picture.cells):
            expected = torch.zeros(heads) if tile < 0 else want[first + tile, :, 4 * y + x]
            torch.testing.assert_close(logits[row, :, i], expected, rtol=1e-4, atol=1e-5)
        first += 1 + picture.tiles
    assert len(segments) == 2 and (logits < 0).any()


@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("name", [*TILED, "llava"])
@pytest.mark.parametrize("method", TILE_METHODS)
def test_dropping_equals_the_masked_model(method: str, name: str, batch: str, build: Any) -> None:
    family = FAMILIES[name]
    if batch == "video" and not family.video:
        batch = "ragged"
    compare_forward(family, build(family), method, family.make_inputs(**BATCHES[batch]), 0.3)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("method", TILE_METHODS)
def test_generate(method: str, name: str, build: Any) -> None:
    check_generate(method, FAMILIES[name], build(FAMILIES[name]), {"images": (2, 1)})


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("method", TILE_METHODS)
@torch.no_grad()
def test_choice_is_independent_of_batch_and_question(method: str, name: str, build: Any) -> None:
    family = FAMILIES[name]
    model = build(family)

    def list_kept(**batch: Any) -> list[list[list[int]]]:
        inputs = family.make_inputs(**batch)
        with tokenprune.patched(model, method, keep=0.3, record=True):
            model(**inputs)
            rows = tokenprune.stats(model).cuts[0].kept
        row_pairs = zip(pieces(family, inputs), rows, strict=True)
        return [[[piece.index(i) for i in row if i in piece] for piece in images] for images, row in row_pairs]

    both = list_kept(images=(1, 1), sizes=[(16, 32), (32, 8)])
    assert [list_kept(images=(1, 1), sizes=[(16, 32), (32, 8)], only=row)[0] for row in (0, 1)] == both
    inputs = family.make_inputs(images=(1, 1), sizes=[(16, 32), (32, 8)])
    for row, counts in zip(both, inputs.counts, strict=True):
        assert [len(tokens) for tokens in row] == [round(0.3 * count) for count in counts]


@pytest.mark.parametrize("method", TILE_METHODS)
@torch.no_grad()
def test_video_frames_have_equal_budgets(method: str, build: Any) -> None:
    family = FAMILIES["llava_onevision"]
    model, inputs = build(family), family.make_inputs(images=(0,), video=5)
    with tokenprune.patched(model, method, keep=10, record=True):
        model(**inputs)
        (kept,) = tokenprune.stats(model).cuts[0].kept
    (((*positions,),),) = pieces(family, inputs)
    assert [len(set(kept) & set(positions[start : start + 4])) for start in range(0, 20, 4)] == [2] * 5


_TILES = ("colpali", "gemma3", "llava", "paligemma", "vipllava")


@pytest.mark.parametrize("method", TILE_METHODS)
def test_unsupported_families_raise(method: str, build: Any) -> None:
    refused = set()
    for family in FAMILIES.values():
        try:
            with tokenprune.patched(build(family), method, keep=0.3):
                pass
        except UnsupportedSetupError as error:
            assert f"{method} needs a" in str(error) and repr(family.kind) in str(error)
            refused.add(family.name)
    assert refused == {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "idefics3"}
    for name, row in SUPPORTED.items():
        assert (checks.find_unsupported_reason(tokenprune.method(method), name) is None) == (
            row.patches == "packed" or (row.patches == "tiles" and name in _TILES)
        ), name


def test_vllm_refuses_tile_methods() -> None:
    method = tokenprune.method("hired")
    reason = checks.find_unsupported_reason(method, "qwen2_vl", engine=Backend.VLLM)
    assert reason is not None and "hired needs a thumbnail" in reason and "Qwen2VLForConditionalGeneration" in reason
    assert checks.find_unsupported_reason(method, "llava_next", engine=Backend.VLLM) is None
