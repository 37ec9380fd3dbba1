# SPDX-License-Identifier: Apache-2.0
"""The papers' table: LLaVA-1.5-7B on GQA, MMBench, MME, POPE, ScienceQA, VQAv2 and TextVQA, at 192, 128 and 64 tokens.

    python benchmarks/experiments/papers_table.py commands            # the exact commands of lmms-eval
    python benchmarks/experiments/papers_table.py run --out results   # run them, and go on where an earlier run stopped
    python benchmarks/experiments/papers_table.py table results       # your numbers beside the published ones
    python benchmarks/experiments/papers_table.py page     # rewrite the tables of docs/results/papers.md

It needs weights and a GPU; docs/results/papers.md describes the comparison.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from papers import counts, outcomes, settings, tables
from papers.published import UNPATCHED, published
from papers.sets import SETS, chosen
from papers.settings import Setting

from tokenprune.cli.common import ErrorGroup, get_console
from tokenprune.errors import TokenPruneError

PAGE = Path(__file__).parents[2] / "docs/results/papers.md"

app = typer.Typer(
    cls=ErrorGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="LLaVA-1.5-7B at 192, 128 and 64 visual tokens: run what papers report, and compare.",
)  # fmt: skip
Methods = Annotated[str | None, typer.Option(help="Comma-separated; default: all. Unpatched always comes along.")]
Budgets = Annotated[str | None, typer.Option(help="Comma-separated, out of 192,128,64; default: all.")]
Sets = Annotated[
    str | None, typer.Option(help=f"Comma-separated, out of {','.join(SETS)}, or tasks such as vqav2_val_lite.")
]
Out = Annotated[Path, typer.Option(help="Folder for the results, one folder in it for each setting.")]
Pretrained = Annotated[str, typer.Option(help="Directory or hub id of the weights.")]
Device = Annotated[str, typer.Option(help="Where the model goes: cuda, cuda:1, cpu ...")]
ThresholdsFile = Annotated[str, typer.Option("--thresholds", help="The file of `tokenprune fit dymu`, for dymu.")]
Split = Annotated[bool, typer.Option("--split", help="One benchmark a command: less is lost when one is cut short.")]
DEFAULT_OUT, DEFAULT_THRESHOLDS = Path("results"), "thresholds.safetensors"


@app.command()
def commands(
    methods: Methods = None,
    budgets: Budgets = None,
    sets: Sets = None,
    out: Out = DEFAULT_OUT,
    pretrained: Pretrained = settings.PRETRAINED,
    device: Device = "cuda",
    thresholds: ThresholdsFile = DEFAULT_THRESHOLDS,
    split: Split = False,
) -> None:
    """Print the commands, for a shell."""
    tasks, picked = chosen(sets), settings.picked(methods, budgets)
    if any(one.method == "dymu" for one in picked):
        typer.echo(
            "# before dymu, once, on a folder of some hundred images like those of the benchmarks (COCO's, for one)"
        )
        typer.echo(shlex.join(settings.calibration(pretrained, thresholds)))
    for one in picked:
        typer.echo(f"# {one.name}: visual tokens {one.tokens}; averaged over layers {one.average:.1f}")
        arguments = one.arguments(pretrained, device, thresholds)
        for group in _groups(tasks, split):
            typer.echo(shlex.join(settings.command(arguments, group, out / one.name)))


@app.command()
def run(
    methods: Methods = None,
    budgets: Budgets = None,
    sets: Sets = None,
    out: Out = DEFAULT_OUT,
    pretrained: Pretrained = settings.PRETRAINED,
    device: Device = "cuda",
    thresholds: ThresholdsFile = DEFAULT_THRESHOLDS,
    split: Split = False,
) -> None:
    """Run the commands one by one; benchmarks that have a result already are skipped, failures are named at the end."""
    tasks, picked = chosen(sets), settings.picked(methods, budgets)
    _check_installed()
    failed: list[str] = []
    for number, one in enumerate(picked, 1):
        label = f"[{number}/{len(picked)}] {one.name}"
        try:
            failed += _run_one(one, label, tasks, out / one.name, (pretrained, device, thresholds), split)
        except OSError as error:
            raise TokenPruneError(f"cannot write to {out / one.name}: {error.strerror or error}") from error
    if failed:
        raise TokenPruneError("\n".join([f"{len(failed)} of the commands left something undone:", *failed]))
    _say(f"all done: python benchmarks/experiments/papers_table.py table {out}")


def _run_one(
    one: Setting, label: str, tasks: list[str], folder: Path, given: tuple[str, str, str], split: bool
) -> list[str]:
    """Run what is missing of one setting, and return what failed."""
    found = outcomes.read(folder, one)
    for path, reason in found.broken.items():
        path.rename(path.with_name(f"{path.name}.broken"))
        _say(f"{label}: set aside, {reason}")
    missing = [task for task in tasks if task not in found.tasks]
    if not missing:
        _say(f"{label}: finished before")
        return []
    pretrained, device, thresholds = given
    if one.method == "dymu" and not Path(thresholds).is_file():
        _say(f"{label}: no thresholds")
        make = shlex.join(settings.calibration(pretrained, thresholds))
        return [f"{one.name}: there is no {thresholds}; make it with `{make}`"]
    failed = []
    for group in _groups(missing, split):
        _say(f"{label}: {', '.join(group)}")
        arguments = one.arguments(pretrained, device, thresholds)
        ended = _execute(settings.command(arguments, group, folder, sys.executable), folder)
        found = outcomes.read(folder, one)
        if left := [task for task in group if task not in found.tasks]:
            _say(f"{label}: failed")
            reasons = "; ".join([ended, *found.broken.values()])
            failed.append(f"{one.name}: no result for {', '.join(left)} ({reasons}); see {folder / 'log.txt'}")
    return failed


def _say(text: str) -> None:
    get_console().print(text, markup=False, soft_wrap=True)


@app.command()
def table(
    results: Annotated[
        Path | None, typer.Argument(help="The folder that `run --out` wrote; without it: no numbers.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A .md or .html file; default: print Markdown.")] = None,
) -> None:
    """Write the published numbers with yours beside them."""
    if out is not None and out.suffix not in (".md", ".html"):
        raise TokenPruneError(f"--out {out}: use a name that ends in .md or .html")
    found = outcomes.read_all(results, settings.settings()) if results else outcomes.Outcomes()
    notes = [_READING, *found.notes]
    if found.numbers:
        notes += _missing(found)
    made = [*tables.comparison(found.numbers), tables.sources()]
    title = f"{published().model}: published and measured"
    if out is not None and out.suffix == ".html":
        text = tables.to_html(made, title, notes)
    else:
        parts = [f"# {title}", *notes, *(tables.to_markdown(one, 2) for one in made)]
        text = "\n\n".join(parts) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise TokenPruneError(f"cannot write {out}: {error.strerror or error}") from error
    get_console(error=True).print(f"written: {out}", markup=False)


@app.command()
def page(check: Annotated[bool, typer.Option("--check", help="Exit with 1 where it is not current.")] = False) -> None:
    """Rewrite the generated parts of docs/results/papers.md."""
    pages = {PAGE: lambda text: budgets_written(written(text))}
    stale = {path: text for path, write in pages.items() if (text := write(path.read_text())) != path.read_text()}
    if check:
        raise typer.Exit(int(bool(stale)))
    for path, text in stale.items():
        path.write_text(text)


def written(text: str) -> str:
    """Return the page with its generated tables of published numbers."""
    made = [tables.summary(), tables.tasks(), tables.sources()]
    return _with_block(text, "papers", "\n\n".join(tables.to_markdown(one, 2) for one in made))


def budgets_written(text: str) -> str:
    """Return the page with its generated table of token counts."""
    return _with_block(text, "counts", tables.to_markdown(counts.table(), 2))


def _with_block(text: str, name: str, made: str) -> str:
    block = re.compile(rf"(<!-- {name}:begin[^\n]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{made}\n\n{match[2]}", text)


_READING = """In parentheses behind a number of yours: how many points it is above or below each published one of the
same budget, in percent of the unpruned model of the same source (yours: of your unpatched run), which other splits and
prompts move least. **Bold**: more than 1 point away from one of them. `?`: the number is in doubt. *Mean of these* is
taken here, over the rows above it that both the method and the unpruned model have; *average as printed* is the
source's, over benchmarks of its own choice.""".replace("\n", " ")


