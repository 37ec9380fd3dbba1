# SPDX-License-Identifier: Apache-2.0
"""Settings of CUDA graphs: the `graphs=` argument of `tokenprune.patch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from tokenprune.errors import OptionError
from tokenprune.selection.options import describe_type, matches_type

_COUNT = Annotated[int, Ge(1)]
_SHARE = Annotated[float, Gt(0), Le(1)] | None


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
        decode: Whether decoding steps with a dynamic cache use graphs. The cache then moves into buffers, which belong
            to the graph and count in `bytes`.
        cache_step: The buffers have a multiple of `cache_step` tokens, or of an eighth to a quarter of their length if
            that is more. Each multiple has its own graph.
        min_uses: A graph is captured when its shape is used for this time.
        free_share: Largest share of the free GPU memory for all graphs, in (0, 1], or None for no such limit.

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
    decode: bool = True
    cache_step: int = 256
    min_uses: int = 1
    free_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("step", "max_tokens", "max_graphs", "bytes", "cache_step", "min_uses"):
            if not matches_type(value := getattr(self, name), _COUNT):
                raise OptionError(f"graphs: {name}={value!r} must be {describe_type(_COUNT)}")
        for name in ("static", "decode"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"graphs: {name}={value!r} must be True or False")
        if not matches_type(self.free_share, _SHARE):
            raise OptionError(f"graphs: free_share={self.free_share!r} must be {describe_type(_SHARE)}")
        if self.max_tokens < self.step:
            raise OptionError(
                f"graphs: max_tokens={self.max_tokens} is less than step={self.step}. Raise max_tokens or lower step."
            )

    @staticmethod
    def from_argument(graphs: Any) -> Graphs | None:
        """Parse a `graphs=` argument.

        True gives the defaults, and False and None give None. "auto" captures a graph when its shape is used for the
        second time, and uses at most 2 GiB or a tenth of the free GPU memory.
        """
        if isinstance(graphs, Graphs):
            return graphs
        if graphs == "auto":
            return Graphs(bytes=2 << 30, min_uses=2, free_share=0.1)
        if graphs is None or isinstance(graphs, bool):
            return Graphs() if graphs else None
        raise OptionError(f'graphs={graphs!r} must be True, False, "auto" or a tokenprune.graphs.Graphs.')

    def bucket(self, length: int) -> int:
        """Return `length` rounded up to a multiple of `step`."""
        return -(-length // self.step) * self.step

    def capacity(self, length: int) -> int:
        """Return the slots of the buffers for a cache of `length` tokens."""
        step = max(self.cache_step, 1 << max(0, length.bit_length() - 3))
        return -(-length // step) * step
