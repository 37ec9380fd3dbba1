# SPDX-License-Identifier: Apache-2.0
"""Merging in timm's plain vision transformers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import snapshot
from each import each
from module_calls import record_inputs
from tests.unit.methods.test_tome import naive
from tokenprune import BudgetError, OptionError, UnsupportedModelError, UnsupportedSetupError

timm = pytest.importorskip("timm")

TINY = dict(img_size=24, patch_size=4, embed_dim=32, depth=4, num_heads=2, num_classes=10)
KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "average": dict(global_pool="avg", class_token=False, init_values=0.5),
    "average with class token": dict(global_pool="avg", fc_norm=True),
    "map": dict(global_pool="map", class_token=False),
    "registers": dict(reg_tokens=4, qk_norm=True, no_embed_class=True),
}


def build(kind: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.models.vision_transformer.VisionTransformer(**TINY, **KINDS[kind]).eval()
        for name, p in model.named_parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=1.5 / math.sqrt(p[0].numel()))
            elif "norm" not in name:
                torch.nn.init.normal_(p, std=0.1)
    return model


def draw_images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def naive_features(model: Any, image: Tensor, plan: list[int], proportional: bool = True) -> tuple[Tensor, list[int]]:
    """Run one image through the blocks in plain loops.

    Returns:
        The full grid after the last block, and the number of tokens after each block.
    """
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    groups = [[i] for i in range(len(x))]
    counts = []
    for block, r in zip(model.blocks, plan, strict=True):
        attention = block.attn
        q, k, v = (
            attention.qkv(block.norm1(x)).view(len(x), 3, attention.num_heads, attention.head_dim).permute(1, 2, 0, 3)
        )
        q, k = attention.q_norm(q), attention.k_norm(k)
        weight = torch.tensor([float(len(group)) for group in groups])
        logits = q @ k.transpose(1, 2) * attention.scale + (weight.log() if proportional else 0)
        x = x + block.ls1(attention.proj((logits.softmax(-1) @ v).transpose(0, 1).flatten(1)))
        joined, _ = naive(k.mean(0), r, model.num_prefix_tokens)
        x = torch.stack([(x[m] * weight[m, None]).sum(0) / weight[m].sum() for m in joined])
        groups = [[i for member in members for i in groups[member]] for members in joined]
        x = x + block.ls2(block.mlp(block.norm2(x)))
        counts.append(len(x))
    grid = torch.empty(sum(map(len, groups)), x.shape[1])
    for feature, group in zip(x, groups, strict=True):
        grid[group] = feature
    return grid, counts


@each("fused", [True, False])
@each("kind", KINDS)
@torch.no_grad()
def test_logits_match_naive_loop(kind: str, fused: bool) -> None:
    model, x = build(kind), draw_images()
    for block in model.blocks:
        block.attn.fused_attn = fused
    plan = [5, 0, 9, 2]
    with tokenprune.patched(model, "tome", r=plan):
        logits, features = model(x), model.forward_features(x)
        stats = tokenprune.stats(model)
    for row, image in enumerate(x):
        grid, counts = naive_features(model, image, plan)
        torch.testing.assert_close(features[row], model.norm(grid), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(logits[row], model.forward_head(model.norm(grid[None]))[0], atol=2e-5, rtol=1e-4)
    entered = 36 + model.num_prefix_tokens
    assert stats.encoder_tokens_per_layer == [3 * n for n in (entered, *counts[:-1])]
    assert (stats.visual_tokens_in, stats.visual_tokens_out) == (108, 60)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_patch_and_unpatch(kind: str) -> None:
    model, x = build(kind), draw_images()
    before, state = model(x), snapshot(model)
    assert tokenprune.patch(model, method="tome", keep=0.25) is model
    assert not torch.equal(model(x), before)
    stats = tokenprune.stats(model)
    assert stats.keep_ratio == 0.25 and 0.3 < stats.prefill_flops_ratio < 0.9
    single = torch.cat([model(image[None]) for image in x])
    torch.testing.assert_close(model(x), single, atol=1e-5, rtol=1e-4)
    tokenprune.unpatch(model)
    assert snapshot(model) == state
    assert torch.equal(model(x), before)
    with tokenprune.patched(model, "tome", keep=1.0):
        assert torch.equal(model(x), before)
        assert tokenprune.stats(model).keep_ratio == tokenprune.stats(model).prefill_flops_ratio == 1


@torch.no_grad()
def test_mlps_run_on_fewer_tokens() -> None:
    model = build("class token")
    with tokenprune.patched(model, "tome", r=(4, -1)), record_inputs(*(block.mlp for block in model.blocks)) as states:
        model(draw_images())
    assert [x.shape[1] for x in states] == [29, 24, 22, 22]


def test_deep_copy_and_training() -> None:
    model, x = build("average"), draw_images()
    tokenprune.patch(model, "tome", keep=0.5)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    twin.train()(x).sum().backward()
    assert all(p.grad is not None for p in twin.blocks.parameters())
    tokenprune.unpatch(twin)
    assert tokenprune.is_patched(model) and not tokenprune.is_patched(twin)
    assert not torch.equal(twin.eval()(x), model(x))


def test_unsupported_setups_raise() -> None:
    model = build("class token")
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match="fastv is not supported for the timm model"):
        tokenprune.patch(model, ["tome", "fastv"])
    with pytest.raises(BudgetError, match="at most half"):
        tokenprune.patch(model, "tome", keep=tokenprune.Budget(tokens=1))
    with pytest.raises(OptionError, match="Pass only one"):
        tokenprune.patch(model, "tome", r=2, keep=1.0)
    with pytest.raises(OptionError, match="processor"):
        tokenprune.patch(model, "tome", processor=object())
    with pytest.raises(UnsupportedModelError, match="not a plain timm VisionTransformer"):
        tokenprune.patch(timm.create_model("test_convnext"), "tome")
    assert snapshot(model) == before
    model.set_grad_checkpointing()
    with tokenprune.patched(model, "tome"), pytest.raises(UnsupportedSetupError, match="set_grad_checkpointing"):
        model(draw_images())


@torch.no_grad()
def test_dropping_in_models_with_a_class_token() -> None:
    model, x = build("class token"), draw_images()
    for options in ({"layer": 1}, {"layer": 1, "threshold": 0.5, "partners": 1}):
        with tokenprune.patched(model, "saint", keep=0.4, **options):
            got, counts = model(x), tokenprune.stats(model).encoder_tokens_per_layer
            single = torch.cat([model(image[None]) for image in x])
        assert counts[0] == counts[1] > counts[2] == counts[3]
        torch.testing.assert_close(got, single)
        assert not torch.allclose(got, model(x))
    with pytest.raises(UnsupportedModelError, match="pools all patches"):
        tokenprune.patch(build("average with class token"), "saint", keep=0.4)
