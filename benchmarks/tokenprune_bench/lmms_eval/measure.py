# SPDX-License-Identifier: Apache-2.0
"""Costs of calls of `generate`, as metrics for the results of lmms-eval."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

import tokenprune
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.statistics import count_bytes
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.statistics import Stats
from tokenprune_bench.profiling.cost import compute_unpatched_cost


@dataclass
class Tally:
    """Sums over calls of `generate`.

    Attributes:
        stats: Cost of all calls.
        requests: Rows of all calls.
        calls: Number of calls.
        failed: Number of calls that raised.
        seconds: Time of all calls.
        new_tokens: Generated tokens of all calls.
        ttft_ms: Time to first token of each call.
    """

    stats: Stats = field(default_factory=Stats)
    requests: int = 0
    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    new_tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)

    @staticmethod
    def total(tallies: Sequence[Tally]) -> Tally:
        """Return the sum of several tallies."""
        total = Tally()
        for tally in tallies:
            for item in fields(Tally):
                setattr(total, item.name, getattr(total, item.name) + getattr(tally, item.name))
        return total

    def to_metrics(self, shares: bool = True) -> dict[str, float]:
        """Return means per request. Times are per call (one batch).

        Args:
            shares: Whether to report shares of the unpatched cost. Methods on pixels change the number of tokens at the
                model's entry, so shares are not known.
        """
        requests = max(1, self.requests)
        names = ("visual_tokens_in", "visual_tokens_out", "visual_tokens_average", "kv_bytes")
        record = {name: getattr(self.stats, name) / requests for name in names}
        if shares:
            record["kv_bytes_full"] = self.stats.kv_bytes_full / requests
            record["keep_ratio"] = self.stats.keep_ratio
            record["prefill_flops_ratio"] = self.stats.prefill_flops_ratio
        if self.calls:
            record["overhead_ms"] = self.stats.overhead_ms / self.calls
            record["ttft_ms"] = statistics.fmean(self.ttft_ms)
            record["ttft_ms_p50"] = statistics.median(self.ttft_ms)
        return record | {"measured_requests": self.requests, "generate_calls": self.calls, "failed_calls": self.failed}


class _Watch(Attachable):
    """Replaces a model's `generate` and records the cost of each call in a `Tally`."""

    def __init__(self, model: nn.Module, tally: Tally) -> None:
        super().__init__()
        self.tally, self.generate = tally, model.generate
        self.model, self.adapter = model, get_adapter(model)
        self.shape = DecoderShape.from_config(self.adapter.text_config)
        self.error: TokenPruneError | None = None
        self._begin = 0.0
        self._first: tuple[float, Any] | None = None  # time of the first forward pass, and the bytes of its cache

    def _attach(self) -> None:
        self.hook(self.model.register_forward_hook, self.first_forward)
        self.wrap(self.model, "generate", self._before)

    def _before(self, generate: Callable[..., Any]) -> _Watch:
        self.generate = generate
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:  # models of lmms-eval catch the error and continue with the next question
            raise self.error
        self._first, self._begin = None, time.perf_counter()
        try:
            output = self.generate(*args, **kwargs)
        except Exception as error:
            self.tally.failed += 1
            if isinstance(error, TokenPruneError):
                self.error = error
            raise
        _wait(getattr(output, "sequences", output))
        seconds = time.perf_counter() - self._begin
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or self._first is None:
            raise TokenPruneError("generate was called without input_ids, so its cost cannot be measured.")
        self._note(ids, kwargs, output, seconds)
        return output

    def first_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._first is None:
            _wait(output.logits)
            end = time.perf_counter()
            self._first = (end - self._begin, count_bytes(getattr(output, compat.CACHE, None), 0)[0])

    def _note(self, ids: torch.Tensor, kwargs: dict[str, Any], output: Any, seconds: float) -> None:
        rows, length = ids.shape
        first, kv_bytes = self._first
        visual = self._count_visual_tokens(ids, kwargs)
        stats = compute_unpatched_cost(self.shape, rows, length, visual, kv_bytes)
        if visual and tokenprune.is_patched(self.model):  # statistics of a patch cover only calls with images
            stats = tokenprune.stats(self.model)
        self.tally.stats += stats
        self.tally.requests += rows
        self.tally.calls += 1
        self.tally.ttft_ms.append(1000 * first)
        self.tally.seconds += seconds
        sequences = getattr(output, "sequences", output)
        self.tally.new_tokens += rows * max(0, sequences.shape[1] - length)

    def _count_visual_tokens(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> int:
        return sum(int(mask.sum()) for mask in self.adapter.visual_mask({"input_ids": ids} | kwargs).values())


def _wait(tensor: torch.Tensor) -> None:
    """Wait for the GPU before the clock is read."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


@contextmanager
def measure_calls(model: nn.Module) -> Iterator[Tally]:
    """Measure every call of `model.generate` within the block, for patched and unpatched models.

    Raises:
        TokenPruneError: The first such error of `generate`, at the end, because callers may have caught it.
    """
    tally = Tally()
    watch = _Watch(model, tally)
    watch.attach()
    try:
        yield tally
    finally:
        watch.detach()
    if watch.error is not None:
        raise watch.error
