# SPDX-License-Identifier: Apache-2.0
"""The generated parts of README.md, from the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import accuracy_pages  # noqa: E402
import rows  # noqa: E402

from tokenprune_bench.recommend import advice  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
HEADLINE = RESULTS / "cpu/stacks.jsonl"  # what benchmarks/stacks.py found and timed
ABOUT = {  # size and a remark of each model that the table may be about
    "demo_qwen": (
        "4.8 M parameters",
        "These images are larger than most that it was trained on, which may be why smaller ones help it.",
    ),
}
COMMON = ("general", "documents", "grounding", "video", "server")  # rows of the table of advice


def accuracy(method: str, keep: float | None) -> Any:
    """The row of the shipped benchmark; `keep` None is that of the unpatched model."""
    results = accuracy_pages.results_of(RESULTS / "bench.jsonl")
    if keep is None:
        return results.baseline
    return next(row for row in results.rows if (row.method, row.keep) == (method, keep))


def first_token() -> dict[str, Any] | None:
    """The time from image to first token on the shipped model, of benchmarks/first_run.py; None where there is none of
    a quiet machine."""
    one = json.loads((RESULTS / "first_run.json").read_text()).get("first_token")
    return one if one and not rows.is_loaded(one) else None


def speed_and_accuracy() -> str:
    """Speed and accuracy at one setting of one shipped model, the tower included: one sentence; of accuracy alone where
    no time of a quiet machine is there."""
    method, keep = "divprune", 0.25
    kept, full, time = accuracy(method, keep), accuracy("", None), first_token()
    if time and (time["model"], time["method"], time["keep"]) != ("demo_vlm (shipped)", method, keep):
        raise ValueError("the time of benchmarks/first_run.py is of another setting or model than the accuracy")
    took = "" if time is None else (
        f"gives its first token {time['speedup']['p50']:.2f} times as fast ({time['ms']['p50']:.0f} ms in place of "
        f"{time['ms_unpatched']['p50']:.0f} ms on {_threads(time['threads'])}, processor and vision tower included) "
        "and "
    )  # fmt: skip
    return (
        f"With `{method}` and a quarter of the tokens the small LLaVA that ships {took}answers "
        f"{100 * kept.overall.value:.1f} % of {full.questions} questions about drawn images right, "
        f"{100 * full.overall.value:.1f} % with all of them."
    )


def _threads(count: int) -> str:
    return f"{count} CPU thread{'' if count == 1 else 's'}"


def headline(up: str = "") -> str:
    """Return the table of what is saved and lost: one model, and one setting a row, whose speed and accuracy come from
    the same record of one raw file. up: from the page to the root of the repository."""
    header, records = rows.read(HEADLINE)
    found = [one for one in records if "group" in one and not rows.is_loaded(one)]
    if not found:
        return ""
    first = found[0]
    lines = ["| setting | visual tokens | time to first token | questions right |", "|---|---:|---:|---:|"]
    right = 100 * header["unpatched"]
    lines.append(f"| all tokens | {first['before']['visual_tokens_in']} | 1x | {right:.1f} % |")
    for one in sorted(found, key=lambda one: one["speedup"]):
        names = " + ".join(re.sub(r"^(\w+)", r"`\1`", part) for part in one["name"].split(" + "))
        lines.append(
            f"| {names} | {one['after']['visual_tokens_average']:.0f} | {1 / one['speedup']:.2f}x "
            f"| {right - 100 * one['drop']:.1f} % |"
        )
    model = first["environment"]["model"].partition(" ")[0]
    size, remark = ABOUT[model]
    note = (
        f"`{model}`, {size}, {header['questions']} questions about drawn images, on {_threads(header['threads'])}; "
        f"image processor and vision tower are in the time. Tokens are averaged over the decoder's layers. {remark} "
        f"Small models are no promise for large ones: [measure yours]({up}docs/bench.md). "
        f"[Raw data]({up}{HEADLINE.relative_to(ROOT).as_posix()})."
    )
    return "\n\n".join(["\n".join(lines), note])


def choice() -> str:
    """Return what to take for the five situations that most readers have, from the table of advice."""
    lines = ["| you have | take |", "|---|---|"]
    known = advice.advice()
    for one in (known[name] for name in COMMON):
        lines.append(f"| {one.title} | [`{one.method}`](docs/methods/{one.method}.md), `keep={one.keep!r}` |")
    return "\n".join(lines)
