# SPDX-License-Identifier: Apache-2.0
"""f3a: behavior that its naive loop (naive/f3a.py) does not cover."""

from __future__ import annotations

import torch

import tokenprune
from greedy import image_tokens, picked
from tokenprune.methods.pre_llm.f3a_scores import draw_matrices, draw_sparse_matrix

GRID = [(1, 7, 9)]
METHOD = tokenprune.method("f3a")
# Row, column and value of the entries of draw_sparse_matrix(2, 6, 3, seed=42), in the order of drawing.
PINNED = ((0, 0, 0.230341), (0, 3, -0.613506), (0, 2, 1.077018), (1, 0, 0.469989), (1, 2, 0.277914), (1, 1, 0.305967))


def test_random_matrices_are_reproducible() -> None:
    """Each row draws its indices before its values, on the CPU. Other devices get a copy."""
    matrix = draw_sparse_matrix(2, 6, 3, seed=42)
    expected = torch.zeros(2, 6)
    for row, column, value in PINNED:
        expected[row, column] = value
    assert torch.allclose(matrix, expected, atol=1e-6)
    drawn = draw_matrices(40, 24, 42, torch.device("cpu"))
    assert [tuple(m.shape) for m in drawn] == [(128, 40), (128, 24), (16, 128), (96, 40), (96, 24)]
    assert [int((m != 0).sum(1).max()) for m in drawn] == [32, 8, 16, 24, 24]
    assert torch.equal(drawn.cue, draw_sparse_matrix(128, 24, 8, 43)) and torch.equal(
        drawn.cue_aligned, draw_sparse_matrix(96, 24, 24, 46)
    )
    assert draw_matrices(40, 24, 42, torch.device("cpu")) is drawn


def test_without_text_and_with_nonfinite_tokens() -> None:
    tokens = image_tokens([63], [16], grids=GRID)
    want = picked(METHOD, image_tokens([63], [16], grids=GRID, text={"hidden": torch.zeros(1, 1, 32)}))
    for words in (0, 3):
        silent = {"hidden": torch.full((1, words, 32), torch.nan), "mask": torch.zeros(1, words, dtype=torch.bool)}
        assert picked(METHOD, image_tokens([63], [16], grids=GRID, text=silent)) == want
    for value in (torch.nan, torch.inf):
        x = tokens.hidden.clone()
        x[0, 5, 3] = value
        zeros = x.clone()
        zeros[0, 5] = 0
        got = picked(METHOD, image_tokens([63], [16], grids=GRID, hidden=x))
        assert got == picked(METHOD, image_tokens([63], [16], grids=GRID, hidden=zeros))
    for degenerate in (torch.ones_like(x), x * torch.nan, x.nan_to_num(nan=0.0) * 1e30):
        picked(METHOD, image_tokens([63], [16], grids=GRID, hidden=degenerate))


def test_video_frames_are_rows_and_mismatched_grids_are_ignored() -> None:
    x = image_tokens([63], [9]).hidden
    rows = picked(METHOD, image_tokens([63], [9], hidden=x, grids=[(1, 21, 3)]))
    assert picked(METHOD, image_tokens([63], [9], hidden=x, grids=[(3, 7, 3)])) == rows
    assert picked(METHOD, image_tokens([63], [9], hidden=x, grids=[(1, 8, 8)])) == picked(
        METHOD, image_tokens([63], [9], hidden=x)
    )
