# SPDX-License-Identifier: Apache-2.0
"""Statistics of the last forward or `generate` call of a patched model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenprune.selection.method import Site

__all__ = ["Cut", "FeatureCacheCounts", "GuardFinding", "Removal", "Stats"]

# Fields that are added over calls. Ratios are computed from the sums.
_SUMS = (
    "visual_tokens_in",
    "visual_tokens_out",
    "visual_tokens_per_layer",
    "prefill_flops",
    "prefill_flops_full",
    "kv_bytes",
    "kv_bytes_full",
    "overhead_ms",
)


@dataclass
class Cut:
    """One cut, recorded with `patch(..., record=True)`.

    Args:
        site: "IN_ENCODER", "PRE_LLM", "IN_LLM" or "DECODE".
        layer: Decoder layer at whose input the cut is made. 0 for tokens that the vision tower merged.
        method: Name of the method.
        kept: Positions of the remaining text and visual tokens in the caller's sequence, sorted, for each batch row.
            Padding is excluded.
        sources: For each batch row, the positions merged into each kept visual position. None if no token is merged.
        step: Decode step of the cut, 0 in prefill. A later cut at the same layer lists the remaining tokens again.
        weights: For each batch row, the weights of the merged positions in their mean, in the order of `sources`. They
            sum to 1. None if all weights are equal.
    """

    site: Site
    layer: int
    method: str
    kept: list[list[int]]
    sources: list[dict[int, list[int]]] | None = None
    step: int = 0
    weights: list[dict[int, list[float]]] | None = None


@dataclass
class Removal:
    """Number of visual tokens that one cut removed in prefill, over the batch.

    Args:
        site: Site of the method. See `Cut`.
        layer: Decoder layer of the cut. See `Cut`.
        method: Name of the method.
        before: Number of visual tokens before the cut.
        after: Number of visual tokens after the cut.
    """

    site: Site
    layer: int
    method: str
    before: int
    after: int


@dataclass
class GuardFinding:
    """Result of the guard for one row of the batch (docs/guides/guard.md).

    Args:
        row: Index of the row.
        image: Similarity of its images to text, from 0 to 1, maximum over the images. None if it was not computed.
        prompt: Kinds of question in its text: "text", "grounding", "counting". None if the text was not read, which
            requires `processor=`.
        risks: Kinds of question for which the budget keeps too few tokens according to measurements. An image that
            resembles text counts as "text".
        tokens: Number of visual tokens.
        kept: Number of visual tokens after the last cut, including tokens that the guard adds.
        raised: True if the guard keeps more tokens than the budget (guard="auto").
    """

    row: int
    image: float | None = None
    prompt: tuple[str, ...] | None = None
    risks: tuple[str, ...] = ()
    tokens: int = 0
    kept: int = 0
    raised: bool = False


@dataclass(frozen=True)
class GraphCounts:
    """Counts of CUDA graph replays since the model was patched with `graphs=` (docs/guides/gpu.md).

    Args:
        hits: Number of replayed prefills.
        misses: Number of prefills without a graph, by reason.
        captured: Number of captured graphs.
        bytes: Memory of the cached graphs, and of the buffers for keys and values.
        step_hits: Number of replayed decoding steps.
        step_misses: Number of decoding steps without a graph, by reason.
    """

    hits: int
    misses: dict[str, int]
    captured: int
    bytes: int
    step_hits: int = 0
    step_misses: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FeatureCacheCounts:
    """Counts of the feature cache since the model was patched with `feature_cache=` (docs/guides/chats.md).

    Args:
        hits: Number of images found in the cache. If images cannot be distinguished, number of encoder calls.
        misses: Number of images that the vision tower encoded.
        evictions: Number of images that were removed to make room.
        not_kept: Number of images larger than `limit`, and of encoder calls in training, with gradients, or with
            arguments that cannot be compared.
        entries: Number of cached images.
        bytes: Size of the cached images.
        limit: Maximum size in bytes.
    """

    hits: int
    misses: int
    evictions: int
    not_kept: int
    entries: int
    bytes: int
    limit: int


@dataclass
class Stats:
    """Statistics of the last forward or `generate` call with images, over the batch.

    Before the first such call, counts are 0 and ratios are 1. Statistics of several calls can be added: the result has
    `sums()` and the ratios of these sums.

    Args:
        visual_tokens_in: Number of visual tokens at the input of the decoder.
        visual_tokens_out: Number of visual tokens in its last layer.
        visual_tokens_per_layer: Number of visual tokens in each decoder layer in prefill. With virtual unmerging
            (`vtu`), the number of tokens to which the weights are applied. Attention and cache hold all tokens then.
        keep_ratio: visual_tokens_out / visual_tokens_in.
        width_per_layer: Slots per row in each decoder layer in prefill. All rows are as wide as the longest row.
        padding_share: Share of these slots, over rows and layers, without a token.
        visual_tokens_full: Number of visual tokens without the PRE_ENCODER method. None if there is no such method, or
            the number is unknown: the images come from an unpatched processor or from more than 64 calls ago, or
            images of different sizes have the same number of tokens.
        prefill_flops: FLOPs of the decoder in prefill, for all slots, in closed form. Excludes tower and LM head.
        prefill_flops_full: FLOPs that the unpatched decoder would need.
        prefill_flops_ratio: prefill_flops / prefill_flops_full.
        prefill_flops_ratio_tokens: The same ratio without padding in both terms.
        kv_bytes: Bytes of the cached keys and values of the prompt, for all slots. With a DECODE method, bytes after
            the last step, including the answer.
        kv_bytes_full: Bytes that the unpatched model would cache.
        kv_bytes_tokens: Part of `kv_bytes` that belongs to tokens, without padding.
        removals: One `Removal` per cut in prefill, in order. PRE_ENCODER methods are not included, because their
            tokens never enter the model. See visual_tokens_full.
        encoder_tokens_per_layer: Number of tokens in each block of the vision tower, including class tokens. Empty
            without a method in the tower.
        attention_blocks: Number of context blocks in prefill attention, over all rows. 0 for full attention.
        notes: Parts of the method that were skipped for this prompt, with the reason. Also lists rows whose last token
            was dropped, so that their last output is zero.
        guard: One `GuardFinding` per row with visual tokens. None if the guard is off, or `keep` is sufficient for any
            question.
        feature_cache: Counts since the model was patched. None without `feature_cache=`.
        graphs: Counts since the model was patched. None without `graphs=`.
        overhead_ms: Host time for selecting and removing tokens. On a GPU this is launch time. None if the engine runs
            in another process.
        cuts: One `Cut` per cut, in order, with `record=True`. Empty otherwise.
        decode_rates: Pruning rate of each row at each decode step. Empty without a DECODE method.
        decode_kept: Number of remaining visual tokens of each row at each decode step. Empty without a DECODE method.

    Examples:
        >>> with tokenprune.patched(model, "divprune", keep=0.25):
        ...     output = model(**inputs)
        ...     stats = tokenprune.stats(model)
        >>> stats.visual_tokens_out / stats.visual_tokens_in
        0.25
    """

    visual_tokens_in: int = 0
    visual_tokens_out: int = 0
    visual_tokens_per_layer: list[int] = field(default_factory=list)
    keep_ratio: float = 1.0
    width_per_layer: list[int] = field(default_factory=list)
    padding_share: float = 0.0
    visual_tokens_full: int | None = field(default=None, kw_only=True)
    prefill_flops: float = 0.0
    prefill_flops_full: float = 0.0
    prefill_flops_ratio: float = 1.0
    prefill_flops_ratio_tokens: float = 1.0
    kv_bytes: int = 0
    kv_bytes_full: int = 0
    kv_bytes_tokens: int = 0
    removals: list[Removal] = field(default_factory=list)
    encoder_tokens_per_layer: list[int] = field(default_factory=list)
    attention_blocks: int = 0
    notes: list[str] = field(default_factory=list)
    guard: list[GuardFinding] | None = None
    feature_cache: FeatureCacheCounts | None = field(default=None, kw_only=True)
    graphs: GraphCounts | None = field(default=None, kw_only=True)
    overhead_ms: float | None = 0.0
    cuts: list[Cut] = field(default_factory=list)
    decode_rates: list[list[float]] = field(default_factory=list)
    decode_kept: list[list[int]] = field(default_factory=list)
    _later: dict[Any, Callable[[Stats], None]] = field(default_factory=dict, repr=False, compare=False)

    def defer(self, fill: Callable[[Stats], None], name: str | None = None) -> None:
        """Call `fill` on these statistics when they are read, not during the forward.

        Args:
            fill: Function that sets fields.
            name: Key of the function. A later function with the same key replaces it.
        """
        self._later[name or object()] = fill

    def finalize(self) -> Stats:
        """Run the deferred functions, and return the statistics."""
        while self._later:
            self._later.pop(next(iter(self._later)))(self)
        return self

    def sums(self) -> dict[str, Any]:
        """Return the fields that can be added over calls, as plain values for `Stats(**sums)`."""
        self.finalize()
        return {name: getattr(self, name) for name in _SUMS}

    def __add__(self, other: Stats) -> Stats:
        theirs = other.sums()
        total = Stats(**{name: _add(value, theirs[name]) for name, value in self.sums().items()})
        if total.visual_tokens_in:
            total.keep_ratio = total.visual_tokens_out / total.visual_tokens_in
        if total.prefill_flops_full:
            total.prefill_flops_ratio = total.prefill_flops / total.prefill_flops_full
        return total

    @property
    def visual_tokens_average(self) -> float:
        """Mean of `visual_tokens_per_layer`. Papers mean this by "192 tokens"."""
        return sum(self.visual_tokens_per_layer) / max(1, len(self.visual_tokens_per_layer))

    @property
    def pixel_keep_ratio(self) -> float | None:
        """visual_tokens_in / visual_tokens_full: share kept by a PRE_ENCODER method. None if it is unknown."""
        return self.visual_tokens_in / self.visual_tokens_full if self.visual_tokens_full else None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, `visual_tokens_average` and `pixel_keep_ratio` as plain Python values."""
        record = dataclasses.asdict(self.finalize()) | {"visual_tokens_average": self.visual_tokens_average}
        record["pixel_keep_ratio"] = self.pixel_keep_ratio
        del record["_later"]
        return record

    def __repr__(self) -> str:
        if not self.visual_tokens_in:
            return "Stats(no visual tokens seen)"
        return (
            f"Stats(visual tokens {self.visual_tokens_in} -> {self.visual_tokens_out} ({self.keep_ratio:.1%}), "
            + (f"of {self.visual_tokens_full} without the method on pixels, " if self.visual_tokens_full else "")
            + f"{self.visual_tokens_average:.1f} on average over layers, prefill FLOPs {self.prefill_flops_ratio:.1%}, "
            f"KV {self.kv_bytes / 2**20:.2f} of {self.kv_bytes_full / 2**20:.2f} MiB, "
            + (f"padding {self.padding_share:.1%}, " if self.padding_share else "")
            + (f"attention in {self.attention_blocks} blocks, " if self.attention_blocks else "")
            + self._guard()
            + self._format_feature_cache()
            + f"overhead {'unknown' if self.overhead_ms is None else f'{self.overhead_ms:.2f} ms'})"
        )

    def _guard(self) -> str:
        rows = self.guard or []
        risky, raised = (sum(bool(getattr(row, name)) for row in rows) for name in ("risks", "raised"))
        return f"guard: {risky} of {len(rows)} rows at risk, {raised} raised, " if risky else ""

    def _format_feature_cache(self) -> str:
        counts = self.feature_cache
        return "" if counts is None else f"feature cache: {counts.hits} hits, {counts.misses} misses, "


def _add(value: Any, other: Any) -> Any:
    """Add two numbers (None if either is unknown), or two lists per layer (either may be empty)."""
    if isinstance(value, list):
        return [a + b for a, b in itertools.zip_longest(value, other, fillvalue=0)]
    return None if value is None or other is None else value + other
