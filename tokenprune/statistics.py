# SPDX-License-Identifier: Apache-2.0
"""Statistics of a patched model's last forward or generate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenprune.selection.method import Site

__all__ = ["Cut", "FeatureCacheCounts", "GuardFinding", "Removal", "Stats"]

# What adds up over calls; ratios follow from the sums.
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
    """One cut, kept with `patch(..., record=True)`.

    site:    the `Site` ("IN_ENCODER", "PRE_LLM", "IN_LLM" or "DECODE"). layer: the decoder layer at whose input it was
             made (0 for tokens that the encoder merged). method: its name.
    kept:    per batch row the sorted positions, in the caller's full-length sequence, that survive so far: text and
             visual tokens, padding left out.
    sources: None for dropping; for merging, per batch row a dict from each kept visual position to the positions merged
             into it.
    weights: None if those count alike; else, per batch row, a dict from each kept visual position to the weight of each
             of its sources in their mean, in the same order; they sum to 1.
    step:    the decode step at which it was made, 0 in prefill. A cut of a later step at the same layer tells anew what
             is left of the prompt.
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
    """The tokens that one method removed in prefill: visual tokens before and after, over the whole batch.

    site, layer, method: as in `Cut`.
    """

    site: Site
    layer: int
    method: str
    before: int
    after: int


