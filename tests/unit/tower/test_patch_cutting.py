# SPDX-License-Identifier: Apache-2.0
"""Patches that a method drops inside the tower, against plain loops over the unpruned tower with masked columns."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES as MORE
from merging_models import blocks_of, tower_of
from oracle import close
from tests.unit.tower.test_encoder import tiles, tokens_in_mlps
from tokenprune import OptionError, Site, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.observation import Observation
from tokenprune.methods.pre_llm import flowcut
from tokenprune.selection import Tower
from tokenprune.selection.observable_registry import find_observable
from tokenprune.testing import ConformanceError, check_method
from tower_features import check_decoder, run_patched
from tower_tokens import best
from zoo import FAMILIES

PALIGEMMA = MORE["paligemma"]

BLOCKS, LAST = 23, 21  # number of blocks in the description, and the block of its last cut


def list_observed_blocks(block: int, read: int) -> list[int]:
    """Return the blocks of the description that a block of the tower observes, up to the last cut."""
    return [LAST - b for b in range(LAST + 1) if math.ceil((b + 0.5) / BLOCKS * read) - 1 == block]


@torch.no_grad()
def run_masked(tower: Any, pixels: Tensor, keep: int, read: int) -> tuple[list[Tensor], list[list[int]]]:
    """Run one image through all blocks at full length, with the columns of dropped patches masked.

    Returns:
        The hidden states, and the kept patches after each block, following the steps of the description.
    """
    x = tower.pre_layrnorm(tower.embeddings(pixels[None]))[0]
    states, kept, score, stages = [x], list(range(1, len(x))), {}, []
    for index, block in enumerate(blocks_of(tower)):
        attn, h = block.self_attn, block.layer_norm1(x)
        q, k, v = (
            p(h).view(len(x), attn.num_heads, attn.head_dim).transpose(0, 1)
            for p in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        visible = torch.zeros(len(x), dtype=torch.bool)
        visible[[0, *kept]] = True
        weights = (q @ k.transpose(1, 2) * attn.head_dim**-0.5).masked_fill(~visible, -torch.inf).softmax(-1)
        similarity = (v[:, :1] @ v.transpose(1, 2)).masked_fill(~visible, -torch.inf).softmax(-1)[:, 0].mean(0).tolist()
        attention, size = weights[:, 0].mean(0).tolist(), v.mean(0).abs().sum(-1).tolist()
        for remaining in list_observed_blocks(index, read):
            mass, similarity_mass = sum(attention[i] for i in kept), sum(similarity[i] for i in kept)
            current = {i: (attention[i] / mass + similarity[i] / similarity_mass) * size[i] for i in kept}
            score = {i: (score[i] + current[i]) / 2 if score else current[i] for i in kept}
            if remaining == 0:
                kept = best(kept, score, keep)
            elif remaining % 2 == 0:
                entropy = -sum(p * math.log(p) for p in (attention[i] / mass for i in kept) if p)
                sharpness = 1 - (entropy / math.log(max(len(kept), 2))) ** 2
                num_dropped = round((len(kept) - keep) / math.sqrt(remaining) * sharpness)
                kept = best(kept, score, max(len(kept) - num_dropped, keep))
            score = {i: score[i] for i in kept}
        x = x + attn.out_proj((weights @ v).transpose(0, 1).flatten(1))
        x = x + block.mlp(block.layer_norm2(x))
        states.append(x)
        stages.append(kept)
    return states, stages


def sharpen(model: Any) -> Any:
    """Return a copy with uneven attention of the class token, so that early blocks drop different counts per image."""
    model = copy.deepcopy(model)
    for block in blocks_of(tower_of(model)):
        block.self_attn.q_proj.weight.data *= 4
    return model


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("keep", [0.3, 9])
@torch.no_grad()
def test_tower_matches_masked_loop(attn: str, keep: Any, build) -> None:
    model = sharpen(build(FAMILIES["llava"], attn))
    tower, pixels = tower_of(model), tiles(model, 3)
    count = tower.embeddings(pixels).shape[1]
    goal = keep if isinstance(keep, int) else round(keep * (count - 1))
    with (
        tokenprune.patched(model, "flowcut", inside=True, keep=keep, guard="off"),
        tokens_in_mlps(model) as token_counts,
    ):
        got = tower(pixels, output_hidden_states=True)
    read, ragged = len(blocks_of(tower)) - 1, False  # the tower's last block is not read
    results = [run_masked(tower, image, goal, read) for image in pixels]
    for row, (states, stages) in enumerate(results):
        assert len(stages[-1]) == goal
        owner = get_record(got).owners[row]
        assert (owner[1:] >= 0).nonzero()[:, 0].add(1).tolist() == stages[-1]
        for block, (want, kept) in enumerate(zip(states, [list(range(1, count)), *stages], strict=True)):
            actual, rows = got.hidden_states[block][row], [0, *kept]
            close(actual[rows], want[rows])
            dropped = [i for i in range(count) if i not in rows]
            assert not actual[dropped].any()
    for block in range(len(token_counts)):
        sizes = {len(stages[block]) for _, stages in results}
        ragged |= len(sizes) > 1
        assert token_counts[block] == 1 + max(sizes)
    assert ragged, "rows of one batch should drop different numbers early"


@torch.no_grad()
def test_observables_do_not_depend_on_the_batch(build, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FAMILIES["llava"])
    pixels, observed = tiles(model, 3), []

    def note(self: Any, flow: Tensor, counts: list[int] | None, remaining: tuple[int, ...]) -> Merge | None:
        """Drop the most attended patches in the first block. The result would differ if they were padding."""
        observed.append((flow, counts or [flow.shape[2] + 1] * len(flow)))
        if len(flow[0, 0]) < patches:
            return None
        kept = torch.ones(len(flow), patches + 1, dtype=torch.bool)
        for row, attention in enumerate(flow[:, 0]):
            kept[row, 1 + attention.topk(3 + int(attention.argmax()) % 7).indices] = False
        return Merge.from_kept(kept, kept.sum(1).tolist())

    patches = tower_of(model).embeddings(pixels).shape[1] - 1
    monkeypatch.setattr(flowcut._TowerCuts, "update", note)
    with tokenprune.patched(model, "flowcut", inside=True, keep=9, guard="off"):
        for images in (pixels, *pixels[:, None]):
            tower_of(model)(images, output_hidden_states=True)
    batch, *alone = (observed[start : start + 2] for start in range(0, len(observed), 2))
    assert len(set(batch[1][1])) > 1
    for row, single in enumerate(alone):
        for (flow, counts), (expected, (count,)) in zip(batch, single, strict=True):
            assert counts[row] == count
            close(flow[row, :, : count - 1], expected[0])


@pytest.mark.parametrize("batch", [{}, {"images": (2, 1)}, {"images": (0, 2)}], ids=["left", "ragged", "text beside"])
@pytest.mark.parametrize("name", ["llava", "llava_siglip"])
@torch.no_grad()
def test_decoder_matches_masked_decoder(name: str, batch: dict, build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(**batch)
    if name == "llava_siglip":
        model = siglip()
    run = run_patched(model, inputs, "flowcut", 0.4, steps=0, inside=True, guard="off")
    stats, (cut,) = run.stats, run.stats.cuts
    assert (cut.site, cut.method, cut.sources) == (Site.IN_ENCODER, "flowcut", None)
    entered, images = stats.encoder_tokens_per_layer, len(inputs["pixel_values"])
    patches = stats.visual_tokens_in // images
    assert stats.visual_tokens_out == images * round(0.4 * patches) and entered[-1] < entered[0]
    check_decoder(family, model, inputs, run)


def siglip() -> Any:
    """Return a LLaVA with a SigLIP tower, a tower without a class token."""
    read = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    vision = PALIGEMMA.config["vision_config"]
    return replace(FAMILIES["llava"], config=FAMILIES["llava"].config | read | {"vision_config": vision}).build()


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "llava_next"])
@torch.no_grad()
def test_acts_inside_the_tower_if_supported(name: str, build) -> None:
    """By default the method acts as in the paper, which gives other logits, and after the tower on other families."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs()

    def run(**options: Any) -> tuple[Tensor, Site]:
        with tokenprune.patched(model, "flowcut", record=True, **({"keep": 0.4} | options)):
            return model(**inputs).logits, tokenprune.stats(model).cuts[0].site

    (got, site), (after_tower, _) = run(), run(inside=False)
    inside = name == "llava"
    assert site is (Site.IN_ENCODER if inside else Site.PRE_LLM) and torch.equal(got, after_tower) is not inside
    if inside:
        assert torch.equal(got, run(inside=True)[0])
    # With these options, the selections of a batch's images depend on each other.
    budgets = tokenprune.Budget(keep=0.4, per="prompt"), tokenprune.Budget.from_kv_share(0.4)
    for options in ({"guard": "auto"}, *({"keep": budget} for budget in budgets)):
        assert run(**options)[1] is Site.PRE_LLM
        if inside:
            with pytest.raises(tokenprune.TokenPruneError, match="flowcut"):
                run(inside=True, **options)


