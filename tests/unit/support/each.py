# SPDX-License-Identifier: Apache-2.0
"""One test of many values: it names all of which it fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from selection import names_of, why_lacking


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that stands where `pytest.mark.parametrize` does, for what is checked in no time: the test is
    one, which is run for all values, and fails with the name of each value of which it fails.

    Fixtures of the test are made once for all values. A value that is skipped, as a model type that the installed
    transformers lacks, is passed over; the test skips if all are. Decorators stack: the values of all are combined.
    """
    names = tuple(part.strip() for part in names.split(",")) if isinstance(names, str) else names
    values = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def of_all(**fixtures: Any) -> None:
            failed, skipped = [], []
            for value in values:
                given = dict(zip(names, value if len(names) > 1 else (value,), strict=True))
                try:
                    if reasons := why_lacking(names_of(given.values())):
                        pytest.skip(reasons[0])
                    test(**fixtures, **given)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                # An assertion of pytest's own, as that nothing was raised, is no Exception.
                except (Exception, pytest.fail.Exception) as error:
                    shown = ", ".join(f"{name}={given[name]!r:.200}" for name in names)
                    failed.append(f"{shown}:\n{type(error).__name__}: {error}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(values)} values fail\n" + "\n".join(failed))
            if skipped and len(skipped) == len(values):
                raise skipped[0]

        asked = inspect.signature(test)
        left = [one for name, one in asked.parameters.items() if name not in names]
        of_all.__signature__ = asked.replace(parameters=left)  # type: ignore[attr-defined]  # pytest reads fixtures here
        return of_all

    return decorate
