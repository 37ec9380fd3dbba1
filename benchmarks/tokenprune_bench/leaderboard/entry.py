# SPDX-License-Identifier: Apache-2.0
"""An entry of the leaderboard: what one run says of its model and its methods."""

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
LEAST_QUESTIONS = 50  # the interval of fewer is wider than 13 points to each side
LEAST_SEEDS = 3  # of what draws at random
Count = Annotated[int, Ge(1)]
Number = Annotated[float, Ge(0), Le(1e6)]


@dataclass(frozen=True)
class Line:
    """A method at a keep.

    method: as `tokenprune bench` spells it, options and stacks too. keep: what was asked for. site: where it acts.
    query_aware: whether the question may change what stays. score: share right (or mean score) with its 95 % interval,
    as three numbers. tokens: visual tokens averaged over the decoder's layers, as a share of the unpatched model's.
    kv: bytes of the KV cache after prefill, as a share of the unpatched model's. ttft: median time to the first token,
    as a share of the unpatched model's, taken in turn with it. marks: baselines that it is not significantly better
    than, at the same keep. None: not known.
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

    schema: of this file. by: who ran it. note: what else a reader should know. date: when it began. model: its id on
    the hub, or a name. weights: what tells them from others. device: of the model. engine: hf or vllm. versions: of
    packages. data: what was asked. digest: of the questions; None: those that ship. metric: how answers were scored.
    equal_cost: whether each keep is a share of tokens averaged over the layers. questions: how many. seeds: of what
    draws at random. layers: of the decoder. visual_tokens: of a question, unpatched. unpatched: the score of the
    unpatched model, as those of lines. run: digest of its results, which tells it from other runs.
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


def entry_of(
    records: Sequence[Mapping[str, Any]], *, by: str, note: str = "", model: str = "", run: str = ""
) -> LeaderboardEntry:
    """Return the entry of a run, whose own word is taken for it.

    records: what `tokenprune bench` wrote, the header first. model: what it shall be called; default: as it calls
    itself. Of what the tables say only what an entry holds is worked out.
    """
    header, *results = records
    about, data = header["environment"], header.get("data", "shipped")
    metric = METRICS[header.get("metric", "exact")]
    answered = [
        (one, get_answers(one, metric.right is not None))
        for one in results
        if one["record"] == "result" and (one["site"] or one["method"] == UNPATCHED)
    ]
    ((base, theirs),) = (pair for pair in answered if pair[0]["method"] == UNPATCHED)
    rivals = {(one["method"], one["keep"]): answers for one, answers in answered if one["method"] in MARKS}
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
        versions=versions_in(about),
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
        lines=[_line(one, answers, base, rivals) for one, answers in answered if one is not base],
    )


def versions_in(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of packages that an environment names."""
    known = ("python", "torch", "transformers", "vllm", "tokenprune")
    return {name: environment[name] for name in known if name in environment}


def _line(one: Mapping[str, Any], answers: Answers, base: Mapping[str, Any], rivals: dict[tuple, Answers]) -> Line:
    """Return the line of a result. base: that of the unpatched model. rivals: the baselines' answers at each keep."""
    stats, timing = one["stats"], one.get("timing") or {}
    kv, whole = stats.get("kv_bytes"), stats.get("kv_bytes_full")
    return Line(
        method=one["method"],
        keep=one["keep"],
        site=one["site"],
        query_aware=any(method.query_aware for method in Setting.from_text(one["method"]).methods),
        score=_score(answers),
        tokens=round(stats["visual_tokens_average"] / base["stats"]["visual_tokens_in"], 4),
        kv=round(kv / whole, 4) if kv and whole else None,
        ttft=timing["ttft_ratio"]["p50"] if "ttft_ratio" in timing else None,
        marks=list(compute_marks(one["method"], one["keep"], answers, rivals)),
    )


def _score(answers: Answers) -> list[float]:
    share = compute_share(answers)
    return [round(one, 6) for one in (share.value, share.low, share.high)]
