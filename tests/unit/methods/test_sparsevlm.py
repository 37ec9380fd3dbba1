# SPDX-License-Identifier: Apache-2.0
"""sparsevlm against naive loops written from its description."""

from __future__ import annotations

import torch

import tokenprune
from each import each
from several_cuts import COUNTS, SHARES, best, naive_centres, rows, view, wanted
from tests.unit.methods.naive.sparsevlm import naive_clusters, naive_raters
from tokenprune.testing import visual_tokens


@each("recycle", [0.05, 0.3, 1.0])
@each("exact", [True, False])
def test_counts_and_merges_match_authors(recycle: float, exact: bool) -> None:
    method = tokenprune.method("sparsevlm", recycle=recycle, exact=exact)
    for seed, counts in enumerate([*COUNTS, [576], [2880]]):
        for share in SHARES:
            requested = wanted(counts, share)
            keep = [min(n, max(1, method.resolve_count(n, k))) for n, k in zip(counts, requested, strict=True)]
            if not exact:
                for n, k, got in zip(counts, requested, keep, strict=True):
                    num_extra = int(min(n - k, int(recycle * (n - k)) + 1) / 10) + 1 if k < n else 0
                    assert got == min(n, k + num_extra)
            if max(counts) > 600:
                continue  # compare only the counts
            tokens = view(counts, keep, method.needs, seed=seed)
            selection = method.select(tokens)
            assert [len(row) for row in rows(selection.keep)] == keep
            for row, (n, k) in enumerate(zip(counts, keep, strict=True)):
                if k in (1, n) or selection.assign is None:
                    continue
                num_clusters = naive_clusters(n, k, recycle)
                assign = selection.assign[row, :n]
                kept = selection.keep[row, :n].nonzero().flatten()
                assert torch.equal(assign[kept], kept)
                num_recycled = int((assign >= 0).sum()) - (k - num_clusters)
                removed = n - k + num_clusters
                assert num_recycled == min(removed, int(recycle * removed) + 1)  # each token is in one cluster


def test_density_uses_cluster_count_neighbours() -> None:
    method = tokenprune.method("sparsevlm", recycle=1.0)
    for seed, (count, keep) in enumerate(((90, 30), (64, 20), (120, 25))):
        tokens = view([count], [keep], method.needs, seed=seed)
        num_clusters = naive_clusters(count, keep, 1.0)
        assert num_clusters > 4
        text = int(tokens.text.mask.sum())
        raters = naive_raters(tokens.embeddings[0], tokens.text.embeddings[0, :text])
        score = tokens.text_attention[0][:, raters].mean((0, 1)).tolist()
        picks = best(score, keep - num_clusters)
        recycled = [i for i in range(count) if i not in picks]
        centres = [recycled[i] for i in naive_centres(tokens.hidden[0, recycled], num_clusters, num_clusters)]
        assert rows(method.select(tokens).keep) == [sorted(picks + centres)]


def test_last_token_rates_without_text() -> None:
    tokens = view([20], [6], tokenprune.method("sparsevlm").needs)
    no_text = {"mask": torch.zeros(1, 5, dtype=torch.bool), "hidden": tokens.text.hidden,
            "embeddings": tokens.text.embeddings, "attention": tokens.text.attention}  # fmt: skip
    silent = visual_tokens(
        tokens.hidden, keep=[6], text=no_text, embeddings=tokens.embeddings, text_attention=tokens.text_attention,
        last_row_attention=tokens.last_row_attention,
    )  # fmt: skip
    got = rows(tokenprune.method("sparsevlm", recycle=0.0).select(silent).keep)
    assert got == [best(tokens.last_row_attention[0].mean(0).tolist(), 6)]
