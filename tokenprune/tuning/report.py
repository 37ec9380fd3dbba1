# SPDX-License-Identifier: Apache-2.0
"""What a tuner found, as a table for people and as a configuration for `patch`."""

from __future__ import annotations

import datetime
from typing import Any

from tokenprune.bench.tables import Cell, Table
from tokenprune.config import Config
from tokenprune.fingerprint import fingerprint
from tokenprune.tuning.panel import Panel
from tokenprune.tuning.promise import points
from tokenprune.tuning.tuner import COLLAPSE, Trial, Tuning


def tuned_config(tuning: Tuning, panel: Panel, data: dict[str, Any]) -> Config:
    """Return the choice with what is promised of it; there must be one. data: name and digest of the questions."""
    choice, promise = tuning.choice, tuning.promise
    env = panel.subject.environment()
    timing = choice.timing
    return Config(
        choice.candidate.setting,
        {
            "promise": {
                "max_drop": promise.max_drop,
                "confidence": promise.confidence,
                "max_kind_drop": promise.max_kind_drop,
                "target_ttft": promise.target_ttft,
            },
            "metric": panel.metric.name,
            "data": data,
            "model": {"name": env["model"], "type": env["model_type"], "fingerprint": fingerprint(panel.subject.model)},
            "questions": {"search": tuning.search, "held_out": tuning.held_out},
            "measured": {
                **tuning.scores,
                "drop": choice.drop,
                "drop_below": choice.bound,
                "kinds": choice.kinds,
            },
            "cost": {
                "prefill_flops_ratio": choice.cost["prefill_flops_ratio"],
                "keep_ratio": choice.cost["keep_ratio"],
                "kv_ratio": choice.cost["kv_bytes"] / max(1, choice.cost["kv_bytes_full"]),
                "ttft_ratio": timing and timing["ttft_ratio"]["p50"],
            },
            "candidates": len(tuning.trials),
            "environment": env,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    )


def tuning_table(tuning: Tuning) -> Table:
    """Return what became of each candidate, those that came furthest first."""
    timed = any(trial.timing for trial in tuning.trials)
    columns = ("method", "keep", "prefill FLOPs", "layer avg", *(("TTFT",) if timed else ()), "asked", "drop", "below")
    trials = sorted(tuning.trials, key=lambda one: (-one.held_out, -one.search, one.drop or 0.0))
    rows = [[*map(Cell, (*_row(one, timed), one.state))] for one in trials]
    sure = f"{100 * tuning.promise.confidence:g} %"
    notes = (
        "Drop: points of the metric lost on the same questions: the held-out ones, where a setting got so far. Below: "
        f"what the drop is shown to be below with a confidence of {sure}, for this setting alone.",
        f"Asked: of {tuning.search} questions to search with and {tuning.held_out} held out. Cheapest: by "
        f"{'measured TTFT' if timed else 'prefill FLOPs of the decoder'}, as a share of the unpatched model's, then by "
        "tokens averaged over layers.",
    )
    title = f"A drop below {points(tuning.promise.max_drop)}, confidence {sure}"
    return Table(title, (*columns, "outcome"), rows, notes)


def _row(trial: Trial, timed: bool) -> list[str]:
    cost, name = trial.cost, trial.candidate.name
    flops = f"{cost['prefill_flops_ratio']:.0%}" if cost else ""
    tokens = f"{cost['visual_tokens_average'] / max(1, cost['visual_tokens_in']):.0%}" if cost else ""
    time = [f"{trial.timing['ttft_ratio']['p50']:.2f}x" if trial.timing else ""] if timed else []
    drop = "" if trial.drop is None else f"{100 * trial.drop:.2f}"
    bound = "" if trial.bound is None else f"{100 * trial.bound:.1f}"
    return [name, trial.candidate.keep, flops, tokens, *time, str(trial.search + trial.held_out), drop, bound]


def outcome(tuning: Tuning) -> list[str]:
    """Return what the search came to, in sentences; warnings last."""
    choice, allowed = tuning.choice, points(tuning.promise.max_drop)
    if choice is None:
        return [f"Nothing keeps the promise: no setting was shown to lose less than {allowed}.", *_closest(tuning)]
    timing, before, after = choice.timing, tuning.scores["unpatched"], tuning.scores["tuned"]
    saved = f"{choice.cost['prefill_flops_ratio']:.0%} of the prefill FLOPs"
    if timing:
        saved = f"{timing['ttft_ratio']['p50']:.2f}x TTFT"
    said = [
        f"{choice.candidate}: {saved}; {100 * before:.1f} → "
        f"{100 * after:.1f} on {tuning.held_out} held-out questions; the drop is below {allowed} with a confidence of "
        f"{100 * tuning.promise.confidence:g} %."
    ]
    if len(choice.kinds) > 1:
        worst = sorted(choice.kinds, key=choice.kinds.get, reverse=True)[:3]
        said.append("Points lost by kind: " + ", ".join(f"{kind} {100 * choice.kinds[kind]:.1f}" for kind in worst))
    if tuning.collapsed:
        said.append(
            f"warning: more than {points(COLLAPSE)} lost in {', '.join(tuning.collapsed)}: such questions are lost, "
            "whatever the mean says; --max-kind-drop forbids it"
        )
    return said


def _closest(tuning: Tuning) -> list[str]:
    tested = [one for one in tuning.trials if one.held_out]
    heard = [one for one in tuning.trials if one.search]
    if tested:
        one = min(tested, key=lambda one: one.bound)
        shown = f", which shows less than {points(one.bound)}"
    elif heard:
        one, shown = min(heard, key=lambda one: one.drop), ""
    else:
        return ["No setting could be tried; the table says why."]
    asked = f"{one.held_out} held-out questions" if one.held_out else f"{one.search} questions of the search"
    return [
        f"{one.candidate} came closest: {points(one.drop)} lost on {asked}{shown}. More questions, larger keeps or a "
        "larger drop may help."
    ]


__all__ = ["outcome", "tuned_config", "tuning_table"]
