# SPDX-License-Identifier: Apache-2.0
"""apet against a naive loop."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import tokenprune
from several_cuts import Arrived, check_in_model, counts_of
from tests.unit.methods.naive.apet import of_image
from tokenprune import Budget, Site
from tokenprune.methods.pre_llm.apet import compute_approximation_error, pick_farthest_points
from tower_tokens import chosen, merged, tower_tokens


def draw_image(count: int, width: int = 16, seed: int = 0, rank: int | None = None) -> torch.Tensor:
    """Return random tokens of a rank, shape (1, count, width)."""
    g = torch.Generator().manual_seed(seed)
    rank = rank or width
    return torch.randn(1, count, rank, generator=g) @ torch.randn(rank, width, generator=g)


def view(x: torch.Tensor, keep: int, **overrides: Any) -> Any:
    return tower_tokens([([(1, x.shape[1])], 0)], [keep], hidden=x, **overrides)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_error_equals_least_squares_residual(scale: float) -> None:
    """A token orthogonal to the basis has its own norm as its error."""
    x = scale * draw_image(40)
    basis, is_valid = pick_farthest_points(x, torch.ones(1, 40, dtype=torch.bool), [6])
    assert is_valid.all()
    s = x[:, basis[0]]
    fit = torch.linalg.lstsq(s[0].T.double(), x[0].T.double()).solution
    want = (x[0].double() - (s[0].T.double() @ fit).T).norm(dim=1)
    error = compute_approximation_error(x, s)[0]
    torch.testing.assert_close(error.double(), want, rtol=1e-4, atol=1e-4 * scale)
    assert sorted(error.topk(6, largest=False).indices.tolist()) == sorted(basis[0].tolist())
    axes = scale * torch.eye(16)[None]
    assert compute_approximation_error(axes, axes[:, :3])[0].tolist() == pytest.approx([0] * 3 + [scale] * 13, abs=2e-5)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_tokens_in_the_span_have_no_error(scale: float) -> None:
    x = scale * draw_image(40, rank=3)
    assert compute_approximation_error(x, x[:, :5]).max() < 1e-3 * x.norm(dim=2).max()
    kept = chosen("apet", view(x, 12))[0]
    assert len(kept) == 12 and kept == list(range(12))


def test_farthest_points_have_falling_distances() -> None:
    x = draw_image(30, seed=1)
    x[0, 15:] = x[0, :15]
    picked, _ = pick_farthest_points(x, torch.ones(1, 30, dtype=torch.bool), [20])
    order = picked[0].tolist()
    assert len({i % 15 for i in order[:15]}) == 15 and len(set(order)) == 20 and order[0] == x[0].norm(dim=1).argmax()
    radii = [max(min(float((a - x[0, j]).norm()) for j in order[:n]) for a in x[0]) for n in range(1, 16)]
    assert all(later <= earlier for earlier, later in pairwise(radii)) and radii[-1] == 0


@pytest.mark.parametrize("own_weight", [0.0, 0.5])
def test_merged_features(own_weight: float) -> None:
    """A kept token is the mean of its group, or is mixed with the basis token that replaces it."""
    x = draw_image(60)
    selection = tokenprune.method("apet", own=own_weight).select(view(x, 24))
    out = merged(view(x, 24), selection)[0]
    kept, targets, basis = of_image(x[0].double(), 24)
    replacements = {targets[s]: s for s in basis if s in targets}
    assert len(replacements) == 10 and len(targets) == 36
    for token in kept:
        if token in replacements:
            want = own_weight * x[0, token] + (1 - own_weight) * x[0, replacements[token]]
        else:
            want = x[0, [token, *(i for i, target in targets.items() if target == token)]].mean(0)
        torch.testing.assert_close(out[token], want)


@pytest.mark.parametrize("keep", [51, 55, 59])
def test_kept_basis_tokens_keep_their_index(keep: int) -> None:
    """Other basis tokens replace the tokens with the smallest errors."""
    x = draw_image(60)
    kept, targets, basis = of_image(x[0].double(), keep)
    assert 0 < len(set(basis) & set(kept)) < 10
    out = merged(view(x, keep), tokenprune.method("apet").select(view(x, keep)))[0]
    for token in set(basis) & set(kept):
        assert torch.equal(out[token], x[0, token])
    assert {s: target for s, target in targets.items() if s in basis}.keys() == set(basis) - set(kept)


def test_non_patches_are_dropped_first_and_never_merged() -> None:
    """The same holds for tokens that are not finite."""
    tokens = tower_tokens([([(5, 5)], 3)], [9])
    features, hidden = tokens.encoder_features, tokens.hidden.clone()
    features[0, 25:] = 0
    hidden[0, 4, 0] = torch.nan
    for options, overrides, dropped in (
        ({"features": "tower"}, {"encoder_features": features}, range(25, 28)),
        ({}, {"hidden": hidden}, [4]),
    ):
        selection = tokenprune.method("apet", **options).select(tower_tokens([([(5, 5)], 3)], [9], **overrides))
        assert not selection.keep[0, list(dropped)].any() and (selection.assign[0, list(dropped)] == -1).all()
        assert merged(tokens, selection)[selection.keep].isfinite().all()


def test_inner_cuts_a_second_time_at_the_middle_layer(build: Any) -> None:
    """The first cut keeps three times as many tokens as the second. Both cuts ignore the question."""
    (first, _), (late, _) = tokenprune.method("apet", inner=True, own=0.5).stages(Budget(keep=0.25), 32)
    assert (first.site, late.site, late.cut_layer, late.own, late.inner) == (Site.PRE_LLM, Site.IN_LLM, 16, 0.5, False)
    assert counts_of(tokenprune.method("apet", inner=True), 32, 400, 0.25) == [(0, 150), (16, 50)]

    def loop(arrived: Arrived) -> list[int]:
        kept, _, _ = of_image(arrived.hidden[arrived.places].double(), len(arrived.stays), basis=2)
        return [arrived.places[i] for i in kept]

    cuts = check_in_model("apet", loop, build, keep=0.5, inner=True, basis=2)
    assert [cut.layer for cut in cuts] == [0, 2]
    assert not tokenprune.method("apet", inner=True).query_aware


def test_tower_features_pass_the_method_checks() -> None:
    method = tokenprune.method("apet", features="tower", own=0.5)
    assert method.needs == {"encoder_features"} and not tokenprune.method("apet").needs
