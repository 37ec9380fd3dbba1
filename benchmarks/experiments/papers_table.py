# SPDX-License-Identifier: Apache-2.0
"""Run the papers' table: LLaVA-1.5-7B on GQA, MMBench, MME, POPE, ScienceQA, VQAv2 and TextVQA at 192, 128, 64 tokens.

    python benchmarks/experiments/papers_table.py commands            # print the lmms-eval commands
    python benchmarks/experiments/papers_table.py run --out results   # run them, or continue an interrupted run
    python benchmarks/experiments/papers_table.py table results       # compare your numbers with the published ones
    python benchmarks/experiments/papers_table.py page     # rewrite the tables of docs/results/papers.md

This needs weights and a GPU. docs/results/papers.md describes the comparison.
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
    help="Run LLaVA-1.5-7B at 192, 128 and 64 visual tokens, and compare with published numbers.",
)  # fmt: skip
Methods = Annotated[str | None, typer.Option(help="Comma-separated. Default: all. Unpatched is always included.")]
Budgets = Annotated[str | None, typer.Option(help="Comma-separated list of 192, 128 and 64. Default: all.")]
Sets = Annotated[
    str | None, typer.Option(help=f"Comma-separated list of {','.join(SETS)}, or tasks such as vqav2_val_lite.")
]
Out = Annotated[Path, typer.Option(help="Folder for the results, with a subfolder for each setting.")]
Pretrained = Annotated[str, typer.Option(help="Directory or hub id of the weights.")]
Device = Annotated[str, typer.Option(help="Device of the model: cuda, cuda:1, cpu ...")]
ThresholdsFile = Annotated[str, typer.Option("--thresholds", help="File written by `tokenprune fit dymu`.")]
Split = Annotated[bool, typer.Option("--split", help="Run each benchmark as a separate command.")]
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
    """Print the commands for a shell."""
    tasks, picked = chosen(sets), settings.picked(methods, budgets)
    if any(setting.method == "dymu" for setting in picked):
        typer.echo(
            "# once before dymu, on a folder of several hundred images similar to the benchmarks' (such as COCO)"
        )
        typer.echo(shlex.join(settings.calibration(pretrained, thresholds)))
    for setting in picked:
        typer.echo(f"# {setting.name}: visual tokens {setting.tokens}; averaged over layers {setting.average:.1f}")
        arguments = setting.arguments(pretrained, device, thresholds)
        for group in _groups(tasks, split):
            typer.echo(shlex.join(settings.command(arguments, group, out / setting.name)))


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
    """Run the commands one by one. Skip benchmarks with a result, and list failures at the end."""
    tasks, picked = chosen(sets), settings.picked(methods, budgets)
    _check_installed()
    failed: list[str] = []
    for index, setting in enumerate(picked, 1):
        label = f"[{index}/{len(picked)}] {setting.name}"
        try:
            failed += _run_one(setting, label, tasks, out / setting.name, (pretrained, device, thresholds), split)
        except OSError as error:
            raise TokenPruneError(f"Cannot write to {out / setting.name}: {error.strerror or error}.") from error
    if failed:
        raise TokenPruneError("\n".join([f"{len(failed)} commands did not finish:", *failed]))
    _say(f"Done. Compare with: python benchmarks/experiments/papers_table.py table {out}")


def _run_one(
    setting: Setting, label: str, tasks: list[str], folder: Path, options: tuple[str, str, str], split: bool
) -> list[str]:
    """Run the missing benchmarks of a setting and return the failures."""
    outcome = outcomes.read(folder, setting)
    for path, reason in outcome.broken.items():
        path.rename(path.with_name(f"{path.name}.broken"))
        _say(f"{label}: renamed a broken result: {reason}")
    missing = [task for task in tasks if task not in outcome.tasks]
    if not missing:
        _say(f"{label}: already finished")
        return []
    pretrained, device, thresholds = options
    if setting.method == "dymu" and not Path(thresholds).is_file():
        _say(f"{label}: no thresholds")
        make = shlex.join(settings.calibration(pretrained, thresholds))
        return [f"{setting.name}: {thresholds} does not exist. Create it with `{make}`."]
    failed = []
    for group in _groups(missing, split):
        _say(f"{label}: {', '.join(group)}")
        arguments = setting.arguments(pretrained, device, thresholds)
        ended = _execute(settings.command(arguments, group, folder, sys.executable), folder)
        outcome = outcomes.read(folder, setting)
        if lost := [task for task in group if task not in outcome.tasks]:
            _say(f"{label}: failed")
            reasons = "; ".join([ended, *outcome.broken.values()])
            failed.append(f"{setting.name}: no result for {', '.join(lost)} ({reasons}). See {folder / 'log.txt'}.")
    return failed


def _say(text: str) -> None:
    get_console().print(text, markup=False, soft_wrap=True)


@app.command()
def table(
    results: Annotated[
        Path | None, typer.Argument(help="Folder of `run --out`. Without it, only published numbers are shown.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A .md or .html file. Default: print Markdown.")] = None,
) -> None:
    """Write the published numbers, with yours beside them."""
    if out is not None and out.suffix not in (".md", ".html"):
        raise TokenPruneError(f"--out {out} has an unknown suffix. Use .md or .html.")
    outcome = outcomes.read_all(results, settings.settings()) if results else outcomes.Outcomes()
    notes = [_READING, *outcome.notes]
    if outcome.numbers:
        notes += _missing(outcome)
    content = [*tables.comparison(outcome.numbers), tables.sources()]
    title = f"{published().model}: published and measured"
    if out is not None and out.suffix == ".html":
        text = tables.to_html(content, title, notes)
    else:
        parts = [f"# {title}", *notes, *(tables.to_markdown(part, 2) for part in content)]
        text = "\n\n".join(parts) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise TokenPruneError(f"Cannot write {out}: {error.strerror or error}.") from error
    get_console(error=True).print(f"Wrote {out}", markup=False)


@app.command()
def page(check: Annotated[bool, typer.Option("--check", help="Exit with 1 if the page is stale.")] = False) -> None:
    """Rewrite the generated parts of docs/results/papers.md."""
    pages = {PAGE: lambda text: budgets_written(written(text))}
    stale = {path: text for path, write in pages.items() if (text := write(path.read_text())) != path.read_text()}
    if check:
        raise typer.Exit(int(bool(stale)))
    for path, text in stale.items():
        path.write_text(text)


def written(text: str) -> str:
    """Return the page with the generated tables of published numbers."""
    content = [tables.summary(), tables.tasks(), tables.sources()]
    return _with_block(text, "papers", "\n\n".join(tables.to_markdown(part, 2) for part in content))


def budgets_written(text: str) -> str:
    """Return the page with the generated table of token counts."""
    return _with_block(text, "counts", tables.to_markdown(counts.table(), 2))


def _with_block(text: str, name: str, content: str) -> str:
    block = re.compile(rf"(<!-- {name}:begin[^\n]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


_READING = """The numbers in parentheses after yours are the differences to each published number of the same budget,
in points of the percentage of the unpruned model of the same source (yours: of your unpatched run). Percentages reduce
the effect of other splits and prompts. **Bold**: more than 1 point difference. `?`: the published number is in doubt.
*Mean of these* is computed here, over the rows above that both the method and the unpruned model have. *Average as
printed* is the source's average over its benchmarks.""".replace("\n", " ")


