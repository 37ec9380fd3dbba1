# SPDX-License-Identifier: Apache-2.0
"""What the recipes (docs/recipes) may promise: sentences from the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

from typing import Any

import front_page
from accuracy_pages import RESULTS, link

UP = "../../"


def documents() -> str:
    header, *records = front_page.records("documents.jsonl")
    found = {(one["method"], one.get("level")): one for one in records if one["record"] == "result"}
    full, exact, half = found["unpatched", "all"], found["pixelprune", "all"], found["pixelprune", "half"]
    photographs = found["dynres", "all"]
    return (
        f"On {header['documents']} clean drawn pages, screens and charts the small model that ships answers "
        f"{_share(exact)} of {header['questions']} questions with {exact['tokens']['tower']:.0f} of "
        f"{full['tokens']['tower']:.0f} tokens in the tower and the decoder, {_share(half)} with "
        f"{half['tokens']['tower']:.0f}, and {_share(full)} unpatched; `dynres` {_share(photographs)} with "
        f"{photographs['tokens']['tower']:.0f}. Two dozen documents tell differences of 15 points, not of 5 "
        f"([all methods there](../methods/pixelprune.md#measured)). Raw data: {link(RESULTS / 'documents.jsonl', UP)}."
    )


def chat() -> str:
    quarter, full, time = front_page.accuracy("divprune", 0.25), front_page.accuracy("", None), _prefill()
    return (
        f"{time} Of {full.questions} questions on drawn images the small LLaVA that ships answers "
        f"{100 * quarter.overall.value:.1f} % with {quarter.tokens_average:.0f} tokens, {100 * full.overall.value:.1f} "
        f"% with {full.tokens_average:.0f}. From the second turn on the tower does not run (`hits` counts that). "
        f"Raw data: {link(RESULTS / 'cpu/efficiency.jsonl', UP)}, {link(RESULTS / 'bench.jsonl', UP)}."
    )


def _prefill() -> str:
    header, *_ = front_page.records("cpu/efficiency.jsonl")
    cut = front_page.prefill("divprune")
    return (
        f"Prefill is {cut['speedup']['p50']:.1f} times as fast with {cut['keep']} of {cut['visual']} tokens, in a "
        f"decoder of {header['parameters'] / 1e6:.0f} M parameters on a CPU."
    )


def video() -> str:
    header, *records = front_page.records("pevlm.jsonl")
    full, blocks = (
        next(one["values"][-1] for one in records if (one["what"], one["way"]) == ("prefill, ms", way))
        for way in ("full", "blocks")
    )
    rows = _videos()
    kept = rows["vidcom2", 0.25]
    return (
        f"Prefill of {header['frames'][-1]} frames in blocks is {full / blocks:.1f} times as fast on a CPU, with all "
        f"tokens there. Of {rows['questions']} questions on drawn videos a small model answers {kept} with the quarter "
        f"of the tokens that `vidcom2` keeps, {rows['random', 0.25]} with a random quarter, and {rows['unpatched']} "
        f"unpatched. What the two do together to answers was not measured. Raw data: "
        f"{link(RESULTS / 'pevlm.jsonl', UP)}, {link(RESULTS / 'bench_videos.jsonl', UP)}."
    )


def _videos() -> dict[Any, Any]:
    from tokenprune.bench.results import read_records, summarise

    results = summarise(read_records(RESULTS / "bench_videos.jsonl"))
    told = {(row.method, row.keep): f"{100 * row.overall.value:.1f} %" for row in results.rows}
    base = results.baseline
    return told | {"questions": base.questions, "unpatched": f"{100 * base.overall.value:.1f} %"}


def served() -> str:
    records = front_page.records("serving.jsonl")
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
