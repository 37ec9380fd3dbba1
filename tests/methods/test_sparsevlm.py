# SPDX-License-Identifier: Apache-2.0
"""sparsevlm against naive loops written from its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from several_cuts import COUNTS, SHARES, Arrived, best, check_in_model, check_ties, naive_centres, rows, view, wanted
from tokenprune import OptionError, VisualTokens
from tokenprune.testing import visual_tokens
from zoo import FAMILIES


def naive_raters(visual: Tensor, text: Tensor) -> list[int]:
    """Words that visual tokens are more alike to than on average, by what enters the decoder; all if there is none."""
    alike = (visual.double() @ text.double().T).softmax(1).mean(0).tolist()
    mean = sum(alike) / len(alike)
    return [i for i, one in enumerate(alike) if one > mean] or list(range(len(alike)))


def naive_clusters(count: int, keep: int, recycle: float = 0.3) -> int:
    """How many of `keep` are merged tokens, so that picks and what is then merged add up."""
    if keep in (1, count):
        return 0
    for number in range(keep):
        removed = count - keep + number
        if int(min(removed, int(recycle * removed) + 1) / 10) + 1 <= number:
            return number
    return keep - 1


def naive_v1(seen: Arrived) -> list[int]:
    raters = naive_raters(seen.entered[seen.all_places], seen.entered[seen.text])
    lines = [seen.text[i] for i in raters]
    heads = len(seen.before)
    score = [sum(float(seen.before[h, r, i]) for h in range(heads) for r in lines) for i in seen.places]
    count, clusters = len(seen.places), naive_clusters(len(seen.places), seen.keep)
    order = sorted(range(count), key=lambda i: (-score[i], i))
    picks = order[: seen.keep - clusters]
    again = sorted(order[seen.keep - clusters :][: int(0.3 * (count - len(picks))) + 1]) if clusters else []
    centres = naive_centres(seen.hidden[[seen.places[i] for i in again]], clusters, clusters) if again else []
    return [seen.places[i] for i in picks] + [seen.places[again[i]] for i in centres]


def test_words_that_the_image_brings_up_rate_and_the_rest_is_merged(build: Any) -> None:
    cuts = check_in_model("sparsevlm", naive_v1, build, keep=0.5)
    assert [cut.layer for cut in cuts] == [1, 2, 3]
    for cut in cuts:
        merged = [len(members) for row in cut.sources for members in row.values()]
        assert max(merged) > 1  # something is


def test_words_of_one_text_are_divided_by_their_distance(build: Any) -> None:
    """Version "+": one-dimensional positions turn pairs of numbers by angles that the distance alone tells."""
    model = build(FAMILIES["llava"], "eager")
    config = model.config.get_text_config()
    width = config.hidden_size // config.num_attention_heads
    base = model.get_submodule(FAMILIES["llava"].decoder).rotary_emb.inv_freq.double()

    def profile(distance: int) -> float:
        return float(2 * (distance * base).cos().sum()) / width**0.5

    def naive(seen: Arrived) -> list[int]:
        lines = [seen.text[i] for i in naive_raters(seen.entered[seen.all_places], seen.entered[seen.text])]
        heads = [{i: sum(float(one[r, i]) / profile(r - i) for r in lines) for i in seen.places} for one in seen.before]
        loudest = sorted(range(len(heads)), key=lambda h: (-sum(heads[h].values()), h))[:2]
        score = {i: sum(heads[h][i] for h in loudest) for i in seen.places}
        return sorted(seen.places, key=lambda i: (-score[i], i))[: seen.keep]

    cuts = check_in_model("sparsevlm", naive, build, keep=0.5, version="+", heads=2)
    assert all(cut.sources is None for cut in cuts)


def test_ties_go_to_the_first() -> None:
    def naive(tokens: VisualTokens, cut: int) -> list[list[int]]:
        found = []
        for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            text = int(tokens.text.mask[row].sum())
            raters = naive_raters(tokens.embeddings[row, :count], tokens.text.embeddings[row, :text])
            weights = torch.zeros(tokens.text.mask.shape)
            weights[row, raters] = 1 / len(raters)
            score = tokens.attention_from(weights)[row].mean(0).tolist()
            found.append(best(score[:count], keep))
        return found

    check_ties(tokenprune.method("sparsevlm", recycle=0.0), naive)


@pytest.mark.parametrize("recycle", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("exact", [True, False])
def test_counts_and_merges(recycle: float, exact: bool) -> None:
    method = tokenprune.method("sparsevlm", recycle=recycle, exact=exact)
    for seed, counts in enumerate([*COUNTS, [576], [2880]]):
        for share in SHARES:
            asked = wanted(counts, share)
            keep = [min(n, max(1, method.budget(n, k))) for n, k in zip(counts, asked, strict=True)]
            if not exact:
                for n, k, got in zip(counts, asked, keep, strict=True):
                    more = int(min(n - k, int(recycle * (n - k)) + 1) / 10) + 1 if k < n else 0
                    assert got == min(n, k + more)
            if max(counts) > 600:
                continue  # counts alone
            tokens = view(counts, keep, method.needs, seed=seed)
            selection = method.select(tokens)
            assert [len(row) for row in rows(selection.keep)] == keep
            for row, (n, k) in enumerate(zip(counts, keep, strict=True)):
                if k in (1, n) or selection.assign is None:
                    continue
                number = naive_clusters(n, k, recycle)
                assign = selection.assign[row, :n]
                kept = selection.keep[row, :n].nonzero().flatten()
                assert torch.equal(assign[kept], kept)
                again = int((assign >= 0).sum()) - (k - number)
                removed = n - k + number
                assert again == min(removed, int(recycle * removed) + 1)  # each in one cluster


def test_clusters_count_as_many_neighbours_as_there_are_of_them() -> None:
    method = tokenprune.method("sparsevlm", recycle=1.0)
    for seed, (count, keep) in enumerate(((90, 30), (64, 20), (120, 25))):
        tokens = view([count], [keep], method.needs, seed=seed)
        number = naive_clusters(count, keep, 1.0)
        assert number > 4
        text = int(tokens.text.mask.sum())
        raters = naive_raters(tokens.embeddings[0], tokens.text.embeddings[0, :text])
        score = tokens.text_attention[0][:, raters].mean((0, 1)).tolist()
        picks = best(score, keep - number)
        again = [i for i in range(count) if i not in picks]
        centres = [again[i] for i in naive_centres(tokens.hidden[0, again], number, number)]
        assert rows(method.select(tokens).keep) == [sorted(picks + centres)]


def test_an_image_with_no_text_behind_it_is_rated_by_the_last_token() -> None:
    tokens = view([20], [6], tokenprune.method("sparsevlm").needs)
    none = {"mask": torch.zeros(1, 5, dtype=torch.bool), "hidden": tokens.text.hidden,
            "embeddings": tokens.text.embeddings, "attention": tokens.text.attention}  # fmt: skip
    alone = visual_tokens(
        tokens.hidden, keep=[6], text=none, embeddings=tokens.embeddings, text_attention=tokens.text_attention,
        last_row_attention=tokens.last_row_attention,
    )  # fmt: skip
    got = rows(tokenprune.method("sparsevlm", recycle=0.0).select(alone).keep)
    assert got == [best(tokens.last_row_attention[0].mean(0).tolist(), 6)]


def test_options_are_checked() -> None:
    for options in (dict(version=1), dict(recycle=1.5), dict(recycle=-0.1), dict(heads=0), dict(layers=(1, 2))):
        with pytest.raises(OptionError, match="sparsevlm"):
            tokenprune.method("sparsevlm", **options)