def _groups(tasks: list[str], split: bool) -> list[list[str]]:
    return [[task] for task in tasks] if split else [tasks]


def _execute(command: list[str], folder: Path) -> str:
    """Run a command with its output in a log, and describe its end. lmms-eval exits with 0 even if it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        return f"exit code {subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode}"


def _check_installed() -> None:
    if importlib.util.find_spec("lmms_eval") is None:
        raise TokenPruneError("lmms-eval is not installed. Run: pip install 'tokenprune-bench[lmms-eval]'")
    if not any(entry_point.name == "tokenprune" for entry_point in entry_points(group="lmms_eval.models")):
        raise TokenPruneError(
            "lmms-eval does not find tokenprune. Install the package (pip install -e .), do not only set the path."
        )


def _missing(outcome: outcomes.Outcomes) -> list[str]:
    notes = [] if UNPATCHED in outcome.numbers else ["Percentages need results of `unpatched`."]
    absent = [setting.name for setting in settings.settings() if setting.name not in outcome.numbers]
    partly = [
        f"{name} ({', '.join(SETS[key].title for key in SETS if key not in numbers)})"
        for name, numbers in outcome.numbers.items()
        if len(numbers) < len(SETS)
    ]
    if absent:
        notes.append(f"Not measured: {', '.join(absent)}.")
    return [*notes, f"In part: {'; '.join(partly)}."] if partly else notes


if __name__ == "__main__":
    app(prog_name="papers_table.py")
