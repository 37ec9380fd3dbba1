# SPDX-License-Identifier: Apache-2.0
"""InfiniPot-V against loops over frames and cells, written from its description."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tokenprune
from policy_views import view_of
from session_oracle import close, played, recorded
from tokenprune.integrations.hf.sessions.policies.base import PolicyView
from zoo import FAMILIES

INFINIPOT = tokenprune.sessions.policy("infinipot_v")


def naive(view: PolicyView, keep: int, tar: float = 0.5, recent: float = 0.25) -> list[list[int]]:
    """Return what stays of each head, by loops."""
    kept = []
    for head in range(view.keys.shape[0]):
        row = min(head, len(view.frame) - 1)
        frame, cell = view.frame[row].tolist(), view.cell[row].tolist()
        frames = sorted(set(view.frame.flatten().tolist()))
        newest = frames[-max(1, int(len(frames) * recent)) :]
        first = keep - round((1 - tar) * keep)
        late = [place for place in range(len(frame)) if frame[place] in newest]
        late = late[len(late) - first :] if len(late) > first else late
        scores = {}
        for place in range(len(frame)):
            if place in late:
                continue
            cosines = [
                torch.cosine_similarity(view.keys[head, place], view.keys[head, other], dim=0).item()
                for other in late
                if cell[other] == cell[place]
            ]
            scores[place] = -sum(cosines) / len(cosines) if cosines else float("inf")
        chosen = late + sorted(scores, key=lambda place: (-scores[place], place))[: first - len(late)]
        norms = view.values[head].norm(dim=-1).tolist()
        others = sorted((p for p in range(len(frame)) if p not in chosen), key=lambda place: (-norms[place], place))
        kept.append(sorted(chosen + others[: keep - len(chosen)]))
    return kept


def chosen(view: PolicyView, keep: int, **options: float) -> list[list[int]]:
    return tokenprune.sessions.policy("infinipot_v", **options).select(view, keep).tolist()


@given(frames=st.integers(2, 9), cells=st.integers(1, 6), share=st.floats(0.1, 0.9), seed=st.integers(0, 5),
       tar=st.sampled_from([0.0, 0.3, 0.5, 1.0]), recent=st.sampled_from([0.1, 0.25, 0.6, 1.0]))  # fmt: skip
def test_it_keeps_what_the_loops_keep(frames, cells, share, seed, tar, recent) -> None:
    view = view_of(frames, cells, seed=seed)
    keep = max(1, int(view.count * share))
    assert chosen(view, keep, tar=tar, recent=recent) == naive(view, keep, tar, recent)


def ragged(seed: int = 0, heads: int = 3) -> PolicyView:
    """Return a view as after a first compression: each head holds other entries, and as many."""
    whole, g = view_of(8, 6, heads=heads, seed=seed), torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randperm(whole.count, generator=g)[:30].sort().values for _ in range(heads)])

    def take(values: torch.Tensor) -> torch.Tensor:
        return values.expand(heads, -1).gather(1, places)

    deep = places[..., None].expand(-1, -1, 8)
    return dataclasses.replace(
        whole, keys=whole.keys.gather(1, deep), values=whole.values.gather(1, deep), frame=take(whole.frame),
        cell=take(whole.cell), index=take(whole.index), position=take(whole.position[0])[None],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_ragged_entries_are_matched_by_their_cells(seed: int) -> None:
    view = ragged(seed)
    assert chosen(view, 17) == naive(view, 17)


def test_the_latest_stay_and_scales_change_nothing() -> None:
    view = view_of(8, 6)
    kept = INFINIPOT.select(view, 30)
    assert all({*range(36, 48)} <= {*row} for row in kept.tolist())
    scaled = dataclasses.replace(view, keys=view.keys * 3, values=view.values * 0.5)
    assert torch.equal(INFINIPOT.select(scaled, 30), kept)


def test_of_equal_frames_the_earlier_stay_and_a_change_is_kept() -> None:
    view, still = view_of(8, 6), torch.eye(8)[:6].expand(2, -1, -1)  # cosines are 1 to the bit
    same = dataclasses.replace(view, keys=still.repeat(1, 8, 1))
    assert chosen(same, 24, tar=1.0) == [[*range(12), *range(36, 48)]] * 2
    keys = same.keys.clone()
    keys[:, 3 * 6 + 2] *= -1  # one cell of an old frame
    assert all(3 * 6 + 2 in row for row in chosen(dataclasses.replace(same, keys=keys), 26))


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_heads_hold_their_own_and_it_equals_one_prefill_under_masks(name: str, build) -> None:
    family = FAMILIES[name]
    made = played(recorded(family, build(family), memory=110, policy="infinipot_v"), asked=True)
    first, *_, last = made.session.held
    assert first.index.shape[0] == 2 and not torch.equal(first.index[0], first.index[1])
    assert not torch.equal(first.index, last.index)
    # Text stays in all heads of all layers.
    for held in (first, last):
        assert torch.equal(held.index[0][held.frame[0] < 0], held.index[1][held.frame[1] < 0])
        assert int((held.frame[0] < 0).sum()) == 9
    silent = played(recorded(family, build(family), memory=110, policy="infinipot_v"))
    found = made.logits()
    assert torch.equal(found, silent.logits())
    assert close(found, made.one_prefill())
    assert (found - made.one_prefill(masked=False)).abs().max() > 0.01
