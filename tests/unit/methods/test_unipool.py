# SPDX-License-Identifier: Apache-2.0
"""unipool: its second cut, and behavior that the loop of its first cut in naive/ does not cover."""

from __future__ import annotations

import torch
from torch import Tensor

import tokenprune
from each import each
from tokenprune import Budget, Pruner
from tokenprune.testing import visual_tokens
from videos import attention_of, best, cos, given, select


def build_second_cut(**options: float) -> Pruner:
    (_, _), (second, _) = tokenprune.method("unipool", **options).stages(Budget(keep=0.4), 28)
    return second


def test_copies_are_pooled_once() -> None:
    frame = torch.eye(12) + 0.1
    video, attention = frame.repeat(4, 1, 1), attention_of(frame[None]).repeat(4, 1)
    for keep in (5, 12):
        tokens = given([video], [keep], [(3, 4)], attention=[attention])
        kept = select("unipool", tokens, inner=False, clusters=0.0).keep[0].nonzero().flatten().tolist()
        assert kept == sorted(best(range(12), attention[0].tolist(), keep))


def naive_scores(x: Tensor, attention: Tensor, text: Tensor) -> tuple[list[float], list[float]]:
    """Return each token's attention from the text and its similarity to the text, both rescaled to 0..1."""

    def rescale(values: list[float]) -> list[float]:
        return [(value - min(values)) / (max(values) - min(values)) for value in values]

    received = attention.mean(0).amax(0).tolist()
    return rescale(received), rescale([max(cos(i, j) for j in text.tolist()) for i in x.tolist()])


@each("balance", [0.0, 0.25, 0.5, 1.0])
def test_second_cut_matches_loop(balance: float) -> None:
    """Tokens are ranked by attention, similarity, or both. Dropped tokens merge with equal weights."""
    g = torch.Generator().manual_seed(1)
    hidden, text = torch.randn(2, 12, 6, generator=g), torch.randn(2, 4, 6, generator=g)
    attention = torch.rand(2, 3, 4, 12, generator=g)
    counts, lengths, keep = (12, 9), (4, 2), [5, 3]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    masked = (attention * mask[:, None, :, None]).mean(1)
    tokens = visual_tokens(
        hidden, counts, keep=keep, text={"hidden": text, "mask": mask},
        text_sum_and_max=torch.stack([masked.sum(1), masked.amax(1)], 1), last_row_attention=torch.rand(2, 3, 12),
    )  # fmt: skip
    selection = build_second_cut(balance=balance).select(tokens)
    assert selection.weight is None and selection.counts == keep
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        attention_scores, similarity_scores = naive_scores(
            hidden[row, :count], attention[row, :, :length, :count], text[row, :length]
        )
        score = [balance * a + (1 - balance) * b for a, b in zip(attention_scores, similarity_scores, strict=True)]
        kept, x = best(range(count), score, keep[row]), hidden[row].tolist()
        want = [i if i in kept else max(kept, key=lambda j: (cos(x[i], x[j]), -j)) for i in range(count)]
        assert selection.assign[row].tolist() == want + [-1] * (12 - count)


def test_last_token_rates_without_text() -> None:
    g = torch.Generator().manual_seed(2)
    hidden, last = torch.randn(2, 8, 6, generator=g), torch.rand(2, 3, 8, generator=g)
    text, mask = torch.randn(2, 2, 6, generator=g), torch.tensor([[True, True], [False, False]])
    common = {"keep": [3, 3], "last_row_attention": last}
    statistics = torch.rand(2, 2, 8, generator=g) * mask[:, :1, None]
    both = build_second_cut().select(
        visual_tokens(hidden, text={"hidden": text, "mask": mask}, text_sum_and_max=statistics, **common)
    )
    no_text = build_second_cut().select(
        visual_tokens(hidden, text={"hidden": text[:, :0]}, text_sum_and_max=torch.zeros(2, 2, 8), **common)
    )
    want = [sorted(best(range(8), scores, 3)) for scores in last.mean(1).tolist()]
    assert both.keep[1].nonzero().flatten().tolist() == want[1]
    assert [row.nonzero().flatten().tolist() for row in no_text.keep] == want
    assert both.keep[0].nonzero().flatten().tolist() != want[0]


def test_nan_token_does_not_spread() -> None:
    g = torch.Generator().manual_seed(3)
    hidden, statistics = torch.randn(1, 8, 6, generator=g), torch.rand(1, 2, 8, generator=g)
    hidden[0, 2, 1], statistics[0, :, 2] = torch.nan, torch.nan
    tokens = visual_tokens(
        hidden, keep=[3], text={"hidden": torch.randn(1, 2, 6, generator=g)}, text_sum_and_max=statistics,
        last_row_attention=torch.rand(1, 3, 8),
    )  # fmt: skip
    kept = build_second_cut(balance=1.0).select(tokens).keep[0].nonzero().flatten().tolist()
    assert kept == sorted(best([i for i in range(8) if i != 2], statistics[0, 1].tolist(), 3))
