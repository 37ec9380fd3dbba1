# SPDX-License-Identifier: Apache-2.0
"""Hooks that a test installs for a while. A single handle is a context manager itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def removed_after(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks at the end of the block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
