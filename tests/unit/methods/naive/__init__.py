# SPDX-License-Identifier: Apache-2.0
"""A table of methods: each file holds a loop written from the description of one method, and its row."""

from __future__ import annotations

import importlib
import pkgutil

from method_rows import Row

TABLE: dict[str, Row] = {}
for _file in pkgutil.iter_modules(__path__):
    TABLE |= importlib.import_module(f"{__name__}.{_file.name}").ROWS
