# SPDX-License-Identifier: Apache-2.0
"""Find the thresholds of `dymu` for a vision tower and a set of images: no labels, no training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenprune.api import is_patched
from tokenprune.budgets import Budget
from tokenprune.errors import AlreadyPatchedError, BudgetError, OptionError
from tokenprune.integrations.shared import checks
from tokenprune.methods.encoder.thresholds import Thresholds
from tokenprune_bench.calibration.images import ImageFiles, PackedPixels, Pixels
from tokenprune_bench.calibration.merge import SCHEDULES, Calibrator
from tokenprune_bench.calibration.state import CalibrationState

if TYPE_CHECKING:
    from tokenprune.integrations.hf.towers.base import TowerPart
    from tokenprune.integrations.timm import TimmPatch
    from tokenprune_bench.calibration.fitting import FitSamples

Step = Callable[[str, int, int], None]


@torch.no_grad()
def calibrate(
    model: Any,
    images: str | Path | Iterable[Any],
    *,
    processor: Any = None,
    keep: float | Sequence[float] = 0.25,
    schedule: str = "constant",
    batch_size: int = 32,
    progress: bool | Step = True,
    out: str | Path | None = None,
    resume: bool = True,
) -> Thresholds:
    """Return the thresholds with which `dymu` keeps the share `keep` of the patches, on average over `images`.

    model:      a vision-language model that `dymu` can patch, or a plain vision transformer of timm; stays as it is.
    images:     a folder (all images in and below it, sorted), or paths, PIL images or tensors of pixels
                (`[3, H, W]`, or `[tiles, 3, H, W]`).
    processor:  what makes pixels of images: the model's processor or image processor; for a model of timm a
                transform, by default the model's own. Tensors need none.
    keep:       one share in (0, 1), or several.
    schedule:   how many tokens each block merges: "constant", "linear" (falling to 0) or "reverse_linear".
    batch_size: images whose pairs of tokens compete with each other (in towers that take images of any size, those
                of one size).
    progress:   whether to draw a bar (on a terminal), or a function that takes (label, done, total; 0 = unknown).
    out:        the file to write. Until it is whole, a file beside it (`.partial`) holds what was done so far, and the
                same call goes on from there, if `images` are files.
    resume:     False: start again, whatever such a file holds.

    Raises OptionError for images or options that cannot be used, BudgetError for a share that cannot be reached,
    AlreadyPatchedError, and what `patch` raises for models that `dymu` does not fit.
    """
    if is_patched(model):
        raise AlreadyPatchedError("the model is patched: call tokenprune.unpatch(model) before calibrating")
    keeps = _keeps(keep)
    if schedule not in SCHEDULES:
        raise OptionError(f"schedule={schedule!r} is not known; use one of {', '.join(map(repr, SCHEDULES))}")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"batch_size={batch_size!r} must be an int >= 1")
    calibrators = [Calibrator(schedule=schedule) for _ in keeps]
    parts = [_part(model, one, share) for one, share in zip(calibrators, keeps, strict=True)]
    tower = parts[0].reducer.layout.shape
    assert tower.module is not None  # engines give it
    source, pixels = ImageFiles(images), _pixels(parts[0], model, processor)
    settings = {"keeps": keeps, "schedule": schedule, "batch_size": batch_size}
    state = CalibrationState.load_or_create(out, source, tower, settings, resume)

    training = model.training
    model.eval()
    try:
        with _steps(progress) as step:
            step("calibrating", state.images, source.total)
            rest = islice(source, state.images, None)
            while batch := list(islice(rest, batch_size)):
                values = pixels(batch)
                for row, (part, one) in enumerate(zip(parts, calibrators, strict=True)):
                    one.batch_thresholds.clear()
                    with _attached(part):
                        tower.module(*values)
                    state.sums[row] += one.thresholds(tower.blocks)
                state.images, state.batches = state.images + len(batch), state.batches + 1
                state.save()
                step("calibrating", state.images, source.total)
    finally:
        model.train(training)
    if not state.images:
        raise OptionError("images is empty: calibration takes images like those that the model will see")
    means = state.sums / state.batches
    result = Thresholds(dict(zip(keeps, means.float(), strict=True)), tower.fingerprint, state.images, settings)
    if out is not None:
        result.save(out)
        state.remove()
    return result


def fit_dymu(
    model: Any,
    samples: FitSamples,
    out: str | Path | None = None,
    *,
    keep: float | Sequence[float] = 0.25,
    schedule: str = "constant",
    batch_size: int = 32,
    restart: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Thresholds:
    """Return the thresholds of `dymu`: `calibrate` on the images of `samples`, as `Method.fit` takes them."""
    if not hasattr(samples, "images"):
        raise OptionError(
            "dymu is fitted on images, not on a model's arguments: call tokenprune_bench.calibration.calibrate(model, "
            "images)"
        )
    return calibrate(
        model,
        samples.images,
        processor=samples.processor,
        keep=keep,
        schedule=schedule,
        batch_size=batch_size,
        progress=False if progress is None else lambda label, done, total: progress(done),
        out=out,
        resume=not restart,
    )


def _keeps(keep: Any) -> list[float]:
    keeps = sorted(set(keep), reverse=True) if isinstance(keep, (list, tuple)) else [keep]
    for one in keeps:
        if isinstance(one, bool) or not isinstance(one, float) or not 0 < one < 1:
            raise BudgetError(f"keep={one!r} cannot be calibrated: use a share between 0 and 1, such as 0.25")
    if not keeps:
        raise BudgetError("keep is empty: name at least one share, such as 0.25")
    return keeps


def _part(model: Any, calibrator: Calibrator, keep: float) -> TowerPart | TimmPatch:
    from tokenprune.integrations.timm import is_timm, timm_patch

    if is_timm(model):
        return timm_patch(model, [calibrator], [Budget.from_keep(keep)])
    from tokenprune.integrations.hf.families import adapter_for
    from tokenprune.integrations.hf.towers.build import tower_part

    adapter = adapter_for(model)
    checks.check(calibrator, adapter.family, config=adapter.config)
    return tower_part(adapter, calibrator, Budget.from_keep(keep))


def _pixels(part: TowerPart | TimmPatch, model: Any, processor: Any) -> Pixels:
    module = part.reducer.layout.shape.module
    assert module is not None  # engines give it
    return (PackedPixels if hasattr(module, "spatial_merge_size") else Pixels)(model, module, processor)


@contextmanager
def _attached(part: TowerPart | TimmPatch) -> Iterator[None]:
    part.attach()
    try:
        yield
    finally:
        part.detach()


@contextmanager
def _steps(progress: bool | Step) -> Iterator[Step]:
    if callable(progress):
        yield progress
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn())
    console = Console(file=sys.stderr)
    hidden = not progress or not console.is_terminal
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("")
        yield lambda label, done, total: bar.update(task, description=label, completed=done, total=total or None)
