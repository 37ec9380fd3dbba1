# SPDX-License-Identifier: Apache-2.0
"""Generated parts of docs/results/training.md, from two raw files; dev/readme.py writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rows
from tables import format_share, format_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/recover.jsonl"
SFT = ROOT / "benchmarks/results/recover_sft.jsonl"
PRUNED, CONTROL = "pruning", "nothing"  # training conditions of benchmarks/experiments/recover.py


def recover() -> str:
    """Return accuracy before and after training under pruning, with intervals of the paired differences."""
    header, records = rows.read(RESULTS)
    tuned = {record["under"]: record for record in records if record["record"] == "tuned"}
    results = {
        (record["tuned"], record["method"], record["keep"]): record
        for record in records
        if record["record"] == "result"
    }
    titles = ["answered with", "before", "trained with pruning", "gain", "trained without (control)", "gain"]
    titles.append("gain over the control")
    lines = []
    for method, keep in [setting[1:] for setting in results if setting[0] is None]:
        shipped, ours, control = (results[name, method, keep]["right"] for name in (None, PRUNED, CONTROL))
        tokens = f"{results[None, method, keep]['tokens']:.0f} tokens"
        name = f"all {tokens}" if method == CONTROL else f"`{method}`, keep {keep:g} ({tokens})"
        cells = [_share(shipped), _share(ours), _gain(ours, shipped), _share(control), _gain(control, shipped)]
        lines.append([name, *cells, _gain(ours, control)])
    tables = [format_table(titles, lines), _kinds(header["kinds"], results)]
    return "\n\n".join([_setting(header, tuned), *tables, _source(RESULTS)])


def sft() -> str:
    """Return accuracy before and after supervised fine-tuning with TRL, with intervals of the paired differences."""
    header, records = rows.read(SFT)
    (tuned,) = (record for record in records if record["record"] == "tuned")
    results = {
        (record["tuned"], record["method"], record["keep"]): record
        for record in records
        if record["record"] == "result"
    }
    said = (
        f"{_name(header)}, {tuned['steps']} steps of {tuned['batch']} lessons, LoRA of rank {header['rank']} on the "
        f"decoder, learning rate {tuned['rate']:g}. Correct answers in %, of {header['questions']} held-out questions."
    )
    lines = []
    for name, method, keep in results:
        if name is None and ("sft", method, keep) in results:
            before, after = results[None, method, keep], results["sft", method, keep]["right"]
            cells = [_share(before["right"]), _share(after), _gain(after, before["right"])]
            lines.append([f"`{method}`, keep {keep:g} ({before['tokens']:.0f} tokens)", *cells])
    return "\n\n".join([said, format_table(["answered with", "before", "after", "gain"], lines), _source(SFT)])


def _name(header: dict[str, Any]) -> str:
    return header["model"].removesuffix(" (shipped)")


def _setting(header: dict[str, Any], tuned: dict[str, dict[str, Any]]) -> str:
    run = tuned[PRUNED]
    return (
        f"{_name(header)}, {run['parameters'] / 1e6:.2f} M trained parameters (LoRA of rank {header['rank']} on the "
        f"decoder, and the projector) on {run['steps'] * run['batch']} questions about {header['images']} drawn "
        f"images: {run['steps']} steps of {run['batch']}, alternating methods and keeps, AdamW, learning rate "
        f"{run['rate']:g}. Correct answers in %, of {header['questions']} held-out questions, and gains in points, "
        "with 95 % intervals."
    )


def _kinds(kinds: list[str], results: dict[Any, dict[str, Any]]) -> str:
    """Return gains by kind of question, averaged over methods and keeps."""
    from tokenprune_bench.paired import Answers, compare_paired

    def answers(tuned: str | None, kind: str) -> Answers:
        pruned = [
            answers_of_run["right"]
            for (name, method, _), answers_of_run in results.items()
            if name == tuned and method != CONTROL
        ]
        return Answers(
            [
                [float(x) for x, its in zip(answers_of_run, kinds, strict=True) if its == kind]
                for answers_of_run in pruned
            ],
            None,
        )

    lines = []
    for kind in dict.fromkeys(kinds):
        gains = [compare_paired(answers(tuned, kind), answers(None, kind)) for tuned in (PRUNED, CONTROL)]
        lines.append([f"`{kind}`", *map(_interval, gains)])
    return format_table(["gain by kind of question", "trained with pruning", "without (control)"], lines)


def _share(right: str) -> str:
    from tokenprune_bench.significance import wilson

    low, high = wilson(right.count("1"), len(right))
    return f"{format_share(right)} [{100 * low:.0f}–{100 * high:.0f}]"


def _gain(ours: str, theirs: str) -> str:
    from tokenprune_bench.paired import Answers, compare_paired

    gain = compare_paired(*(Answers([[float(digit) for digit in right]], [right]) for right in (ours, theirs)))
    return _interval(gain)


def _interval(gain: Any) -> str:
    return f"{100 * gain.difference:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def _source(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"By `python benchmarks/experiments/{path.stem}.py`; [raw data](../../{name})."
