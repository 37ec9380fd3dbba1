# SPDX-License-Identifier: Apache-2.0
"""The repr of a method: the call that makes it."""

from __future__ import annotations

import dataclasses
from typing import Any


class ReprIsCall:
    """Base of dataclasses whose repr is `name(option=value, ...)`, with those options alone that differ from their
    defaults."""

    name = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass writes a repr of its own into every class that does not have one there: hand it the inherited one.
        if "__repr__" not in vars(cls):
            cls.__repr__ = super(cls, cls).__repr__

    def __repr__(self) -> str:
        options = [(one, getattr(self, one.name)) for one in dataclasses.fields(self) if one.repr]
        given = [f"{one.name}={value!r}" for one, value in options if not _is_default(one, value)]
        return f"{self.name or type(self).__qualname__}({', '.join(given)})"


def _is_default(option: dataclasses.Field, value: Any) -> bool:
    default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
    if type(value) is not type(default):
        return False
    try:
        return bool(value == default)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors are not equal as a whole
        return False
