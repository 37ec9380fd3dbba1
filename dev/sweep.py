# SPDX-License-Identifier: Apache-2.0
"""Run every method on a tiny model of every family: one image, two images per row, and videos.

    python dev/sweep.py                                    # all, 3 minutes on one core; rewrites dev/sweep.json
    python dev/sweep.py --families glm4v --methods mmtok   # prints the outcomes and writes no file

An input that the unpatched model does not run is left out. The record counts four outcomes: "ok", "refused by patch()",
"refused in the call" (both are errors of `tokenprune.errors`) and "raw error" (any other exception, which is a fault).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "dev/sweep.json"
sys.path[:0] = [str(ROOT / "tests/unit/support")]

import tokenprune  # noqa: E402
from families import FAMILIES as TINY  # noqa: E402
from selection import REASONS  # noqa: E402
from tokenprune.integrations.shared.towers.tower_scores import find_pixel_observables  # noqa: E402
from tokenprune.selection.sites.units import UnitDropper  # noqa: E402
from zoo import Family  # noqa: E402

# Some families need another version of transformers.
FAMILIES = {name: family for name, family in TINY.items() if name not in REASONS}
OK, AT_PATCH, IN_CALL, RAW = "ok", "refused by patch()", "refused in the call", "raw error"
KEEP = 0.3
INPUTS: dict[str, dict[str, Any]] = {
    "image": {"images": (1,)},
    "two images per row": {"images": (2, 1)},
    "videos": {"images": (0, 0), "video": (5, 5)},
}
# Methods that read colours ask the processor how it normalises them; methods that resize images need a real one.
COLOURS = SimpleNamespace(image_processor=SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.25] * 3))


@dataclass(frozen=True)
class Outcome:
    """Outcome of one method on one input of one family. `input` is empty if `patch()` refused the method."""

    family: str
    method: str
    input: str
    outcome: str
    reason: str = ""


def sweep(families: Sequence[str], methods: Sequence[str]) -> Iterator[Outcome]:
    """Yield the outcomes of each method on the inputs of each family."""
    for name in families:
        model = FAMILIES[name].build()
        inputs = runnable_inputs(FAMILIES[name], model)
        for method in methods:
            yield from sweep_method(name, model, inputs, method)


def runnable_inputs(family: Family, model: Any) -> dict[str, dict[str, Any]]:
    """Return the inputs that the unpatched model runs."""
    runnable = {}
    for name, options in INPUTS.items():
        if "video" in options and family.video is None:
            continue
        inputs = family.make_inputs(**options)
        try:
            run(model, inputs, tokenprune.Site.PRE_LLM)
        except Exception:  # transformers raises many classes
            continue
        runnable[name] = inputs
    return runnable


def sweep_method(family: str, model: Any, inputs: dict[str, dict[str, Any]], name: str) -> Iterator[Outcome]:
    """Yield the outcome of `patch()` if it refuses the method, else one outcome per input."""
    method = tokenprune.method(name)
    processor = COLOURS if find_pixel_observables(method) or isinstance(method, UnitDropper) else None
    try:
        tokenprune.patch(model, method, keep=KEEP, processor=processor, guard="off")
    except Exception as error:
        yield Outcome(family, name, "", *describe(error, AT_PATCH))
        return
    try:
        for kind, arguments in inputs.items():
            try:
                run(model, arguments, method.site)
            except Exception as error:
                yield Outcome(family, name, kind, *describe(error, IN_CALL))
            else:
                yield Outcome(family, name, kind, OK)
    finally:
        tokenprune.unpatch(model)


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any], site: tokenprune.Site) -> None:
    """Run one forward, or the first steps of `generate` for methods that act while decoding."""
    if site is tokenprune.Site.DECODE:
        model.generate(**inputs, max_new_tokens=3)
    else:
        model(**inputs)


def describe(error: Exception, refused: str) -> tuple[str, str]:
    """Return the outcome that an exception means, and its reason."""
    if isinstance(error, tokenprune.TokenPruneError):
        return refused, f"{type(error).__name__}: {error}"
    return RAW, f"{type(error).__name__}: {str(error)[:300]}"


def get_record(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the content of the record: counts, refusals by method and class of error, and each bad outcome in full."""
    counts = Counter(outcome.outcome for outcome in outcomes)
    refused: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        if outcome.outcome == AT_PATCH:
            refused.setdefault(outcome.method, Counter())[outcome.reason.split(":")[0]] += 1
    return {
        "transformers": transformers.__version__,
        "not in this transformers": [name for name in TINY if name in REASONS],
        "families": len({outcome.family for outcome in outcomes}),
        "methods": len({outcome.method for outcome in outcomes}),
        "counts": {name: counts[name] for name in (OK, AT_PATCH, IN_CALL, RAW)},
        "runs by input": dict(Counter(outcome.input for outcome in outcomes if outcome.outcome == OK)),
        "families refused by patch()": {
            name: dict(sorted(classes.items())) for name, classes in sorted(refused.items())
        },
        IN_CALL: [asdict(outcome) for outcome in outcomes if outcome.outcome == IN_CALL],
        RAW: [asdict(outcome) for outcome in outcomes if outcome.outcome == RAW],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help="names separated by commas")
    parser.add_argument("--methods", help="names separated by commas")
    options = parser.parse_args()
    logging.getLogger("tokenprune").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    families = options.families.split(",") if options.families else list(FAMILIES)
    methods = options.methods.split(",") if options.methods else tokenprune.available_methods()
    outcomes = []
    for name in families:
        outcomes += sweep([name], methods)
        counts = Counter(outcome.outcome for outcome in outcomes if outcome.family == name)
        print(name, dict(counts), flush=True)
    record = get_record(outcomes)
    if options.families or options.methods:
        for outcome in outcomes:
            print(f"{outcome.family:20} {outcome.method:14} {outcome.input:20} {outcome.outcome}  {outcome.reason}")
    else:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(record["counts"])
    sys.exit(bool(record[RAW]))


if __name__ == "__main__":
    main()
