# SPDX-License-Identifier: Apache-2.0
"""The older name of `tokenprune.lmms_eval`, kept for commands and imports that use it."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("tokenprune.lmms_eval"), name)
