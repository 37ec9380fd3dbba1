# SPDX-License-Identifier: Apache-2.0
"""Read the arguments of a `Budget` from a JSON object, and write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from tokenprune.budgets.by_age import Ages
from tokenprune.budgets.checks import TARGETS, check_one_target
from tokenprune.budgets.over_layers import CostShare
from tokenprune.budgets.video import VideoBudget
from tokenprune.errors import BudgetError

_KEYS = (*TARGETS, "age", "step", "fps", "frame_weights")


class JsonBudget(Protocol):
    """Part of a `Budget` that is written to JSON."""

    @property
    def target(self) -> str: ...

    @property
    def amount(self) -> Any: ...

    @property
    def video(self) -> VideoBudget | None: ...

    @property
    def ages(self) -> Ages | None: ...


def read_arguments(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Budget` for a JSON object. Raise BudgetError if it is invalid."""
    if unknown := sorted(set(value) - {*_KEYS}):
        raise BudgetError(
            f"keep has no key {', '.join(unknown)}. Pass a number, or an object with one of {', '.join(TARGETS[1:])}."
        )
    fields = {name: field for name, field in value.items() if field is not None or name == "step"}
    check_one_target([name for name in TARGETS if name in fields])
    costs = [CostShare(name, fields[name]) for name in ("kv_share", "flops_share") if name in fields]
    video = {name: fields[name] for name in ("per_second", "fps", "frames", "frame_weights") if name in fields}
    has_ages = bool({"age", "step"} & fields.keys())
    return {name: fields[name] for name in TARGETS[:4] if name in fields} | {
        "cost": costs[0] if costs else None,
        "video": VideoBudget(**video) if video else None,
        "ages": Ages(cast(Any, fields.get("age")), fields.get("step", 1)) if has_ages else None,
    }


def write_object(budget: JsonBudget) -> dict[str, Any]:
    """Return the JSON object of a budget."""
    value = {budget.target: list(budget.amount) if budget.target == "frames" else budget.amount}
    if budget.video is not None and budget.video.fps is not None:
        value["fps"] = budget.video.fps
    if budget.video is not None and budget.video.frame_weights is not None:
        value["frame_weights"] = list(budget.video.frame_weights)
    if budget.ages is not None:
        value |= {"age": [list(tier) for tier in budget.ages.tiers], "step": budget.ages.step}
    return value
