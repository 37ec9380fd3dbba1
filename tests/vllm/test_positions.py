# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions against a naive computation on the unpruned prompt, for every way to split a prompt."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, field_name, find_runs
from tokenprune.integrations.vllm.worker.position_notes import PositionNotes, wrap_init_v1, wrap_init_v2
from tokenprune.integrations.vllm.worker.positions import (
    DIGITS,
    compute_item_positions,
    compute_prompt_positions,
    decode_columns,
    encode_columns,
    wrap_gather_v1,
    wrap_recompute_v2,
)

COLUMNS = 3 * DIGITS
PAD, STRIDE = 9, 300  # frames are far apart in time: positions above the range of 16-bit floats


def rule(tokens: list[int], features: list[MultiModalFeatureSpec]) -> tuple[torch.Tensor, int]:
    """Text counts on all axes. Each run of placeholders is a video of two rows, whose frames are STRIDE apart."""
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
    result = torch.tensor(positions).T
    return result, int(result.max()) + 1 - len(tokens)


def item(plan: Plan) -> dict[str, Any]:
    return {field_name("video"): MultiModalFieldElem(data=plan.encode(), field=MultiModalBatchedField())}


class Known:
    """Positions that both runners hold for three requests. The second request is read.

    The hooks of both runners call the model, as in vLLM when a request arrives.
    """

    def __init__(self, tokens: list[int], features: list[MultiModalFeatureSpec]) -> None:
        self.model: Any = SimpleNamespace(tokenprune_axes=3, tokenprune_notes=PositionNotes())
        self.provisional, self.delta, notes = compute_prompt_positions(rule, tokens, features)
        record = self.model.tokenprune_notes.record
        for hook in (
            wrap_init_v1(lambda runner, request: record(notes)),
            wrap_init_v2(lambda state, row, model: record(notes)),
        ):
            runner = SimpleNamespace(get_model=lambda: self.model, requests={"a": None, "b": None, 1: None})
            arguments = (
                (runner, SimpleNamespace(req_id="b")) if hook.__name__.startswith("_init") else (None, 1, self.model)
            )
            hook(*arguments)
        self.reset()

    def reset(self) -> None:
        """Reset all positions that were written."""
        positions = self.provisional
        self.v1 = torch.zeros_like(positions)
        self.v2 = torch.zeros(9, positions.shape[1] + 2, dtype=torch.int32)
        self.v2[3:6, :-2] = positions

    def write_rows(
        self, features: list[Any], rows: list[torch.Tensor], computed: int, count: int
    ) -> list[torch.Tensor]:
        """Write the positions of `rows` with both runners, and return the results. vLLM 0.33 rebuilds items first."""
        features = [dataclasses.replace(feature, data=None) for feature in features]
        v1_rows, v2_rows = (
            self._with_v1(features, rows, computed, count),
            self._with_v2(features, rows, computed, count),
        )
        assert len(v1_rows) == len(v2_rows) and all(map(torch.equal, v1_rows, v2_rows))
        return v1_rows

    def _with_v1(self, features: list[Any], rows: list[torch.Tensor], computed: int, count: int) -> list[torch.Tensor]:
        """Use V1, which only has positions of the tokens that it reads in this step."""
        now = torch.zeros(3, count + 1, dtype=torch.long)
        now[:, 1:] = self.provisional[:, computed : computed + count]
        requests = {"a": ([], 7), "b": (features, computed)}
        runner = SimpleNamespace(
            get_model=lambda: self.model, input_batch=SimpleNamespace(req_ids=["a", "b"]),
            requests={
                name: SimpleNamespace(mm_features=item_features, num_computed_tokens=before)
                for name, (item_features, before) in requests.items()
            },
            mrope_positions=SimpleNamespace(gpu=now),
        )  # fmt: skip
        step = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": count})
        placed, is_row = wrap_gather_v1(lambda *_: (rows, "is_row"))(runner, step)
        assert is_row == "is_row" and not now[:, 0].any()
        self.v1[:, computed : computed + count] = now[:, 1:]
        return list(placed)

    def _with_v2(self, features: list[Any], rows: list[torch.Tensor], computed: int, count: int) -> list[torch.Tensor]:
        batch = SimpleNamespace(
            req_ids=["a", "b"], idx_mapping_np=np.array([2, 1]), num_scheduled_tokens=np.array([1, count]),
            num_computed_prefill_tokens_np=np.array([7, computed]),
        )  # fmt: skip
        pruner = SimpleNamespace(
            model=self.model,
            encoder_cache=SimpleNamespace(mm_features={"a": [], "b": features}),
            rope_state=SimpleNamespace(num_dims=3, prefill_positions=SimpleNamespace(gpu=self.v2)),
        )
        placed: list[torch.Tensor] = wrap_recompute_v2(None)(pruner, rows, batch, None)
        return placed


