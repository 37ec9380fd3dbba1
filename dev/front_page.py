# SPDX-License-Identifier: Apache-2.0
"""The generated parts of README.md, from the registry and the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenprune
from tokenprune import Site

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True)
class Choice:
    """A row of the table that helps to choose.

    case: what the reader has. method, keep: what to pass to `patch`, as Python code. why: the reason, with the page
    that shows it. more: what else to pass to `patch`, as Python code.
    """

    case: str
    method: str
    keep: str
    why: str
    more: str = ""


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def prefill(method: str) -> dict[str, Any]:
    """The first case of the benchmark of efficiency on the CPU."""
    _, *found = records("cpu/efficiency.jsonl")
    return next(one for one in found if (one["visual"], one["method"]) == (found[0]["visual"], method))


def accuracy(method: str, keep: float | None) -> Any:
    """The row of the shipped benchmark; `keep` None is that of the unpatched model."""
    from tokenprune.bench.results import read_records, summarise

    results = summarise(read_records(RESULTS / "bench.jsonl"))
    if keep is None:
        return results.baseline
    return next(row for row in results.rows if (row.method, row.keep) == (method, keep))


def fair(method: str, share: float | None) -> Any:
    """The row of the second model, which favours no method, at a share averaged over layers; None: unpatched."""
    from tokenprune.bench.results import read_records, summarise

    results = summarise(read_records(RESULTS / "all_methods-demo_qwen.jsonl"))
    if share is None:
        return results.baseline
    return next(row for row in results.rows if (row.method, row.keep) == (method, share))


def lost(method: str, kind: str, keep: float) -> float:
    """Points that a kind of question lost, as in docs/guard.md."""
    table = json.loads((ROOT / "tokenprune/assets/guard.json").read_text())
    found = table["methods"][method][kind]["measured"]
    one = next(one for one in found if one["keep"] == keep)
    return 100 * (one["unpatched"] - one["share"])


def selection(method: str, count: int) -> float:
    """Seconds that choosing among `count` visual tokens takes."""
    one = next(one for one in records("cpu/scaling.jsonl")[1:] if (one["what"], one["method"]) == ("selection", method))
    return one["points"][str(count)]["seconds"]


def problem() -> str:
    header, *_ = records("cpu/efficiency.jsonl")
    whole, cut = prefill("unpatched"), prefill("divprune")
    full, quarter = fair("", None), fair("divprune", 0.25)
    visual, text = whole["visual"], int(header["text"])
    return (
        f"With one image of {visual} visual tokens and {text} of text, {100 * visual / (visual + text):.0f} % of what "
        f"a vision-language model reads is the image: a decoder of {header['parameters'] / 1e6:.0f} M parameters takes "
        f"{whole['ms']['p50']:.0f} ms to read it all on {header['threads']} CPU threads, and {cut['ms']['p50']:.0f} ms "
        f"where `divprune` keeps {cut['keep']} tokens of the image.\n"
        "\ntokenprune drops or merges visual tokens in any Hugging Face vision-language model, without training, in "
        "one line, and tells what that saves and costs. With a quarter of them a small model that ships answers "
        f"{100 * quarter.overall.value:.1f} % of {full.questions} questions right, {100 * full.overall.value:.1f} % "
        "with all ([all methods](docs/all-methods.md)). Raw data: [speed](benchmarks/results/cpu/efficiency.jsonl), "
        "[answers](benchmarks/results/all_methods-demo_qwen.jsonl)."
    )


def printed() -> str:
    one = json.loads((RESULTS / "first_run.json").read_text())
    return "\n".join(
        [
            "```text",
            *one["printed"],
            "```",
            "",
            "From a run on the 4.5 M-parameter model and [an image]"
            f"({one['stand_ins']['photo.jpg']}) that ship with the package, on a CPU: "
            "`python benchmarks/first_run.py`; raw data: "
            "[benchmarks/results/first_run.json](benchmarks/results/first_run.json).",
        ]
    )


def choices() -> list[Choice]:
    far = 32768
    served = max(records("serving.jsonl"), key=lambda one: (one["concurrency"], one["speedup"]))
    video, frames = records("pevlm.jsonl"), records("pevlm.jsonl")[0]["frames"][-1]
    full, blocks = (next(one["values"][-1] for one in video[1:] if (one["what"], one["way"]) == ("prefill, ms", way))
                    for way in ("full", "blocks"))  # fmt: skip
    quarter, cut = accuracy("divprune", 0.25), prefill("divprune")
    return [
        Choice(
            "long prompts on Qwen: large images, thousands of visual tokens",
            '"dart"',
            "0.25",
            f"choosing among {far} tokens takes it {1e3 * selection('dart', far):.0f} ms; `divprune`, which compares "
            f"all pairs, {selection('divprune', far):.0f} s ([how it grows](docs/performance.md#how-it-grows))",
        ),
        Choice(
            "a vLLM server",
            '"divprune"',
            "0.25",
            f"the prompt itself gets shorter: {served['speedup']:.1f} times the requests a second at "
            f"{served['concurrency']} at once ([serving](docs/serving.md#measured))",
        ),
        Choice(
            "OCR: signs, documents, charts",
            '"dart"',
            "0.5",
            "reading falls first: of words and digits in drawn images "
            f"{_points(lost('dart', 'text', 0.5))} lost at 0.5, "
            f"{_points(lost('dart', 'text', 0.25))} at 0.25; `downsample` loses "
            f"{_points(lost('downsample', 'text', 0.5))} at 0.5 ([the guard](docs/guard.md#the-floors))",
        ),
        Choice(
            "counting, among other questions",
            '"divprune"',
            "0.25",
            f"counting loses {_points(lost('divprune', 'counting', 0.25))}: the guard keeps more tokens for such "
            "prompts alone ([what it gives back](docs/guard.md#what-auto-gives-back))",
            'guard="auto", processor=processor',
        ),
        Choice(
            "video",
            '"divprune"',
            'Budget(keep=0.25, per="frame")',
            "every frame keeps a quarter of its tokens, so that none is left out ([budgets](docs/guide/budgets.md))",
        ),
        Choice(
            "video of a hundred frames and more",
            '"pevlm"',
            "1.0",
            f"removes nothing: prefill in blocks is {full / blocks:.1f} times as fast at {frames} frames "
            "([measured](docs/benchmark.md#long-videos-pevlm)); composes with `divprune`",
        ),
        Choice(
            "follow-up questions, a prefix cache",
            '"divprune"',
            "0.25",
            "chooses without the question: the next question finds as much as the first one "
            "([prefix-cache-safe](docs/methods/README.md))",
        ),
        Choice(
            "no attention weights (flash attention)",
            '"divprune"',
            "0.25",
            f"reads none, and cuts before the first layer: prefill {cut['speedup']['p50']:.1f} times as fast with "
            f"{cut['keep']} of {cut['visual']} tokens; {100 * quarter.overall.value:.1f} % right at 0.25 "
            "([performance](docs/performance.md#efficiency-in-prefill), [benchmark](docs/benchmark.md))",
        ),
    ]


def _points(value: float) -> str:
    return f"{value:.0f} point{'' if round(value) == 1 else 's'}"


def choice() -> str:
    lines = ["| you have | method | keep | why |", "|---|---|---|---|"]
    for one in choices():
        call = f"`{one.method}`" + (f" with `{one.more}`" if one.more else "")
        lines.append(f"| {one.case} | {call} | `{one.keep}` | {one.why} |")
    dart, divprune = accuracy("dart", 0.25), accuracy("divprune", 0.25)
    default = (
        "`patch(model)` alone is `dart` at 0.25, because that can be done for any prompt: it needs no attention "
        "weights, no processor and no calibration, its time grows with the tokens and not with their square, and it "
        "knows the question. It is not the best choice for every prompt: on the shipped benchmark it answers "
        f"{100 * dart.overall.value:.1f} % right with {dart.tokens_average:.0f} tokens on average over the layers, "
        f"`divprune` {100 * divprune.overall.value:.1f} % with {divprune.tokens_average:.0f} "
        "([benchmark](docs/benchmark.md)). These are measurements of small models: let `tokenprune tune` choose on "
        "[your questions](docs/tune.md)."
    )
    return "\n".join([*lines, "", default])


def methods() -> str:
    """The names of all methods, by the place where they act."""
    infos = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
    places = []
    for site in Site:
        names = [f"[`{info.name}`](docs/methods/{info.name}.md)" for info in infos if info.site is site]
        places.append(f"{site.words} {', '.join(names)}")
    return f"{len(infos)} [methods](docs/methods/README.md): " + "; ".join(places) + "."
