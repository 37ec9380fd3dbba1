# SPDX-License-Identifier: Apache-2.0
"""What a tuner found, as a table for people and as a configuration for `patch`."""

from __future__ import annotations

import datetime
from typing import Any

from tokenprune.bench.tables import Cell, Table
from tokenprune.config import Config
from tokenprune.fingerprint import fingerprint
from tokenprune.tuning.panel import Panel
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
    """Return what became of each candidate: those that came furthest first, then by cost."""
    timed = any(trial.timing for trial in tuning.trials)
    columns = ("method", "keep", "prefill FLOPs", "layer avg", *(("TTFT",) if timed else ()), "asked", "drop", "below")
    trials = sorted(tuning.trials, key=lambda one: (-one.held_out, -one.search, one.drop or 0.0))
    rows = [[*map(Cell, _row(one, timed)), Cell(one.state, bad=False)] for one in trials]
    promise = tuning.promise
    asked = next((one.search + one.held_out for one in trials if one.held_out), tuning.search)
    price = "TTFT, measured" if timed else "prefill FLOPs of the decoder"
    notes = [
        f"Drop: points of the metric lost on the same questions, of the held-out ones where they were asked. Below: with a "
        f"confidence of {100 * promise.confidence:g} %, for this one setting. Cheapest means {price}, as a share of the "
        "unpatched model; then tokens averaged over layers.",
        f"Asked: of {tuning.search} questions of the search and {tuning.held_out} that are held out, {asked} at most.",
    ]
    title = f"A drop below {100 * promise.max_drop:g} points, confidence {100 * promise.confidence:g} %"
    return Table(title, (*columns, "outcome"), rows, tuple(notes))


def _row(trial: Trial, timed: bool) -> list[str]:
    flops = f"{trial.cost['prefill_flops_ratio']:.0%}" if trial.cost else ""
    tokens = f"{trial.cost['visual_tokens_average'] / trial.cost['visual_tokens_in']:.0%}" if trial.cost else ""
    time = [f"{trial.timing['ttft_ratio']['p50']:.2f}x" if trial.timing else ""] if timed else []
    drop = "" if trial.drop is None else f"{100 * trial.drop:.2f}"
    bound = "" if trial.bound is None else f"{100 * trial.bound:.1f}"
    return [
        trial.candidate.name, trial.candidate.keep, flops, tokens, *time, str(trial.search + trial.held_out), drop, bound
    ]  # fmt: skip


def outcome(tuning: Tuning) -> list[str]:
    """Return what the search came to, in sentences; warnings last."""
    promise, choice = tuning.promise, tuning.choice
    if choice is None:
        limit = f"{100 * promise.max_drop:g} points"
        closest = min((one for one in tuning.trials if one.held_out), key=lambda one: one.bound, default=None)
        said = [f"Nothing keeps the promise: no setting was shown to lose less than {limit}."]
        if closest is not None:
            said.append(
                f"{closest.candidate} came closest: {100 * closest.drop:.2f} points lost on {closest.held_out} held-out "
                f"questions, which shows less than {100 * closest.bound:.1f}. More questions, larger keeps or a larger "
                "drop may help."
            )
        return said
    saved = f"{choice.timing['ttft_ratio']['p50']:.2f}x TTFT" if choice.timing else (
        f"{choice.cost['prefill_flops_ratio']:.0%} of the prefill FLOPs"
    )  # fmt: skip
    said = [
        f"{choice.candidate}: {saved}; {100 * tuning.scores['unpatched']:.1f} → {100 * tuning.scores['tuned']:.1f} on "
        f"{tuning.held_out} held-out questions; the drop is below {100 * promise.max_drop:g} points with a confidence of "
        f"{100 * promise.confidence:g} %."
    ]
    if len(choice.kinds) > 1:
        worst = sorted(choice.kinds, key=choice.kinds.get, reverse=True)[:3]
        said.append("Most is lost in: " + ", ".join(f"{kind} {100 * choice.kinds[kind]:.1f}" for kind in worst))
    for kind in tuning.collapsed:
        said.append(
            f"warning: {kind} loses {100 * choice.kinds[kind]:.0f} points, more than {100 * COLLAPSE:.0f}: this kind of "
            "question is lost, whatever the mean says; --max-kind-drop forbids it"
        )
    return said


__all__ = ["outcome", "tuned_config", "tuning_table"]
