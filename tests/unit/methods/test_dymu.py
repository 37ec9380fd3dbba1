# SPDX-License-Identifier: Apache-2.0
"""dymu's merges by thresholds in the tower, against naive loops."""

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
    scores = []
    for a in range(0, len(keys), 2):
        best, partner = -math.inf, -1
        for b in range(1, len(keys), 2):
            cosine = float(keys[a] @ keys[b] / (keys[a].norm() * keys[b].norm()))
            if a >= protected and b >= protected and cosine > best:
                best, partner = cosine, b
        if partner >= 0:
            scores.append((best, a, partner))
    return scores


def naive_groups(keys: Tensor, r: int, protected: int) -> list[list[int]]:
    """Return the members of each output token of one image, after r merges."""
    pairs = sorted(naive_scores(keys, protected), key=lambda pair: -pair[0])[:r]
    sources = [a for _, a, _ in pairs]
    rest = [a for a in range(protected, len(keys)) if a % 2 == 0 and a not in sources]
    order = [*range(protected), *rest, *(b for b in range(protected, len(keys)) if b % 2)]
    return [[token] + [a for _, a, b in pairs if b == token] for token in order]


def naive_match(keys: Tensor, tau: float, protected: int, limit: int | None = None) -> list[list[int]]:
    above = sum(score > tau for score, _, _ in naive_scores(keys, protected))
    r = min(above, (len(keys) - protected) // 2, len(keys) if limit is None else limit)
    return naive_groups(keys, r, protected) if r else [[token] for token in range(len(keys))]


def mixed(model: Any) -> Tensor:
    """Return noise, a constant image, and stripes, which lose very different numbers of tokens."""
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
    keys[2] = keys[2].abs()  # more similar
    for row, count in enumerate(counts):
        keys[row, count:], size[row, count:] = 1e3, 0  # padding must have no effect
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
                for index, group in enumerate(groups):
                    weight = size[row, group]
                    close(got[row, index], (x[row, group] * weight[:, None]).sum(0) / weight.sum(), 1e-6)
                    assert sizes[row, index] == weight.sum()
                    assert (assign[row, group] == index).all()
                assert not sizes[row, len(groups) :].any()
                assert sizes[row].sum() == size[row].sum()
                # Protected and unmerged tokens are bit-equal to the input.
                unmerged = [index for index, group in enumerate(groups) if len(group) == 1]
                assert torch.equal(got[row, unmerged], x[row, [groups[index][0] for index in unmerged]])
                assert unmerged[:protected] == list(range(protected))
            if limit is None:
                num_merged = [count - count_left for count, count_left in zip(counts, merge.num_kept, strict=True)]
                assert all(current >= previous for current, previous in zip(num_merged, last, strict=True))
                last = num_merged


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
    counts = []
    for row, pixels_of_image in enumerate(pixels):
        image = InputImage(tower, pixels_of_image)
        close(got.hidden_states[0][row], image.grid())
        for stage, (block, tau) in enumerate(zip(blocks_of(tower), taus, strict=True), 1):
            keys = image.attend(block, proportional)
            image.finish(block, naive_match(keys, tau, image.protected))
            close(got.hidden_states[stage][row], image.grid())
        owner = get_record(got).owners[row]
        assert sorted(owner.unique().tolist()) == list(range(len(image.groups)))
        assert all((owner[group] == index).all() for index, group in enumerate(image.groups))
        counts.append(len(image.groups))
    assert len(set(counts)) > 1


@torch.no_grad()
def test_batch_matches_single_images(family: Family, model) -> None:
    pixels = torch.cat([mixed(model), tiles(model, 2, seed=7)])
    options = dict(keep=0.5, thresholds=by_hand(model, TAUS[family.name]))
    with tokenprune.patched(model, "dymu", **options), tokens_in_mlps(model) as token_counts:
        batch = tower_of(model)(pixels, output_hidden_states=True)
        assert token_counts == sorted(token_counts, reverse=True)
        counts_per_image = []
        for row in range(len(pixels)):
            single = tower_of(model)(pixels[row : row + 1], output_hidden_states=True)
            assert torch.equal(get_record(batch).owners[row], get_record(single).owners[0])
            for got, want in zip(batch.hidden_states, single.hidden_states, strict=True):
                close(got[row], want[0], 1e-6)
            counts_per_image.append(get_record(single).block_tokens)
    assert get_record(batch).block_tokens == [sum(counts) for counts in zip(*counts_per_image, strict=True)]
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
    thresholds = calibrate(model, pixels, keep=0.5, progress=False)
    with tokenprune.patched(model, "dymu", keep=0.5, thresholds=thresholds), torch.no_grad():
        output = tower_of(model)(pixels.bfloat16())
    assert output.last_hidden_state.isfinite().all()
    assert len({len(owner.unique()) for owner in get_record(output).owners}) > 1


# -- exact counts ------------------------------------------------------------------------------------------------------


def naive_exact(n: int, above: int, rest: int, floor: int, protected: int, max_r: int | None) -> int:
    """Return the number of merged pairs: as close to `above` as possible if `rest` blocks must reach `floor`."""

    def max_merges(count: int) -> int:
        return min((count - protected) // 2, count if max_r is None else max_r)

    def min_count(count: int) -> int:
        for _ in range(rest):
            count -= max_merges(count)
        return count

    allowed = [r for r in range(max_merges(n) + 1) if min_count(n - r) <= floor <= n - r]
    return min(allowed, key=lambda r: abs(r - above))


@pytest.mark.parametrize("max_r", [None, 9])
@pytest.mark.parametrize("taus", [[0.6, 0.7, 0.75], [1.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [0.9, 0.5, 0.2]])
@torch.no_grad()
def test_exact_keeps_requested_count(family: Family, model, taus: list[float], max_r: int | None) -> None:
    """The count does not depend on the content. Thresholds still decide merges within this count."""
    pixels, tower = mixed(model), tower_of(model)
    options = dict(thresholds=by_hand(model, taus), exact=True, max_r=max_r)
    shape = tower_shape(model)
    with tokenprune.patched(model, "dymu", keep=0.5, **options):
        got = tower(pixels, output_hidden_states=True)
    want, entered = shape.count_kept(tokenprune.Budget(keep=0.5)) + shape.protected, []
    for row, pixels_of_image in enumerate(pixels):
        image, counts = InputImage(tower, pixels_of_image), []
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
    thresholds = calibrate(model, pixels, keep=0.5, progress=False)
    owners = []
    for exact in (False, True):
        with tokenprune.patched(model, "dymu", keep=0.5, thresholds=thresholds, exact=exact):
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
    thresholds = Thresholds({0.05: torch.ones(3), 0.5: torch.ones(3)}, tower_shape(model).fingerprint, 1)
    with pytest.raises(BudgetError, match=r"exactly 2 of 36 patches: 2 blocks merge at most half"):
        tokenprune.patch(model, "dymu", keep=0.05, thresholds=thresholds, exact=True)
    with pytest.raises(BudgetError, match="max_r=3"):
        tokenprune.patch(model, "dymu", keep=0.5, thresholds=thresholds, exact=True, max_r=3)
    with pytest.raises(OptionError, match="exact=1 must be True or False"):
        tokenprune.method("dymu", exact=1)