@torch.no_grad()
def test_acts_inside_the_tower_before_another_method(build) -> None:
    model, family = build(FAMILIES["llava"]), FAMILIES["llava"]
    with tokenprune.patched(model, ["flowcut", "fastv"], keep=0.5, record=True):
        model(**family.make_inputs())
        assert [cut.site for cut in tokenprune.stats(model).cuts] == [Site.IN_ENCODER, Site.IN_LLM]


def test_unsupported_setups_raise(build) -> None:
    for name in ("llava_next", "qwen2_vl", "internvl", "gemma3"):
        with pytest.raises(UnsupportedSetupError, match="flowcut"):
            tokenprune.patch(build(FAMILIES[name]), "flowcut", inside=True, keep=0.5)
    model = build(FAMILIES["llava"])
    inside = tokenprune.method("flowcut", inside=True)
    for methods in (["tome", "flowcut"], [inside, "tome"], [inside, "vscan"]):
        with pytest.raises(OptionError, match="flowcut"):
            tokenprune.patch(model, methods, keep=0.5)
    with pytest.raises(OptionError, match="inside='yes'"):
        tokenprune.method("flowcut", inside="yes")


def test_method_conforms() -> None:
    ((stage, _),) = tokenprune.method("flowcut", inside=True).stages(tokenprune.Budget.from_keep(0.5), 4)
    check_method(stage)
    tower = Tower(tokens=578, protected=2, blocks=24, blocks_read=23)
    check_method(stage, tower=tower)

    def without_class(flow: Tensor, counts: Any) -> Merge:
        return Merge.from_kept(torch.arange(flow.shape[2] + 1).expand(len(flow), -1) > 0, [flow.shape[2]] * len(flow))

    for matcher, message in ((None, "keeps 32 patches, not 16"), (without_class, "block 0 drops a class token")):
        plan = partial(lambda budget, tower, matcher: [matcher] * tower.blocks_read + [None], matcher=matcher)
        broken = type("Broken", (type(stage),), {"__doc__": "Broken.", "plan": staticmethod(plan)})
        with pytest.raises(ConformanceError, match=message):
            check_method(dataclass(frozen=True)(broken)())