@dataclass
class GuardFinding:
    """The guard's findings on one row of the batch (docs/guides/guard.md).

    row:     its number.
    image: how much its images look like text, 0 to 1, the most of them; None: they were not looked at.
    prompt:  the kinds of question that its text asks, out of "text", "grounding", "counting"; None: it was not read,
             which takes a tokenizer (`processor=`).
    risks:   those kinds for which the budget keeps fewer tokens than was measured to be enough; an image that looks
             like text counts as "text".
    tokens:  its visual tokens. kept: what the budget of the last cut, and the guard, leave of them.
    raised:  whether the guard keeps more than the budget says (guard="auto").
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
    """Prefills of `patch(..., graphs=...)` since the model was patched (docs/guides/gpu.md).

    hits:     prefills that were replayed. misses: those that ran without a graph, by reason.
    captured: graphs that were made. bytes: what those take that are kept.
    """

    hits: int
    misses: dict[str, int]
    captured: int
    bytes: int


@dataclass(frozen=True)
class FeatureCacheCounts:
    """Hits and misses of `patch(..., feature_cache=...)` since the model was patched (docs/guides/chats.md).

    hits:      images that were found; where images cannot be distinguished, calls of the encoder.
    misses:    those that the vision tower had to encode.
    evictions: those that made room for others.
    not_kept:  those that were larger than `limit`, and calls of the encoder while training, with gradients, or with
               arguments that cannot be compared.
    entries, bytes: what is held now. limit: bytes that may be held.
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
    """Counts over the whole batch of the last forward or generate with images. Before the first such call the counts
    are zeros and the ratios are 1. Those of several calls can be added: the sum holds `sums()` and the ratios of these.

    visual_tokens_in:        visual tokens that entered the decoder.
    visual_tokens_out:       visual tokens that its last layer saw.
    visual_tokens_per_layer: visual tokens that each decoder layer saw in prefill; with virtual unmerging (`vtu`) those
                             that its weights were applied to, while attention and cache hold all of them.
    keep_ratio:              visual_tokens_out / visual_tokens_in.
    width_per_layer:         slots of each row that each decoder layer computed in prefill: all rows of a batch are as
                             wide as the longest.
    padding_share:           share of these slots, over rows and layers, that held no token: padding, and what fills up
                             rows that are shorter than the widest. It is work, and KV memory, without a use.
    visual_tokens_full:      with a method on pixels, the visual tokens that the prompt would have had without it;
                             None: there is no such method, or it is not known, because the images come from another
                             processor than the patched one, or from more than 64 calls ago, or because images of
                             several sizes make as many tokens.
    prefill_flops, prefill_flops_full: decoder prefill FLOPs, of all slots: what was computed, and what the unpatched
                             model would compute (closed form, accounting.py; no tower, no head).
    prefill_flops_ratio:     prefill_flops / prefill_flops_full.
    prefill_flops_ratio_tokens: the same of the tokens alone, here and in the unpatched model: what a batch without
                             padding would compute.
    kv_bytes, kv_bytes_full: bytes of the keys and values of the prompt, as cached and as the unpatched model would
                             cache them, in all slots; with a method that acts while decoding, those after the last
                             step, answer included.
    kv_bytes_tokens:         what of `kv_bytes` is keys and values of tokens.
    removals:                one `Removal` for each cut of prefill, in order. What methods on pixels save is not
                             among them: their tokens never enter the model (see visual_tokens_full).
    encoder_tokens_per_layer: tokens that entered each block of the vision tower, class tokens included, if a method
                              acts there; else empty.
    attention_blocks:        context blocks that prefill attention went in, over all rows; 0 for full attention.
    notes:                   what a method did not do for this prompt, and why; and rows whose last token is gone, so
                             that their last output is zero.
    guard:                   one `GuardFinding` for each row with visual tokens; None where the guard is off, or has
                             nothing to look for because `keep` is enough for any question.
    feature_cache:           a `FeatureCacheCounts`, since the model was patched; None without `feature_cache=`.
    graphs:                  a `GraphCounts`, since the model was patched; None without `graphs=`.
    overhead_ms:             wall time on the host spent in choosing and removing tokens. On a GPU this is launch time.
                             None: an engine in another process, which does not tell.
    cuts:                    one `Cut` per cut in order, with record=True; else empty.
    decode_rates, decode_kept: for each decode step, for each batch row, the pruning rate in force and how many visual
                             tokens are left, if a method acts while decoding; else empty.
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
        """Have `fill` write something here when the statistics are asked for, not in the forward; in the place of what
        was left under the same `name` before."""
        self._later[name or object()] = fill

    def finalize(self) -> Stats:
        """Return these statistics, with everything written that was left for later."""
        while self._later:
            self._later.pop(next(iter(self._later)))(self)
        return self

    def sums(self) -> dict[str, Any]:
        """Return what adds up over calls, as plain values; `Stats(**sums)` holds it again."""
        self.finalize()
        return {name: getattr(self, name) for name in _SUMS}

    def __add__(self, other: Stats) -> Stats:
        theirs = other.sums()
        total = Stats(**{name: _plus(value, theirs[name]) for name, value in self.sums().items()})
        if total.visual_tokens_in:
            total.keep_ratio = total.visual_tokens_out / total.visual_tokens_in
        if total.prefill_flops_full:
            total.prefill_flops_ratio = total.prefill_flops / total.prefill_flops_full
        return total

    @property
    def visual_tokens_average(self) -> float:
        """Mean of `visual_tokens_per_layer`: what papers call "192 tokens"."""
        return sum(self.visual_tokens_per_layer) / max(1, len(self.visual_tokens_per_layer))

    @property
    def pixel_keep_ratio(self) -> float | None:
        """visual_tokens_in / visual_tokens_full: what a method on pixels left; None where that is not known."""
        return self.visual_tokens_in / self.visual_tokens_full if self.visual_tokens_full else None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, the layer average and the ratio of methods on pixels, as plain Python values."""
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
            + self._feature_cache()
            + f"overhead {'unknown' if self.overhead_ms is None else f'{self.overhead_ms:.2f} ms'})"
        )

    def _guard(self) -> str:
        rows = self.guard or []
        risky, raised = (sum(bool(getattr(one, what)) for one in rows) for what in ("risks", "raised"))
        return f"guard: {risky} of {len(rows)} rows at risk, {raised} raised, " if risky else ""

    def _feature_cache(self) -> str:
        counts = self.feature_cache
        return "" if counts is None else f"feature cache: {counts.hits} hits, {counts.misses} misses, "


def _plus(one: Any, other: Any) -> Any:
    """Add numbers, None if either is unknown, or lists with one number a layer, of which one may be empty."""
    if isinstance(one, list):
        return [a + b for a, b in itertools.zip_longest(one, other, fillvalue=0)]
    return None if one is None or other is None else one + other
