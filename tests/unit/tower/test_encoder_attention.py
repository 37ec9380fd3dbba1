# SPDX-License-Identifier: Apache-2.0
"""Attention scores of vision towers, against plain loops."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForImageTextToText

import tokenprune
from families import FAMILIES as OTHERS
from oracle import close
from tokenprune import OptionError
from tower_attention import make_seer
from tower_values import CLASS_TOKEN, attentions_of, run_tower, tower_of
from zoo import FAMILIES as ZOO
from zoo import IMAGE, TEXT, Family

PACKED = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")
FAMILIES = ZOO | {name: OTHERS[name] for name in (*PACKED, "paligemma", "paligemma2", "llava_next_video")}
# Blocks of the test models' towers: a quarter of the depth, and the last block that is read. CLIP's last
# block is not read. Qwen2.5-VL's blocks 0 and 2 attend in windows.
BLOCKS = {
    0.25: dict.fromkeys(FAMILIES, 0) | {"qwen2_5_vl": 1},
    -1: dict.fromkeys(FAMILIES, 2) | dict.fromkeys(("llava", "llava_next", "llava_next_video"), 1)
    | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", *PACKED), 3) | {"glm4v": 1, "glm4v_moe": 1},
}  # fmt: skip


def naive_scores(
    family: Family, model: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch, layers: tuple
) -> tuple[list[list[int]], dict[Any, Tensor]]:
    """Return the cell of each placeholder in reading order, and its scores in each layer, shape (tokens, heads)."""
    run, scores = run_tower(family, model, inputs, monkeypatch), {}
    for layer in layers:
        maps = [weights for *_, weights in run.calls[BLOCKS[layer][family.name]]]
        if family.name in CLASS_TOKEN:
            tiles = [tile[:, 0, 1:].T for call_maps in maps for tile in call_maps]
        else:
            tiles = [tile.mean(1).T for call_maps in maps for tile in call_maps]
        scores[layer] = run.average(torch.cat(tiles))
    if not family.name.startswith(("qwen", "glm")):
        return run.cells, scores
    # Cells follow from the order of the prompt.
    grids = [grid for name in ("video_grid_thw", "image_grid_thw") for grid in inputs.get(name, torch.zeros(0, 3))]
    cells = [
        [1000 * image + t, row, column, int(h) // 2, int(w) // 2, 4]
        for image, (frames, h, w) in enumerate(grids)
        for t in range(int(frames)) for row in range(int(h) // 2) for column in range(int(w) // 2)
    ]  # fmt: skip
    return cells, scores


BATCHES = {
    "images": {"images": (1, 2)},
    "video": {"video": True, "images": (1, 1)},
    "text beside": {"images": (0, 3)},
    "videos alone": {"images": (0, 0), "video": (True, 5)},
}


CASES = [
    pytest.param(family, batch, id=f"{name}-{batch}")
    for name, family in FAMILIES.items()
    for batch in BATCHES
    if not batch.startswith("video") or (family.video and family.mixes == (batch == "video"))
]


@pytest.mark.parametrize(("family", "batch"), CASES)
@torch.no_grad()
def test_scores_and_cells_match_naive(family: Family, batch: str, build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method gets the attention maps of the eager tower for each attention implementation, also in generate."""
    inputs = family.make_inputs(**BATCHES[batch])
    model = build(family, "eager")
    cells, scores = naive_scores(family, model, inputs, monkeypatch, (0.25, -1))
    flat = {tuple(index): i for i, index in enumerate(family.visual_mask(model, inputs).nonzero().tolist())}
    method, calls = make_seer(site="IN_LLM" if batch == "text beside" else "PRE_LLM")
    for model in (build(family), build(family, "eager")):
        with tokenprune.patched(model, method, keep=0.5):
            model(**inputs)
            model.generate(**inputs, max_new_tokens=1)
    assert len(calls) == 4
    for call in calls:
        for segment, (row, count) in enumerate(zip(call.segments.row, call.segments.counts, strict=True)):
            tokens = [flat[row, position] for position in call.segments.position[segment, :count].tolist()]
            for layer, got in call.maps.items():
                assert got.dtype == torch.float32
                close(got[segment, :, :count].T, scores[layer][tokens], 1e-6)
                assert not got[segment, :, count:].any()
            assert int(call.patches.tile.max()) < call.patches.tiles
            got = torch.stack([x for x in vars(call.patches).values() if isinstance(x, torch.Tensor)])[:, segment]
            want = [cells[i] for i in tokens]
            first = min(cell[0] for cell in want if cell[0] >= 0)
            for cell, other in zip(want, got[:, :count].T.tolist(), strict=True):
                assert other[0] == -1 if cell[0] < 0 else other == [cell[0] - first, *cell[1:]]
            assert (got[0, count:] == -1).all()


