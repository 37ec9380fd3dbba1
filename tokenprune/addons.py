# SPDX-License-Identifier: Apache-2.0
"""The seam between the core and its add-ons.

An add-on is a room of the package that builds on the core: sessions, guard, drafting, graphs, reuse (of encoded
images), attention (changes of it), processor (methods on pixels), and serve, on a vLLM server. No file of the core
imports one. Where a caller asks for one, it is loaded by name, here: a plain patch and a plain server load none.
"""

from __future__ import annotations

import importlib
from typing import Any


def add_on(module: str) -> Any:
    """Return a module of an add-on, as in "guard.part", which is loaded now if it was not before."""
    return importlib.import_module(f"tokenprune.{module}")
