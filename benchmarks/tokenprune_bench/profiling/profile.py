# SPDX-License-Identifier: Apache-2.0
"""Profiles of one call: its time stage by stage, before and after a method, beside the closed forms.

The two take turns, like in `bench.timing`; the processor is timed too. Stages are known by watching the model from
outside: its `get_image_features` (or that of videos) is the tower's, its decoder's first forward is the prefill. On an
accelerator the host waits for the device where a stage ends, which costs a little that a plain call does not pay.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenprune import api
from tokenprune.errors import OptionError
from tokenprune.settings import Setting
from tokenprune.settings.cost import CostModel, Load
from tokenprune_bench.profiling.cost import Prefill, closed_forms, load_of, spent
from tokenprune_bench.profiling.machine_load import machine_load
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.patched import patched_by
from tokenprune_bench.profiling.stages import FIRST_TOKEN, STAGES
from tokenprune_bench.profiling.timing import NEW_TOKENS, quantiles, run_once


@dataclass
class Side:
    """One of the two that were timed. runs: milliseconds of each stage, run by run. answer: in words. visual: tokens
    that enter the decoder, those in its last layer, and their average over the layers. kv_bytes: of the cache after
    prefill."""

    runs: list[dict[str, float]] = field(default_factory=list)
    answer: str = ""
    visual: tuple[int, int, float] = (0, 0, 0.0)
    kv_bytes: int = 0

    def first_token(self) -> list[float]:
        """Return the milliseconds from the image to the first token, run by run: the processor is part of it."""
        return [sum(run[stage] for stage in FIRST_TOKEN) for run in self.runs]

    def median(self, stage: str) -> float:
        return statistics.median(run[stage] for run in self.runs)

    @property
    def middle(self) -> dict[str, float]:
        """The run whose time to the first token is the median; of an even number of runs the faster of the two in the
        middle. Its stages add up to its time to the first token, which medians of single stages do not."""
        ranked = sorted(zip(self.first_token(), range(len(self.runs)), strict=True))
        return self.runs[ranked[(len(ranked) - 1) // 2][1]]


@dataclass
class Profile:
    """The time of a call by stage.

    before, after: unpatched and patched; after is None without a setting. model: the closed forms, without a tower
    where that of the family is not known. load: of the unpatched call. environment: of `Model.environment`.
    machine_load: of the machine, over the last minute; None where that is not known. images: of the prompt.
    """

    setting: Setting | None
    before: Side
    after: Side | None
    model: CostModel
    load: Load
    environment: dict[str, Any]
    machine_load: float | None
    images: int = 1

    @property
    def visual_of_an_image(self) -> float:
        """Visual tokens of an image, unpatched; of several images the mean."""
        return self.load.visual / self.images

    def ratio(self, stage: str | None = None) -> float | None:
        """Return before / after, of a stage or (None) of the time to the first token: the median over pairs of runs
        that follow each other. None without a setting, or where one of the two takes no time."""
        if self.after is None:
            return None
        if stage is None:
            pairs = [*zip(self.before.first_token(), self.after.first_token(), strict=True)]
        else:
            runs = zip(self.before.runs, self.after.runs, strict=True)
            pairs = [(one[stage], other[stage]) for one, other in runs]
        pairs = [(one, other) for one, other in pairs if one > 0 and other > 0]
        return statistics.median(one / other for one, other in pairs) if pairs else None

    def predicted(self) -> float | None:
        """Return the ratio of prefill FLOPs, before / after, that the closed forms say; None without a setting, or a
        tower that is known."""
        if self.setting is None or self.after is None or self.model.tower is None:
            return None
        methods, budgets = self.setting.steps()
        return self.model.compute_cost(self.load).flops / self.model.predict(self.load, methods, budgets).flops

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""

        def record(side: Side) -> dict[str, Any]:
            stages = {stage: quantiles([run[stage] for run in side.runs]) for stage in STAGES}
            return {
                "stages_ms": stages,
                "first_token_ms": quantiles(side.first_token()),
                "runs": side.runs,
                "answer": side.answer,
                "visual_tokens_in": side.visual[0],
                "visual_tokens_out": side.visual[1],
                "visual_tokens_average": side.visual[2],
                "kv_bytes": side.kv_bytes,
            }

        cost = self.model.compute_cost(self.load)
        return {
            "setting": self.setting and self.setting.to_json(),
            "environment": self.environment,
            "load": self.machine_load,
            "before": record(self.before),
            "after": None if self.after is None else record(self.after),
            "speedup": self.ratio(),
            "speedup_by_flops": self.predicted(),
            "flops": {"tower": cost.tower if self.model.tower else None, "decoder": cost.decoder},
            "prompt": {"views": list(self.load.views), "visual": self.load.visual, "text": self.load.text},
        }


def profile_call(
    subject: Model,
    images: Sequence[Any],
    question: str,
    setting: Setting | Mapping[str, Any] | None = None,
    *,
    repeats: int = 7,
    new_tokens: int = NEW_TOKENS,
    step: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> Profile:
    """Time one question about images, unpatched and (with a setting, as `patch(config=...)` takes it) patched.

    repeats: timed runs of each, after one that does not count. new_tokens: that each run makes, at least 2. step:
    called with a label, how many runs are done, and of how many, between the runs.
    Raises OptionError for numbers that are too small, and what `patch` and the processor raise.
    """
    if repeats < 1 or new_tokens < 2:
        raise OptionError("a profile takes at least one run, and two new tokens: the first one and a step of decoding")

    setting = None if setting is None else Setting.from_json(setting)

    def ask() -> dict[str, Any]:
        return subject.inputs([list(images)], [question])

    before, after = Side(), None if setting is None else Side()
    inputs = ask()
    model, load = closed_forms(subject), load_of(subject, inputs)
    with Prefill(subject) as prefill:
        before.answer = subject.generate(inputs)[0]
    before.visual, before.kv_bytes = (load.visual, load.visual, float(load.visual)), prefill.kv_bytes
    if after is not None:
        with patched_by(subject, setting):
            small = ask()
            after.answer = subject.generate(small)[0]
            stats = spent(subject, small)
            after.visual = stats.visual_tokens_in, stats.visual_tokens_out, stats.visual_tokens_average
            after.kv_bytes = stats.kv_bytes
    sides = [(before, None)] + ([] if after is None else [(after, setting)])
    for repeat in range(repeats + 1):
        for place, (side, how) in enumerate(sides if repeat % 2 else reversed(sides)):
            step("profile", repeat * len(sides) + place, (repeats + 1) * len(sides))
            with patched_by(subject, how):
                run = _run(subject, ask, new_tokens, patched=how is not None)
            if repeat:
                side.runs.append(run)
    return Profile(setting, before, after, model, load, subject.environment(), machine_load(), len(images))


def _run(subject: Model, ask: Callable[[], dict[str, Any]], new_tokens: int, patched: bool) -> dict[str, float]:
    """Return the milliseconds of each stage of one call."""
    wait = _waiter(subject)
    begin = time.perf_counter()
    inputs = ask()
    wait()
    run = {"processor": 1000 * (time.perf_counter() - begin)}
    with watched(subject, wait) as spans:
        ttft, step = run_once(subject, inputs, new_tokens)
    prefill = spans["decoder"][0]
    run["tower"] = sum(spans["tower"])
    # Of a method that decides while decoding, the first decision only is part of the prefill; it cannot be separated.
    run["selection"] = min(prefill, api.stats(subject.model).overhead_ms or 0.0) if patched else 0.0
    run["prefill"] = prefill - run["selection"]
    run["rest"] = max(0.0, ttft - run["tower"] - prefill)
    run["decode"] = step
    return run


def _waiter(subject: Model) -> Callable[[], None]:
    if subject.model.device.type == "cuda":
        return torch.cuda.synchronize
    return lambda: None


class _Timed:
    """Stands in for `get_image_features` and notes how long it takes; calls inside each other count once."""

    def __init__(self, original: Callable, spans: list[float], wait: Callable[[], None], inside: list[int]) -> None:
        self.original, self.spans, self.wait, self.inside = original, spans, wait, inside
        self.__signature__ = inspect.signature(original)  # generate() reads it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.wait()
        begin = time.perf_counter()
        self.inside.append(1)
        try:
            return self.original(*args, **kwargs)
        finally:
            self.wait()
            self.inside.pop()
            if not self.inside:
                self.spans.append(1000 * (time.perf_counter() - begin))


@contextmanager
def watched(subject: Model, wait: Callable[[], None]) -> Iterator[dict[str, list[float]]]:
    """Return a context that gives the milliseconds of what runs in it: "tower", of each encoding, and "decoder", of
    each forward. wait: returns when the device is done. Enter it after a patch, and leave it before."""
    spans: dict[str, list[float]] = {"tower": [], "decoder": []}
    base, decoder = subject.adapter.base, subject.adapter.decoder
    inside: list[int] = []
    begun: list[float] = []

    def enter(*_: Any) -> None:
        wait()
        begun.append(time.perf_counter())

    def leave(*_: Any) -> None:
        wait()
        spans["decoder"].append(1000 * (time.perf_counter() - begun.pop()))

    names = [name for name in ("get_image_features", "get_video_features") if hasattr(base, name)]
    owned = {name: vars(base)[name] for name in names if name in vars(base)}
    handles = [decoder.register_forward_pre_hook(enter, prepend=True), decoder.register_forward_hook(leave)]
    try:
        for name in names:
            setattr(base, name, _Timed(getattr(base, name), spans["tower"], wait, inside))
        yield spans
    finally:
        for name in names:
            delattr(base, name)
            if name in owned:
                setattr(base, name, owned[name])
        for handle in handles:
            handle.remove()
