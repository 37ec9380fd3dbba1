# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/measure/leaderboard.md, from our runs and benchmarks/experiments/leaderboard/entries.

python dev/leaderboard_page.py            # rewrite the page, after a run, a new entry or a new method
python dev/leaderboard_page.py --check    # exit with 1 if the page is stale
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenprune.selection.method import Site
from tokenprune_bench.leaderboard.checks import read_entry
from tokenprune_bench.leaderboard.entry import LeaderboardEntry, Line, build_entry
from tokenprune_bench.results import read_records

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/measure/leaderboard.md"
ENTRIES = ROOT / "benchmarks/experiments/leaderboard/entries"
RESULTS = ROOT / "benchmarks/results"
OURS = ("all_methods-demo_smol.jsonl",)
SHOWN, MAX_ROWS = 0.25, 12  # keep and number of rows of our own runs; docs/results/all-methods.md has the others
BASELINES = ("random", "uniform", "downsample")
# The published budget of 576 tokens that is closest to a share.
PUBLISHED = {0.25: 128, 0.11: 64}
COLUMNS = (
    "method", "model", "keep", "right, %", "tokens, %", "first token", "papers' rank", "acts", "query-aware", "vLLM",
)  # fmt: skip
FILTERS = ("model", "keep", "acts", "query-aware", "vLLM")
_BLOCK = re.compile(r"(<!-- board:begin[^\n]*-->\n).*?(<!-- board:end -->)", re.DOTALL)


class Run(NamedTuple):
    """An entry and its file."""

    entry: LeaderboardEntry
    path: Path

    @property
    def name(self) -> str:
        """Name of the model in the table."""
        return self.entry.model.removesuffix(" (shipped)")


def runs() -> list[Run]:
    """Return the submitted entries by model, then our own runs."""
    theirs = [Run(read_entry(path), path) for path in sorted(ENTRIES.glob("*.json"))]
    return [*sorted(theirs, key=lambda run: (run.name.lower(), run.path.name)), *map(ours, OURS)]


def ours(name: str) -> Run:
    path = RESULTS / name
    entry = build_entry(read_records(path), by="the project")
    lines = sorted((line for line in entry.lines if line.keep == SHOWN), key=lambda line: -line.score[0])
    shown = [line for index, line in enumerate(lines) if index < MAX_ROWS or line.method in BASELINES]
    return Run(replace(entry, lines=shown), path)


def board(all_runs: list[Run]) -> str:
    """Return the table of all lines by model and keep, the best method first."""
    lines = [_row(COLUMNS), "|---" * len(COLUMNS) + "|"]
    for run in all_runs:
        for line in sorted(run.entry.lines, key=lambda row: (-row.keep, -row.score[0], row.method)):
            lines.append(_row(cells(run, line)))
    return "\n".join(lines)


def cells(run: Run, line: Line) -> Iterator[str]:
    """Yield the cells of a line."""
    value, low, high = line.score
    name, colon, options = line.method.partition(":")
    known = "+" not in line.method and (ROOT / f"docs/methods/{name}.md").is_file()
    yield f"[`{name}`](../methods/{name}.md){_plain(colon + options)}" if known else _plain(line.method)
    yield _plain(run.name)
    yield f"{100 * line.keep:g} %" if line.keep <= 1 and not isinstance(line.keep, int) else f"{line.keep} tokens"
    marks = "".join(f" {mark}" for mark in line.marks)
    yield f"{100 * value:.1f} [{100 * low:.0f}–{100 * high:.0f}]{marks}"
    yield f"{100 * line.tokens:.1f}"
    yield f"{line.ttft:.2f}" if line.ttft is not None else ""
    yield _published(line)
    yield ", ".join(Site(part).description for part in dict.fromkeys(line.site.split("+")))
    yield "yes" if line.query_aware else "no"
    yield served().get(line.method, "no" if known and not options else "")


@cache
def ranks(budget: int) -> Mapping[str, str]:
    """Return the rank ("2 of 12") of each method with a published average at this budget of 576 tokens."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
    try:
        from rank_agreement import published_scores
    finally:
        sys.path.remove(str(ROOT / "benchmarks" / "experiments"))
    import tokenprune

    scores = published_scores(tokenprune.available_methods(), budget)
    return {
        name: f"{1 + sum(other > score for other in scores.values())} of {len(scores)}"
        for name, score in scores.items()
    }


def _published(line: Line) -> str:
    return ranks(PUBLISHED[line.keep]).get(line.method, "") if line.keep in PUBLISHED else ""


@cache
def served() -> dict[str, str]:
    """Return which methods vLLM serves with their default options: "yes", or "in_llm" with experimental_in_llm."""
    import tokenprune
    from tokenprune.errors import OptionError
    from tokenprune.integrations.vllm.settings.parse import check_method

    answers = dict[str, str]()
    for name in tokenprune.available_methods():
        method = tokenprune.method(name)
        for in_llm, word in ((False, "yes"), (True, "in_llm")):
            with suppress(OptionError):
                check_method(method, in_llm)
                answers.setdefault(name, word)
    return answers


def sources(all_runs: list[Run]) -> str:
    """Return the table of runs: model, questions, environment and author."""
    columns = ("model", "unpatched, %", "asked", "tokens, layers", "ran on", "by", "file")
    lines = [_row(columns), "|---" * len(columns) + "|"]
    for run in all_runs:
        entry = run.entry
        value, low, high = entry.unpatched
        asked = f"{entry.questions} questions ({entry.data}, {entry.metric}), seeds {', '.join(map(str, entry.seeds))}"
        versions = ", ".join(f"{name} {version}" for name, version in entry.versions.items())
        cost = "at equal cost" if entry.equal_cost else "at one keep"
        told = f"{entry.by}, {entry.date[:10]}" + (f": {entry.note}" if entry.note else "")
        lines.append(
            _row(
                [
                    _plain(run.name),
                    f"{100 * value:.1f} [{100 * low:.0f}–{100 * high:.0f}]",
                    _plain(f"{asked}, {cost}"),
                    f"{entry.visual_tokens:.0f}, {entry.layers}",
                    _plain(f"{entry.device}, {entry.dtype}, {versions}"),
                    _plain(told),
                    f"[{run.path.name}](../../{run.path.relative_to(ROOT).as_posix()})",
                ]
            )
        )
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Escape submitted text for a Markdown table."""
    return re.sub(r"[\\`*\[\]|~#]|\b_|_\b", lambda match: f"&#{ord(match[0])};", html.escape(text, quote=False))


def _row(parts: object) -> str:
    return f"| {' | '.join(parts)} |"


def page(text: str) -> str:
    """Return the page with its current generated part."""
    all_runs = runs()
    marker = f'<div id="board" data-filters="{",".join(FILTERS)}"></div>'
    new_part = "\n\n".join([marker, board(all_runs), "## Runs", sources(all_runs)])
    return _BLOCK.sub(lambda match: f"{match[1]}\n{new_part}\n\n{match[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if parser.parse_args().check:
        sys.exit(old != new)
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
