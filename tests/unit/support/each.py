# SPDX-License-Identifier: Apache-2.0
"""Run one test for many values and report all failing values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from selection import names_of, why_lacking


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator like `pytest.mark.parametrize` for fast checks: one test runs all values and reports each
    failure.

    Fixtures are created once for all values. Values that skip, such as model types missing from the installed
    transformers, are passed over; the test skips if all values skip. Stacked decorators combine their values.
    """
    names = tuple(part.strip() for part in names.split(",")) if isinstance(names, str) else names
    values = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            failed, skipped = [], []
            for value in values:
                arguments = dict(zip(names, value if len(names) > 1 else (value,), strict=True))
                try:
                    if reasons := why_lacking(names_of(arguments.values())):
                        pytest.skip(reasons[0])
                    test(**fixtures, **arguments)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                # Failures raised by pytest, such as a missing exception, do not derive from Exception.
                except (Exception, pytest.fail.Exception) as error:
                    description = ", ".join(f"{name}={arguments[name]!r:.200}" for name in names)
                    failed.append(f"{description}:\n{type(error).__name__}: {error}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(values)} values fail\n" + "\n".join(failed))
            if skipped and len(skipped) == len(values):
                raise skipped[0]

        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in names]
        # pytest finds the fixtures of a test in its signature.
        run_all.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run_all

    return decorate
