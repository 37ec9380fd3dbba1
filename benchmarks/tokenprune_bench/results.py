# SPDX-License-Identifier: Apache-2.0
"""From the records of a benchmark to what its tables say: shares with intervals, marks, and kinds that collapsed."""

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
RESULTS = "results.jsonl"  # in the folder of a run
MARKS = {"random": "≤rnd", "downsample": "≤down"}
DRAWN_PREFIX = "drawn "  # how the names of tokenprune-demo's own sets of questions begin
COLLAPSE = 0.20  # a kind that loses more than this against the unpatched model is shown as lost


@dataclass(frozen=True)
class ScoreShare:
    """A share right (or mean score) with its 95 % interval; collapsed: it fell by more than `COLLAPSE`."""

    value: float
    low: float
    high: float
    collapsed: bool = False


@dataclass(frozen=True)
class Hard:
    """The questions that `downsample` at the same keep gets wrong: how many, and what this method and the unpatched
    model score on them."""

    questions: int
    ours: ScoreShare
    unpatched: float


@dataclass(frozen=True)
class ControlAnswers:
    """The unpatched model's answers without a video's motion: only its first frame, or its frames shuffled.

    kinds: the score of each kind that must fail. chance: what knowing nothing gives. passed: those kinds whose whole
    interval is above that.
    """

    name: str
    kinds: dict[str, ScoreShare]
    chance: dict[str, float]

    @property
    def passed(self) -> list[str]:
        return [kind for kind, share in self.kinds.items() if share.low > self.chance[kind]]


@dataclass(frozen=True)
class Row:
    """One line of the tables. `stats` and `timing` are those of the record; tokens in them are sums over all questions.

    marks: the baselines at the same keep that this method is not significantly better than. versus: the difference to
    the unpatched model and to the baselines at the same keep. hard: None where `downsample` got nothing wrong, did not
    run, or the metric knows no right and wrong. groups: shares of the groups beside the kinds, if there are some.
    evidence: mean evidence recall over all questions with evidence, and of each kind and group ("", kind, group); empty
    where the method does not choose among tokens. setting: what the method was given, where each was given another
    (`Plan.equal_cost`); else None. loyalty: the share of answers that are, letter for letter, the unpatched model's;
    None of that model itself, and of records that lack it.
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
        """The keep, and of a stack that has it at each cut what it leaves in all."""
        cuts = 1 if self.setting is not None or self.site is None else self.site.count("+") + 1
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
        """Median time to the first token as a share of the unpatched model's; None where it was not taken."""
        return self.timing["ttft_ratio"]["p50"] if self.timing and "ttft_ratio" in self.timing else None


@dataclass(frozen=True)
class Results:
    """A whole benchmark: its header, a row for each result in the order of the run, and what was skipped.

    answers: of each (method, keep), to compare two of them.
    """

    header: dict[str, Any]
    rows: list[Row]
    skipped: list[dict[str, Any]]
    controls: list[ControlAnswers] = field(default_factory=list)
    answers: dict[tuple[str, float | int], Answers] = field(default_factory=dict)

    @property
    def evidence_only(self) -> bool:
        """True if no answers were generated, so that scores mean nothing."""
        return bool(self.header.get("evidence_only"))

    @property
    def equal_cost(self) -> bool:
        """True if each `keep` is a share that every method spends, averaged over the decoder's layers."""
        return bool(self.header["plan"].get("equal_cost"))

    @property
    def groups(self) -> list[str]:
        """Groups beside the kinds by which questions are kept apart (the grounds of videos), in their order."""
        return list(dict.fromkeys(self.header.get("group_of_question", ())))

    @property
    def kinds(self) -> list[str]:
        return self.header["kinds"]

    @property
    def baseline(self) -> Row:
        """The unpatched model."""
        return self.rows[0]

    def unpatched_ms(self, name: str = "ttft") -> float | None:
        """Return the unpatched model's time in milliseconds, to the first token ("ttft") or of a further one ("token"):
        the median over the rows, in turn with each of which it was timed anew. None where nothing was timed.

        Times that are shown are ratios times this: a machine that changes its pace between two rows changes none.
        """
        times = []
        for row in self.rows:
            if row.timing and f"{name}_ratio" in row.timing:
                known = row.timing.get(f"{name}_ms_unpatched")  # records of old lack it
                ours, ratio = row.timing[f"{name}_ms"], row.timing[f"{name}_ratio"]
                times.append(known["p50"] if known else ours["p50"] / ratio["p50"])
        return statistics.median(times) if times else None


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Read what `tokenprune bench` wrote with --json or --run (a folder; a torn last line is left out).

    Raises TokenPruneError for anything else.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _checked(path, [record for record, _ in read_lines(path / RESULTS)])
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise TokenPruneError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TokenPruneError(f"{path} holds no JSON lines: {error}") from error
    return _checked(path, records)


def _checked(path: Path, records: list[Any]) -> list[dict[str, Any]]:
    if not records or not isinstance(records[0], dict) or records[0].get("record") != "header":
        raise TokenPruneError(f"{path} was not written by `tokenprune bench`: its first line is no header")
    if records[0].get("schema") != SCHEMA:
        found = records[0].get("schema")
        raise TokenPruneError(f"{path} has schema {found}, this version reads {SCHEMA}: run the bench again")
    return records


