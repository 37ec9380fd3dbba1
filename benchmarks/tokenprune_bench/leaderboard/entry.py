# SPDX-License-Identifier: Apache-2.0
"""An entry of the leaderboard: the model, its methods and the measurements of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from tokenprune.settings import Setting
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.paired import Answers
from tokenprune_bench.results import MARKS, UNPATCHED, compute_marks, compute_share, get_answers

SCHEMA = 1
MIN_QUESTIONS = 50  # with fewer, the interval is wider than 13 points to each side
MIN_SEEDS = 3  # of random methods
Count = Annotated[int, Ge(1)]
Number = Annotated[float, Ge(0), Le(1e6)]


@dataclass(frozen=True)
class Line:
    """A method at a keep.

    Attributes:
        method: Name with options and stacks, as in `tokenprune bench`.
        keep: Requested keep.
        site: Site of the method.
        query_aware: Whether the selection depends on the question.
        score: Share of correct answers (or mean score), and its 95 % interval.
        tokens: Visual tokens averaged over the decoder's layers, as a share of unpatched.
        kv: Bytes of the KV cache after prefill, as a share of unpatched, or None.
        ttft: Median time to first token as a share of unpatched, or None.
        marks: Baselines that the method does not significantly beat at the same keep.
    """

    method: str
    keep: Annotated[float, Gt(0), Le(1e6)]
    site: str
    query_aware: bool
    score: Sequence[Number]
    tokens: Number
    kv: Number | None
    ttft: Number | None
    marks: Sequence[str]


@dataclass(frozen=True)
class LeaderboardEntry:
    """A run.

    Attributes:
        schema: Schema of this file.
        by: Author of the run.
        note: Additional note.
        date: Start of the run.
        model: Hub id or name of the model.
        model_type: Model type of its config.
        weights: Digest of the weights.
        device: Device of the model.
        dtype: dtype of the model.
        engine: "hf" or "vllm".
        versions: Versions of packages.
        data: Name of the questions.
        digest: Digest of the questions, None for the shipped questions.
        metric: Metric of the scores.
        equal_cost: Whether each keep is a share of tokens averaged over the layers.
        questions: Number of questions.
        seeds: Seeds of random methods.
        layers: Decoder layers.
        visual_tokens: Visual tokens per question, unpatched.
        unpatched: Score of the unpatched model, and its interval.
        run: Digest of the results, which identifies the run.
        lines: The methods.
    """

    schema: Literal[1]
    by: str
    note: str
    date: str
    model: str
    model_type: str | None
    weights: str | None
    device: str
    dtype: str | None
    engine: Literal["hf", "vllm"]
    versions: dict
    data: str
    digest: str | None
    metric: str
    equal_cost: bool
    questions: Count
    seeds: Sequence[int]
    layers: Count
    visual_tokens: Number
    unpatched: Sequence[Number]
    run: str
    lines: Sequence[Line]


def build_entry(
    records: Sequence[Mapping[str, Any]], *, by: str, note: str = "", model: str = "", run: str = ""
) -> LeaderboardEntry:
    """Return the entry of a run.

    Args:
        records: Records of `tokenprune bench`, the header first.
        by: Author of the run.
        note: Additional note.
        model: Name of the model. Default: the name in the records.
        run: Digest of the results.
    """
    header, *results = records
    about, data = header["environment"], header.get("data", "shipped")
    metric = METRICS[header.get("metric", "exact")]
    answered = [
        (record, get_answers(record, metric.right is not None))
        for record in results
        if record["record"] == "result" and (record["site"] or record["method"] == UNPATCHED)
    ]
    ((base, theirs),) = (pair for pair in answered if pair[0]["method"] == UNPATCHED)
    rivals = {(record["method"], record["keep"]): answers for record, answers in answered if record["method"] in MARKS}
    return LeaderboardEntry(
        schema=SCHEMA,
        by=by,
        note=note,
        date=header["date"],
        model=model or about["model"],
        model_type=about.get("model_type"),
        weights=about.get("weights"),
        device=about["device"],
        dtype=about.get("dtype"),
        engine=about.get("engine", "hf"),
        versions=get_versions(about),
        data=data if isinstance(data, str) else data["name"],
        digest=None if isinstance(data, str) else data["digest"],
        metric=metric.name,
        equal_cost=bool(header["plan"].get("equal_cost")),
        questions=base["questions"],
        seeds=list(header["plan"]["seeds"]),
        layers=len(base["stats"]["visual_tokens_per_layer"]),
        visual_tokens=round(base["stats"]["visual_tokens_in"] / base["questions"], 2),
        unpatched=_score(theirs),
        run=run,
        lines=[_build_line(record, answers, base, rivals) for record, answers in answered if record is not base],
    )


def get_versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of packages in an environment."""
    known = ("python", "torch", "transformers", "vllm", "tokenprune")
    return {name: environment[name] for name in known if name in environment}


def _build_line(
    record: Mapping[str, Any], answers: Answers, base: Mapping[str, Any], rivals: dict[tuple, Answers]
) -> Line:
    """Return the line of a result.

    Args:
        record: The result.
        answers: Its answers.
        base: Result of the unpatched model.
        rivals: Answers of the baselines by method and keep.
    """
    stats, timing = record["stats"], record.get("timing") or {}
    kv, unpruned_kv = stats.get("kv_bytes"), stats.get("kv_bytes_full")
    return Line(
        method=record["method"],
        keep=record["keep"],
        site=record["site"],
        query_aware=any(method.query_aware for method in Setting.from_text(record["method"]).methods),
        score=_score(answers),
        tokens=round(stats["visual_tokens_average"] / base["stats"]["visual_tokens_in"], 4),
        kv=round(kv / unpruned_kv, 4) if kv and unpruned_kv else None,
        ttft=timing["ttft_ratio"]["p50"] if "ttft_ratio" in timing else None,
        marks=list(compute_marks(record["method"], record["keep"], answers, rivals)),
    )


def _score(answers: Answers) -> list[float]:
    share = compute_share(answers)
    return [round(value, 6) for value in (share.value, share.low, share.high)]
