# SPDX-License-Identifier: Apache-2.0
"""Choose which variants of a test run: all, those that pair every two values, or those of one family of each kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from families import FAMILIES, REFUSED

# `-m fast` runs one family of each kind; a test without a family is fast too.
FAST_FAMILIES = {
    "llava": "one square of patches for each image, a class token, positions on one axis",
    "llava_onevision": "tiles of an image, videos",
    "qwen2_5_vl": "a tower that packs all images, positions on three axes",
    "gemma3": "sliding windows, masks by token type",
    "instructblip": "a Q-Former",
    "qwen3_5": "layers that carry a state",
}
# Tests that take more than about a second whatever the family: they start processes, run whole benchmarks, or simulate.
SLOW: set[str] = set()


def families_of(item: pytest.Item) -> set[str]:
    """Return the names of the families that a test is run on."""
    given = getattr(item, "callspec", None)
    values = [] if given is None else [getattr(value, "name", value) for value in given.params.values()]
    return {value for value in values if isinstance(value, str) and (value in FAMILIES or value in REFUSED)}


def is_fast(item: pytest.Item) -> bool:
    """Return whether a test is one of `-m fast`."""
    path, _, name = item.nodeid.partition("::")
    name = name.partition("[")[0]
    return not {path, f"{path}::{name}"} & SLOW and families_of(item) <= FAST_FAMILIES.keys()


def covering(variants: Sequence[dict[str, Any]]) -> list[int]:
    """Return the indices of few variants, in order, that hold every two values of different parameters that any does.

    Greedy: the next one is that with the most pairs which are not held yet, the first of these.
    """
    # By identity, because values need not be hashable; those of one parameter are the same objects in all variants.
    marked = [sorted((name, id(value)) for name, value in variant.items()) for variant in variants]
    pairs = [set(combinations(values, 2)) or set(values) for values in marked]
    missing, chosen = set().union(*pairs), []
    while missing:
        chosen.append(max(range(len(pairs)), key=lambda index: len(pairs[index] & missing)))
        missing -= pairs[chosen[-1]]
    return sorted(chosen)


def leave_out_combinations(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove from `items` those variants of tests marked `pairwise` that hold no new pair of values; return them.

    The marker may be given `runs=`, a function of the test's parameters that says whether a variant runs or skips: one
    that skips holds no pair.
    """
    groups: dict[str, list[Any]] = defaultdict(list)
    left_out: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("pairwise")
        if marker is None:
            continue
        runs = marker.kwargs.get("runs")
        if runs is None or runs(**item.callspec.params):
            groups[item.nodeid.partition("[")[0]].append(item)
        else:
            left_out.append(item)
    for group in groups.values():
        held = set(covering([item.callspec.params for item in group]))
        left_out += [item for index, item in enumerate(group) if index not in held]
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    return left_out
