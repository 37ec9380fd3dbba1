# SPDX-License-Identifier: Apache-2.0
"""Time to first token and time per token, patched against unpatched, in one process and on the same question.

Runs of both models alternate, so a slow phase of the machine affects both, and ratios are taken per pair of runs. The
timed call is `generate`: vision tower, prefill and decoding, without the processor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from transformers.generation.streamers import BaseStreamer

from tokenprune_bench.profiling.machine_load import get_machine_load
from tokenprune_bench.profiling.model import Model

NEW_TOKENS = 9  # the first token, and eight tokens for the median


class _Clock(BaseStreamer):
    """Record the time of each token of `generate`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def run_once(subject: Model, inputs: dict[str, Any], new_tokens: int = NEW_TOKENS) -> tuple[float, float]:
    """Return the time to first token and the median time of a further token, in milliseconds."""
    clock = _Clock()
    begin = time.perf_counter()
    subject.generate(inputs, streamer=clock, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    # The first entry is the prompt, which `generate` streams before the model runs.
    first, *rest = clock.times[1:]
    steps = [1000 * (b - a) for a, b in zip([first, *rest], rest, strict=False)]
    return 1000 * (first - begin), statistics.median(steps)


def compute_quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return p20, p50 and p80, interpolated between the values."""
    values_at = np.quantile(values, (0.2, 0.5, 0.8)).round(4).tolist()
    return dict(zip(("p20", "p50", "p80"), values_at, strict=True))


def compare_times(
    subject: Model,
    patched: Callable[[], AbstractContextManager[Any]],
    ask: Callable[[], dict[str, Any]],
    repeats: int,
    new_tokens: int = NEW_TOKENS,
    processor: bool = False,
) -> dict[str, Any]:
    """Time an unpatched and a patched model in alternation.

    Args:
        subject: The model.
        patched: Opens a context that patches the model.
        ask: Builds the model arguments of one batch.
        repeats: Timed runs of each model, after one warm-up run.
        new_tokens: Number of generated tokens, at least 2.
        processor: Whether the time to first token includes the processor.

    Returns:
        Quantiles of `ttft_ms` and `token_ms`, of the same for the unpatched model (`ttft_ms_unpatched`,
        `token_ms_unpatched`), and of the ratios patched / unpatched of consecutive runs (`ttft_ratio`, `token_ratio`).
        `load` is the load average of the machine over the last minute.
    """
    full = ask()
    with patched():
        small = ask()

    def run(inputs: dict[str, Any]) -> tuple[float, float]:
        if not processor:
            return run_once(subject, inputs, new_tokens)
        begin = time.perf_counter()
        inputs = ask()
        before = 1000 * (time.perf_counter() - begin)
        first, step = run_once(subject, inputs, new_tokens)
        return before + first, step

    def run_patched() -> tuple[float, float]:
        with patched():
            return run(small)

    return time_in_turns(lambda: run(full), run_patched, repeats, len(full["input_ids"]), new_tokens)


def compare_batches(
    unpatched: Callable[[], Any], patched: Callable[[], Any], repeats: int, rows: int
) -> dict[str, Any]:
    """Time two ways to answer the same `rows` questions in alternation.

    Returns:
        Quantiles of `batch_ms`, `batch_ms_unpatched` and `batch_ratio` (patched / unpatched) over `repeats` runs after
        one warm-up run, and `batch_rows`.
    """

    def timed(run: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
        def once() -> tuple[float, float]:
            begin = time.perf_counter()
            run()
            return 1000 * (time.perf_counter() - begin), 1.0  # steps are not measured

        return once

    timing = time_in_turns(timed(unpatched), timed(patched), repeats, rows)
    times = {name.replace("ttft", "batch"): value for name, value in timing.items() if name.startswith("ttft")}
    return times | {"batch_rows": rows}


def time_in_turns(
    unpatched: Callable[[], tuple[float, float]],
    patched: Callable[[], tuple[float, float]],
    repeats: int,
    rows: int = 1,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, Any]:
    """Call two functions in alternation. Each returns the milliseconds to a first token and of a further token.

    Args:
        unpatched: Runs the unpatched model.
        patched: Runs the patched model.
        repeats: Timed runs of each function, after one warm-up run.
        rows: Number of questions per call.
        new_tokens: Number of generated tokens per call.

    Returns:
        As `compare_times`.
    """
    runs: dict[str, list[tuple[float, float]]] = {"unpatched": [], "patched": []}
    for repeat in range(repeats + 1):
        # The first function alternates, because the second finds warmer caches.
        for which in ("unpatched", "patched") if repeat % 2 else ("patched", "unpatched"):
            result = patched() if which == "patched" else unpatched()
            if repeat:
                runs[which].append(result)
    # The load shows whether other processes disturbed the times.
    timing: dict[str, Any] = {"repeats": repeats, "rows": rows, "new_tokens": new_tokens, "load": get_machine_load()}
    for index, name in enumerate(("ttft", "token")):
        ours, theirs = ([run[index] for run in runs[which]] for which in ("patched", "unpatched"))
        timing[f"{name}_ms"], timing[f"{name}_ms_unpatched"] = compute_quantiles(ours), compute_quantiles(theirs)
        timing[f"{name}_ratio"] = compute_quantiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return timing
