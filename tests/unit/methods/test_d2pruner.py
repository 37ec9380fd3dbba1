# SPDX-License-Identifier: Apache-2.0
"""d2pruner against naive loops written from its description, and the fit of its prior."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from several_cuts import SHARES, Arrived, best, check_in_model, rows, view, wanted
from tests.unit.api.test_cli import call
from tokenprune import AlreadyPatchedError, OptionError, TokenPruneError
from tokenprune.methods.in_llm.d2pruner import AttentionPrior, resize_table
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune_bench.calibration import fit_d2pruner
from zoo import FAMILIES


def naive_choice(
    importance: list[float], hidden: Tensor, keep: int, cells: list[tuple[int, int, int]], pivots: float = 0.7,
    alpha: float = 1.0, threshold: float = 0.8, radius: float = 1.0,
) -> list[int]:  # fmt: skip
    """Return the kept tokens. cells: frame, row and column of each token."""
    unit = torch.nn.functional.normalize(hidden.double(), dim=1)
    order = sorted(range(len(importance)), key=lambda i: (-importance[i], i))
    pivot_tokens = order[: max(1, int(pivots * keep))]
    chosen: list[int] = []
    for i in order[len(pivot_tokens) :]:
        if len(pivot_tokens) + len(chosen) == keep:
            break

        def compute_similarity(j: int, i: int = i) -> float:
            (f, r, c), (g, s, d) = cells[i], cells[j]
            proximity = float(torch.tensor(-((r - s) ** 2 + (c - d) ** 2) / (2 * radius**2)).exp()) if f == g else 0.0
            return alpha * float(unit[i] @ unit[j]) + (1 - alpha) * proximity

        if all(compute_similarity(j) <= threshold for j in chosen):
            chosen.append(i)
    rest = [i for i in order if i not in pivot_tokens and i not in chosen]
    return sorted((pivot_tokens + chosen + rest)[:keep])


CELLS = {
    None: lambda n: [(i, 0, 0) for i in range(n)],
    (2, 4, 5): lambda n: [(i // 20, i // 5 % 4, i % 5) for i in range(n)],
}


@each("grid", [None, (2, 4, 5)])
@each(
    "options", [{}, {"alpha": 0.5, "threshold": 0.4}, {"pivots": 0.1, "threshold": 0.1}, {"pivots": 1.0},
                {"threshold": -2.0, "pivots": 0.2}, {"alpha": 0.0, "radius": 2.0, "threshold": 0.5}],
)  # fmt: skip
def test_selection_matches_loop(grid: Any, options: dict[str, Any]) -> None:
    method = tokenprune.method("d2pruner", **options)
    for seed, levels in enumerate((None, 2)):
        for share in SHARES:
            counts = [40, 11]
            keep = wanted(counts, share)
            tokens = view(counts, keep, method.needs, seed=seed, levels=levels, grids=[grid, None])
            score = tokens.last_row_attention.mean(1).tolist()
            want = [
                naive_choice(score[row][:n], tokens.hidden[row, :n], k, CELLS[grid if row == 0 else None](n), **options)
                for row, (n, k) in enumerate(zip(counts, keep, strict=True))
            ]
            assert rows(method.select(tokens).keep) == want


def save_prior(path: Path, table: Tensor, decoder: Any, layer: int = 2) -> str:
    AttentionPrior(table, layer, compute_fingerprint(decoder)).save(path)
    return str(path)


def test_importance_is_attention_over_prior(build: Any, tmp_path: Path) -> None:
    decoder = build(FAMILIES["llava"], "eager").get_submodule(FAMILIES["llava"].decoder)
    table = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    path = save_prior(tmp_path / "prior.safetensors", table, decoder)

    def naive(arrived: Arrived) -> list[int]:
        attention = arrived.before[:, arrived.last, arrived.places].mean(0)
        importance = (attention / table.flatten()).tolist()
        cells = [(0, i // 6, i % 6) for i in range(36)]
        return [
            arrived.places[i] for i in naive_choice(importance, arrived.hidden[arrived.places], arrived.keep, cells)
        ]

    check_in_model("d2pruner", naive, build, keep=0.3, prior=path)


def test_uniform_prior_changes_nothing(build: Any, tmp_path: Path) -> None:
    """With pivots=1.0, tokens are ranked as in fastv. Zero cells of a prior raise no error."""
    decoder = build(FAMILIES["llava"]).get_submodule(FAMILIES["llava"].decoder)
    uniform = save_prior(tmp_path / "even.safetensors", torch.full((3, 5), 0.25), decoder)
    sparse = save_prior(tmp_path / "holes.safetensors", torch.eye(3, 4), decoder)
    tokens = view([30, 12], [9, 3], ("last_row_attention",), grids=[(1, 5, 6), None])
    got = [rows(tokenprune.method("d2pruner", prior=prior).select(tokens).keep) for prior in (None, uniform)]
    assert got[0] == got[1]
    pivots_only = rows(tokenprune.method("d2pruner", pivots=1.0).select(tokens).keep)
    assert pivots_only == [best(tokens.last_row_attention[row].mean(0).tolist()[:n], k) for row, (n, k) in
                         enumerate(((30, 9), (12, 3)))]  # fmt: skip
    assert [len(row) for row in rows(tokenprune.method("d2pruner", prior=sparse).select(tokens).keep)] == [9, 3]
    assert "prior=None" in tokens._source.notes[0]


def test_resize_to_same_grid_is_identity() -> None:
    table = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(resize_table(table, 24, (1, 4, 6)), table.flatten())
    assert torch.equal(resize_table(table, 48, (2, 4, 6)), table.flatten().repeat(2))
    assert torch.equal(resize_table(table, 24, None), table.flatten())
    assert resize_table(table, 7, None).shape == (7,)


@torch.no_grad()
def test_fit_writes_prior(build: Any, tmp_path: Path) -> None:
    """The prior is the last row of eager attention, averaged over images and heads. Fitting restores the model."""
    family = FAMILIES["llava"]
    model, path = build(family), tmp_path / "fitted.safetensors"
    samples = [family.make_inputs(), family.make_inputs(images=(2,), seed=1)]
    prior = fit_d2pruner(model, samples, path, layer=3)
    assert not tokenprune.is_patched(model)
    maps, eager = [], build(family, "eager")
    for sample in samples:
        attention = eager(**sample, output_attentions=True).attentions[2].mean(1)
        for row, visual in enumerate(family.visual_mask(eager, sample)):
            last = int(sample["attention_mask"][row].nonzero().max())
            maps += [
                attention[row, last, image_tokens].view(6, 6)
                for image_tokens in visual.nonzero().flatten().split(36)
                if len(image_tokens)
            ]
    torch.testing.assert_close(prior.table, torch.stack(maps).mean(0), atol=1e-6, rtol=0)
    with tokenprune.patched(model, "d2pruner", keep=0.5, layer=3, prior=path):
        model(**samples[0])
    with pytest.raises(OptionError, match="Pass layer=3"):
        tokenprune.method("d2pruner", prior=path)
    other = build(FAMILIES["llava_next"])
    with pytest.raises(OptionError, match="another model"):
        tokenprune.patch(other, "d2pruner", layer=3, prior=path)
    assert not tokenprune.is_patched(other)
    with pytest.raises(TokenPruneError, match="Cannot fit"):
        fit_d2pruner(model, [family.make_inputs(images=(0, 0))])
    with pytest.raises(OptionError, match="out of range"):
        fit_d2pruner(model, samples, layer=4)
    with tokenprune.patched(model, "fastv"), pytest.raises(AlreadyPatchedError):
        fit_d2pruner(model, samples)


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nothing")
    for path in (broken, tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(OptionError, match="fit d2pruner"):
            tokenprune.method("d2pruner", prior=str(path))


def test_fit_and_show_commands(tmp_path: Path) -> None:
    for name, kind in (("d2pruner", "attention prior"), ("fitprune", "recipes")):
        out = tmp_path / f"{name}.safetensors"
        output = call("fit", name, "--limit", "2", "--out", str(out)).output
        assert kind in output and out.exists()
    tokenprune.method("d2pruner", prior=tmp_path / "d2pruner.safetensors")
    tokenprune.method("fitprune", recipe=tmp_path / "fitprune.safetensors")
