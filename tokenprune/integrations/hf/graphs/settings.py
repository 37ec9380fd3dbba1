# SPDX-License-Identifier: Apache-2.0
"""Bounds of graphed prefill, as `patch(..., graphs=)` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from tokenprune.errors import OptionError
from tokenprune.selection.options import describe_type, matches_type

_COUNT = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Graphs:
    """Bounds of the graphs of a decoder.

    step: lengths of prompts are rounded up to a multiple of it, in tokens, and each multiple has a graph of its own.
    most: the longest length, in tokens, that is graphed; longer prompts keep the GPU busy without. number, bytes: how
    many graphs are kept, and how much memory they may take together; the one that was used last longest ago goes first,
    and none that takes more by itself is kept.
    static: whether the prefill of a static cache is graphed on a GPU, too. It is equal on an H200, also beside steps
    that transformers compiled; what it saves is not measured.

    Raises OptionError for bounds that are no whole numbers from 1 on, and where `most` is below `step`.
    """

    step: int = 64
    most: int = 1024
    number: int = 32
    bytes: int = 4 << 30
    static: bool = False

    def __post_init__(self) -> None:
        for name in ("step", "most", "number", "bytes"):
            if not matches_type(value := getattr(self, name), _COUNT):
                raise OptionError(f"graphs: {name}={value!r} must be {describe_type(_COUNT)}")
        if not isinstance(self.static, bool):
            raise OptionError(f"graphs: static={self.static!r} must be True or False")
        if self.most < self.step:
            raise OptionError(f"graphs: most={self.most} is below step={self.step}, so that no length fits")

    @staticmethod
    def of(graphs: Any) -> Graphs | None:
        """Return what `graphs=` asks for: True for the defaults, False or None for no graphs."""
        if isinstance(graphs, Graphs):
            return graphs
        if graphs is None or isinstance(graphs, bool):
            return Graphs() if graphs else None
        raise OptionError(f"graphs={graphs!r} must be True, False or a tokenprune.graphs.Graphs")

    def bucket(self, length: int) -> int:
        """Return `length` rounded up to a multiple of `step`."""
        return -(-length // self.step) * self.step
