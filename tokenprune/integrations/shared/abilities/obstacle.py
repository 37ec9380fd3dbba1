# SPDX-License-Identifier: Apache-2.0
"""An obstacle, and what sentences about obstacles share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import TokenPruneError, UnsupportedSetupError
from tokenprune.models.families import Family
from tokenprune.selection.method import Method
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import observables_of

AFTER_THE_TOWER = "use a method that acts after the tower, such as divprune"
OTHER_OF_THE_TOWER = "use a method that goes by the tower alone, such as fastervlm"
ON_IMAGES_TOO = "use a method that acts on images too, such as divprune"


@dataclass(frozen=True)
class Obstacle:
    """Why a method may not act, as a sentence, and the error that says so."""

    reason: str
    error: type[TokenPruneError] = UnsupportedSetupError


def reads_tower(method: Method | None) -> bool:
    """Return True for a method that reads anything of the vision tower."""
    return method is not None and bool(_read_of_tower(method))


def not_on(method: Method, row: Family) -> str | None:
    """Return what a method needs that a family lacks; None if it lacks nothing."""
    return next((why for one in observables_of(method.needs) if (why := one.obstacle(row))), None)


def in_reading(
    method: Method, row: Family, shown: str, tower: str | None, write: Callable[[Any], str] = repr, more: str = ""
) -> Iterator[Obstacle]:
    """Yield what keeps `method` from reading what it needs of a family.

    shown: the name of the family. tower: further words about its vision tower, None where it is known how that makes
    visual tokens. write: of the value of an option. more: another way out.
    """
    if tower is not None and reads_tower(method):
        yield Obstacle(
            f"{method.name} looks into the vision tower, but of {row.name!r}{tower} it is not known how its patches "
            f"become visual tokens; {AFTER_THE_TOWER}{_or_less(method, write)}{more}"
        )
    elif lacks := not_on(method, row):
        instead = OTHER_OF_THE_TOWER if reads_tower(method) else "use a method that does not, such as divprune"
        yield Obstacle(f"{method.name} needs {lacks}, which {shown} does not have: {instead}")


def in_joined_layers(method: Method, config: Any) -> Iterator[Obstacle]:
    """Yield what keeps `method` from acting in a tower whose features are those of several layers."""
    if not isinstance(layer := getattr(config, "vision_feature_layer", -1), int):
        yield Obstacle(
            f"{method.name}: this model joins the features of several tower layers ({layer}), which are left with "
            f"different tokens; {AFTER_THE_TOWER}"
        )


def _or_less(method: Method, write: Callable[[Any], str]) -> str:
    """Return the options under which a method reads nothing of the tower, as the end of a sentence; empty if there are
    none. write: of a value."""
    options = method.fallback_hint(_read_of_tower(method), write)
    return f", or {method.name} with {options}" if options else ""


def _read_of_tower(method: Method) -> list[str]:
    return [one.name for one in observables_of(method.needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)]
