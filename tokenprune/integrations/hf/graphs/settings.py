# SPDX-License-Identifier: Apache-2.0
"""Settings of graphed prefill: the `graphs=` argument of `tokenprune.patch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from tokenprune.errors import OptionError
from tokenprune.selection.options import describe_type, matches_type

_COUNT = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Graphs:
    """Limits of the CUDA graphs of a decoder.

    When `max_graphs` or `bytes` is exceeded, the least recently used graph is freed.

    Args:
        step: Prompt lengths are rounded up to a multiple of `step` tokens. Each multiple has its own graph.
        max_tokens: Longest prompt, in tokens, that uses a graph. Longer prompts keep the GPU busy without graphs.
        max_graphs: Number of graphs to keep.
        bytes: GPU memory of all graphs together, in bytes. A graph that needs more on its own is not kept.
        static: Whether the prefill of a static cache uses graphs on a GPU. Its outputs are equal on an H200, also with
            decoding steps compiled by transformers. The speed-up has not been measured.

    Raises:
        OptionError: If a limit is not a positive integer, or `max_tokens` is less than `step`.

    Examples:
        >>> graphs = Graphs(step=64, max_tokens=2048)
        >>> graphs.bucket(130)
        192
    """

    step: int = 64
    max_tokens: int = 1024
    max_graphs: int = 32
    bytes: int = 4 << 30
    static: bool = False

    def __post_init__(self) -> None:
        for name in ("step", "max_tokens", "max_graphs", "bytes"):
            if not matches_type(value := getattr(self, name), _COUNT):
                raise OptionError(f"graphs: {name}={value!r} must be {describe_type(_COUNT)}")
        if not isinstance(self.static, bool):
            raise OptionError(f"graphs: static={self.static!r} must be True or False")
        if self.max_tokens < self.step:
            raise OptionError(
                f"graphs: max_tokens={self.max_tokens} is less than step={self.step}. Raise max_tokens or lower step."
            )

    @staticmethod
    def from_argument(graphs: Any) -> Graphs | None:
        """Parse a `graphs=` argument: True gives the defaults, False and None give None."""
        if isinstance(graphs, Graphs):
            return graphs
        if graphs is None or isinstance(graphs, bool):
            return Graphs() if graphs else None
        raise OptionError(f"graphs={graphs!r} must be True, False or a tokenprune.graphs.Graphs.")

    def bucket(self, length: int) -> int:
        """Return `length` rounded up to a multiple of `step`."""
        return -(-length // self.step) * self.step
