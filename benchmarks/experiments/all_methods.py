# SPDX-License-Identifier: Apache-2.0
"""Measure the accuracy of all methods at equal cost on a shipped model, and compare their order with the papers' order.

    python benchmarks/experiments/all_methods.py ask --questions 16    # continue an earlier run
    python benchmarks/experiments/all_methods.py ask --methods fastv,divprune --questions 2 --out trial.jsonl
    python benchmarks/experiments/all_methods.py page  # rewrite the page and for_comparison.json

At each target, each method gets the setting that spends this share of the visual tokens, averaged over the decoder
layers (as in `tokenprune bench --equal-cost`). If such a setting does not exist, the raw file stores the reason. The
script appends each row to benchmarks/results/all_methods-MODEL.jsonl and skips rows that the file already has. Delete
the lines of a method to measure it again.
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
ENOUGH = 3  # minimum number of settings for a verdict on a method
COMPARISON = ROOT / "benchmarks/tokenprune_bench/tuning/for_comparison.json"
BASELINES = {"random": "rnd", "uniform": "uni", "downsample": "down"}
MODELS = ("demo_smol", "demo_qwen")  # on the page
SHOWN = (0.05, 0.11, 0.25, 0.5)  # targets in the table; 0.33 is too close to 0.25 for a column
# The published budget (of 576 tokens) closest to each target. No paper reports a budget near 0.5.
PUBLISHED = {0.33: 192, 0.25: 128, 0.11: 64}
# Header fields that must be equal for rows to be comparable, with their names in an error.
_SAME = {
    "kinds": "questions", "kind_of_question": "questions", "suffix": "suffix", "max_new_tokens": "max_new_tokens",
    "model": "model", "weights": "weights", "dtype": "dtype",
}  # fmt: skip

app = typer.Typer(
    cls=ErrorGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)


class Rows:
    """Adapt a results file to the run folder that `Bench` expects, and skip the rows that the file has.

    The file stores complete rows, not single answers. Each call runs the unpatched model again, because the costs of
    the methods are relative to it. Raises RunError if the file has other questions, another model or another dtype.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        lines = read_lines(path)
        known = [record for record, _ in lines]
        if known and (differences := _list_differences(known[0], header)):
            raise RunError(f"{path} has {', '.join(differences)}. Pass the same options, or another --out.")
        self.known = {(record.get("method"), record.get("keep")) for record in known}
        self.results = [result for result in known if result.get("method") != UNPATCHED]
        self._lines = JsonLinesWriter(path, lines[-1][1] if lines else 0)

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

    def batches(self, setting: Mapping[str, Any]) -> dict[int, Any]:
        return {}

    def add_batch(self, *batch: Any) -> None:
        pass

    def finish(self, passes: Any) -> None:
        pass


