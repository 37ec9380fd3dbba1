# SPDX-License-Identifier: Apache-2.0
"""`tokenprune calibrate`, `fit-dyrate`, `fit-d2pruner` and `fit-fitprune`: what some methods need for a model before
they can act in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    ThreadsOption,
    get_console,
    load_model,
    read_keeps,
    show_progress,
)


def calibrate(
    images: Annotated[Path, typer.Option(help="Folder of images like those that the model will see.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")] = Path("thresholds.safetensors"),
    keep: Annotated[str, typer.Option(help="Comma-separated shares of the patches to keep on average.")] = "0.25",
    schedule: Annotated[
        str, typer.Option(help="How many tokens each block merges: constant, linear or reverse_linear.")
    ] = "constant",
    batch_size: Annotated[int, typer.Option(min=1, help="Images whose tokens compete with each other.")] = 32,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an interrupted run has done.")] = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Find the thresholds that `dymu` needs for a model, on unlabelled images."""
    import tokenprune

    keeps = list(read_keeps(keep))
    subject = load_model(model, device, threads, dtype, suffix="")
    with show_progress() as step:
        found = tokenprune.calibrate(
            subject.model,
            images,
            processor=subject.processor,
            keep=keeps,
            schedule=schedule,
            batch_size=batch_size,
            progress=step,
            out=out,
            resume=not restart,
        )
    console = get_console()
    for share in found.keeps:
        row = " ".join(f"{value:.3f}" for value in found.values[share].tolist())
        console.print(f"keep {share:g}: {row}", markup=False, soft_wrap=True)
    console.print(f"written: {out} (calibrated on {found.images} images)", markup=False, soft_wrap=True)


def fit_dyrate(
    out: Annotated[Path, typer.Option(help="The predictor file to write.")] = Path("predictor.safetensors"),
    images: Annotated[Path | None, typer.Option(help="Folder of images; default: drawn scenes.")] = None,
    question: Annotated[str, typer.Option(help="Asked about each image of --images.")] = "Describe this image.",
    limit: Annotated[int, typer.Option(min=1, help="How many images.")] = 24,
    keep: Annotated[float, typer.Option(help="Share that prefill keeps; use the same with dyrate.")] = 0.5,
    layer: Annotated[int, typer.Option(help="As in dyrate.")] = 3,
    grid: Annotated[int, typer.Option(min=1, help="As in dyrate.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 32,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Fit the predictor of `dyrate` to a model: how many visual tokens each step of an answer can do without."""
    from tokenprune.calibration.fitting import fit

    subject = load_model(model, device, threads, suffix="")
    options = dict(keep=keep, layer=layer, grid=grid, max_new_tokens=max_new_tokens)
    with show_progress() as step:
        seen = fit(subject, out, images, question, limit, step, options)
    console = get_console()
    console.print(f"{sum(seen.labels)} decode steps; right on {seen.accuracy:.1%} of them; steps a rate:")
    console.print(", ".join(f"{number / grid:g}: {count}" for number, count in enumerate(seen.labels)), markup=False)
    console.print(f"written: {out}", markup=False, soft_wrap=True)


_ImagesOption = Annotated[Path | None, typer.Option(help="Folder of images; default: drawn scenes.")]
_QuestionOption = Annotated[str, typer.Option(help="Asked about each image; one that asks for nothing in particular.")]


def fit_d2pruner(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("prior.safetensors"),
    images: _ImagesOption = None,
    question: _QuestionOption = "Describe this image.",
    limit: Annotated[int, typer.Option(min=1, help="How many images; the authors take 1000.")] = 200,
    layer: Annotated[int, typer.Option(min=1, help="As in d2pruner.")] = 2,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Find the prior of `d2pruner`: what a model attends to whatever an image shows."""
    import tokenprune
    from tokenprune.calibration.fitting import fit_attention

    subject = load_model(model, device, threads, suffix="")
    with show_progress() as step:
        prior = fit_attention(tokenprune.fit_d2pruner, subject, out, images, question, limit, step, layer=layer)
    rows, columns = prior.table.shape
    console = get_console()
    console.print(f"{rows} x {columns} places; the most attended to gets {prior.table.max():.3g}", markup=False)
    console.print(f"written: {out}", markup=False, soft_wrap=True)


def fit_fitprune(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("recipe.safetensors"),
    images: _ImagesOption = None,
    question: _QuestionOption = "Describe this image.",
    limit: Annotated[int, typer.Option(min=1, help="How many images.")] = 48,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Fit the recipe of `fitprune`: how many visual tokens each decoder layer can do without."""
    import tokenprune
    from tokenprune.calibration.fitting import fit_attention

    subject = load_model(model, device, threads, suffix="")
    with show_progress() as step:
        recipe = fit_attention(tokenprune.fit_fitprune, subject, out, images, question, limit, step)
    console = get_console()
    console.print(f"{len(recipe.table)} recipes for {recipe.table.shape[1]} layers", markup=False)
    console.print(f"written: {out}", markup=False, soft_wrap=True)
