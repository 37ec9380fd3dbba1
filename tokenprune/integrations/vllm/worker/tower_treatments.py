# SPDX-License-Identifier: Apache-2.0
"""Worker: the three treatments of a call's items in the vision tower: reduce their tokens, read values, or neither."""

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
    """Result of the tower for an item, besides its features. If both are None, the method sees only the features.

    Attributes:
        kept: Mask of the kept rows, shape (tokens,), bool, if they were chosen in the tower or before it.
        encoded: Values of the tower, for methods that read them.
    """

    kept: Tensor | None = None
    encoded: TowerValues | None = None


class TowerTreatment(Protocol):
    """Acts on the vision tower during one call of the model's `embed_multimodal`."""

    def activate(self) -> AbstractContextManager[Any]:
        """Return the context in which the model encodes."""

    def get_results(self, features: Sequence[Tensor]) -> Iterator[TowerResult]:
        """Yield the result of each item, given the model's features, one entry per item."""


@dataclass(frozen=True)
class PlainTower:
    """Does not change or read the tower."""

    plans: Sequence[Plan]

    def activate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def get_results(self, features: Sequence[Tensor]) -> Iterator[TowerResult]:
        return (TowerResult() for _ in self.plans)


@dataclass(frozen=True)
class ReducedTower:
    """Merges or drops units in the tower, while `part` is attached."""

    plans: Sequence[Plan]
    part: ServedRowTower | ServedPackedTower

    def activate(self) -> AbstractContextManager[Any]:
        return self.part

    def get_results(self, features: Sequence[Tensor]) -> Iterator[TowerResult]:
        """Yield the mask of kept rows of each item.

        Raises:
            PlaceholderMismatchError: If the number of kept rows differs from the number of placeholders in the prompt.
        """
        assert self.part.kept is not None  # the tower ran
        expected = sum(sum(plan.keep) for plan in self.plans)
        if self.part.num_kept != expected:
            raise PlaceholderMismatchError(
                f"The tower kept {self.part.num_kept} tokens, but the prompt has {expected} placeholders."
            )
        pieces = self.part.kept.split([rows.numel() // rows.shape[-1] for rows in features])
        for piece, rows in zip(pieces, features, strict=True):
            yield TowerResult(kept=piece.to(rows.device))


class ReadTower:
    """Reads values of the tower for plans whose methods need them, without changing the tower."""

    def __init__(self, reader: TowerReader, plans: Sequence[Plan], kwargs: Mapping[str, Any], modality: str) -> None:
        self.reader, self.plans, self.kwargs, self.modality = reader, plans, kwargs, modality
        self._methods = [_find_reading_method(plan) for plan in plans]
        self._scores: BlockScores = {}

    @contextmanager
    def activate(self) -> Iterator[None]:
        methods = [method for method in self._methods if method is not None]
        with self.reader.observe(methods, self.kwargs, self.modality) as self._scores:
            yield

    def get_results(self, features: Sequence[Tensor]) -> Iterator[TowerResult]:
        for index, method in enumerate(self._methods):
            if method is None:
                yield TowerResult()
            else:
                encoded = self.reader.get_values(method, self._scores, index, features, self.kwargs, self.modality)
                yield TowerResult(encoded=encoded)


def _find_reading_method(plan: Plan) -> Pruner | None:
    """Return the method of a plan if it reads the tower, else None."""
    method = plan.setting.method
    if not plan.reduces or not reads_tower(method):
        return None
    assert isinstance(method, Pruner)
    return method


def create_tower_treatment(
    model: Any, plans: Sequence[Plan], kwargs: Mapping[str, Any], modality: str
) -> TowerTreatment:
    """Return the treatment of plans that one forward of the tower may treat together; see `split_plans`."""
    if plans and (is_merging(plans[0]) or is_dropping(plans[0])):
        method = plans[0].setting.method if is_merging(plans[0]) else get_method(plans[0].setting)
        assert isinstance(method, TowerMethod)
        if model.tokenprune_family.tower_rows == "all images":
            return ReducedTower(plans, ServedPackedTower(model, method, plans))
        return ReducedTower(plans, ServedRowTower(model, method, plans, kwargs))
    if any(_find_reading_method(plan) for plan in plans):
        return ReadTower(model.tokenprune_tower, plans, kwargs, modality)
    return PlainTower(plans)