def _list_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the fields that differ between two headers, such as "dtype bfloat16, not float32"."""
    old, new = ({**header, **header.get("environment", {})} for header in (old, new))
    phrases = {
        "other questions" if name == "questions" else f"{name} {old.get(field)}, not {new.get(field)}"
        for field, name in _SAME.items()
        if old.get(field) != new.get(field)
    }
    return sorted(phrases)


def results_file(model: str) -> Path:
    return RESULTS / f"all_methods-{model}.jsonl"


@app.command()
def ask(
    model: Annotated[str, typer.Option(help=f"{' or '.join(SHIPPED)}.")] = MODELS[0],
    methods: Annotated[str, typer.Option(help="Comma-separated. Default: all methods for images.")] = "",
    questions: Annotated[int, typer.Option(min=0, help="Number of held-out images. 0: all.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Use every n-th image only.")] = 1,
    targets: Annotated[
        str, typer.Option(help="Shares of the visual tokens, comma-separated.")
    ] = "0.5,0.33,0.25,0.11,0.05",
    out: Annotated[Path | None, typer.Option(help="Default: benchmarks/results/all_methods-MODEL.jsonl.")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    device: Annotated[str | None, typer.Option()] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Default: PyTorch's default.")] = None,
) -> None:
    """Measure every method at every target. Skip rows that the file already has."""
    import torch

    from tokenprune.cli.common import read_keeps
    from tokenprune_demo.heldout import load_heldout

    if model not in SHIPPED:
        raise OptionError(f"--model {model!r} is not a shipped model. Choose from: {', '.join(SHIPPED)}.")
    plan = BenchPlan(
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        keeps=read_keeps(targets), images=questions, batch_size=batch_size, repeats=0, equal_cost=True,
    )  # fmt: skip
    if threads is not None:
        torch.set_num_threads(threads)
    subject = load_model(model, device=device, dtype=dtype)
    examples = load_heldout(limit=questions or None, folder=subject.heldout)
    first = {"questions": [example for example in examples if example.index % every == 0], "about": {"every": every}}
    path = out or results_file(model)
    with show_progress() as step, Rows(path, Bench(subject, plan, **first).header()) as rows:
        records = list(Bench(subject, plan, step, folder=rows, **first).records())
    count = sum((record.get("method"), record.get("keep")) not in rows.known for record in records)
    get_console(error=True).print(f"{path}: {count} new rows", markup=False)


@app.command()
def page(check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a file is stale.")] = False) -> None:
    """Rewrite the generated part of docs/results/all-methods.md, and for_comparison.json."""
    texts = {PAGE: written(PAGE.read_text()), COMPARISON: for_comparison()}
    if check:
        raise typer.Exit(int(any(path.read_text() != text for path, text in texts.items())))
    for path, text in texts.items():
        path.write_text(text)


def for_comparison() -> str:
    """Return the text of for_comparison.json: methods that beat both `random` and `uniform` at no target.

    The file also counts how often a method beat each of the two. Methods in the table of advice are left out: they may
    be recommended for their speed.
    """
    advised = {advice.method for advice in load_advice().values()}
    paths = [path for path in map(results_file, MODELS) if path.exists()]
    beaten: dict[str, list[set[str]]] = {}
    for path in paths:
        records = read_records(path)
        results = summarise(records)
        names = list(dict.fromkeys(row.method for row in results.rows[1:]))
        for target in finished_targets(records):
            for name, marks in marks_at(results, names, target).items():
                if name not in BASELINES and (name, target) in results.answers:
                    beaten.setdefault(name, []).append(set(BASELINES.values()) - set(marks))
    reasons = {
        name: f"random at {_times('rnd', sets)}, uniform at {_times('uni', sets)} of {len(sets)} settings"
        for name, sets in sorted(beaten.items())
        if name not in advised and len(sets) >= ENOUGH and not any({"rnd", "uni"} <= names for names in sets)
    }
    content = {
        "made_by": "python benchmarks/experiments/all_methods.py page",
        "models": list(MODELS),
        "methods": reasons,
    }
    return json.dumps(content, indent=1) + "\n"


def _times(mark: str, beaten: Sequence[set[str]]) -> int:
    return sum(mark in baselines for baselines in beaten)


def written(text: str) -> str:
    """Return the page with an updated generated part."""
    paths = [path for path in map(results_file, MODELS) if path.exists()]
    parts = [section(path, path == paths[0]) for path in paths]
    content = "\n\n".join(parts)
    block = re.compile(r"(<!-- all:begin[^\n]*-->\n).*?(<!-- all:end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


def section(path: Path, with_table: bool = True) -> str:
    """Return the section of one model: Kendall's tau and, if `with_table`, the table and the missed targets."""
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
    shown_targets = [target for target in targets if target in SHOWN]
    table, missing = (_table(results, shown_targets), _not_reached(results, shown_targets)) if with_table else ("", "")
    title = header["environment"]["model"].removesuffix(" (shipped)")
    parts = [f"## {title}", head, table, *_agreements(records, targets), missing, source]
    return "\n\n".join(part for part in parts if part)


