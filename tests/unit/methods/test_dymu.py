# SPDX-License-Identifier: Apache-2.0
"""dymu merges by thresholds in the tower, as plain loops do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from made_up_thresholds import TAUS, by_hand, tower_shape
from merging_models import SUPPORTED, blocks_of, tower_of
from naive_towers import InputImage
from oracle import close
from tests.unit.tower.test_encoder import tiles, tokens_in_mlps
from tokenprune import BudgetError, OptionError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.kernels.merging import threshold_match
from tokenprune_bench.calibration import Thresholds, calibrate
from zoo import FAMILIES, Family


@pytest.fixture(params=SUPPORTED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def naive_scores(keys: Tensor, protected: int) -> list[tuple[float, int, int]]:
    """Return (similarity, source, target) of each token at an even position of one image, in index order."""
    found = []
    for a in range(0, len(keys), 2):
        best, partner = -math.inf, -1
        for b in range(1, len(keys), 2):
            cosine = float(keys[a] @ keys[b] / (keys[a].norm() * keys[b].norm()))
            if a >= protected and b >= protected and cosine > best:
                best, partner = cosine, b
        if partner >= 0:
            found.append((best, a, partner))
    return found


def naive_groups(keys: Tensor, r: int, protected: int) -> list[list[int]]:
    """One image, r pairs: the members of each token of the output, in its order."""
    pairs = sorted(naive_scores(keys, protected), key=lambda one: -one[0])[:r]
    gone = [a for _, a, _ in pairs]
    stay = [a for a in range(protected, len(keys)) if a % 2 == 0 and a not in gone]
    order = [*range(protected), *stay, *(b for b in range(protected, len(keys)) if b % 2)]
    return [[token] + [a for _, a, b in pairs if b == token] for token in order]


def naive_match(keys: Tensor, tau: float, protected: int, limit: int | None = None) -> list[list[int]]:
    above = sum(score > tau for score, _, _ in naive_scores(keys, protected))
    r = min(above, (len(keys) - protected) // 2, len(keys) if limit is None else limit)
    return naive_groups(keys, r, protected) if r else [[token] for token in range(len(keys))]


def mixed(model: Any) -> Tensor:
    """Noise, a constant image, and stripes: they lose very different numbers of tokens."""
    pixels = tiles(model, 3)
    pixels[1] = 0.3
    pixels[2] = pixels[2, :, :1].expand_as(pixels[2])
    return pixels


# -- one merge ---------------------------------------------------------------------------------------------------------


@each(("n", "protected"), [(2, 0), (7, 0), (12, 0), (13, 1), (12, 1), (17, 2), (12, 5)])
@each("padding", [0, 3])
def test_merge_matches_naive_loop(n: int, protected: int, padding: int) -> None:
    g = torch.Generator().manual_seed(n)
    counts = [n, max(1, n - padding), n]
    keys, x = torch.randn(3, n, 4, generator=g), torch.randn(3, n, 6, generator=g)
    size = torch.randint(1, 5, (3, n), generator=g).float()
    keys[2] = keys[2].abs()  # more alike
    for row, count in enumerate(counts):
        keys[row, count:], size[row, count:] = 1e3, 0  # padding must not be looked at
    last = [0] * 3
    for tau in (0.95, 0.7, 0.4, 0.0):
        for limit in (None, 2):
            merge = threshold_match(keys, counts if padding else None, threshold=tau, protected=protected, limit=limit)
            want = [naive_match(keys[row, :c], tau, protected, limit) for row, c in enumerate(counts)]
            if merge is None:
                assert [len(groups) for groups in want] == counts
                continue
            assert merge.num_kept == [len(groups) for groups in want] and merge.keep.shape[1] == max(merge.num_kept)
            got, sizes, assign = merge.mean(x, size), merge.sum(size), merge.assign
            for row, groups in enumerate(want):
                for place, group in enumerate(groups):
                    weight = size[row, group]
                    close(got[row, place], (x[row, group] * weight[:, None]).sum(0) / weight.sum(), 1e-6)
                    assert sizes[row, place] == weight.sum()
                    assert (assign[row, group] == place).all()
                assert not sizes[row, len(groups) :].any()
                assert sizes[row].sum() == size[row].sum()
                # The protected tokens and those that nothing joins are copied to the bit.
                alone = [place for place, group in enumerate(groups) if len(group) == 1]
                assert torch.equal(got[row, alone], x[row, [groups[place][0] for place in alone]])
                assert alone[:protected] == list(range(protected))
            if limit is None:
                gone = [count - left for count, left in zip(counts, merge.num_kept, strict=True)]
                assert all(now >= before for now, before in zip(gone, last, strict=True))
                last = gone


def test_duplicates_merge_first() -> None:
    keys = torch.randn(1, 12, 4, generator=torch.Generator().manual_seed(0))
    keys[0, 6], keys[0, 4] = keys[0, 9], 2 * keys[0, 5]
    merge = threshold_match(keys, None, threshold=0.9999, protected=1)
    assert sorted(merge.source[0].tolist()) == [4, 6]
    assert sorted(merge.keep.gather(1, merge.target)[0].tolist()) == [5, 9]


# -- the tower ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_tower_matches_naive_loop(family: Family, build, attn: str, proportional: bool) -> None:
    model, taus = build(family, attn), TAUS[family.name]
    pixels, tower = mixed(model), tower_of(model)
    options = dict(thresholds=by_hand(model, taus), proportional=proportional)
    with tokenprune.patched(model, "dymu", keep=0.5, **options):
        got = tower(pixels, output_hidden_states=True)
    left = []
    for row, one in enumerate(pixels):
        image = InputImage(tower, one)
        close(got.hidden_states[0][row], image.grid())
        for stage, (block, tau) in enumerate(zip(blocks_of(tower), taus, strict=True), 1):
            keys = image.attend(block, proportional)
            image.finish(block, naive_match(keys, tau, image.protected))
            close(got.hidden_states[stage][row], image.grid())
        owner = get_record(got).owners[row]
        assert sorted(owner.unique().tolist()) == list(range(len(image.groups)))
        assert all((owner[group] == place).all() for place, group in enumerate(image.groups))
        left.append(len(image.groups))
    assert len(set(left)) > 1


@torch.no_grad()
def test_batch_matches_single_images(family: Family, model) -> None:
    pixels = torch.cat([mixed(model), tiles(model, 2, seed=7)])
    options = dict(keep=0.5, thresholds=by_hand(model, TAUS[family.name]))
    with tokenprune.patched(model, "dymu", **options), tokens_in_mlps(model) as seen:
        batch = tower_of(model)(pixels, output_hidden_states=True)
        assert seen == sorted(seen, reverse=True)
        left = []
        for row in range(len(pixels)):
            alone = tower_of(model)(pixels[row : row + 1], output_hidden_states=True)
            assert torch.equal(get_record(batch).owners[row], get_record(alone).owners[0])
            for got, want in zip(batch.hidden_states, alone.hidden_states, strict=True):
                close(got[row], want[0], 1e-6)
            left.append(get_record(alone).block_tokens)
    assert get_record(batch).block_tokens == [sum(counts) for counts in zip(*left, strict=True)]
    kept_all = get_record(batch).owners.shape[1]
    kept = [len(owner.unique()) for owner in get_record(batch).owners]
    with tokenprune.patched(model, "dymu", max_r=1, **options):
        assert get_record(tower_of(model)(pixels[1:2])).block_tokens == [kept_all - i for i in range(3)]
    assert len(set(kept)) > 1
    assert kept.index(min(kept)) == 1, "the constant image keeps the fewest"


@torch.no_grad()
def test_threshold_of_one_merges_nothing(family: Family, model) -> None:
    inputs = family.make_inputs()
    before = model(**inputs).logits
    for options in (dict(keep=1.0), dict(keep=0.5, thresholds=by_hand(model, [1.0] * 3))):
        with tokenprune.patched(model, "dymu", **options):
            assert torch.equal(model(**inputs).logits, before)
            assert tokenprune.stats(model).keep_ratio == 1
    assert torch.equal(model(**inputs).logits, before)


def test_gradients_and_half_precision(family: Family) -> None:
    model = family.build()
    pixels = mixed(model)
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=by_hand(model, TAUS[family.name])):
        tower_of(model)(pixels).last_hidden_state.square().sum().backward()
    gradients = [p.grad for p in tower_of(model).parameters() if p.grad is not None]
    assert len(gradients) > 10 and all(g.isfinite().all() for g in gradients)
    model = model.bfloat16()
    found = calibrate(model, pixels, keep=0.5, progress=False)
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=found), torch.no_grad():
        output = tower_of(model)(pixels.bfloat16())
    assert output.last_hidden_state.isfinite().all()
    assert len({len(owner.unique()) for owner in get_record(output).owners}) > 1


# -- exactly as many as asked for --------------------------------------------------------------------------------------


def naive_exact(n: int, above: int, rest: int, floor: int, protected: int, max_r: int | None) -> int:
    """Return the number of merged pairs: as close to `above` as possible if `rest` blocks must reach `floor`."""

    def most_now(count: int) -> int:
        return min((count - protected) // 2, count if max_r is None else max_r)

    def least(count: int) -> int:
        for _ in range(rest):
            count -= most_now(count)
        return count

    able = [r for r in range(most_now(n) + 1) if least(n - r) <= floor <= n - r]
    return min(able, key=lambda r: abs(r - above))


@pytest.mark.parametrize("max_r", [None, 9])
@pytest.mark.parametrize("taus", [[0.6, 0.7, 0.75], [1.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [0.9, 0.5, 0.2]])
@torch.no_grad()
def test_exact_keeps_requested_count(family: Family, model, taus: list[float], max_r: int | None) -> None:
    """The count is independent of the content and matches a naive loop; thresholds still decide where possible."""
    pixels, tower = mixed(model), tower_of(model)
    options = dict(thresholds=by_hand(model, taus), exact=True, max_r=max_r)
    shape = tower_shape(model)
    with tokenprune.patched(model, "dymu", keep=0.5, **options):
        got = tower(pixels, output_hidden_states=True)
    want, entered = shape.count_kept(tokenprune.Budget(keep=0.5)) + shape.protected, []
    for row, one in enumerate(pixels):
        image, counts = InputImage(tower, one), []
        for stage, (block, tau) in enumerate(zip(blocks_of(tower), taus, strict=True), 1):
            keys = image.attend(block)
            counts.append(len(keys))
            joined = [[token] for token in range(len(keys))]
            if stage <= shape.blocks_read:
                above = sum(score > tau for score, _, _ in naive_scores(keys, image.protected)) if tau < 1 else 0
                r = naive_exact(len(keys), above, shape.blocks_read - stage, want, image.protected, max_r)
                joined = naive_groups(keys, r, image.protected) if r else joined
            image.finish(block, joined)
            close(got.hidden_states[stage][row], image.grid())
        assert len(get_record(got).owners[row].unique()) == len(image.groups) == want
        entered.append(counts)
    assert get_record(got).block_tokens == [sum(counts) for counts in zip(*entered, strict=True)]


@torch.no_grad()
def test_exact_matches_thresholds_at_same_count(build) -> None:
    """Thresholds calibrated on one image already give the requested count for it."""
    model = build(FAMILIES["llava"])
    pixels = tiles(model, 1)
    found = calibrate(model, pixels, keep=0.5, progress=False)
    owners = []
    for exact in (False, True):
        with tokenprune.patched(model, "dymu", keep=0.5, thresholds=found, exact=exact):
            owners.append(get_record(tower_of(model)(pixels)).owners)
    assert len(owners[0].unique()) == tower_shape(model).count_kept(tokenprune.Budget(keep=0.5)) + 1
    assert torch.equal(*owners)


@torch.no_grad()
def test_exact_in_the_decoder(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    inputs["pixel_values"][0] = 0.3
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=by_hand(model, TAUS["llava"]), exact=True):
        for run in (model, lambda **inputs: model.generate(**inputs, max_new_tokens=2, min_new_tokens=2)):
            run(**inputs)
            assert tokenprune.stats(model).visual_tokens_out == 3 * tower_shape(model).count_kept(
                tokenprune.Budget(keep=0.5)
            )


def test_exact_rejects_unreachable_count(build) -> None:
    model = build(FAMILIES["llava"])
    few = Thresholds({0.05: torch.ones(3), 0.5: torch.ones(3)}, tower_shape(model).fingerprint, 1)
    with pytest.raises(BudgetError, match=r"exactly 2 of 36 patches: 2 blocks merge at most half"):
        tokenprune.patch(model, "dymu", keep=0.05, thresholds=few, exact=True)
    with pytest.raises(BudgetError, match="max_r=3"):
        tokenprune.patch(model, "dymu", keep=0.5, thresholds=few, exact=True, max_r=3)
    with pytest.raises(OptionError, match="exact=1 must be True or False"):
        tokenprune.method("dymu", exact=1)
