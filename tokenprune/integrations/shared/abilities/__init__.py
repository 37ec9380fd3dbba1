# SPDX-License-Identifier: Apache-2.0
"""The one answer to where a method may act, for patch(), the vLLM plugin, `recommend`, the commands and the pages.

The facts come from tables: of a family and its vision tower in `models.families`, of an observable in its own class
(`where`, `backends`), of a cache in `transformers.py`. This package turns them into sentences. The engines add checks
that need a loaded model, the configuration of a server, or a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.integrations.shared.abilities.obstacle import AFTER_THE_TOWER, Obstacle, reads_tower
from tokenprune.integrations.shared.abilities.transformers import (
    DYNAMIC,
    STATIC,
    Cache,
    in_company,
    in_transformers,
    with_cache,
)
from tokenprune.integrations.shared.abilities.vllm import in_vllm, refusal, unserved, unserved_family
from tokenprune.models.families import Family
from tokenprune.selection.method import Method, Site
from tokenprune.selection.observable import Backend

__all__ = [
    "AFTER_THE_TOWER",
    "DYNAMIC",
    "STATIC",
    "Cache",
    "Obstacle",
    "check",
    "check_cache",
    "check_together",
    "obstacle",
    "reads_tower",
    "refusal",
    "unserved",
    "unserved_family",
]


def obstacle(
    method: Method, family: Family | str | None = None, backend: Backend = Backend.HF, cache: Cache = DYNAMIC,
    config: Any = None,
) -> str | None:  # fmt: skip
    """Return why `method` may not act on `family` in `backend` with `cache`, None where it may.

    family: a model type, an architecture of vLLM, or a row; None asks about the method alone. config: of the model, for
    what its vision tower decides. A method of several stages may act where each of them may. In transformers a method
    may also act where its preferred variant may.
    """
    preferred = method.preferred if backend is Backend.HF else method
    if preferred != method and obstacle(preferred, family, backend, cache, config) is None:
        return None
    stages = [stage for stage, _ in method.stages(Budget.of(0.5), 32)] if backend is Backend.HF else [method]
    every = (_obstacles(stage, family, backend, cache, config, True) for stage in stages)
    found = next(itertools.chain.from_iterable(every), None)
    return None if found is None else found.reason


def check(
    method: Method, family: Family | str, backend: Backend = Backend.HF, config: Any = None, acts: bool = True
) -> None:
    """Raise the error of the first obstacle; see `obstacle`. acts: False for a method whose budget removes nothing:
    then what the family shows and lets go does not matter."""
    for found in _obstacles(method, family, backend, DYNAMIC, config, acts):
        raise found.error(found.reason)


def check_cache(site: Site, family: Family | str, cache: Cache, name: str = "a method") -> None:
    """Raise UnsupportedSetupError where a method at `site`, called `name`, may not act on `family` with `cache`."""
    for found in with_cache(site, family, cache, name):
        raise found.error(found.reason)


def check_together(methods: Sequence[Method]) -> None:
    """Raise OptionError where `methods`, in the order in which data meets them, may not act in one model."""
    for found in in_company(methods):
        raise found.error(found.reason)


def _obstacles(
    method: Method, family: Family | str | None, backend: Backend, cache: Cache, config: Any, acts: bool
) -> Iterator[Obstacle]:
    if backend is Backend.HF:
        yield from in_transformers(method, family, acts, config)
        yield from with_cache(method.site, family, cache, method.name)
    else:
        yield from in_vllm(method, family, backend is Backend.VLLM_IN_LLM, config)
