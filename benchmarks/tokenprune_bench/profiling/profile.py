# SPDX-License-Identifier: Apache-2.0
"""Profile one call stage by stage, before and after a method, with closed-form costs.

Patched and unpatched runs alternate, as in `timing`; the processor is timed too. Stages are observed from outside the
model: `get_image_features` (or `get_video_features`) is the tower stage, and the decoder's first forward is the prefill
stage. On an accelerator the host waits for the device after each stage, which adds a small cost.
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
from tokenprune_bench.profiling.cost import CacheMeter, build_cost_model, build_load, get_batch_cost
from tokenprune_bench.profiling.machine_load import get_machine_load
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.patched import patched_by
from tokenprune_bench.profiling.stages import FIRST_TOKEN, STAGES
from tokenprune_bench.profiling.timing import NEW_TOKENS, compute_quantiles, run_once


@dataclass
class SideProfile:
    """Measurements of the unpatched or of the patched model.

    Attributes:
        runs: Milliseconds of each stage, one dict per run.
        answer: The answer.
        visual: Visual tokens at the decoder's entry, in its last layer, and on average over the layers.
        kv_bytes: Cache size after prefill.
    """

    runs: list[dict[str, float]] = field(default_factory=list)
    answer: str = ""
    visual: tuple[int, int, float] = (0, 0, 0.0)
    kv_bytes: int = 0

    def first_token(self) -> list[float]:
        """Return the milliseconds from the image to the first token of each run, including the processor."""
        return [sum(run[stage] for stage in FIRST_TOKEN) for run in self.runs]

    def median(self, stage: str) -> float:
        return statistics.median(run[stage] for run in self.runs)

    @property
    def median_run(self) -> dict[str, float]:
        """The run with the median time to first token (the faster of the two middle runs for an even number).

        Its stages add up to its time to first token; medians of single stages do not.
        """
        ranked = sorted(zip(self.first_token(), range(len(self.runs)), strict=True))
        return self.runs[ranked[(len(ranked) - 1) // 2][1]]


@dataclass
class Profile:
    """Time of a call by stage.

    Attributes:
        setting: The setting, or None.
        before: The unpatched model.
        after: The patched model. None without a setting.
        model: Closed-form cost model, without a tower if the family's tower is not known.
        load: Load of the unpatched call.
        environment: Result of `Model.environment`.
        machine_load: Load average of the machine over the last minute, or None.
        images: Number of images in the prompt.
    """

    setting: Setting | None
    before: SideProfile
    after: SideProfile | None
    model: CostModel
    load: Load
    environment: dict[str, Any]
    machine_load: float | None
    images: int = 1

    @property
    def processor_share(self) -> float:
        """Share of the time to first token that the processor takes, with the setting if there is one."""
        run = (self.after or self.before).median_run
        return run["processor"] / sum(run[stage] for stage in FIRST_TOKEN)

    @property
    def visual_tokens_per_image(self) -> float:
        """Visual tokens per image, unpatched."""
        return self.load.visual / self.images

    def ratio(self, stage: str | None = None) -> float | None:
        """Return the time ratio before / after of a stage, or of the time to first token if `stage` is None.

        The ratio is the median over pairs of consecutive runs. None without a setting, or if a stage takes no time.
        """
        if self.after is None:
            return None
        if stage is None:
            pairs = [*zip(self.before.first_token(), self.after.first_token(), strict=True)]
        else:
            runs = zip(self.before.runs, self.after.runs, strict=True)
            pairs = [(before[stage], after[stage]) for before, after in runs]
        pairs = [(before, after) for before, after in pairs if before > 0 and after > 0]
        return statistics.median(before / after for before, after in pairs) if pairs else None

    def predict_speedup(self) -> float | None:
        """Return the closed-form ratio of prefill FLOPs before / after. None without a setting or a known tower."""
        if self.setting is None or self.after is None or self.model.tower is None:
            return None
        methods, budgets = self.setting.steps()
        return self.model.compute_cost(self.load).flops / self.model.predict(self.load, methods, budgets).flops

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as plain values."""

        def record(side: SideProfile) -> dict[str, Any]:
            stages = {stage: compute_quantiles([run[stage] for run in side.runs]) for stage in STAGES}
            return {
                "stages_ms": stages,
                "first_token_ms": compute_quantiles(side.first_token()),
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
            "speedup_by_flops": self.predict_speedup(),
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
    """Time one question about images, unpatched and, with a setting, patched.

    Args:
        subject: The model.
        images: Images of the prompt.
        question: The question.
        setting: Setting as in `patch(config=...)`. None times the unpatched model only.
        repeats: Timed runs of each model, after one warm-up run.
        new_tokens: Number of generated tokens, at least 2.
        step: Progress callback with a label, the number of finished runs, and their total.

    Raises:
        OptionError: If `repeats` or `new_tokens` is too small.
        TokenPruneError: If the setting does not fit the model.

    Examples:
        >>> from tokenprune_bench.profiling.model import load_model
        >>> subject = load_model("demo_vlm", device="cpu")
        >>> setting = {"method": "divprune", "keep": 0.25}
        >>> profile = profile_call(subject, [image], "what color is the star?", setting, repeats=1, new_tokens=2)
        >>> profile.after.visual
        (256, 64, 64.0)
    """
    if repeats < 1 or new_tokens < 2:
        raise OptionError("A profile needs at least one run and two new tokens.")

    setting = None if setting is None else Setting.from_json(setting)

    def ask() -> dict[str, Any]:
        return subject.inputs([list(images)], [question])

    before, after = SideProfile(), None if setting is None else SideProfile()
    inputs = ask()
    model, load = build_cost_model(subject), build_load(subject, inputs)
    with CacheMeter(subject) as prefill:
        before.answer = subject.generate(inputs)[0]
    before.visual, before.kv_bytes = (load.visual, load.visual, float(load.visual)), prefill.kv_bytes
    if after is not None:
        with patched_by(subject, setting):
            small = ask()
            after.answer = subject.generate(small)[0]
            stats = get_batch_cost(subject, small)
            after.visual = stats.visual_tokens_in, stats.visual_tokens_out, stats.visual_tokens_average
            after.kv_bytes = stats.kv_bytes
    sides = [(before, None)] + ([] if after is None else [(after, setting)])
    for repeat in range(repeats + 1):
        for index, (side, how) in enumerate(sides if repeat % 2 else reversed(sides)):
            step("profile", repeat * len(sides) + index, (repeats + 1) * len(sides))
            with patched_by(subject, how):
                run = _run(subject, ask, new_tokens, patched=how is not None)
            if repeat:
                side.runs.append(run)
    return Profile(setting, before, after, model, load, subject.environment(), get_machine_load(), len(images))


def _run(subject: Model, ask: Callable[[], dict[str, Any]], new_tokens: int, patched: bool) -> dict[str, float]:
    """Return the milliseconds of each stage of one call."""
    wait = _get_synchronizer(subject)
    begin = time.perf_counter()
    inputs = ask()
    wait()
    run = {"processor": 1000 * (time.perf_counter() - begin)}
    with time_stages(subject, wait) as spans:
        ttft, step = run_once(subject, inputs, new_tokens)
    prefill = spans["decoder"][0]
    run["tower"] = sum(spans["tower"])
    # A decode method also decides in later steps. That part of its time cannot be separated from prefill.
    run["selection"] = min(prefill, api.stats(subject.model).overhead_ms or 0.0) if patched else 0.0
    run["prefill"] = prefill - run["selection"]
    run["rest"] = max(0.0, ttft - run["tower"] - prefill)
    run["decode"] = step
    return run


def _get_synchronizer(subject: Model) -> Callable[[], None]:
    if subject.model.device.type == "cuda":
        return torch.cuda.synchronize
    return lambda: None


class _Timed:
    """Wrapper of `get_image_features` that records its time. Nested calls count once."""

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
def time_stages(subject: Model, wait: Callable[[], None]) -> Iterator[dict[str, list[float]]]:
    """Open a context that records milliseconds: "tower" for each encoding, and "decoder" for each forward.

    Enter it after a patch, and leave it before `unpatch`.

    Args:
        subject: The model.
        wait: Waits for the device.
    """
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
