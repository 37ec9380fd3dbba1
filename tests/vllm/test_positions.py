# SPDX-License-Identifier: Apache-2.0
"""Positions of M-RoPE against a naive account of the full prompt, at every place where a prompt can be split."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange

from tokenprune.integrations.vllm.setting.plan import Plan, field_name, runs_of
from tokenprune.integrations.vllm.setting.settings import ServedSetting
from tokenprune.integrations.vllm.worker import positions
from tokenprune.integrations.vllm.worker.positions import (
    COLUMNS,
    WHOLE,
    from_columns,
    of_prompt,
    place,
    to_columns,
    within_item,
)
from tokenprune.methods.pre_llm.divprune import DivPrune

PAD, STRIDE = 9, 300  # a video's frames are far apart in time: positions beyond what 16-bit floats count


def rule(tokens: list[int], features: list[MultiModalFeatureSpec]) -> tuple[torch.Tensor, int]:
    """Text counts on all axes; each run of placeholders is a video of two rows, its frames STRIDE apart."""
    positions: list[list[int]] = []
    run = 0
    following = 0
    for token in tokens:
        if token != PAD:
            run, following = 0, max([-1, *map(max, positions)]) + 1
            positions.append([following] * 3)
            continue
        if run == 0:
            following = max([-1, *map(max, positions)]) + 1
        positions.append([following + run // 4 * STRIDE, following + run % 4 // 2, following + run % 2])
        run += 1
    made = torch.tensor(positions).T
    return made, int(made.max()) + 1 - len(tokens)


def item(plan: Plan) -> dict[str, Any]:
    return {field_name("video"): MultiModalFieldElem(data=plan.encode(), field=MultiModalBatchedField())}


@pytest.mark.parametrize("keep", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("per_run", [False, True])
def test_every_split(keep: float, first: int, dtype: torch.dtype, per_run: bool) -> None:
    generator = torch.Generator().manual_seed(first)
    # A run; two runs with text between them, and text before and behind; a run.
    texts = ["#" * 8, "ab########c########d", "#" * 12]
    tokens: list[int] = list(range(20, 20 + first))
    full, kept_places, features, rows = list(tokens), list(range(first)), [], []
    for text in texts:
        plan = Plan.make(
            ServedSetting(DivPrune(), keep),
            runs_of([PAD if c == "#" else ord(c) for c in text], [c == "#" for c in text]),
            per_run,
        )
        if plan.reduces:
            begin, end = plan.span
            pads = torch.tensor([place for place, embed in enumerate(plan.is_embed) if embed])
            gone: set[int] = set()
            for segment, kept in zip(pads.split(plan.counts), plan.keep, strict=True):
                gone |= set(segment[torch.randperm(len(segment), generator=generator)[kept:]].tolist())
            left = [place for place in range(begin, end) if place not in gone]
            # Between runs with a budget each, text stays text.
            stay = [place for place in left if plan.is_embed[place]] if per_run else left
            written = plan.reduced()
        else:
            stay, written = [place for place, embed in enumerate(plan.is_embed) if embed], plan.tokens
        features.append(MultiModalFeatureSpec(item(plan), "video", "", PlaceholderRange(len(tokens), len(written))))
        columns = torch.full((len(stay), COLUMNS), WHOLE, dtype=dtype)
        if plan.reduces:
            columns = to_columns(within_item(rule, plan, item(plan), "video")[:, stay], dtype)
        rows.append(torch.cat([torch.zeros(len(stay), 5, dtype=dtype), columns], 1))
        if plan.reduces:
            kept_places += [len(full) + p for p in [*range(begin), *left, *range(end, plan.length)]]
        else:
            kept_places += [len(full) + p for p in range(plan.length)]
        full += [*plan.tokens, 50, 51]
        kept_places += [len(full) - 2, len(full) - 1]
        tokens += [*written, 50, 51]

    whole, _ = rule(full, [])
    wanted = whole[:, kept_places]
    provisional, delta = of_prompt(rule, tokens, features)
    assert delta == int(whole.max()) + 1 - len(tokens)
    text = torch.tensor(tokens) != PAD
    assert torch.equal(provisional[:, text], wanted[:, text])  # nothing depends on which tokens were kept

    is_row = ~text
    every = torch.cat(rows)
    owner = torch.cat([torch.full((len(one),), index) for index, one in enumerate(rows)])
    assert int(is_row.sum()) == len(every)
    for size in range(1, len(tokens) + 1):
        for skipped in (0, size // 2, len(tokens) // 2):  # a hit of the prefix cache
            positions = provisional.clone()
            for computed in range(skipped, len(tokens), size):
                before, after = int(is_row[:computed].sum()), int(is_row[: computed + size].sum())
                chunk, of = every[before:after], owner[before:after]
                pieces = [chunk[of == index] for index in of.unique()]
                cut, positions, told = place(tokens, pieces, positions, computed, [PAD])
                assert [len(one) for one in cut] == [len(one) for one in pieces]
                assert all(one.shape[1] == 5 for one in cut) and told == delta
            assert torch.equal(positions[:, skipped:], wanted[:, skipped:])


def test_digits_are_exact() -> None:
    positions = torch.randint(0, 256**2, (3, 5000), generator=torch.Generator().manual_seed(0))
    positions[:, :4] = torch.tensor([0, 255, 256, 65535])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        columns = to_columns(positions, dtype)
        assert columns.shape == (5000, COLUMNS)
        assert torch.equal(from_columns(columns), positions)


def by_loop(rule: Any, plan: Plan) -> torch.Tensor:
    """`within_item`, token by token."""
    known, _ = rule(plan.tokens, [])
    first, end = plan.span
    start, found = first, []
    for at in range(plan.length):
        inside = plan.per_run and first <= at < end
        if inside and not (at > first and plan.is_embed[at] and plan.is_embed[at - 1]):
            start = at
        begin = start if inside else first
        base = 0 if begin == 0 else int(known[:, begin - 1].max()) + 1
        found.append(known[:, at] - base)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("per_run", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_runs_stand_where_a_walk_over_the_tokens_puts_them(seed: int, per_run: bool) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice([0, 1, 1, 2, 5]), *(chance.choice([1, 1, 2, 4, 9]) for _ in range(chance.randrange(6)))]
    text = "".join("ab#"[2 * (index % 2)] * length for index, length in enumerate(lengths)) or "#"
    text += "" if "#" in text else "#"
    embeds = [c == "#" for c in text]
    plan = Plan.make(
        ServedSetting(DivPrune(), 0.5), runs_of([PAD if c == "#" else ord(c) for c in text], embeds), per_run
    )
    assert torch.equal(within_item(rule, plan, item(plan), "video"), by_loop(rule, plan))


class Operations(TorchDispatchMode):
    """Counts operations on tensors within."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_walk_of_a_long_video_takes_as_many_operations_as_of_a_short_one() -> None:
    def plan(frames: int) -> Plan:
        text = ("a" + 4 * "#") * frames
        tokens = [PAD if c == "#" else ord(c) for c in text]
        return Plan.make(ServedSetting(DivPrune(), 0.5), runs_of(tokens, [c == "#" for c in text]), True)

    counts = []
    for frames in (2, 50):
        one = plan(frames)
        known = rule(one.tokens, [])
        with Operations() as operations:
            within_item(lambda *_: known, one, item(one), "video")  # noqa: B023
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0