@pytest.mark.parametrize("keep", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("per_run", [False, True])
def test_every_split(keep: float, first: int, dtype: torch.dtype, per_run: bool) -> None:
    generator = torch.Generator().manual_seed(first)
    # A run; two runs with text before, between and after them; a run.
    texts = ["#" * 8, "ab########c########d", "#" * 12]
    tokens: list[int] = list(range(20, 20 + first))
    full, kept_places, features, rows = list(tokens), list(range(first)), [], []
    for text in texts:
        plan = Plan.build(
            parse_setting({"method": "divprune", "keep": keep}),
            find_runs([PAD if c == "#" else ord(c) for c in text], [c == "#" for c in text]),
            per_run,
        )
        if plan.reduces:
            begin, end = plan.span
            pads = torch.tensor([token_index for token_index, embed in enumerate(plan.is_embed) if embed])
            dropped: set[int] = set()
            for segment, kept in zip(pads.split(plan.counts), plan.keep, strict=True):
                dropped |= set(segment[torch.randperm(len(segment), generator=generator)[kept:]].tolist())
            kept_indices = [token_index for token_index in range(begin, end) if token_index not in dropped]
            # Text between runs with separate budgets is kept.
            row_indices = (
                [token_index for token_index in kept_indices if plan.is_embed[token_index]] if per_run else kept_indices
            )
            prompt_tokens = plan.reduced()
        else:
            row_indices, prompt_tokens = (
                [token_index for token_index, embed in enumerate(plan.is_embed) if embed],
                plan.tokens,
            )
        embeds = torch.tensor([token == PAD for token in prompt_tokens])
        features.append(
            MultiModalFeatureSpec(item(plan), "video", "", PlaceholderRange(len(tokens), len(prompt_tokens), embeds))
        )
        columns = torch.zeros(len(row_indices), COLUMNS, dtype=dtype)
        if plan.reduces:
            columns = encode_columns(compute_item_positions(rule, plan, item(plan), "video")[:, row_indices], dtype)
        rows.append(torch.cat([torch.zeros(len(row_indices), 5, dtype=dtype), columns], 1))
        if plan.reduces:
            kept_places += [len(full) + p for p in [*range(begin), *kept_indices, *range(end, plan.length)]]
        else:
            kept_places += [len(full) + p for p in range(plan.length)]
        full += [*plan.tokens, 50, 51]
        kept_places += [len(full) - 2, len(full) - 1]
        tokens += [*prompt_tokens, 50, 51]

    full_positions, _ = rule(full, [])
    expected = full_positions[:, kept_places]
    known = Known(tokens, features)
    provisional, delta = known.provisional, known.delta
    assert delta == int(full_positions.max()) + 1 - len(tokens)
    text = torch.tensor(tokens) != PAD
    assert torch.equal(provisional[:, text], expected[:, text])  # no value depends on the kept tokens

    is_row = ~text
    all_rows = torch.cat(rows)
    owner = torch.cat([torch.full((len(piece),), index) for index, piece in enumerate(rows)])
    assert int(is_row.sum()) == len(all_rows)
    for size in range(1, len(tokens) + 1):
        for skipped in (0, size // 2, len(tokens) // 2):  # a hit of the prefix cache
            known.reset()
            for computed in range(skipped, len(tokens), size):
                before, after = int(is_row[:computed].sum()), int(is_row[: computed + size].sum())
                chunk, chunk_owner = all_rows[before:after], owner[before:after]
                pieces = [chunk[chunk_owner == index] for index in chunk_owner.unique()]
                cut = known.write_rows(features, pieces, computed, min(size, len(tokens) - computed))
                assert [len(piece) for piece in cut] == [len(piece) for piece in pieces]
                assert all(piece.shape[1] == 5 for piece in cut)
            for of_runner in (known.v1[:, : len(tokens)], known.v2[3:6, : len(tokens)]):
                assert torch.equal(of_runner[:, skipped:].long(), expected[:, skipped:])
            assert not known.v2[:3].any() and not known.v2[6:].any()


def one_item() -> tuple[list[int], MultiModalFeatureSpec, torch.Tensor]:
    """Return a prompt of one reduced video, its item, and the item's rows."""
    plan = Plan.build(parse_setting({"method": "divprune", "keep": 0.5}), find_runs([PAD] * 8), False)
    feature = MultiModalFeatureSpec(item(plan), "video", "", PlaceholderRange(1, plan.rows))
    return [20, *plan.reduced(), 50], feature, torch.zeros(plan.rows, COLUMNS + 5)


def test_item_without_note_raises() -> None:
    tokens, feature, rows = one_item()
    known = Known(tokens, [feature])
    known.model.tokenprune_notes = PositionNotes()
    for write in (known._with_v1, known._with_v2):
        with pytest.raises(UnsupportedSetupError, match="no positions for the item at token 1 of a request"):
            write([feature], [rows], 0, len(tokens))
    known = Known(tokens, [feature])
    moved = dataclasses.replace(feature, mm_position=PlaceholderRange(2, len(rows)))
    with pytest.raises(UnsupportedSetupError, match="at token 2"):
        known.write_rows([moved], [rows], 0, len(tokens))


def test_notes_of_finished_requests_are_dropped() -> None:
    notes, live = PositionNotes(), {"a", "b"}
    for request in ("a", "b"):
        with notes.recording(request, live):
            notes.record({0: None})
    live = {"b", "c"}
    with notes.recording("c", live):
        notes.record({4: None})
    notes.record({8: None})  # outside of an arriving request
    assert notes._of_request == {"b": {0: None}, "c": {4: None}}
    with notes.recording("b"):
        pass  # the model was not called, so the old notes do not belong to this prompt
    assert not notes.get("b")


def test_digits_are_exact() -> None:
    positions = torch.randint(0, 256**2, (3, 5000), generator=torch.Generator().manual_seed(0))
    positions[:, :4] = torch.tensor([0, 255, 256, 65535])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        columns = encode_columns(positions, dtype)
        assert columns.shape == (5000, COLUMNS)
        assert torch.equal(decode_columns(columns), positions)


def compute_by_loop(rule: Any, plan: Plan) -> torch.Tensor:
    """Compute `compute_item_positions` token by token."""
    known, _ = rule(plan.tokens, [])
    first, end = plan.span
    start, columns = first, []
    for index in range(plan.length):
        inside = plan.per_run and first <= index < end
        if inside and not (index > first and plan.is_embed[index] and plan.is_embed[index - 1]):
            start = index
        begin = start if inside else first
        base = 0 if begin == 0 else int(known[:, begin - 1].max()) + 1
        columns.append(known[:, index] - base)
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("per_run", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_item_positions_match_a_loop_over_tokens(seed: int, per_run: bool) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice([0, 1, 1, 2, 5]), *(chance.choice([1, 1, 2, 4, 9]) for _ in range(chance.randrange(6)))]
    text = "".join("ab#"[2 * (index % 2)] * length for index, length in enumerate(lengths)) or "#"
    text += "" if "#" in text else "#"
    embeds = [c == "#" for c in text]
    plan = Plan.build(
        parse_setting({"method": "divprune", "keep": 0.5}),
        find_runs([PAD if c == "#" else ord(c) for c in text], embeds),
        per_run,
    )
    assert torch.equal(compute_item_positions(rule, plan, item(plan), "video"), compute_by_loop(rule, plan))


class Operations(TorchDispatchMode):
    """Count tensor operations within the context."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_number_of_operations_does_not_depend_on_length() -> None:
    def plan(frames: int) -> Plan:
        text = ("a" + 4 * "#") * frames
        tokens = [PAD if c == "#" else ord(c) for c in text]
        return Plan.build(
            parse_setting({"method": "divprune", "keep": 0.5}), find_runs(tokens, [c == "#" for c in text]), True
        )

    counts = []
    for frames in (2, 50):
        item_plan = plan(frames)
        known = rule(item_plan.tokens, [])
        with Operations() as operations:
            compute_item_positions(lambda *_: known, item_plan, item(item_plan), "video")  # noqa: B023
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0