def summarise(records: Iterable[dict[str, Any]]) -> Results:
    """Work out shares, intervals, marks and collapsed kinds; raises TokenPruneError without an unpatched record."""
    header, *rest = records
    results = [record for record in rest if record["record"] == "result"]
    base = next((record for record in results if record["method"] == UNPATCHED), None)
    if base is None:
        raise TokenPruneError("these records hold no result of the unpatched model to compare with")
    places, metric = _places(header), METRICS[header.get("metric", "exact")]
    answers = {id(record): get_answers(record, metric.right is not None) for record in results}
    before = {kind: compute_share(answers[id(base)], places[kind]).value for kind in places}
    rivals = {(one["method"], one["keep"]): answers[id(one)] for one in results if one["method"] in MARKS}
    results = [base, *(record for record in results if record is not base)]
    groups = _places_of_groups(header)
    rows = [_row(record, answers[id(record)], places, groups, before, rivals, answers[id(base)]) for record in results]
    controls = [_control(record, places) for record in rest if record["record"] == "control"]
    skipped = [record for record in rest if record["record"] == "skipped"]
    given = {(record["method"], record["keep"]): answers[id(record)] for record in results}
    return Results(header, rows, skipped, controls, given)


def get_scores(record: dict[str, Any]) -> list[list[float]]:
    """Return the scores of a result, `[seeds][questions]`."""
    return record["scores"] if "scores" in record else [[float(one) for one in some] for some in record["right"]]


def find_busy_load(results: Results) -> tuple[float, int] | None:
    """Return the highest load met while timing and the number of cores, if other work kept the machine busy."""
    load = max((row.timing.get("load") or 0 for row in results.rows if row.timing), default=0)
    cores = results.header["environment"].get("cores") or 1
    return (load, cores) if is_busy(load, cores) else None


def get_answers(record: dict[str, Any], binary: bool) -> Answers:
    """Return the answers of a result. binary: whether its metric knows right and wrong."""
    return Answers(get_scores(record), record["right"] if binary else None, "scores" in record)


def _places(header: dict[str, Any]) -> dict[str, list[int]]:
    """Return the indices of each kind's questions; kinds without questions are left out."""
    asked = header["kind_of_question"]
    places = {kind: [i for i, k in enumerate(asked) if k == f"{n}"] for n, kind in enumerate(header["kinds"])}
    return {kind: indices for kind, indices in places.items() if indices}


def _places_of_groups(header: dict[str, Any]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for index, group in enumerate(header.get("group_of_question", ())):
        places.setdefault(group, []).append(index)
    return places


def _control(record: dict[str, Any], places: dict[str, list[int]]) -> ControlAnswers:
    answers = Answers([[float(one) for one in some] for some in record["right"]], record["right"])
    chance = {kind: one for kind, one in record["chance"].items() if kind in places}
    return ControlAnswers(record["control"], {kind: compute_share(answers, places[kind]) for kind in chance}, chance)


def _evidence(record: dict[str, Any], places: dict[str, list[int]]) -> dict[str, float]:
    """Mean evidence recall over the questions at these places, and over all (""); of seeds the mean."""
    if "evidence" not in record:
        return {}
    found = {}
    for name, indices in {"": range(record["questions"]), **places}.items():
        values = [some[index] for some in record["evidence"] for index in indices if some[index] is not None]
        if values:
            found[name] = statistics.fmean(values)
    return found


def compute_share(answers: Answers, indices: list[int] | None = None) -> ScoreShare:
    """Return the mean score on these questions (default: all), with Wilson's interval; of grades by bootstrap."""
    chosen = range(len(answers.scores[0])) if indices is None else indices
    if not answers.graded:
        return ScoreShare(*pooled_interval(["".join(one[index] for index in chosen) for one in answers.right]))
    means = answers.means[list(chosen)]
    return ScoreShare(float(means.mean()), *bootstrap(means))


def _row(
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
        # Not a rounding error away from the limit: 0.8 - 0.6 > 0.2 in floating point.
        kinds[kind] = replace(share, collapsed=before[kind] - share.value > COLLAPSE + 1e-9)
    name, keep = record["method"], record["keep"]
    others = {UNPATCHED: base, **{one: rivals[one, keep] for one in MARKS if (one, keep) in rivals}}
    against = {one: compare_paired(answers, theirs) for one, theirs in others.items() if UNPATCHED != name != one}
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
        hard=_hard(answers, base, None if name == UNPATCHED else rivals.get(("downsample", keep))),
        groups={group: compute_share(answers, indices) for group, indices in groups.items()},
        evidence=_evidence(record, places | groups),
        setting=record.get("setting"),
        loyalty=ScoreShare(*pooled_interval(record["same"])) if "same" in record else None,
    )


def _hard(answers: Answers, base: Answers, downsample: Answers | None) -> Hard | None:
    if downsample is None or downsample.right is None:
        return None
    places = [index for index, right in enumerate(downsample.right[0]) if right == "0"]
    return Hard(len(places), compute_share(answers, places), compute_share(base, places).value) if places else None


def compute_marks(method: str, keep: float | int, ours: Answers, rivals: dict[tuple, Answers]) -> tuple[str, ...]:
    """Return the marks of the baselines that `method` does not beat at this keep.

    rivals: the answers of each (baseline, keep) that ran.
    """
    if method == UNPATCHED:
        return ()
    found = ((name, mark, rivals[name, keep]) for name, mark in MARKS.items() if (name, keep) in rivals)
    return tuple(mark for name, mark, theirs in found if name != method and not _better(ours, theirs))


def _better(ours: Answers, theirs: Answers) -> bool:
    if ours.right is None or theirs.right is None:
        return is_better_graded(ours, theirs)
    return is_better(ours.right, theirs.right)
