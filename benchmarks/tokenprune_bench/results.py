# SPDX-License-Identifier: Apache-2.0
"""Compute shares with intervals, baseline marks and collapsed kinds from the records of a benchmark."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenprune.errors import TokenPruneError
from tokenprune_bench.json_lines import read_lines
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.paired import Answers, PairedDifference, bootstrap, compare_paired, is_better_graded
from tokenprune_bench.profiling.kept_tokens import format_keep
from tokenprune_bench.profiling.machine_load import is_busy
from tokenprune_bench.profiling.patched import UNPATCHED
from tokenprune_bench.significance import is_better, pooled_interval

SCHEMA = 1
RESULTS = "results.jsonl"  # file in a run folder
MARKS = {"random": "≤rnd", "downsample": "≤down"}
DRAWN_PREFIX = "drawn "  # prefix of the names of tokenprune-demo's question sets
COLLAPSE = 0.20  # a kind with a larger drop is marked as collapsed


@dataclass(frozen=True)
class ScoreShare:
    """A share of right answers (or mean score) with its 95 % interval.

    Attributes:
        value: The share.
        low: Lower end of the interval.
        high: Upper end of the interval.
        collapsed: Whether it fell by more than `COLLAPSE`.
    """

    value: float
    low: float
    high: float
    collapsed: bool = False


@dataclass(frozen=True)
class Hard:
    """Results on the questions that `downsample` at the same keep gets wrong.

    Attributes:
        questions: Number of these questions.
        ours: Share of this method.
        unpatched: Share of the unpatched model.
    """

    questions: int
    ours: ScoreShare
    unpatched: float


@dataclass(frozen=True)
class ControlAnswers:
    """Answers of the unpatched model to a video without its motion: only its first frame, or shuffled frames.

    Attributes:
        name: Name of the control.
        kinds: Score of each kind that must fail.
        chance: Chance level of each kind.
    """

    name: str
    kinds: dict[str, ScoreShare]
    chance: dict[str, float]

    @property
    def passed(self) -> list[str]:
        """Kinds with an interval completely above chance."""
        return [kind for kind, share in self.kinds.items() if share.low > self.chance[kind]]


@dataclass(frozen=True)
class Row:
    """One row of the tables. Token counts are sums over all questions.

    Attributes:
        method: Name of the method.
        keep: The requested keep.
        site: Site of the method, joined by "+" for stacks.
        overall: Share over all questions.
        kinds: Share of each kind of question.
        marks: Baselines at the same keep that this method does not beat significantly.
        questions: Number of questions.
        stats: Cost of the record.
        timing: Timing of the record.
        differences: Differences to the unpatched model and to the baselines at the same keep.
        hard: Results on hard questions. None if `downsample` did not run or made no error, or the metric has no right
            and wrong.
        groups: Shares of the groups beside the kinds.
        evidence: Mean evidence recall over all questions (""), and of each kind and group. Empty for methods that do
            not select tokens.
        setting: Setting of the record, if method and keep do not determine it: at equal cost, or with
            `BenchPlan.max_visual_tokens`.
        loyalty: Share of answers equal to the unpatched model's, character by character. None for that model.
    """

    method: str
    keep: float | int
    site: str | None
    overall: ScoreShare
    kinds: dict[str, ScoreShare]
    marks: tuple[str, ...]
    questions: int
    stats: dict[str, Any]
    timing: dict[str, Any] | None
    differences: dict[str, PairedDifference]
    hard: Hard | None
    groups: dict[str, ScoreShare] = field(default_factory=dict)
    evidence: dict[str, float] = field(default_factory=dict)
    setting: dict[str, Any] | None = None
    loyalty: ScoreShare | None = None

    @property
    def keep_text(self) -> str:
        """The keep, with the share after all cuts for a stack."""
        cuts = 1 if self.site is None else self.site.count("+") + 1
        return format_keep(self.keep, cuts, self.tokens_out / max(1.0, self.tokens_in))

    @property
    def tokens_in(self) -> float:
        """Visual tokens of one question's image before pruning."""
        return self.stats["visual_tokens_in"] / self.questions

    @property
    def tokens_out(self) -> float:
        """Visual tokens of one question's image in the last decoder layer."""
        return self.stats["visual_tokens_out"] / self.questions

    @property
    def tokens_average(self) -> float:
        """Visual tokens of one question's image, averaged over the decoder's layers."""
        return self.stats["visual_tokens_average"] / self.questions

    @property
    def ttft_ratio(self) -> float | None:
        """Median time to first token as a share of the unpatched time, or None without timing."""
        return self.timing["ttft_ratio"]["p50"] if self.timing and "ttft_ratio" in self.timing else None