def _groups(tasks: list[str], split: bool) -> list[list[str]]:
    return [[task] for task in tasks] if split else [tasks]


def _execute(command: list[str], folder: Path) -> str:
    """Run a command with its output in a log, and say how it ended. lmms-eval ends with 0 even where it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        return f"exit code {subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode}"


def _check_installed() -> None:
    if importlib.util.find_spec("lmms_eval") is None:
        raise TokenPruneError("lmms-eval is not installed: pip install 'tokenprune-bench[lmms-eval]'")
    if not any(one.name == "tokenprune" for one in entry_points(group="lmms_eval.models")):
        raise TokenPruneError(
            "lmms-eval does not see tokenprune: install the package (pip install -e .), not only its path"
        )


def _missing(found: outcomes.Outcomes) -> list[str]:
    notes = [] if UNPATCHED in found.numbers else ["Without results of `unpatched` there are no percentages."]
    absent = [one.name for one in settings.settings() if one.name not in found.numbers]
    partly = [
        f"{name} ({', '.join(SETS[key].title for key in SETS if key not in numbers)})"
        for name, numbers in found.numbers.items()
        if len(numbers) < len(SETS)
    ]
    if absent:
        notes.append(f"Not measured: {', '.join(absent)}.")
    return [*notes, f"In part: {'; '.join(partly)}."] if partly else notes


if __name__ == "__main__":
    app(prog_name="papers_table.py")
