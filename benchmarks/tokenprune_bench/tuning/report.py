# SPDX-License-Identifier: Apache-2.0
"""Result of a tuner as sentences, as tables, and as a config for `patch`."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from tokenprune.settings import Setting
from tokenprune_bench.profiling.kept_tokens import format_keep, format_percent
from tokenprune_bench.tables import Cell, Table
from tokenprune_bench.tuning.betting import LIKELY
from tokenprune_bench.tuning.evaluator import Evaluator
from tokenprune_bench.tuning.objective import MAX_SPREAD, TITLES, WORK, compute_shares, compute_spread
from tokenprune_bench.tuning.promise import format_points
from tokenprune_bench.tuning.trial import COLLAPSE, Trial, Tuning

_SHORT_ROWS = 8


def build_tuned_config(tuning: Tuning, evaluator: Evaluator, data: dict[str, Any]) -> Setting:
    """Return the chosen setting with a record of the promise. A choice is required.

    Args:
        tuning: Result of the search.
        evaluator: Evaluator of the search.
        data: Name and digest of the questions.
    """
    choice, promise = tuning.choice, tuning.promise
    env = evaluator.environment
    model = {"name": env["model"], "type": env["model_type"]}
    if "engine" not in env:  # the fingerprint of vLLM cannot be compared with a model of transformers
        model["fingerprint"] = evaluator.backend.fingerprint()
    return dataclasses.replace(
        choice.candidate,
        tuned={
            "promise": {
                "max_drop": promise.max_drop,
                "confidence": promise.confidence,
                "max_kind_drop": promise.max_kind_drop,
                "target_ttft": promise.target_ttft,
            },
            "objective": tuning.objective,
            "ranked_by": tuning.ranked_by,
            "metric": evaluator.metric.name,
            "data": data,
            "model": model,
            "questions": {"search": tuning.search, "held_out": tuning.held_out},
            "measured": {
                **tuning.scores,
                "drop": choice.drop,
                "drop_below": choice.bound,
                "kinds": choice.kinds,
            },
            "cost": build_cost_summary(choice),
            "candidates": len(tuning.trials),
            "tested": len(tuning.tested),
            "environment": env,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    )


def build_cost_summary(trial: Trial) -> dict[str, Any]:
    """Return the cost of an asked setting per question, next to the unpatched model on the same questions.

    Returns:
        A dict with these entries, among others. `visual_tokens` is averaged over the decoder's layers. `kv_bytes` is
        measured after prefill. `ttft_ms` is the median of the paired time ratios times the unpatched median; the
        `ttft_*` entries are None without timing. `ttft_reliable` is False if the spread of the runs exceeds
        `objective.MAX_SPREAD`. `batch_ratio` is the patched time of a batch over the unpatched time, if measured.
        `work_ratio` is the ratio of prefill FLOPs of tower and decoder, with the tower in closed form.
    """
    cost, timing, asked = trial.cost, trial.timing, trial.search + trial.held_out
    ratio, unpatched_ms = (timing["ttft_ratio"]["p50"], timing["ttft_ms_unpatched"]["p50"]) if timing else (None, None)
    return {
        "prefill_flops_ratio": cost["prefill_flops_ratio"],
        "keep_ratio": cost["keep_ratio"],
        "visual_tokens": cost["visual_tokens_average"] / asked,
        "visual_tokens_unpatched": cost["visual_tokens_in"] / asked,
        "kv_ratio": cost["kv_bytes"] / max(1, cost["kv_bytes_full"]),
        "kv_bytes": cost["kv_bytes"] / asked,
        "kv_bytes_unpatched": cost["kv_bytes_full"] / asked,
        "ttft_ratio": ratio,
        "ttft_ms": timing and ratio * unpatched_ms,
        "ttft_ms_unpatched": unpatched_ms,
        "ttft_reliable": timing and compute_spread(timing) <= MAX_SPREAD,
        "work_ratio": compute_shares(cost, None, trial.predicted)[WORK],
    } | ({"batch_ratio": timing["batch_ratio"]["p50"]} if timing and "batch_ratio" in timing else {})


def describe_outcome(tuning: Tuning, metric: str = "accuracy %") -> list[str]:
    """Describe the result in sentences: the verdict first, warnings last.

    Args:
        tuning: Result of the search.
        metric: Title of the metric.
    """
    choice, promise = tuning.choice, tuning.promise
    allowed, sure = format_points(promise.max_drop), f"a confidence of {100 * promise.confidence:g} %"
    if choice is None:
        return [*_describe_failure(tuning, allowed, sure), *tuning.notes]
    cost, before, after = build_cost_summary(choice), tuning.scores["unpatched"], tuning.scores["tuned"]
    said = [
        f"{choice.candidate.name}, keep {_keep(choice)}: less than {allowed} lost, with {sure}.",
        f"{metric} {100 * before:.1f} → {100 * after:.1f} on {tuning.held_out} held-out questions (shown: less than "
        f"{format_points(choice.bound)} lost); " + "; ".join(_format_cost_changes(cost)) + ".",
    ]
    if len(choice.kinds) > 1:
        worst = sorted(choice.kinds, key=choice.kinds.get, reverse=True)[:3]
        said.append("Points lost by kind: " + ", ".join(f"{kind} {100 * choice.kinds[kind]:.1f}" for kind in worst))
    if tuning.collapsed:
        said.append(
            f"warning: more than {format_points(COLLAPSE)} lost in {', '.join(tuning.collapsed)}: these "
            "kinds fail although the mean is good; --max-kind-drop forbids it"
        )
    if cost["ttft_ratio"] is not None and cost["ttft_reliable"] and cost["ttft_ratio"] >= 1:
        said.append(
            "warning: the time to first token does not improve on this machine; only memory and FLOPs are saved"
        )
    return said + [f"warning: {note}" for note in tuning.notes]


def _format_cost_changes(cost: dict[str, Any]) -> list[str]:
    """Return tokens, time and memory as "unpatched → tuned" phrases."""
    tokens, before_tokens = cost["visual_tokens"], cost["visual_tokens_unpatched"]
    said = [
        f"visual tokens {before_tokens:.0f} → {tokens:.0f} ({tokens / max(1, before_tokens):.0%}, averaged over layers)"
    ]
    if cost["ttft_ratio"] is not None:
        doubt = "" if cost["ttft_reliable"] else ", not reliable"
        said.append(
            f"TTFT {cost['ttft_ms_unpatched']:.1f} → {cost['ttft_ms']:.1f} ms ({cost['ttft_ratio']:.2f}x{doubt})"
        )
    if "batch_ratio" in cost:
        said.append(f"questions a second {1 / cost['batch_ratio']:.2f}x")
    before, after = (cost[name] / 2**10 for name in ("kv_bytes_unpatched", "kv_bytes"))
    said.append(f"KV cache {before:.0f} → {after:.0f} KiB ({cost['kv_ratio']:.0%})")
    said.append(f"prefill FLOPs {cost['prefill_flops_ratio']:.0%}")
    if round(cost["work_ratio"], 2) != round(cost["prefill_flops_ratio"], 2):
        said[-1] += f", with the vision tower's {cost['work_ratio']:.0%}"
    return said


def build_tuning_table(tuning: Tuning) -> Table:
    """Return a table of the tested settings, the safest first."""
    sure = f"{100 * tuning.promise.confidence:g} %"
    notes = (
        "Drop: points of the metric lost on the held-out questions. Below: upper bound of the drop with a confidence "
        f"of {sure}, for this setting only. Other columns: share of the unpatched model's cost.",
        f"Asked: {tuning.search} questions to search with and {tuning.held_out} held out. Cheapest: by "
        f"{TITLES[tuning.ranked_by]}.",
    )
    title = f"Tested for a drop below {format_points(tuning.promise.max_drop)}, confidence {sure}, the safest first"
    return _build_table(title, tuning.tested, notes)


def build_short_table(tuning: Tuning) -> Table:
    """Return the first `_SHORT_ROWS` tested settings, the chosen one included, with the columns that fit 80 letters."""
    trials = list(tuning.tested[:_SHORT_ROWS])
    if tuning.choice is not None and tuning.choice not in trials:
        trials[-1] = tuning.choice
    table = _build_table("Tested on the held-out questions, the safest first", trials, ())
    indices = [table.columns.index(name) for name in ("method", "keep", "tokens", "TTFT", "KV cache", "drop", "below")]
    rows = [[row[index] for index in indices] for row in table.rows]
    return Table(table.title, tuple(table.columns[index] for index in indices), rows)


def shorten_outcome(lines: Sequence[str]) -> list[str]:
    """Return the first two lines of `describe_outcome` and the first warning."""
    warnings = [line for line in lines[2:] if line.startswith("warning")]
    return [*lines[:2], *warnings[:1]]


def build_others_table(tuning: Tuning) -> Table:
    """Return a table of the settings that were not tested, with the reasons."""
    rest = sorted(
        (trial for trial in tuning.trials if not trial.held_out), key=lambda trial: (-trial.search, trial.drop or 0.0)
    )
    note = f"Asked: of {tuning.search} questions to search with. Drop: points of the metric lost on them."
    return _build_table("Not tested", rest, (note,))


def _build_table(title: str, trials: Sequence[Trial], notes: tuple[str, ...]) -> Table:
    columns = ("method", "keep", "tokens", "TTFT", "KV cache", "prefill FLOPs", "asked", "drop", "below", "outcome")
    return Table(title, columns, [[*map(Cell, _build_row(trial))] for trial in trials], notes, last_left=True)


def _build_row(trial: Trial) -> list[str]:
    cost = build_cost_summary(trial) if trial.cost else {}
    tokens = f"{cost['visual_tokens'] / max(1, cost['visual_tokens_unpatched']):.0%}" if cost else ""
    time = f"{trial.timing['ttft_ratio']['p50']:.2f}x" if trial.timing else ""
    shares = [f"{cost[name]:.0%}" if cost else "" for name in ("kv_ratio", "prefill_flops_ratio")]
    drop = "" if trial.drop is None else f"{100 * trial.drop:.2f}"
    bound = "" if trial.bound is None else f"{100 * trial.bound:.1f}"
    asked = str(trial.search + trial.held_out)
    return [trial.candidate.name, _keep(trial), tokens, time, *shares, asked, drop, bound, trial.state]


def _keep(trial: Trial) -> str:
    """Return the keep, and for a stack with answers the share that all cuts keep together."""
    cuts = len(trial.candidate.methods)
    if cuts == 1 or not trial.cost:
        return trial.candidate.keep_text
    if "," in trial.candidate.keep_text:
        return f"{trial.candidate.keep_text} ({format_percent(trial.cost['keep_ratio'])} in all)"
    return format_keep(trial.candidate.keep_text, cuts, trial.cost["keep_ratio"])


def _describe_failure(tuning: Tuning, allowed: str, sure: str) -> list[str]:
    tested, promise = tuning.tested, tuning.promise
    if not tested:
        heard = [trial for trial in tuning.trials if trial.search]
        if not heard:
            return ["No setting could be tried; --details prints the reasons."]
        trial = min(heard, key=lambda trial: trial.drop)
        return [
            f"None of {len(heard)} settings was worth a test: each lost too much in the search, or saves no cost (see "
            "--details). Larger keeps or a larger drop may help.",
            f"{trial.candidate} came closest: {format_points(trial.drop)} lost on {trial.search} questions.",
        ]
    trial, asked = tested[0], tuning.search + tuning.held_out
    closest = f"{trial.candidate}, the safest, lost {format_points(trial.drop)} on {trial.held_out} held-out questions"
    verdict = f"None of {len(tested)} tested was shown to lose less than {allowed}, with {sure}"
    asked_of = (
        f"Tested on {trial.held_out} held-out questions, the safest first: "
        f"{', '.join(str(each.candidate) for each in tested)}. "
        f"This promise needs at least {promise.questions_needed} held-out questions, if no answer changes."
    )
    if trial.state.startswith("keeps"):  # only --max-kind-drop failed
        return [f"{verdict}, and no more in any kind of question than --max-kind-drop allows.", f"{closest}.", asked_of]
    closest += f", and is shown to lose less than {format_points(trial.bound)}."
    if tuning.more_questions is None:
        return [f"{verdict}; more questions would hardly help: larger keeps, or a larger drop may.", closest, asked_of]
    return [
        f"{verdict}; ask about {tuning.more_questions} more questions.",
        f"{closest} An estimate: with {asked + tuning.more_questions} questions in all it would pass {LIKELY:.0%} "
        "of the time, if its drop stays the same.",
        asked_of,
    ]


__all__ = [
    "build_cost_summary",
    "build_others_table",
    "build_short_table",
    "build_tuned_config",
    "build_tuning_table",
    "describe_outcome",
    "shorten_outcome",
]
