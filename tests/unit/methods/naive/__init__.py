# SPDX-License-Identifier: Apache-2.0
"""Table of methods. Each file holds the naive loop of a method, written from the paper, and a row of the table."""

from __future__ import annotations

import importlib
import pkgutil

from method_rows import Row

TABLE: dict[str, Row] = {}
for _file in pkgutil.iter_modules(__path__):
    TABLE |= importlib.import_module(f"{__name__}.{_file.name}").ROWS