@dataclass(frozen=True)
class Results:
    """All results of a benchmark.

    Attributes:
        header: The header record.
        rows: One row per result, in the order of the run.
        skipped: Records of skipped settings.
        controls: Results of the controls.
        answers: Answers of each (method, keep).
    """

    header: dict[str, Any]
    rows: list[Row]
    skipped: list[dict[str, Any]]
    controls: list[ControlAnswers] = field(default_factory=list)
    answers: dict[tuple[str, float | int], Answers] = field(default_factory=dict)

    @property
    def evidence_only(self) -> bool:
        """True if no answers were generated, so scores have no meaning."""
        return bool(self.header.get("evidence_only"))

    @property
    def equal_cost(self) -> bool:
        """True if each keep is a share that every method spends, averaged over the decoder's layers."""
        return bool(self.header["plan"].get("equal_cost"))

    @property
    def max_visual_tokens(self) -> int | None:
        """Maximum number of tokens per image before methods select tokens, or None."""
        return self.header["plan"].get("max_visual_tokens")

    @property
    def groups(self) -> list[str]:
        """Groups beside the kinds (the grounds of videos), in order."""
        return list(dict.fromkeys(self.header.get("group_of_question", ())))

    @property
    def kinds(self) -> list[str]:
        return self.header["kinds"]

    @property
    def baseline(self) -> Row:
        """The unpatched model."""
        return self.rows[0]

    def unpatched_ms(self, name: str = "ttft") -> float | None:
        """Return the unpatched time in milliseconds to the first token ("ttft") or per further token ("token").

        Each row was timed against its own unpatched runs; this is the median over the rows. Tables show ratios times
        this value, so changes in the machine's speed between rows have no effect. None without timing.
        """
        times = []
        for row in self.rows:
            if row.timing and f"{name}_ratio" in row.timing:
                known = row.timing.get(f"{name}_ms_unpatched")  # missing in old records
                ours, ratio = row.timing[f"{name}_ms"], row.timing[f"{name}_ratio"]
                times.append(known["p50"] if known else ours["p50"] / ratio["p50"])
        return statistics.median(times) if times else None


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Read records written by `tokenprune bench` with --json (a file) or --run (a folder).

    Raises:
        TokenPruneError: If the file cannot be read or has another format.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _check_records(path, [record for record, _ in read_lines(path / RESULTS)])
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise TokenPruneError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise TokenPruneError(f"{path} is not a file of JSON lines: {error}.") from error
    return _check_records(path, records)


def _check_records(path: Path, records: list[Any]) -> list[dict[str, Any]]:
    if not records or not isinstance(records[0], dict) or records[0].get("record") != "header":
        raise TokenPruneError(f"{path} was not written by `tokenprune bench`: its first line is not a header.")
    if records[0].get("schema") != SCHEMA:
        schema = records[0].get("schema")
        raise TokenPruneError(f"{path} has schema {schema}, but this version reads {SCHEMA}. Run the benchmark again.")
    return records


def summarise(records: Iterable[dict[str, Any]]) -> Results:
    """Compute the results from records.

    Raises:
        TokenPruneError: If there is no record of the unpatched model.
    """
    header, *rest = records
    results = [record for record in rest if record["record"] == "result"]
    base = next((record for record in results if record["method"] == UNPATCHED), None)
    if base is None:
        raise TokenPruneError("The records lack a result of the unpatched model.")
    places, metric = _find_kind_places(header), METRICS[header.get("metric", "exact")]
    answers = {id(record): get_answers(record, metric.right is not None) for record in results}
    before = {kind: compute_share(answers[id(base)], places[kind]).value for kind in places}
    rivals = {
        (record["method"], record["keep"]): answers[id(record)] for record in results if record["method"] in MARKS
    }
    results = [base, *(record for record in results if record is not base)]
    groups = _find_group_places(header)
    rows = [
        _build_row(record, answers[id(record)], places, groups, before, rivals, answers[id(base)]) for record in results
    ]
    controls = [_build_control(record, places) for record in rest if record["record"] == "control"]
    skipped = [record for record in rest if record["record"] == "skipped"]
    answers_by_setting = {(record["method"], record["keep"]): answers[id(record)] for record in results}
    return Results(header, rows, skipped, controls, answers_by_setting)


def get_scores(record: dict[str, Any]) -> list[list[float]]:
    """Return the scores of a result, shape (seeds, questions)."""
    return (
        record["scores"]
        if "scores" in record
        else [[float(score) for score in scores_of_seed] for scores_of_seed in record["right"]]
    )


def find_busy_load(results: Results) -> tuple[float, int] | None:
    """Return the highest load during timing and the number of cores if the machine was busy, else None."""
    load = max((row.timing.get("load") or 0 for row in results.rows if row.timing), default=0)
    cores = results.header["environment"].get("cores") or 1
    return (load, cores) if is_busy(load, cores) else None


def get_answers(record: dict[str, Any], binary: bool) -> Answers:
    """Return the answers of a result.

    Args:
        record: The result record.
        binary: Whether the metric has right and wrong answers.
    """
    return Answers(get_scores(record), record["right"] if binary else None, "scores" in record)


