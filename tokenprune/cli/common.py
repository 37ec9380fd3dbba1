# SPDX-License-Identifier: Apache-2.0
"""Shared code of all commands: console, command lookup, and the options --model, --methods and --keep."""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tokenprune.cli.completion import complete_models
from tokenprune.errors import MissingPackageError, OptionError, TokenPruneError

if TYPE_CHECKING:
    from rich.console import Console

    from tokenprune.settings import Setting

STOPPED = 130  # exit code after Ctrl+C, as in a shell
_PIPED_WIDTH = 160
_MAX_INT = 2**31 - 1  # largest value of an integer option
# Commands by section of `tokenprune --help`, in order.
SECTIONS = {
    "Use": ("demo", "methods", "recommend", "families", "show", "app"),
    "Measure": ("bench", "report", "leaderboard", "profile", "tune", "draft"),
    "Serve": ("capacity", "serve-check"),
    "Extend": ("new-method", "new-family", "fit"),
}
# Commands of the package tokenprune-bench.
BENCH_COMMANDS = "app bench demo fit leaderboard profile recommend report show tune".split()
METHODS_HELP = "Comma-separated methods, with options (dart:pivot_text=0) or combined (divprune+fastv)"

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Directory, Hub id, demo_qwen, demo_smol, demo_video or demo_vlm. Default: demo_vlm.",
        autocompletion=complete_models,
    ),
]


def get_console(error: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=error, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=error, highlight=False, width=_PIPED_WIDTH)
    return console


def say(text: str, style: str = "", error: bool = False) -> None:
    """Print a line, wrapped on a terminal and unwrapped in a pipe."""
    from rich.text import Text

    console = get_console(error)
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


@cache
def _find_entry_points() -> dict[str, EntryPoint]:
    """Return the commands of installed packages by name."""
    return {entry.name: entry for entry in entry_points(group="tokenprune.commands")}


def _import_command(entry: EntryPoint) -> Any:
    """Return the command of another package. If it cannot be imported, the command raises an error when called."""
    holder = typer.Typer()
    try:
        command = entry.load()
        settings = getattr(command, "context_settings", {})
    except Exception as error:
        reason = f"`tokenprune {entry.name}` cannot be imported ({entry.value}): {error}"
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}

        def command() -> None:
            raise TokenPruneError(reason)

        command.__doc__ = reason
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=entry.name)
    else:
        holder.command(entry.name, cls=BoundedCommand, context_settings=settings)(command)
    return typer.main.get_group(holder).commands[entry.name]


class BoundedCommand(TyperCommand):
    """Command that rejects integers above 2**31 - 1, which torch and itertools do not accept."""

    def invoke(self, ctx: Any) -> Any:
        names = {param.name: param.opts[0] for param in self.params}
        for name, value in ctx.params.items():
            if isinstance(value, int) and abs(value) > _MAX_INT:
                raise OptionError(f"{names[name]} {value} is too large. The maximum is {_MAX_INT}.")
        return super().invoke(ctx)


class ErrorGroup(TyperGroup):
    """Command group that prints a TokenPruneError as one red line and exits with code 2. Ctrl+C exits with code 130.

    Other exceptions are bugs and keep their traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TokenPruneError as error:
            say(f"error: {error}", "bold red", error=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            get_console(error=True).print(*stop.args or ("stopped",), markup=False, soft_wrap=True)
            raise typer.Exit(STOPPED) from None


class Commands(ErrorGroup):
    """Commands of this package and of installed packages, in the sections of `SECTIONS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = {*super().list_commands(ctx), *_find_entry_points()}
        ordered = [name for section in SECTIONS.values() for name in section if name in names]
        return [*ordered, *sorted(names - {*ordered})]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command of this package, or import a command of an installed package."""
        command: Any = self.commands.get(name)
        if command is None and name in _find_entry_points():
            command = _import_command(_find_entry_points()[name])
        if command is not None:
            command.rich_help_panel = next((title for title, names in SECTIONS.items() if name in names), "Other")
        elif name in BENCH_COMMANDS:
            raise MissingPackageError(f"`tokenprune {name}` requires another package: pip install tokenprune-bench")
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and (close := get_close_matches(args[0], self.list_commands(ctx))):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, close))}?")
        return super().resolve_command(ctx, args)


def load_config(model: str | None) -> Any:
    """Return the configuration of a model without loading weights. Default: the shipped model demo_vlm."""
    from tokenprune.models.model_config import read_model_config

    return read_model_config(model or "demo_vlm")


def read_keeps(text: str, single: bool = False) -> tuple[float | int, ...]:
    """Read the comma-separated numbers of --keep, or a single number. Raise TokenPruneError if they are invalid."""
    from tokenprune.settings.one_line import parse_number

    keeps = tuple(parse_number(part) for part in text.split(",") if part.strip())
    if not keeps or any(isinstance(keep, str) for keep in keeps) or (single and len(keeps) > 1):
        expected = "one number" if single else "a comma-separated list of numbers"
        hint = "Pass a share such as 0.25, or a number of tokens per image such as 64."
        raise TokenPruneError(f"--keep {text!r} is not {expected}. {hint}")
    if 1 in (keep for keep in keeps if isinstance(keep, int)):
        raise TokenPruneError(
            f"--keep {text} is ambiguous. Use 1.0 to keep all tokens. To keep one token per image, pass "
            'Budget(tokens=1) in Python, or "keep": {"tokens": 1} in a configuration.'
        )
    return keeps


def read_specs(methods: str) -> list[Setting]:
    """Return the settings that --methods lists, without a keep."""
    from tokenprune.settings import Setting
    from tokenprune.settings.one_line import split_methods

    return [Setting.from_text(text).validate() for text in split_methods(methods)]


def read_settings(methods: str, keep: str, max_tokens: int | None = None) -> list[Setting]:
    """Return a setting for each combination of --methods and --keep. Empty without a method.

    Commas separate settings. Plus signs combine methods and their keeps, as in "divprune+fastv,dart" with "0.5+0.25".

    Args:
        methods: Value of --methods.
        keep: Value of --keep.
        max_tokens: Value of --max-visual-tokens.

    Raises:
        OptionError: If the number of keeps does not match the number of methods.

    Examples:
        >>> [str(setting) for setting in read_settings("divprune,fastv", "0.5,0.25")]
        ['divprune 0.5', 'divprune 0.25', 'fastv 0.5', 'fastv 0.25']
    """
    from tokenprune.budgets import Budget
    from tokenprune.errors import OptionError
    from tokenprune.settings import Setting
    from tokenprune.settings.max_visual_tokens import LIMITER, check_limit

    settings: list[Setting] = []
    if max_tokens is not None and not methods.strip():
        return [Setting.from_text(LIMITER, Budget(tokens=max_tokens).to_json())]
    for stack in read_specs(methods):
        num_methods = len(stack.names)
        for text in keep.split(","):
            keeps: list[Any] = [*read_keeps(text.replace("+", ","))]
            if len(keeps) not in (1, num_methods):
                raise OptionError(
                    f"--keep {text} has {len(keeps)} numbers for {num_methods} method{'s'[: num_methods > 1]} in "
                    f"{stack.to_text()}. Pass one number, or one per method joined with plus signs."
                )
            if max_tokens is None:
                settings.append(stack.with_keep(keeps if keeps[1:] else keeps[0]))
                continue
            check_limit(max_tokens, stack.names)
            keep_of_each = keeps if keeps[1:] else keeps * num_methods
            settings.append(
                Setting.from_text(f"{LIMITER}+{stack.to_text()}", [Budget(tokens=max_tokens).to_json(), *keep_of_each])
            )
    return settings
