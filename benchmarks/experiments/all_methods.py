# SPDX-License-Identifier: Apache-2.0
"""All methods at equal cost on a shipped model: accuracy, ranks, and how far they agree with the papers' order.

    python benchmarks/experiments/all_methods.py ask --questions 16    # continue an earlier run
    python benchmarks/experiments/all_methods.py ask --methods fastv,divprune --questions 2 --out trial.jsonl
    python benchmarks/experiments/all_methods.py page  # rewrite the page and for_comparison.json

Every method gets, for each target, the setting in which it spends that share of the visual tokens, averaged over the
decoder's layers (tokenprune bench --equal-cost); one that has none is written down with the reason. Each row of the
file is written when it is done, and no row that is there is asked again: to ask a method anew, remove its lines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import calm_threads  # noqa: F401
import typer
from rank_agreement import agreement, answers, images_of, published_scores

from tokenprune.cli.common import ErrorGroup, get_console
from tokenprune.errors import OptionError
from tokenprune.models.model_config import SHIPPED
from tokenprune_bench.cli.common import show_progress
from tokenprune_bench.errors import RunError
from tokenprune_bench.json_lines import JsonLinesWriter, read_lines
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.recommend.advice import load_advice
from tokenprune_bench.results import UNPATCHED, Results, read_records, summarise
from tokenprune_bench.significance import LEVEL, better_p, holm, interleave_seeds, pooled_interval
from tokenprune_bench.suite import Bench, BenchPlan

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/results/all-methods.md"
ENOUGH = 3  # settings, below which nothing is said of a method as a whole
COMPARISON = ROOT / "benchmarks/tokenprune_bench/tuning/for_comparison.json"
BASELINES = {"random": "rnd", "uniform": "uni", "downsample": "down"}
MODELS = ("demo_smol", "demo_qwen")  # on the page
SHOWN = (0.05, 0.11, 0.25, 0.5)  # targets in the table; 0.33 lies so near to 0.25 that its column said little more
# The published budget, of 576 tokens, that comes nearest to a target; at 0.5 nothing is published.
PUBLISHED = {0.33: 192, 0.25: 128, 0.11: 64}
# What makes rows of one file comparable.
_SAME = ("kinds", "kind_of_question", "suffix", "max_new_tokens")
_SAME_MODEL = ("model", "weights", "dtype")

app = typer.Typer(
    cls=ErrorGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)


class Rows:
    """The rows of a file, as `Bench` takes the folder of a run: what is there is not asked again.

    Only whole rows are kept, no answers to single questions; the unpatched model is asked anew by each call, since the
    others' costs are counted against its own. Raises RunError for a file of other questions, or of another model.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        found = read_lines(path)
        known = [record for record, _ in found]
        if known and _of(known[0]) != _of(header):
            raise RunError(f"{path} was made with other questions or another model: name another --out, or remove it")
        self.known = {(one.get("method"), one.get("keep")) for one in known}
        self.results = [one for one in known if one.get("method") != UNPATCHED]
        self._lines = JsonLinesWriter(path, found[-1][1] if found else 0)

    def __enter__(self) -> Rows:
        self._lines.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._lines.__exit__(*error)

    def add_result(self, record: dict[str, Any]) -> None:
        if (record.get("method"), record.get("keep")) in self.known:
            return
        if record["record"] == "result":
            accuracy, low, high = pooled_interval(record["right"])
            record = record | {"accuracy": accuracy, "interval": [low, high], "load": os.getloadavg()[0]}
        self._lines.write(record)

    def batches(self, place: Mapping[str, Any]) -> dict[int, Any]:
        return {}

    def add_batch(self, *batch: Any) -> None:
        pass

    def finish(self, passes: Any) -> None:
        pass


def _of(header: Mapping[str, Any]) -> list[Any]:
    environment = header.get("environment", {})
    return [header.get(name) for name in _SAME] + [environment.get(name) for name in _SAME_MODEL]


def results_file(model: str) -> Path:
    return RESULTS / f"all_methods-{model}.jsonl"