def test_merge_with_drops() -> None:
    kept = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]], dtype=torch.bool)
    merge = Merge.from_kept(kept, [3, 1])
    assert merge.assign.tolist() == [[0, -1, 1, 2, -1], [-1, 0, -1, -1, -1]]
    assert merge.sum(torch.ones(2, 5)).tolist() == [[1, 1, 1], [1, 0, 0]]
    x = torch.arange(10.0).view(2, 5, 1)
    assert merge.mean(x, torch.ones(2, 5))[0, :, 0].tolist() == [0, 2, 3] and merge.mean(x, torch.ones(2, 5))[1, 0] == 6


@pytest.mark.parametrize("protected", [0, 1])
def test_encoder_flow_does_not_depend_on_padding(protected: int) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 7, 4, generator=g)
    mask = torch.zeros(1, 1, 1, 7).masked_fill(torch.arange(7) > 4, -torch.inf).expand(-1, -1, 7, -1)
    flow = find_observable("encoder_flow")
    padded = flow.compute_per_patch(Observation(query, key, mask, 0.5, causal=False, value=value), protected)
    short = (x[:, :, :5] for x in (query, key))
    unpadded = flow.compute_per_patch(Observation(*short, None, 0.5, causal=False, value=value[:, :, :5]), protected)
    torch.testing.assert_close(padded[..., : 5 - protected], unpadded)
    assert not padded[:, :2, 5 - protected :].any()
