# SPDX-License-Identifier: Apache-2.0
"""`tokenprune fit`: compute a method's calibration file for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import ModelOption, get_console
from tokenprune.errors import OptionError
from tokenprune.selection.files import check_output
from tokenprune_bench.cli.common import DeviceOption, DtypeOption, ThreadsOption, load_model, show_progress


def fit(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Method to fit. Default: list the methods with a fit.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: called as the method's option.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of images; default: drawn scenes.")] = None,
    data: Annotated[Path | None, typer.Option(help="File of rows with image and question, without answers.")] = None,
    question: Annotated[str | None, typer.Option(help="Asked about each image; default: the method's.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many images; default: the method's.")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    show_help: Annotated[
        bool, typer.Option("--help", help="Show this message, with NAME also the options of its fit.")
    ] = False,
) -> None:
    """Fit a method to a model, on images without labels.

    Options of the method's `fit` follow the others, for example --keep 0.5,0.25.
    `tokenprune fit NAME --help` lists them.
    """
    console = get_console()
    if show_help:
        _print_help(context, name)
        return
    from tokenprune_bench.calibration.fitting import FitSamples, Fitter, format_fit_options, list_fittable

    if name is None:
        if context.args or out or images or data or model:
            raise OptionError(f"name the method to fit: one of {', '.join(list_fittable())}")
        for method_name in list_fittable():
            console.print(f"{method_name}: {format_fit_options(method_name)}", markup=False, soft_wrap=True)
        return
    if images and data:
        raise OptionError("pass either --images or --data, not both")
    fitter = Fitter(name, _parse_options(context.args))
    out = fitter.default_out if out is None else out
    check_output(out)
    asked = fitter.load_samples(
        images, question, limit, data
    )  # what is not to be had is named before the model is loaded
    subject = load_model(model, device, threads, dtype, suffix="")
    with show_progress() as step:
        result = fitter.run(subject, FitSamples(subject, asked), out, step)
    console.print(str(result), markup=False, soft_wrap=True)
    console.print(f"written: {out}", markup=False, soft_wrap=True)


# Each method's `fit` has options of its own, which `--help` lists.
fit.context_settings = {  # type: ignore[attr-defined]
    "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []
}  # fmt: skip


def _print_help(context: typer.Context, name: str | None) -> None:
    """Print the help of the command, and the options of a method's `fit`."""
    from rich.padding import Padding
    from rich.text import Text

    options = {}
    if name is not None:
        from tokenprune_bench.calibration.fitting import describe_fit_options

        options = describe_fit_options(name)  # raises for a method without a `fit`
    help_text = context.get_help()  # typer prints it, and returns an empty text
    console = get_console()
    if help_text:
        console.print(help_text, markup=False)
    if name is not None:
        console.print(
            f"Options of the fit of {name}:" if options else f"The fit of {name} has no options.", markup=False
        )
    for option, description in options.items():
        console.print(Text(f"  {option}", style="bold"))
        console.print(Padding(Text(description), (0, 0, 0, 4)))


def _parse_options(arguments: Sequence[str]) -> dict[str, str | bool]:
    """Return the options that typer does not know, by name; True for one without a value."""
    options: dict[str, str | bool] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            if name in options:
                raise OptionError(f"--{name} stands there twice")
            options[name] = value if equals else True
        elif name and options[name] is True:
            options[name] = argument
        else:
            raise OptionError(f"{argument!r} belongs to no option: write --option value")
    return options