def _find_kind_places(header: dict[str, Any]) -> dict[str, list[int]]:
    """Return the question indices of each kind. Kinds without questions are left out."""
    asked = header["kind_of_question"]
    places = {kind: [i for i, k in enumerate(asked) if k == f"{n}"] for n, kind in enumerate(header["kinds"])}
    return {kind: indices for kind, indices in places.items() if indices}


def _find_group_places(header: dict[str, Any]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for index, group in enumerate(header.get("group_of_question", ())):
        places.setdefault(group, []).append(index)
    return places


def _build_control(record: dict[str, Any], places: dict[str, list[int]]) -> ControlAnswers:
    answers = Answers(
        [[float(chance_of_kind) for chance_of_kind in answers_of_seed] for answers_of_seed in record["right"]],
        record["right"],
    )
    chance = {kind: chance_of_kind for kind, chance_of_kind in record["chance"].items() if kind in places}
    return ControlAnswers(record["control"], {kind: compute_share(answers, places[kind]) for kind in chance}, chance)


def _compute_evidence_recall(record: dict[str, Any], places: dict[str, list[int]]) -> dict[str, float]:
    """Return the mean evidence recall of each set of questions, and of all questions (""), over all seeds."""
    if "evidence" not in record:
        return {}
    means = {}
    for name, indices in {"": range(record["questions"]), **places}.items():
        values = [recalls[index] for recalls in record["evidence"] for index in indices if recalls[index] is not None]
        if values:
            means[name] = statistics.fmean(values)
    return means


def compute_share(answers: Answers, indices: list[int] | None = None) -> ScoreShare:
    """Return the mean score on these questions (default all) with an interval: Wilson's, or bootstrap if graded."""
    chosen = range(len(answers.scores[0])) if indices is None else indices
    if not answers.graded:
        return ScoreShare(
            *pooled_interval(["".join(answers_of_seed[index] for index in chosen) for answers_of_seed in answers.right])
        )
    means = answers.means[list(chosen)]
    return ScoreShare(float(means.mean()), *bootstrap(means))


def _build_row(
    record: dict[str, Any],
    answers: Answers,
    places: dict[str, list[int]],
    groups: dict[str, list[int]],
    before: dict[str, float],
    rivals: dict[tuple, Answers],
    base: Answers,
) -> Row:
    kinds = {}
    for kind, indices in places.items():
        share = compute_share(answers, indices)
        # The tolerance covers rounding: 0.8 - 0.6 > 0.2 in floating point.
        kinds[kind] = replace(share, collapsed=before[kind] - share.value > COLLAPSE + 1e-9)
    name, keep = record["method"], record["keep"]
    others = {
        UNPATCHED: base,
        **{name_of_rival: rivals[name_of_rival, keep] for name_of_rival in MARKS if (name_of_rival, keep) in rivals},
    }
    against = {
        name_of_rival: compare_paired(answers, theirs)
        for name_of_rival, theirs in others.items()
        if UNPATCHED != name != name_of_rival
    }
    return Row(
        method=name,
        keep=keep,
        site=record["site"],
        overall=compute_share(answers),
        kinds=kinds,
        marks=compute_marks(name, keep, answers, rivals),
        questions=record["questions"],
        stats=record["stats"],
        timing=record.get("timing"),
        differences=against,
        hard=_compute_hard(answers, base, None if name == UNPATCHED else rivals.get(("downsample", keep))),
        groups={group: compute_share(answers, indices) for group, indices in groups.items()},
        evidence=_compute_evidence_recall(record, places | groups),
        setting=record.get("setting"),
        loyalty=ScoreShare(*pooled_interval(record["same"])) if "same" in record else None,
    )


def _compute_hard(answers: Answers, base: Answers, downsample: Answers | None) -> Hard | None:
    if downsample is None or downsample.right is None:
        return None
    places = [index for index, right in enumerate(downsample.right[0]) if right == "0"]
    return Hard(len(places), compute_share(answers, places), compute_share(base, places).value) if places else None


def compute_marks(method: str, keep: float | int, ours: Answers, rivals: dict[tuple, Answers]) -> tuple[str, ...]:
    """Return the marks of the baselines that `method` does not beat at this keep.

    Args:
        method: Name of the method.
        keep: The keep.
        ours: Answers of the method.
        rivals: Answers of each (baseline, keep).
    """
    if method == UNPATCHED:
        return ()
    candidates = ((name, mark, rivals[name, keep]) for name, mark in MARKS.items() if (name, keep) in rivals)
    return tuple(mark for name, mark, theirs in candidates if name != method and not _is_better(ours, theirs))


def _is_better(ours: Answers, theirs: Answers) -> bool:
    if ours.right is None or theirs.right is None:
        return is_better_graded(ours, theirs)
    return is_better(ours.right, theirs.right)
