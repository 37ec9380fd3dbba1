# SPDX-License-Identifier: Apache-2.0
"""Calibrate the thresholds of `dymu` for a vision tower and a set of images, without labels or training."""

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
    """Return the thresholds that make `dymu` keep the share `keep` of the patches, on average over `images`.

    Args:
        model: A vision-language model that `dymu` supports, or a plain vision transformer of timm. It is not changed.
        images: A folder (searched recursively, sorted), or paths, PIL images or pixel tensors with shape (3, height,
            width) or (tiles, 3, height, width).
        processor: The model's processor or image processor. For a timm model a transform, by default the model's own.
            Tensors need no processor.
        keep: One share in (0, 1), or several.
        schedule: Number of merged tokens per block: "constant", "linear" (falling to 0) or "reverse_linear".
        batch_size: Number of images whose token pairs compete. In towers with variable sizes only images of one size
            compete.
        progress: Whether to draw a bar on a terminal, or a callback with (label, done, total); total 0 means unknown.
        out: File to write. An unfinished run is stored beside it (`.partial`), and the same call resumes it if `images`
            are files.
        resume: False ignores an unfinished run.

    Returns:
        The thresholds of each block, for each share.

    Raises:
        OptionError: If images or options are not valid.
        BudgetError: If a share cannot be reached.
        AlreadyPatchedError: If the model is patched.
        UnsupportedSetupError: If `dymu` does not support the model.

    Examples:
        >>> thresholds = calibrate(model, [image], processor=processor, keep=0.5, progress=False)
        >>> thresholds.keeps
        [0.5]
    """
    if is_patched(model):
        raise AlreadyPatchedError("The model is patched. Call tokenprune.unpatch(model) before calibrating.")
    keeps = _keeps(keep)
    if schedule not in SCHEDULES:
        raise OptionError(f"schedule={schedule!r} is not known. Use one of {', '.join(map(repr, SCHEDULES))}.")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"batch_size={batch_size!r} is not valid. Pass an int >= 1.")
    calibrators = [Calibrator(schedule=schedule) for _ in keeps]
    parts = [_build_part(model, calibrator, share) for calibrator, share in zip(calibrators, keeps, strict=True)]
    tower = parts[0].reducer.layout.shape
    assert tower.module is not None  # set by the engines
    source, pixels = ImageFiles(images), _build_pixels(parts[0], model, processor)
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
                for row, (part, calibrator) in enumerate(zip(parts, calibrators, strict=True)):
                    calibrator.batch_thresholds.clear()
                    with _attached(part):
                        tower.module(*values)
                    state.sums[row] += calibrator.thresholds(tower.blocks)
                state.images, state.batches = state.images + len(batch), state.batches + 1
                state.save()
                step("calibrating", state.images, source.total)
    finally:
        model.train(training)
    if not state.images:
        raise OptionError("images is empty. Pass images like the model's real inputs.")
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
    """Fit the thresholds of `dymu`: run `calibrate` on the images of `samples`, with the interface of `Method.fit`."""
    if not hasattr(samples, "images"):
        raise OptionError(
            "dymu is fitted on images, not on model arguments. Call tokenprune_bench.calibration.calibrate(model, "
            "images)."
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
    for share in keeps:
        if isinstance(share, bool) or not isinstance(share, float) or not 0 < share < 1:
            raise BudgetError(f"keep={share!r} cannot be calibrated. Pass a share between 0 and 1, such as 0.25.")
    if not keeps:
        raise BudgetError("keep is empty. Pass at least one share, such as 0.25.")
    return keeps


def _build_part(model: Any, calibrator: Calibrator, keep: float) -> TowerPart | TimmPatch:
    from tokenprune.integrations.timm import build_timm_patch, is_timm

    if is_timm(model):
        return build_timm_patch(model, [calibrator], [Budget.from_keep(keep)])
    from tokenprune.integrations.hf.families import get_adapter
    from tokenprune.integrations.hf.towers.build import build_tower_part

    adapter = get_adapter(model)
    checks.check(calibrator, adapter.family, config=adapter.config)
    return build_tower_part(adapter, calibrator, Budget.from_keep(keep))


def _build_pixels(part: TowerPart | TimmPatch, model: Any, processor: Any) -> Pixels:
    module = part.reducer.layout.shape.module
    assert module is not None  # set by the engines
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