def finished_targets(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the targets with a row or a reason for skipping of every method."""
    methods_by_target: dict[float, set[str]] = {}
    for record in records[1:]:
        if record["method"] != UNPATCHED:
            methods_by_target.setdefault(record["keep"], set()).add(record["method"])
    everyone = set().union(*methods_by_target.values())
    return sorted(target for target, methods in methods_by_target.items() if methods == everyone)


def ranks(scores: Mapping[str, float]) -> dict[str, int]:
    """Return the rank of each name by descending score. Equal scores share the better rank."""
    return {name: 1 + sum(other > score for other in scores.values()) for name, score in scores.items()}


def _table(results: Results, targets: list[float]) -> str:
    """Return the table of accuracy at each target, sorted by mean rank."""
    rows = {(row.method, row.keep): row for row in results.rows[1:]}
    names = list(dict.fromkeys(name for name, _ in rows))
    by_rank = {
        target: ranks({name: rows[name, target].overall.value for name in names if (name, target) in rows})
        for target in targets
    }
    # Methods that miss a target are ranked by their other targets.
    marks = {target: marks_at(results, names, target) for target in targets}
    order = sorted(
        names, key=lambda name: (_mean([by_rank[target][name] for target in targets if name in by_rank[target]]), name)
    )
    header = ["method", *(f"at {100 * target:g} %" for target in targets)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name in order:
        cells = [_cell(rows.get((name, target)), marks[target].get(name, ())) for target in targets]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def marks_at(results: Results, names: Sequence[str], target: float) -> dict[str, list[str]]:
    """Return for each method the baselines that it does not beat significantly at a target.

    One-sided McNemar tests, with Holm's correction over all methods compared with one baseline.
    """
    marks: dict[str, list[str]] = {name: [] for name in names}
    right_by_method = {
        name: interleave_seeds(results.answers[name, target].right)
        for name in names
        if (name, target) in results.answers
    }
    for baseline, baseline_mark in BASELINES.items():
        if baseline in right_by_method:
            p = {
                name: better_p(right, right_by_method[baseline])
                for name, right in right_by_method.items()
                if name not in BASELINES
            }
            for name, corrected in holm(p).items():
                if corrected >= LEVEL:
                    marks[name].append(baseline_mark)
    return marks


def _cell(row: Any, marks: Sequence[str]) -> str:
    if row is None:
        return ""
    share = row.overall
    accuracy = f"{100 * share.value:.1f} [{100 * share.low:.0f}–{100 * share.high:.0f}]"
    return f"{accuracy} ≤{'/'.join(marks)}" if marks else accuracy


def _mean(ranks_at_targets: list[int]) -> float:
    return sum(ranks_at_targets) / len(ranks_at_targets)


def _agreements(records: list[dict[str, Any]], targets: list[float]) -> list[str]:
    """Return Kendall's tau between our order and the published order, at the targets with published numbers."""
    lines, images = [], images_of(records[0])
    for target, budget in PUBLISHED.items():
        scores = answers(records, target)
        printed = published_scores(list(scores), budget)
        if target not in targets or len(printed) < 3:
            continue
        tau = agreement(scores, printed, images)
        lines.append(
            f"{100 * target:g} % against {budget} of 576 tokens: tau {tau['tau']:.2f} "
            f"[{tau['low']:.2f}, {tau['high']:.2f}], {len(printed)} methods"
        )
    return [f"Kendall's tau against the papers: {'; '.join(lines)}."] if lines else []


def _not_reached(results: Results, targets: list[float]) -> str:
    """Return the list of methods without a row, grouped by reason."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for skipped in (skipped for skipped in results.skipped if skipped["keep"] in targets):
        # Remove the method and the numbers, so that methods and targets with the same reason share a line.
        name_pattern = re.escape(skipped["method"])
        promised, solved = (
            rf"{name_pattern} has no setting for a layer average of [\d.]+: ",
            r"Budget\(average_share=[\d.]+\) ",
        )
        reason = re.sub(rf"^({promised}|{solved})", "", skipped["reason"])
        reason = re.sub(r"average_share=[\d.]+", "average_share=...", re.sub(r"spent [\d.]+", "spent less", reason))
        # Keep the problem only: an error ends with the advice.
        reason = re.split(r"[;:.](?: |$)", re.sub(f"^{name_pattern}:? ", "", reason))[0]
        by_reason.setdefault(reason, {}).setdefault(skipped["method"], []).append(f"{100 * skipped['keep']:g}")
    lines = []
    for shared_reason, targets_by_name in by_reason.items():
        names = [
            f"`{name}`" + ("" if len(missed) == len(targets) else f" at {', '.join(missed)} %")
            for name, missed in targets_by_name.items()
        ]
        lines.append(f"- {', '.join(names)}: {shared_reason}")
    return "\n".join(["### Not reached", "", *lines]) if lines else ""


if __name__ == "__main__":
    app(prog_name="all_methods.py")
