# SPDX-License-Identifier: Apache-2.0
"""The generated parts of README.md, from the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import accuracy_pages  # noqa: E402
import rows  # noqa: E402
import which_method  # noqa: E402

RESULTS = ROOT / "benchmarks/results"


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


def problem() -> str:
    visual, text = 576, 64
    return (
        f"With one image of {visual} visual tokens, as LLaVA-1.5 has it, and {text} of text, "
        f"{100 * visual / (visual + text):.0f} % of what a vision-language model reads is the image.\n"
        "\ntokenprune drops or merges visual tokens in any Hugging Face vision-language model, without training, in "
        f"one line, and tells what that saves and costs. {speed_and_accuracy()} Raw data: "
        "[time](benchmarks/results/first_run.json), [answers](benchmarks/results/bench.jsonl)."
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


def choice() -> str:
    dart, divprune = accuracy("dart", 0.25), accuracy("divprune", 0.25)
    default = (
        "One table feeds this, [its evidence](docs/guide/which-method.md) and `tokenprune recommend MODEL --task ...`. "
        "`patch(model)` alone is `dart` at 0.25, because that can be done for any prompt: it needs no attention "
        "weights, no processor and no calibration, its time grows with the tokens and not with their square, and it "
        "knows the question. It is not the best choice for every prompt: on the shipped benchmark it answers "
        f"{100 * dart.overall.value:.1f} % right with {dart.tokens_average:.0f} tokens on average over the layers, "
        f"`divprune` {100 * divprune.overall.value:.1f} % with {divprune.tokens_average:.0f} "
        "([benchmark](docs/benchmark.md)). These are measurements of small models: let `tokenprune tune` choose on "
        "[your questions](docs/tune.md)."
    )
    return f"{which_method.table(up='')}\n\n{default}"
