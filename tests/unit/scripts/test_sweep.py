# SPDX-License-Identifier: Apache-2.0
"""Test `dev/sweep.py`: its committed record of every method on every family, and a part of the sweep."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
import torch

import tokenprune
from families import FAMILIES
from selection import REASONS
from tokenprune.models.families import SUPPORTED
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables
from zoo import FAMILIES as ZOO

# patch() cannot know these refusals, because other prompts run: an image of many tiles has too few tokens per tile for
# the tiny tower's two blocks, and only videos are refused.
EXPECTED_IN_CALL = {
    ("llava_next", "tome", "two images per row"): "a block merges at most half of its tokens",
    ("llava_onevision", "tome", "videos"): "video features",
    ("llava_onevision", "saint", "videos"): "video features",
}


@pytest.fixture(scope="module")
def sweep(script: Any) -> ModuleType:
    return script("sweep")


def list_tower_methods() -> list[str]:
    """Return one method per set of observables of the vision tower."""
    by_needs: dict[frozenset[str], str] = {}
    for name in tokenprune.available_methods():
        observables = select_observables(tokenprune.method(name).needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)
        if observables:
            by_needs.setdefault(frozenset(observable.name for observable in observables), name)
    return sorted(by_needs.values())


def check(outcomes: list[Any], sweep: ModuleType) -> None:
    """Check that no outcome is a raw error, and that each refusal in a call is expected."""
    bad = [outcome for outcome in outcomes if outcome.outcome in (sweep.RAW, sweep.IN_CALL)]
    assert {(outcome.family, outcome.method, outcome.input) for outcome in bad} <= EXPECTED_IN_CALL.keys(), bad
    assert not [outcome for outcome in bad if outcome.outcome == sweep.RAW]


def test_the_record_has_no_raw_error(sweep: ModuleType) -> None:
    record = json.loads(sweep.RECORD.read_text(encoding="utf-8"))
    assert record["counts"][sweep.RAW] == 0 and record[sweep.RAW] == []
    refused = {(row["family"], row["method"], row["input"]): row["reason"] for row in record[sweep.IN_CALL]}
    assert refused.keys() == EXPECTED_IN_CALL.keys(), "a refusal that patch() could know belongs into patch()"
    assert all(EXPECTED_IN_CALL[key] in reason for key, reason in refused.items())
    assert record["counts"][sweep.IN_CALL] == len(refused)
    assert record["families"] >= 70 and record["methods"] >= 70 and record["counts"][sweep.OK] > 7000


def test_every_method_on_glm4v(sweep: ModuleType) -> None:
    """The tower of GLM-4V merges patches, so its output has fewer rows than its blocks."""
    outcomes = list(sweep.sweep(["glm4v"], tokenprune.available_methods()))
    check(outcomes, sweep)
    ran = {(outcome.method, outcome.input) for outcome in outcomes if outcome.outcome == sweep.OK}
    assert {(method, kind) for method in ("vispruner", "sinkpruner", "mmtok") for kind in sweep.INPUTS} <= ran


@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES.items() if SUPPORTED[family.kind].patches and name not in ZOO]
)
def test_methods_that_read_the_tower(name: str, sweep: ModuleType) -> None:
    if name in REASONS:
        pytest.skip(REASONS[name])
    outcomes = list(sweep.sweep([name], list_tower_methods()))
    check(outcomes, sweep)
    assert any(outcome.outcome == sweep.OK for outcome in outcomes)


@torch.no_grad()
def test_a_raw_error_is_recorded_as_such(sweep: ModuleType, build: Any) -> None:
    class Broken(tokenprune.Pruner):
        name = "broken"

        def score(self, tokens: Any) -> torch.Tensor:
            raise RuntimeError("sizes do not match")

    family = FAMILIES["llava"]
    model = build(family)
    inputs = sweep.runnable_inputs(family, model)
    assert list(inputs) == ["image", "two images per row"]  # LLaVA does not support videos
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenprune, "method", lambda name: Broken())
        outcomes = list(sweep.sweep_method("llava", model, inputs, "broken"))
    assert [outcome.outcome for outcome in outcomes] == [sweep.RAW] * 2
    assert outcomes[0].reason == "RuntimeError: sizes do not match"
    record = sweep.get_record(outcomes)
    assert record["counts"][sweep.RAW] == len(record[sweep.RAW]) == 2
    (refused,) = sweep.sweep_method("llava", model, inputs, "vcast")
    assert refused.outcome == sweep.AT_PATCH and not tokenprune.is_patched(model)
