# SPDX-License-Identifier: Apache-2.0
"""Merging in the tower, and the input of the decoder afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import pieces
from merging_models import SUPPORTED, blocks_of, image_arguments, tower_of
from module_calls import record_inputs
from naive_towers import InputImage
from oracle import close, survivors
from tests.unit.methods.test_tome import naive
from tokenprune import Budget, Site
from tower_features import check_decoder, run_patched
from zoo import FAMILIES, Family

BATCHES = {"left": {}, "ragged": {"images": (2, 1)}, "text beside": {"images": (0, 2)}, "one row": {"only": 1}}


@pytest.fixture(params=SUPPORTED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def tiles(model: Any, count: int = 2, seed: int = 0) -> Tensor:
    side = model.config.vision_config.image_size
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def tokens_in_mlps(model: Any) -> Any:
    """Record the number of tokens that each MLP of the tower gets, in order of the calls."""
    mlps = [block.mlp for block in blocks_of(tower_of(model))]
    return record_inputs(*mlps, note=lambda args, kwargs: args[0].shape[1])


@torch.no_grad()
def naive_tower(
    tower: Any, pixels: Tensor, plan: list[int], proportional: bool
) -> tuple[list[Tensor], list[list[int]]]:
    """Run one image through the blocks in plain loops.

    Returns:
        Features on the full grid after each block, and the final groups.
    """
    image = InputImage(tower, pixels)
    grids = [image.x]
    for block, r in zip(blocks_of(tower), plan, strict=True):
        keys = image.attend(block, proportional)
        image.finish(block, naive(keys, r, image.protected)[0])
        grids.append(image.grid())
    return grids, image.groups


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_tower_matches_naive_loop(family: Family, build, attn: str, proportional: bool) -> None:
    model = build(family, attn)
    pixels, plan = tiles(model), [4, 0, 3] if family.name == "llava_onevision" else [5, 4, 0]
    with tokenprune.patched(model, "tome", r=plan, proportional=proportional):
        got = tower_of(model)(pixels, output_hidden_states=True)
    for row, image in enumerate(pixels):
        grids, groups = naive_tower(tower_of(model), image, plan, proportional)
        assert sorted(i for group in groups for i in group) == list(range(len(grids[0])))
        assert len(groups) == len(grids[0]) - sum(plan)
        for stage, want in enumerate(grids):
            close(got.hidden_states[stage][row], want)
        last = got.last_hidden_state[row]
        norm = tower_of(model).post_layernorm if family.name == "llava_onevision" else torch.nn.Identity()
        close(last, norm(grids[-1]))


@torch.no_grad()
def test_mlps_run_on_fewer_tokens(family: Family, model) -> None:
    inputs = family.make_inputs()
    count = tower_of(model).embeddings(tiles(model)).shape[1]
    num_unread = 0 if family.name == "llava_onevision" else 1  # LLaVA does not read the last block
    plan = [3] * (3 - num_unread) + [0] * num_unread
    with tokenprune.patched(model, "tome", r=3), tokens_in_mlps(model) as token_counts:
        model(**inputs)
        stats = tokenprune.stats(model)
    assert token_counts == [count - 3, count - 6, count - 6 - plan[2]]
    entered = stats.encoder_tokens_per_layer
    images = entered[0] // count
    assert entered == [images * n for n in (count, count - 3, count - 6)]


@pytest.mark.parametrize("proportional", [True, False])
@torch.no_grad()
def test_merging_duplicates_changes_no_output(proportional: bool) -> None:
    """k equal tokens of size 1 equal one token of size k, only with proportional attention."""
    family = FAMILIES["llava"]
    model = family.build()
    model.model.vision_tower.embeddings.position_embedding.weight.zero_()
    # Neighbours are equal, so each pair has an even and an odd index. The class token has index 0.
    image = tiles(model, 1).view(1, 3, 6, 4, 3, 2, 4)
    pixels = image[..., :1, :].expand_as(image).reshape(1, 3, 24, 24)
    want = tower_of(model)(pixels, output_hidden_states=True).hidden_states
    with tokenprune.patched(model, "tome", r=[18], proportional=proportional), tokens_in_mlps(model) as token_counts:
        got = tower_of(model)(pixels, output_hidden_states=True).hidden_states
    assert token_counts == [19, 19, 19]
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
    assert worst < 1e-5 if proportional else worst > 1e-3


def group_equal_features(features: list[Tensor]) -> list[list[list[int]]]:
    """Return the indices of bit-equal features of each image. Each newline is a separate group."""
    groups_per_image = []
    for image in features:
        groups: list[list[int]] = []
        for token_index, feature in enumerate(image):
            same = [group for group in groups if torch.equal(image[group[0]], feature)]
            same[0].append(token_index) if same else groups.append([token_index])
        groups_per_image.append(groups)
    return groups_per_image


def expected_sources(family: Family, model: Any, inputs: Any, features: list[Tensor]) -> list[dict[int, list[int]]]:
    newline = getattr(model.model, "image_newline", None)
    sources, image = [], 0
    for row_positions in pieces(family, inputs):
        row: dict[int, list[int]] = {}
        for positions in row_positions:
            for group in group_equal_features([features[image]])[0]:
                is_newline = newline is not None and torch.equal(features[image][group[0]], newline)
                for part in [[token_index] for token_index in group] if is_newline else [group]:
                    row[positions[part[0]]] = [positions[token_index] for token_index in part]
            image += 1
        sources.append(row)
    return sources


@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_decoder_gets_one_token_per_group(family: Family, model, batch: str) -> None:
    inputs = family.make_inputs(**BATCHES[batch])
    with tokenprune.patched(model, "tome", keep=0.4, record=True):
        got = model(**inputs).logits
        stats = tokenprune.stats(model)
        output = model.model.get_image_features(**image_arguments(inputs))
    (cut,) = stats.cuts
    want = expected_sources(family, model, inputs, output.pooler_output)
    assert (cut.site, cut.layer, cut.method) == (Site.IN_ENCODER, 0, "tome")
    assert cut.sources == want
    assert stats.visual_tokens_in == sum(map(sum, inputs.counts))
    assert stats.visual_tokens_out == sum(map(len, want)) < stats.visual_tokens_in
    assert stats.visual_tokens_per_layer == [stats.visual_tokens_out] * 4
    visual, attention_mask = family.visual_mask(model, inputs), inputs["attention_mask"].bool()
    alive = survivors(cut, inputs["input_ids"].shape[1])
    assert torch.equal(alive & ~visual, attention_mask & ~visual)
    assert [row.nonzero().flatten().tolist() for row in alive & visual] == [sorted(row) for row in want]
    # By hand: the unpatched decoder on the kept tokens of each row, at their positions.
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    embeds[visual] = torch.cat(output.pooler_output)
    begin = attention_mask.long().cumsum(1) - 1
    for row in range(len(alive)):
        kept = alive[row].nonzero().flatten()
        hidden = model.model.language_model(
            inputs_embeds=embeds[row, kept][None], position_ids=kept[None], attention_mask=torch.ones(1, len(kept))
        ).last_hidden_state
        assert begin[row, kept[0]] >= 0
        close(got[row, kept], model.lm_head(hidden)[0])


def test_keep_is_the_share_of_patches() -> None:
    model = FAMILIES["llava"].build()
    inputs = FAMILIES["llava"].make_inputs(images=(2, 1))
    for keep, num_kept in ((0.5, 18), (0.25, 9), (0.9, 32), (20, 20), (36, 36), (1000, 36)):
        with tokenprune.patched(model, "tome", keep=keep):
            model(**inputs)
            assert tokenprune.stats(model).visual_tokens_out == 3 * num_kept


@pytest.mark.parametrize("method", ["tome", ["tome", "fastv"], ["tome", "divprune"], ["tome", "pool", "dart"]])
@pytest.mark.parametrize("batch", ["ragged", "one row"])
@torch.no_grad()
def test_generate_and_combined_methods(family: Family, model, batch: str, method: Any) -> None:
    inputs = family.make_inputs(**BATCHES[batch])
    run = run_patched(model, inputs, method, 0.5, steps=4)
    names, stats = [method] if isinstance(method, str) else method, run.stats
    assert [cut.method for cut in run.step_cuts] == names
    assert stats.visual_tokens_per_layer[0] <= 0.75 * stats.visual_tokens_in
    if len(names) > 1:
        assert stats.visual_tokens_out < 0.45 * stats.visual_tokens_in
    check_decoder(family, model, inputs, run)


@torch.no_grad()
def test_beams_and_samples(family: Family, model) -> None:
    """generate() repeats each row, and the copies of a row merge like the row."""
    inputs = family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, "tome", keep=0.5, record=True):
        model(**inputs)
        (cut,) = tokenprune.stats(model).cuts
        beams = model.generate(**inputs, max_new_tokens=4, num_beams=3)
        assert tokenprune.stats(model).cuts[0].sources == [row for row in cut.sources for _ in range(3)]
        model.generate(**inputs, max_new_tokens=2, do_sample=True, num_return_sequences=2)
        assert tokenprune.stats(model).cuts[0].kept == [row for row in cut.kept for _ in range(2)]
        single = model.generate(**family.make_inputs(images=(2, 1), only=1), max_new_tokens=4, num_beams=3)
    assert torch.equal(beams[1, -4:], single[0, -4:])


@torch.no_grad()
def test_per_prompt_budget_of_a_composed_method(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, ["tome", "fastv"], keep=[0.5, Budget(keep=0.5, per="prompt")], record=True):
        model(**inputs)
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_per_layer == [54, 54, 27, 27]
    assert stats.cuts[0].sources is not None
