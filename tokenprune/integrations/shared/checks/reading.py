# SPDX-License-Identifier: Apache-2.0
"""Checks of both engines: does a family provide what a method reads?"""

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
    """Return True if a method reads values of the vision tower.

    Examples:
        >>> reads_tower(tokenprune.method("fastervlm")), reads_tower(tokenprune.method("divprune"))
        (True, False)
    """
    return method is not None and bool(_list_tower_observables(method))


def find_missing_observable(method: Method, row: Family) -> str | None:
    """Return a description of the first value that a method needs and a family does not provide, or None."""
    return next(
        (why for observable in select_observables(method.needs) if (why := observable.find_obstacle(row))), None
    )


def find_reading_error(
    method: Method, row: Family, name: str, tower: str | None, write: Callable[[Any], str] = repr, more: str = ""
) -> TokenPruneError | None:
    """Return an error if a method reads values that a family does not provide.

    Args:
        name: Name of the family, for the user.
        tower: Further words about the vision tower if patches cannot be traced to visual tokens, else None.
        more: Another solution, appended to the message.
    """
    if tower is not None and reads_tower(method):
        options = method.fallback_hint(_list_tower_observables(method), write)
        fix = AFTER_THE_TOWER[:-1] + (f", or {method.name} with {options}" if options else "") + more
        return UnsupportedSetupError(
            f"{method.name} reads the vision tower, and the patches of {row.name!r}{tower} cannot be traced to visual "
            f"tokens. {fix}."
        )
    if missing := find_missing_observable(method, row):
        fix = "reads only the tower, such as fastervlm" if reads_tower(method) else "does not, such as divprune"
        return UnsupportedSetupError(
            f"{method.name} needs {missing}, which {name} does not have. Use a method that {fix}."
        )
    return None


def find_joined_layers_error(method: Method, config: Any) -> TokenPruneError | None:
    """Return an error if the visual tokens join the features of several tower layers.

    `method` would leave different tokens in each of these layers.
    """
    if isinstance(layer := getattr(config, "vision_feature_layer", -1), int):
        return None
    return UnsupportedSetupError(
        f"{method.name} is not supported for this model, which joins the features of several tower layers ({layer}). "
        f"{AFTER_THE_TOWER}"
    )


def _list_tower_observables(method: Method) -> list[str]:
    return [
        observable.name for observable in select_observables(method.needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)
    ]
