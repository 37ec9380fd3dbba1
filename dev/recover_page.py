# SPDX-License-Identifier: Apache-2.0
"""The generated part of docs/guide/recover.md, from the raw file of benchmarks/recover.py; dev/readme.py writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/recover.jsonl"
CONTROL = "nothing"  # as in benchmarks/recover.py


def recover() -> str:
    """What was tuned how, and right answers before and after, with intervals of the differences."""
    header, *records = (json.loads(line) for line in RESULTS.read_text().splitlines())
    tuned = {one["under"]: one for one in records if one["record"] == "tuned"}
    right = {(one["tuned"], one["method"], one["keep"]): one for one in records if one["record"] == "result"}
    settings = [(method, keep) for name, method, keep in right if name is None and method != CONTROL]
    lines = [
        "| answered with | before | tuned under pruning | gain | tuned without (control) | gain of the control "
        "| under pruning over control |",
        "|---" * 7 + "|",
    ]
    for method, keep in settings:
        before, after, control = (right[name, method, keep]["right"] for name in (None, method, CONTROL))
        gains = [_gain(after, before), _gain(control, before), _gain(after, control)]
        name = f"`{method}`, keep {keep:g} ({right[None, method, keep]['tokens']:.0f} tokens)"
        cells = [name, _share(before), _share(after), gains[0], _share(control), gains[1], gains[2]]
        lines.append(f"| {' | '.join(cells)} |")
    before, *whole = [one for (_, method, _), one in right.items() if method == CONTROL]
    said = [f"Answered with all {before['tokens']:.0f} tokens: {_share(before['right'])} as shipped"]
    said += [
        f"{_share(one['right'])} tuned under `{one['tuned']}` ({_gain(one['right'], before['right'])})" for one in whole
    ]
    return "\n\n".join([_setting(header, tuned), "\n".join(lines), ", ".join(said) + ".", _source()])


def _setting(header: dict[str, Any], tuned: dict[str, dict[str, Any]]) -> str:
    one = next(iter(tuned.values()))
    cpu, wall = (_range([run[name] / 60 for run in tuned.values()]) for name in ("cpu_seconds", "seconds"))
    return (
        f"{header['model']}, {one['parameters'] / 1e6:.2f} M parameters tuned (LoRA of rank {header['rank']} on the "
        f"decoder, and the projector) on {one['steps'] * one['batch']} questions about {header['images']} drawn "
        f"images: {one['steps']} steps of {one['batch']}, learning rate {one['rate']:g}, AdamW; {cpu} minutes of one "
        f"CPU core each, {wall} by the clock of a busy machine. Percent right of {header['questions']} held-out "
        "questions with 95 % intervals (Wilson); gains in points, with the interval of the paired difference."
    )


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _share(right: str) -> str:
    from tokenprune.bench.significance import wilson

    low, high = wilson(right.count("1"), len(right))
    return f"{100 * right.count('1') / len(right):.1f} [{100 * low:.0f}–{100 * high:.0f}]"


def _gain(ours: str, theirs: str) -> str:
    from tokenprune.bench.paired import Answers, versus

    found = versus(*(Answers([[float(one) for one in right]], [right]) for right in (ours, theirs)))
    return f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def _source() -> str:
    name = RESULTS.relative_to(ROOT).as_posix()
    return f"By `python benchmarks/recover.py`; raw data, with the machine's load: [{name}](../../{name})."
