# SPDX-License-Identifier: Apache-2.0
"""A comparison in one sentence a method. It claims what was measured, and nothing of times taken on a busy machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenprune_bench.metrics import exact
from tokenprune_bench.profiling.machine_load import is_busy

if TYPE_CHECKING:
    from tokenprune_bench.app.comparison import Asked, Comparison

CLEAR = 0.05  # a speed-up or slow-down below this share is called none
WHY_SLOWER = "With few tokens or a small model, choosing tokens can cost more time than it saves."


def headline(found: Comparison, one: Asked, cores: int | None) -> str:
    """Return what a setting did, as in "4x fewer visual tokens, same answer, 1.4x faster to the first token"; what is
    not known yet is left out."""
    parts = [fewer(one)]
    if found.before is not None and one.answer is not None:
        parts.append(changed(found.before, one.answer, found.prompt.right))
    if one.ttft is not None:
        parts.append(faster(one.ttft, cores))
    return ", ".join(parts)


def fewer(one: Asked) -> str:
    """Return how many fewer visual tokens the decoder saw. A method inside it leaves early layers all of them, so its
    layers are averaged."""
    layers = one.stats.visual_tokens_per_layer
    seen = sum(layers) / max(1, len(layers))
    if not seen:
        return "no visual token left"
    ratio = one.tokens / seen
    if ratio < 1.005:
        return "all visual tokens kept"
    return f"{times(ratio)} fewer visual tokens" + ("" if len(set(layers)) == 1 else " on average over the layers")


def changed(before: str, after: str, right: str | None) -> str:
    """Return in words what became of the answer. right: the right one, None: it is not known."""
    if exact(after, before):
        return "same answer"
    if right is None:
        return "answer changed"
    if exact(before, right):
        return "answer changed from right to wrong"
    return "answer changed from wrong to right" if exact(after, right) else "answer changed, both wrong"


def faster(ttft: dict[str, Any], cores: int | None) -> str:
    """Return in words how the time to the first token changed, of runs in turns; see `timing.compare`."""
    if is_busy(ttft["load"], cores):
        return "times not judged (busy machine)"
    ratio = ttft["ttft_ratio"]
    speed_up = 1 / ratio["p50"]
    if ratio["p20"] < 1 < ratio["p80"] or max(speed_up, 1 / speed_up) < 1 + CLEAR:
        return "no clear difference in time to the first token"
    if speed_up > 1:
        return f"{times(speed_up)} faster to the first token"
    return f"{times(1 / speed_up)} slower to the first token"


def slower(one: Asked, cores: int | None) -> bool:
    """Return True where the setting was measured, and found slower."""
    return one.ttft is not None and "slower" in faster(one.ttft, cores)


def times(ratio: float) -> str:
    """Return a ratio with two digits, "1.4x", "4x", "12x"."""
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"
