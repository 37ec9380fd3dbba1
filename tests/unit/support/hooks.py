# SPDX-License-Identifier: Apache-2.0
"""Remove several hooks at once. A single handle is already a context manager."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def removed_after(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks at the end of this context."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
