# SPDX-License-Identifier: Apache-2.0
"""Helpers of all commands: the console, where commands come from, and reading of --methods and --keep."""

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

STOPPED = 130  # exit code after Ctrl+C, as of a shell
_PIPED_WIDTH = 160
_LARGEST = 2**31 - 1  # of a whole number that an option takes; C code below takes few that are larger
BENCH_COMMANDS = (
    "app bench demo fit leaderboard profile recommend report show tune".split()
)  # commands of tokenprune-bench
METHODS_HELP = "Names with commas between them; options (dart:pivot_text=0) and stacks (divprune+fastv) too"

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Directory, hub id, demo_qwen, demo_smol, demo_video or demo_vlm; default: demo_vlm.",
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
    """Print a line: broken between words on a screen, whole in a pipe."""
    from rich.text import Text

    console = get_console(error)
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


@cache
def _entries() -> dict[str, EntryPoint]:
    """Return the commands that installed packages bring, by name."""
    return {entry.name: entry for entry in entry_points(group="tokenprune.commands")}


def _imported(entry: EntryPoint) -> Any:
    """Return the command of another package; one that cannot be imported says so when it is called."""
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
    """A command whose whole numbers are of a size that torch and itertools take."""

    def invoke(self, ctx: Any) -> Any:
        names = {one.name: one.opts[0] for one in self.params}
        for name, value in ctx.params.items():
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise OptionError(f"{names[name]} {value} is too large: use {_LARGEST} at most")
        return super().invoke(ctx)


class ErrorGroup(TyperGroup):
    """A group of commands that turns our own errors into one red line and exit code 2, Ctrl+C into one line and exit
    code 130; other exceptions are bugs and keep their traceback."""

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
    """Commands of this package, and of packages installed beside it, which are imported when they are named."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_entries())]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command of ours, or import that of an installed package."""
        if name in self.commands:
            return self.commands[name]
        if name in _entries():
            return _imported(_entries()[name])
        if name in BENCH_COMMANDS:
            raise MissingPackageError(f"`tokenprune {name}` is of another package: pip install tokenprune-bench")
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and (close := get_close_matches(args[0], self.list_commands(ctx))):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, close))}?")
        return super().resolve_command(ctx, args)


def load_config(model: str | None) -> Any:
    """Return the config of a model, without its weights; None: the one that ships."""
    from tokenprune.models.model_config import read_model_config

    return read_model_config(model or "demo_vlm")


def read_keeps(text: str, one: bool = False) -> tuple[float | int, ...]:
    from tokenprune.settings.one_line import parse_number

    keeps = tuple(parse_number(part) for part in text.split(",") if part.strip())
    if not keeps or any(isinstance(keep, str) for keep in keeps) or (one and len(keeps) > 1):
        wanted = "one number" if one else "numbers with commas between them"
        hint = "a share such as 0.25, or a whole number of tokens per image"
        raise TokenPruneError(f"--keep {text!r} is not {wanted}: use {hint}")
    if 1 in (keep for keep in keeps if isinstance(keep, int)):
        raise TokenPruneError(
            f"--keep {text} could mean all tokens or a single one of each image: use 1.0 for all of them; a single one "
            'is Budget(tokens=1) in Python, and "keep": {"tokens": 1} in the setting of a server or a configuration'
        )
    return keeps


def read_specs(methods: str) -> list[Setting]:
    """Return the methods and stacks that --methods names, each a setting without a keep."""
    from tokenprune.settings import Setting
    from tokenprune.settings.one_line import split_methods

    return [Setting.from_text(one).validate() for one in split_methods(methods)]


def read_settings(methods: str, keep: str, most: int | None = None) -> list[Setting]:
    """Return each setting that --methods and --keep name; none without a method. most: of --max-visual-tokens.

    Commas part settings, and plus signs the methods of a stack and their keeps: "divprune+fastv,dart" at "0.5+0.25" ...
    """
    from tokenprune.budgets import Budget
    from tokenprune.errors import OptionError
    from tokenprune.settings import Setting
    from tokenprune.settings.max_visual_tokens import LIMITER, check_limit

    settings: list[Setting] = []
    if most is not None and not methods.strip():
        return [Setting.from_text(LIMITER, Budget(tokens=most).to_json())]
    for stack in read_specs(methods):
        number = len(stack.names)
        for text in keep.split(","):
            keeps: list[Any] = [*read_keeps(text.replace("+", ","))]
            if len(keeps) not in (1, number):
                raise OptionError(
                    f"--keep {text} has {len(keeps)} numbers for {number} method{'s'[: number > 1]} in "
                    f"{stack.to_text()}: give one, or one for each with plus signs between them (commas part settings)"
                )
            if most is None:
                settings.append(stack.with_keep(keeps if keeps[1:] else keeps[0]))
                continue
            check_limit(most, stack.names)
            of_each = keeps if keeps[1:] else keeps * number
            settings.append(
                Setting.from_text(f"{LIMITER}+{stack.to_text()}", [Budget(tokens=most).to_json(), *of_each])
            )
    return settings
