# SPDX-License-Identifier: Apache-2.0
"""Worker: the three ways in which the vision tower treats the items of a call: it is left with fewer tokens, merged or
dropped, it is read, or runs as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.shared.checks import reads_tower
from tokenprune.integrations.shared.towers.tower_scores import BlockScores, TowerValues
from tokenprune.integrations.vllm.settings.items import get_method
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.worker.tower import TowerReader
from tokenprune.integrations.vllm.worker.tower_packed import ServedPackedTower, is_dropping
from tokenprune.integrations.vllm.worker.tower_rows import ServedRowTower, is_merging
from tokenprune.selection.method import Pruner
from tokenprune.selection.sites.encoder import TowerMethod


@dataclass(frozen=True)
class TowerResult:
    """The tower's contribution to an item beside its features; both None: the method sees the features alone.

    kept: bool `[n]`, the rows that stay, if they were chosen in the tower or before it. encoded: observables of the
    tower, for a method that reads them.
    """

    kept: Tensor | None = None
    encoded: TowerValues | None = None


class TowerTreatment(Protocol):
    """Acts on the vision tower during one call of the model's `embed_multimodal`."""

    def activate(self) -> AbstractContextManager[Any]:
        """Return the context in which the model encodes."""

    def get_results(self, features: Sequence[Tensor]) -> Iterator[TowerResult]:
        """Yield the result of each item. features: the model's, one entry for each item."""


@dataclass(frozen=True)
class PlainTower:
    """Leaves the tower alone."""

    plans: Sequence[Plan]

    def activate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def get_results(self, features: Sequence[Tensor]) -> Iterator[TowerResult]:
        return (TowerResult() for _ in self.plans)


@dataclass(frozen=True)
class ReducedTower:
    """Has tokens merge, or units leave, in the tower, as `part` does within its context."""

    plans: Sequence[Plan]
    part: ServedRowTower | ServedPackedTower

    def activate(self) -> AbstractContextManager[Any]:
        return self.part

    def get_results(self, features: Sequence[Tensor]) -> Iterator[TowerResult]:
        """Yield the rows that stay; raises PlaceholderMismatchError if the prompt has room for another number."""
        assert self.part.kept is not None  # the tower ran
        wanted = sum(sum(plan.keep) for plan in self.plans)
        if self.part.num_kept != wanted:
            raise PlaceholderMismatchError(f"the tower left {self.part.num_kept} tokens where the prompt has {wanted}")
        pieces = self.part.kept.split([rows.numel() // rows.shape[-1] for rows in features])
        for piece, rows in zip(pieces, features, strict=True):
            yield TowerResult(kept=piece.to(rows.device))


class ReadTower:
    """Reads observables of the tower for the plans whose methods need them. It runs as it is.

    kwargs: arguments of `embed_multimodal`.
    """

    def __init__(self, reader: TowerReader, plans: Sequence[Plan], kwargs: Mapping[str, Any], modality: str) -> None:
        self.reader, self.plans, self.kwargs, self.modality = reader, plans, kwargs, modality
        self._methods = [_reading_method(plan) for plan in plans]
        self._seen: BlockScores = {}

    @contextmanager
    def activate(self) -> Iterator[None]:
        methods = [method for method in self._methods if method is not None]
        with self.reader.observe(methods, self.kwargs, self.modality) as self._seen:
            yield

    def get_results(self, features: Sequence[Tensor]) -> Iterator[TowerResult]:
        for index, method in enumerate(self._methods):
            if method is None:
                yield TowerResult()
            else:
                encoded = self.reader.get_values(method, self._seen, index, features, self.kwargs, self.modality)
                yield TowerResult(encoded=encoded)


def _reading_method(plan: Plan) -> Pruner | None:
    """Return the method of a plan that reads the tower; None if it reads nothing there."""
    method = plan.setting.method
    if not plan.reduces or not reads_tower(method):
        return None
    assert isinstance(method, Pruner)
    return method


def create_tower_treatment(
    model: Any, plans: Sequence[Plan], kwargs: Mapping[str, Any], modality: str
) -> TowerTreatment:
    """Return the reducer for plans that are treated alike in the tower of vLLM's `model` (see `stretches`).

    kwargs: arguments of `embed_multimodal`.
    """
    if plans and (is_merging(plans[0]) or is_dropping(plans[0])):
        method = plans[0].setting.method if is_merging(plans[0]) else get_method(plans[0].setting)
        assert isinstance(method, TowerMethod)
        if model.tokenprune_family.tower_rows == "all images":
            return ReducedTower(plans, ServedPackedTower(model, method, plans))
        return ReducedTower(plans, ServedRowTower(model, method, plans, kwargs))
    if any(_reading_method(plan) for plan in plans):
        return ReadTower(model.tokenprune_tower, plans, kwargs, modality)
    return PlainTower(plans)
