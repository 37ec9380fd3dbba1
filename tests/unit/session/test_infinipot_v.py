# SPDX-License-Identifier: Apache-2.0
"""InfiniPot-V equals loops over frames and cells, written from its description."""

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


def keep_by_loops(view: PolicyView, keep: int, tar: float = 0.5, recent: float = 0.25) -> list[list[int]]:
    """Return the kept indices of each head, computed by loops."""
    kept = []
    for head in range(view.keys.shape[0]):
        row = min(head, len(view.frame) - 1)
        frame, cell = view.frame[row].tolist(), view.cell[row].tolist()
        frames = sorted(set(view.frame.flatten().tolist()))
        newest = frames[-max(1, int(len(frames) * recent)) :]
        num_temporal = keep - round((1 - tar) * keep)
        recent_indices = [index for index in range(len(frame)) if frame[index] in newest]
        recent_indices = (
            recent_indices[len(recent_indices) - num_temporal :]
            if len(recent_indices) > num_temporal
            else recent_indices
        )
        scores = {}
        for index in range(len(frame)):
            if index in recent_indices:
                continue
            cosines = [
                torch.cosine_similarity(view.keys[head, index], view.keys[head, other], dim=0).item()
                for other in recent_indices
                if cell[other] == cell[index]
            ]
            scores[index] = -sum(cosines) / len(cosines) if cosines else float("inf")
        temporal = (
            recent_indices
            + sorted(scores, key=lambda index: (-scores[index], index))[: num_temporal - len(recent_indices)]
        )
        norms = view.values[head].norm(dim=-1).tolist()
        by_norm = sorted((p for p in range(len(frame)) if p not in temporal), key=lambda index: (-norms[index], index))
        kept.append(sorted(temporal + by_norm[: keep - len(temporal)]))
    return kept


def select(view: PolicyView, keep: int, **options: float) -> list[list[int]]:
    return tokenprune.sessions.policy("infinipot_v", **options).select(view, keep).tolist()


@given(frames=st.integers(2, 9), cells=st.integers(1, 6), share=st.floats(0.1, 0.9), seed=st.integers(0, 5),
       tar=st.sampled_from([0.0, 0.3, 0.5, 1.0]), recent=st.sampled_from([0.1, 0.25, 0.6, 1.0]))  # fmt: skip
def test_equals_the_loops(frames, cells, share, seed, tar, recent) -> None:
    view = view_of(frames, cells, seed=seed)
    keep = max(1, int(view.count * share))
    assert select(view, keep, tar=tar, recent=recent) == keep_by_loops(view, keep, tar, recent)


def make_ragged_view(seed: int = 0, heads: int = 3) -> PolicyView:
    """Return a view after a first compression: heads hold different entries of equal number."""
    view, g = view_of(8, 6, heads=heads, seed=seed), torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(view.count, generator=g)[:30].sort().values for _ in range(heads)])

    def take(values: torch.Tensor) -> torch.Tensor:
        return values.expand(heads, -1).gather(1, indices)

    expanded = indices[..., None].expand(-1, -1, 8)
    return dataclasses.replace(
        view, keys=view.keys.gather(1, expanded), values=view.values.gather(1, expanded), frame=take(view.frame),
        cell=take(view.cell), index=take(view.index), position=take(view.position[0])[None],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_ragged_entries_are_matched_by_their_cells(seed: int) -> None:
    view = make_ragged_view(seed)
    assert select(view, 17) == keep_by_loops(view, 17)


def test_the_latest_stay_and_scales_change_nothing() -> None:
    view = view_of(8, 6)
    kept = INFINIPOT.select(view, 30)
    assert all({*range(36, 48)} <= {*row} for row in kept.tolist())
    scaled = dataclasses.replace(view, keys=view.keys * 3, values=view.values * 0.5)
    assert torch.equal(INFINIPOT.select(scaled, 30), kept)


def test_of_equal_frames_the_earlier_stay_and_a_change_is_kept() -> None:
    view, static_keys = view_of(8, 6), torch.eye(8)[:6].expand(2, -1, -1)  # cosines are exactly 1
    same = dataclasses.replace(view, keys=static_keys.repeat(1, 8, 1))
    assert select(same, 24, tar=1.0) == [[*range(12), *range(36, 48)]] * 2
    keys = same.keys.clone()
    keys[:, 3 * 6 + 2] *= -1  # a cell of an old frame
    assert all(3 * 6 + 2 in row for row in select(dataclasses.replace(same, keys=keys), 26))


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_heads_hold_their_own_and_it_equals_one_prefill_under_masks(name: str, build) -> None:
    family = FAMILIES[name]
    recording = played(recorded(family, build(family), memory=110, policy="infinipot_v"), asked=True)
    first, *_, last = recording.session.held
    assert first.index.shape[0] == 2 and not torch.equal(first.index[0], first.index[1])
    assert not torch.equal(first.index, last.index)
    # Every head of every layer keeps the text.
    for held in (first, last):
        assert torch.equal(held.index[0][held.frame[0] < 0], held.index[1][held.frame[1] < 0])
        assert int((held.frame[0] < 0).sum()) == 9
    silent = played(recorded(family, build(family), memory=110, policy="infinipot_v"))
    logits = recording.logits()
    assert torch.equal(logits, silent.logits())
    assert close(logits, recording.one_prefill())
    assert (logits - recording.one_prefill(masked=False)).abs().max() > 0.01
