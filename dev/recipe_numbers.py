# SPDX-License-Identifier: Apache-2.0
"""What the recipes (docs/recipes) may promise: sentences from the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

from typing import Any

import front_page
from accuracy_pages import RESULTS, link, results_of
from front_page import rows

UP = "../../"


def chat() -> str:
    return (
        f"{front_page.speed_and_accuracy()} From the second turn on the tower does not run (`hits` counts that). Raw "
        f"data: {link(front_page.HEADLINE, UP)}."
    )


def video() -> str:
    header, records = rows.read(RESULTS / "pevlm.jsonl")
    times = {
        one["way"]: one["values"][-1]
        for one in records
        if one["what"] == "prefill, ms" and not rows.is_loaded(one, header)
    }
    took = "" if not times else (
        f"Prefill of {header['frames'][-1]} frames in blocks is {times['full'] / times['blocks']:.1f} times as fast on "
        "a CPU, with all tokens there. "
    )  # fmt: skip
    found = _videos()
    return (
        f"{took}Of {found['questions']} questions on drawn videos a small model answers {found['vidcom2', 0.25]} with "
        f"the quarter of the tokens that `vidcom2` keeps, {found['random', 0.25]} with a random quarter, and "
        f"{found['unpatched']} unpatched. What the two do together to answers was not measured. Raw data: "
        f"{link(RESULTS / 'pevlm.jsonl', UP)}, {link(RESULTS / 'bench_videos.jsonl', UP)}."
    )


def _videos() -> dict[Any, Any]:
    results = results_of(RESULTS / "bench_videos.jsonl")
    told = {(row.method, row.keep): f"{100 * row.overall.value:.1f} %" for row in results.rows}
    base = results.baseline
    return told | {"questions": base.questions, "unpatched": f"{100 * base.overall.value:.1f} %"}


def served() -> str:
    records = rows.lines(RESULTS / "serving.jsonl")
    if not records:
        return f"Raw data: {link(RESULTS / 'serving.jsonl', UP)}."
    most = max(one["concurrency"] for one in records)
    found = {one["setting"]: one for one in records if one["concurrency"] == most}
    off, cut = found["off"], found["keep 0.25"]
    return (
        f"With {most} requests at once, {cut['speedup']:.1f} times the requests a second at a quarter of the tokens; "
        f"half of the first tokens come within {cut['ttft_p50']:.1f} s in place of {off['ttft_p50']:.1f} s. Prompts "
        f"have {cut['prompt_tokens']:.0f} tokens in place of {off['prompt_tokens']:.0f}. So it was on {off['cpus']} "
        f"CPU cores with a decoder of 100 M parameters ([all of it](../serving.md#measured)). Raw data: "
        f"{link(RESULTS / 'serving.jsonl', UP)}."
    )


def _share(one: dict[str, Any]) -> str:
    return f"{100 * one['right'].count('1') / len(one['right']):.1f} %"