@app.command()
def ask(
    model: Annotated[str, typer.Option(help=f"{' or '.join(SHIPPED)}.")] = MODELS[0],
    methods: Annotated[str, typer.Option(help="Comma-separated; default: all that act on images.")] = "",
    questions: Annotated[int, typer.Option(min=0, help="Held-out images with their questions; 0: all.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Of these images, take each n-th one.")] = 1,
    targets: Annotated[
        str, typer.Option(help="Shares of the visual tokens, comma-separated.")
    ] = "0.5,0.33,0.25,0.11,0.05",
    out: Annotated[Path | None, typer.Option(help="Default: benchmarks/results/all_methods-MODEL.jsonl.")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    device: Annotated[str | None, typer.Option()] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Default: as many as PyTorch takes.")] = None,
) -> None:
    """Ask every method at every target; rows that are in the file already are not asked again."""
    import torch

    from tokenprune.cli.common import read_keeps
    from tokenprune_demo.heldout import load_heldout

    if model not in SHIPPED:
        raise OptionError(f"--model {model!r} is none of {', '.join(SHIPPED)}")
    plan = BenchPlan(
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        keeps=read_keeps(targets), images=questions, batch_size=batch_size, repeats=0, equal_cost=True,
    )  # fmt: skip
    if threads is not None:
        torch.set_num_threads(threads)
    subject = load_model(model, device=device, dtype=dtype)
    asked = load_heldout(limit=questions or None, folder=subject.heldout)
    first = {"questions": [one for one in asked if one.index % every == 0], "about": {"every": every}}
    path = out or results_file(model)
    with show_progress() as step, Rows(path, Bench(subject, plan, **first).header()) as rows:
        made = list(Bench(subject, plan, step, folder=rows, **first).records())
    count = sum((one.get("method"), one.get("keep")) not in rows.known for one in made)
    get_console(error=True).print(f"{path}: {count} new rows", markup=False)


@app.command()
def page(check: Annotated[bool, typer.Option("--check", help="Exit with 1 where it is not current.")] = False) -> None:
    """Rewrite the generated part of docs/results/all-methods.md, and for_comparison.json."""
    made = {PAGE: written(PAGE.read_text()), COMPARISON: for_comparison()}
    if check:
        raise typer.Exit(int(any(path.read_text() != text for path, text in made.items())))
    for path, text in made.items():
        path.write_text(text)


def for_comparison() -> str:
    """Return the file that names the methods which, at no target of our models, were shown to beat both `random` and
    `uniform`, and how often each beat either. What the table of advice names for another reason, its speed, is not
    among them."""
    advised = {one.method for one in load_advice().values()}
    paths = [path for path in map(results_file, MODELS) if path.exists()]
    beaten: dict[str, list[set[str]]] = {}
    for path in paths:
        records = read_records(path)
        results = summarise(records)
        names = list(dict.fromkeys(row.method for row in results.rows[1:]))
        for at in finished_targets(records):
            for name, marks in marks_at(results, names, at).items():
                if name not in BASELINES and (name, at) in results.answers:
                    beaten.setdefault(name, []).append(set(BASELINES.values()) - set(marks))
    why = {
        name: f"random at {_times('rnd', of)}, uniform at {_times('uni', of)} of {len(of)} settings"
        for name, of in sorted(beaten.items())
        if name not in advised and len(of) >= ENOUGH and not any({"rnd", "uni"} <= one for one in of)
    }
    made = {"made_by": "python benchmarks/experiments/all_methods.py page", "models": list(MODELS), "methods": why}
    return json.dumps(made, indent=1) + "\n"


def _times(mark: str, beaten: Sequence[set[str]]) -> int:
    return sum(mark in one for one in beaten)


def written(text: str) -> str:
    """Return the page with its generated part as it has to be."""
    paths = [path for path in map(results_file, MODELS) if path.exists()]
    parts = [section(path, path == paths[0]) for path in paths]
    made = "\n\n".join(parts)
    block = re.compile(r"(<!-- all:begin[^\n]*-->\n).*?(<!-- all:end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{made}\n\n{match[2]}", text)


def section(path: Path, whole: bool = True) -> str:
    """Return the section of one model: Kendall's tau and, if `whole`, the table and the targets not reached."""
    records = read_records(path)
    results = summarise(records)
    base, targets, header = results.baseline, finished_targets(records), results.header
    share, count, dtype = base.overall, len(set(images_of(header))), header["environment"]["dtype"]
    head = (
        f"Unpatched: {100 * share.value:.1f} % [{100 * share.low:.0f}–{100 * share.high:.0f}] of {base.questions} "
        f"questions about {count} images with {base.tokens_in:.0f} visual tokens; "
        f"{len(base.stats['visual_tokens_per_layer'])} decoder layers, {dtype}."
    )
    options = {"--questions": header["plan"]["images"], "--every": header.get("every", 1)}
    arguments = "".join(f" {name} {value}" for name, value in options.items() if value not in (0, 1))
    arguments += "" if dtype == "float32" else f" --dtype {dtype}"
    source = (
        f"Raw data: [{path.name}](../../benchmarks/results/{path.name}), by "
        f"`python benchmarks/experiments/all_methods.py ask --model {path.stem.partition('-')[2]}{arguments}`."
    )
    shown = [at for at in targets if at in SHOWN]
    table, missing = (_table(results, shown), _not_reached(results, shown)) if whole else ("", "")
    title = header["environment"]["model"].removesuffix(" (shipped)")
    parts = [f"## {title}", head, table, *_agreements(records, targets), missing, source]
    return "\n\n".join(part for part in parts if part)


def finished_targets(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the targets at which every method has a row, or a reason why it has none."""
    asked: dict[float, set[str]] = {}
    for one in records[1:]:
        if one["method"] != UNPATCHED:
            asked.setdefault(one["keep"], set()).add(one["method"])
    everyone = set().union(*asked.values())
    return sorted(target for target, methods in asked.items() if methods == everyone)


def ranks(scores: Mapping[str, float]) -> dict[str, int]:
    """Return the place of each in the descending order; equal scores share the better place."""
    return {name: 1 + sum(other > score for other in scores.values()) for name, score in scores.items()}


def _table(results: Results, targets: list[float]) -> str:
    """Return the table of accuracy at each target, the best mean rank first."""
    rows = {(row.method, row.keep): row for row in results.rows[1:]}
    names = list(dict.fromkeys(name for name, _ in rows))
    by_rank = {
        at: ranks({name: rows[name, at].overall.value for name in names if (name, at) in rows}) for at in targets
    }
    # Methods that miss a target are ranked by their other targets.
    marks = {at: marks_at(results, names, at) for at in targets}
    order = sorted(names, key=lambda name: (_mean([by_rank[at][name] for at in targets if name in by_rank[at]]), name))
    header = ["method", *(f"at {100 * at:g} %" for at in targets)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name in order:
        cells = [_cell(rows.get((name, at)), marks[at].get(name, ())) for at in targets]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def marks_at(results: Results, names: Sequence[str], at: float) -> dict[str, list[str]]:
    """Return the baselines that each method is not shown to beat at a target: one-sided McNemar tests, corrected by
    Holm for all methods held against one baseline."""
    found: dict[str, list[str]] = {name: [] for name in names}
    asked = {name: interleave_seeds(results.answers[name, at].right) for name in names if (name, at) in results.answers}
    for baseline, mark in BASELINES.items():
        if baseline in asked:
            p = {name: better_p(right, asked[baseline]) for name, right in asked.items() if name not in BASELINES}
            for name, corrected in holm(p).items():
                if corrected >= LEVEL:
                    found[name].append(mark)
    return found


def _cell(row: Any, marks: Sequence[str]) -> str:
    if row is None:
        return ""
    share = row.overall
    accuracy = f"{100 * share.value:.1f} [{100 * share.low:.0f}–{100 * share.high:.0f}]"
    return f"{accuracy} ≤{'/'.join(marks)}" if marks else accuracy


def _mean(places: list[int]) -> float:
    return sum(places) / len(places)


def _agreements(records: list[dict[str, Any]], targets: list[float]) -> list[str]:
    """Return Kendall's tau between our order and the published order, at the targets with published numbers."""
    lines, images = [], images_of(records[0])
    for at, budget in PUBLISHED.items():
        scores = answers(records, at)
        printed = published_scores(list(scores), budget)
        if at not in targets or len(printed) < 3:
            continue
        found = agreement(scores, printed, images)
        lines.append(
            f"{100 * at:g} % against {budget} of 576 tokens: tau {found['tau']:.2f} "
            f"[{found['low']:.2f}, {found['high']:.2f}], {len(printed)} methods"
        )
    return [f"Kendall's tau against the papers: {'; '.join(lines)}."] if lines else []


def _not_reached(results: Results, targets: list[float]) -> str:
    """Methods without a row, by reason."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for one in (one for one in results.skipped if one["keep"] in targets):
        # The same sentence for several targets, and methods.
        who = re.escape(one["method"])
        promised, solved = rf"{who} has no setting for a layer average of [\d.]+: ", r"Budget\(average_share=[\d.]+\) "
        reason = re.sub(rf"^({promised}|{solved})", "", one["reason"])
        reason = re.sub(r"average_share=[\d.]+", "average_share=...", re.sub(r"spent [\d.]+", "spent less", reason))
        # The page leaves out the advice at the end of an error.
        reason = re.split(r"[;:.](?: |$)", re.sub(f"^{who}:? ", "", reason))[0]
        by_reason.setdefault(reason, {}).setdefault(one["method"], []).append(f"{100 * one['keep']:g}")
    lines = []
    for why, who in by_reason.items():
        names = [
            f"`{name}`" + ("" if len(at) == len(targets) else f" at {', '.join(at)} %") for name, at in who.items()
        ]
        lines.append(f"- {', '.join(names)}: {why}")
    return "\n".join(["### Not reached", "", *lines]) if lines else ""


if __name__ == "__main__":
    app(prog_name="all_methods.py")
