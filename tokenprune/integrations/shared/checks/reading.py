# SPDX-License-Identifier: Apache-2.0
"""Checks that both engines share: which parts of a model a method reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenprune.errors import TokenPruneError, UnsupportedSetupError
from tokenprune.models.families import Family
from tokenprune.selection.method import Method
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables

AFTER_THE_TOWER = "Use a method that acts after the tower, such as divprune."
ON_IMAGES_TOO = "Use a method that also acts on images, such as divprune."


def reads_tower(method: Method | None) -> bool:
    """Return True if a method reads values of the vision tower."""
    return method is not None and bool(_tower_observables(method))


def find_missing_observable(method: Method, row: Family) -> str | None:
    """Return the first value that a method needs and a family does not have, in words; None if it has all."""
    return next((why for seen in select_observables(method.needs) if (why := seen.find_obstacle(row))), None)


def find_reading_error(
    method: Method, row: Family, name: str, tower: str | None, write: Callable[[Any], str] = repr, more: str = ""
) -> TokenPruneError | None:
    """Return an error if `method` reads values that a family does not provide.

    name: of the family, for the user. tower: more words about its vision tower, None if it is known how the patches
    become visual tokens. write: formats the value of an option. more: another solution.
    """
    if tower is not None and reads_tower(method):
        options = method.fallback_hint(_tower_observables(method), write)
        fix = AFTER_THE_TOWER[:-1] + (f", or {method.name} with {options}" if options else "") + more
        return UnsupportedSetupError(
            f"{method.name} reads the vision tower, and how the patches of {row.name!r}{tower} become visual tokens is "
            f"not known. {fix}."
        )
    if missing := find_missing_observable(method, row):
        fix = "reads only the tower, such as fastervlm" if reads_tower(method) else "does not, such as divprune"
        return UnsupportedSetupError(
            f"{method.name} needs {missing}, which {name} does not have. Use a method that {fix}."
        )
    return None


def find_joined_layers_error(method: Method, config: Any) -> TokenPruneError | None:
    """Return an error if the features of a tower come from several layers, where `method` leaves different tokens."""
    if isinstance(layer := getattr(config, "vision_feature_layer", -1), int):
        return None
    return UnsupportedSetupError(
        f"{method.name} is not supported for this model, which joins the features of several tower layers ({layer}). "
        f"{AFTER_THE_TOWER}"
    )


def _tower_observables(method: Method) -> list[str]:
    return [seen.name for seen in select_observables(method.needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)]