def packed_stand_in(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """Stand-in for a flash kernel with several sequences on one axis."""
    lengths = cu_seq_lens_q.diff().tolist()
    parts = [x.split(lengths, 2) for x in (query, key, value)]
    out = [scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("flash_packed_stand_in", packed_stand_in)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_flash_attention_in_the_tower(name: str, build) -> None:
    family = FAMILIES[name]
    inputs = family.make_inputs(images=(1, 2), video=True)
    flash = family.build()
    tower_of(flash).config._attn_implementation = "flash_packed_stand_in"
    method, calls = make_seer()
    for model in (build(family), flash):
        with tokenprune.patched(model, method, keep=0.5):
            model(**inputs)
    for layer in (0.25, -1):
        close(calls[1].maps[layer], calls[0].maps[layer])


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "side"), [("llava", 1), ("mistral3", 2)])
@torch.no_grad()
def test_packed_images_of_any_size(name: str, side: int, attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixtral's tower, in LLaVA and Mistral 3: scores compare the patches of one image only."""
    vision = dict(model_type="pixtral", hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=64,
                  patch_size=4, intermediate_size=32, head_dim=16)  # fmt: skip
    options = dict(spatial_merge_size=2) if side == 2 else dict(vision_feature_select_strategy="full")
    config = CONFIG_MAPPING[name](
        text_config={**TEXT, "model_type": "mistral"}, vision_config=vision, image_token_id=IMAGE,
        vision_feature_layer=-1, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=attn).eval()
    for block in model.model.vision_tower.transformer.layers:
        block.attention.q_proj.weight.normal_()  # far from even attention
        block.attention.k_proj.weight.normal_()
    sizes, pixels = torch.tensor([[24, 16], [16, 40], [8, 8]]), torch.randn(3, 3, 24, 40)
    counts = [h // 4 // side * (w // 4 // side) for h, w in sizes.tolist()]
    ids = torch.tensor([[5, *(token for n in counts for token in [*[IMAGE] * n, 7])]])
    inputs = dict(input_ids=ids, pixel_values=pixels, image_sizes=sizes)
    method, calls = make_seer((0, -1))
    with tokenprune.patched(model, method, keep=0.5):
        model(**inputs)
    maps: list[Tensor] = []
    module = sys.modules[type(model.model.vision_tower).__module__]
    original = module.eager_attention_forward
    monkeypatch.setattr(
        module, "eager_attention_forward", lambda *a, **k: [out := original(*a, **k), maps.append(out[1])][0]
    )
    model.model.vision_tower.config._attn_implementation = "eager"
    model(**inputs)
    (call,) = calls
    for layer, index in {0: 0, -1: 2}.items():
        start = 0
        for segment, (height, width) in enumerate((sizes // 4).tolist()):
            patch_slice = slice(start, start := start + height * width)
            received = maps[index][0, :, patch_slice, patch_slice].mean(1)
            square = received.view(2, height // side, side, width // side, side).mean((2, 4)).flatten(1)
            close(call.maps[layer][segment, :, : counts[segment]], square, 1e-6)
            cells = torch.cartesian_prod(torch.arange(height // side), torch.arange(width // side))
            assert torch.equal(call.patches.row[segment, : counts[segment]], cells[:, 0])
            assert torch.equal(call.patches.column[segment, : counts[segment]], cells[:, 1])
            assert call.patches.tile[segment, : counts[segment]].unique().tolist() == [0]
            assert (call.patches.height[segment, 0], call.patches.width[segment, 0]) == (height // side, width // side)
            assert call.patches.size[segment, 0] == side**2


@torch.no_grad()
def test_any_block_can_be_read(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index from the front (also of a block that the model does not read), an index from the back, and a share."""
    family = FAMILIES["llava"]
    model, inputs = build(family, "eager"), family.make_inputs()
    method, calls = make_seer((0, 1, 2, -2, 0.9))
    with tokenprune.patched(model, method, keep=0.5):
        model(**inputs)
    for layer, block in {0: 0, 1: 1, 2: 2, -2: 0, 0.9: 1}.items():
        monkeypatch.setitem(BLOCKS, layer, {"llava": block})
        want = naive_scores(family, model, inputs, monkeypatch, (layer,))[1][layer]
        close(calls[0].maps[layer].transpose(1, 2).flatten(0, 1), want, 1e-6)
    for layer in (3, -3, 1.5):
        with pytest.raises(OptionError, match=f"{layer}"):
            tokenprune.patch(model, make_seer((layer,))[0], keep=0.5)
    with pytest.raises(OptionError, match=r"block 2 .* windows.*\[1, 3\]"):
        tokenprune.patch(build(FAMILIES["qwen2_5_vl"]), make_seer((2,))[0], keep=0.5)


@torch.no_grad()
def compute_logits(model: Any, job: Any) -> Tensor:
    return model(**job).logits


def test_threads_do_not_mix(family: Family, model) -> None:
    jobs = [family.make_inputs(seed=seed, images=images) for seed, images in enumerate([(2, 1), (1, 0)])]
    with tokenprune.patched(model, "vscan", keep=0.3):
        sequential = [compute_logits(model, job) for job in jobs]
        barrier = threading.Barrier(len(jobs))

        def wait(*_: Any) -> None:
            barrier.wait(120)

        handle = attentions_of(model)[0].register_forward_pre_hook(wait)
        try:
            with ThreadPoolExecutor(len(jobs)) as pool:
                parallel = list(pool.map(lambda job: compute_logits(model, job), jobs))
        finally:
            handle.remove()
    for got, want in zip(parallel, sequential, strict=True):
        assert torch.equal(got, want)