def test_a_step_that_places_nothing_looks_at_no_position() -> None:
    plan = Plan.make(ServedSetting(DivPrune(), 0.5), runs_of([PAD] * 8), False)
    tokens = [*range(20, 25), *plan.reduced(), 50, 51]
    features = [MultiModalFeatureSpec(item(plan), "video", "", PlaceholderRange(5, plan.rows))]
    known, delta = of_prompt(rule, tokens, features)
    with Operations() as operations:
        assert place(tokens, [], known, 11, [PAD]) == ([], known, delta)
    assert operations.count == 0
    assert place(tokens, [], known.clone(), 11, [PAD])[2] == delta  # of a runner that copies them


@pytest.mark.only_v1("it asks for every request in each step")
def test_a_step_of_decoding_looks_at_no_position(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start("qwen2_5_vl", {"method": "divprune", "keep": 0.25})
    original, counts = positions.place, list[int]()

    def spy(tokens: Any, embeddings: Any, *rest: Any) -> Any:
        with Operations() as operations:
            made = original(tokens, embeddings, *rest)
        if not embeddings:
            counts.append(operations.count)
        return made

    monkeypatch.setattr(positions, "place", spy)
    checkpoint = engine.checkpoint
    engine.generate([engine.request(checkpoint.prompt(1), checkpoint.images(1))])
    assert counts and not any(counts)
