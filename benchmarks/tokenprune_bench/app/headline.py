# SPDX-License-Identifier: Apache-2.0
"""Describe a comparison in one sentence per method. Times of a busy machine are not judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenprune_bench.metrics import ending, exact
from tokenprune_bench.profiling.machine_load import is_busy

if TYPE_CHECKING:
    from tokenprune_bench.app.comparison import Comparison, SettingResult

CLEAR = 0.05  # smaller speedups and slowdowns are not reported
WHY_SLOWER = "With few tokens or a small model, selecting tokens can take more time than it saves."


def headline(comparison: Comparison, result: SettingResult, cores: int | None) -> str:
    """Return a sentence such as "4x fewer visual tokens, same answer, 1.4x faster to the first token"."""
    parts = [describe_tokens(result)]
    if comparison.before is not None and result.answer is not None:
        parts.append(describe_answer(comparison.before, result.answer, comparison.prompt.right))
    if result.ttft is not None:
        parts.append(describe_speed(result.ttft, cores))
    return ", ".join(parts)


def describe_tokens(result: SettingResult) -> str:
    """Return the reduction of visual tokens, averaged over the layers because methods inside the decoder cut late."""
    layers = result.stats.visual_tokens_per_layer
    average = sum(layers) / max(1, len(layers))
    if not average:
        return "no visual tokens kept"
    ratio = result.tokens / average
    if ratio < 1.005:
        return "all visual tokens kept"
    return f"{format_ratio(ratio)} fewer visual tokens" + (
        "" if len(set(layers)) == 1 else " on average over the layers"
    )


def describe_answer(before: str, after: str, right: str | None) -> str:
    """Describe the change of the answer. `right` is the correct answer, or None if unknown."""
    if exact(after, before):
        return "same answer"
    if right is None:
        return "answer changed"
    if ending(before, right):
        return "both answers right" if ending(after, right) else "answer changed from right to wrong"
    return "answer changed from wrong to right" if ending(after, right) else "answer changed, both wrong"


def describe_speed(ttft: dict[str, Any], cores: int | None) -> str:
    """Describe the change of the time to first token. `ttft` is a result of `timing.compare_times`."""
    if is_busy(ttft["load"], cores):
        return "times not judged (busy machine)"
    ratio = ttft["ttft_ratio"]
    speed_up = 1 / ratio["p50"]
    if ratio["p20"] < 1 < ratio["p80"] or max(speed_up, 1 / speed_up) < 1 + CLEAR:
        return "no clear difference in time to the first token"
    if speed_up > 1:
        return f"{format_ratio(speed_up)} faster to the first token"
    return f"{format_ratio(1 / speed_up)} slower to the first token"


def is_slower(result: SettingResult, cores: int | None) -> bool:
    """Return True if the setting was measured to be slower."""
    return result.ttft is not None and "slower" in describe_speed(result.ttft, cores)


def format_ratio(ratio: float) -> str:
    """Format a ratio with two digits, "1.4x", "4x", "12x"."""
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"
