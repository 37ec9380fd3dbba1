# SPDX-License-Identifier: Apache-2.0
"""Write the guard's floors (guard.json) and the tables of docs/results/guard.md.

python dev/guard.py            # rewrite tokenprune/integrations/hf/guard/guard.json and docs/results/guard.md
python dev/guard.py --check    # exit with 1 if one of them is stale

A keep is sufficient for a kind of question if accuracy drops by at most LIMIT in every model and for every benchmark
kind of this kind. With at least MANY questions, the lower end of the 95 % interval may drop by at most COLLAPSE. A
method's floor is the lowest sufficient keep such that all higher measured keeps are sufficient too, or 1.0. The records
of demo_smol are at equal cost, so methods inside the decoder keep fewer tokens there and the floor is strict.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenprune.integrations.hf.guard.settings import KINDS
from tokenprune_bench.results import COLLAPSE, UNPATCHED, read_records
from tokenprune_bench.significance import pooled_interval

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
TABLE = ROOT / "tokenprune/integrations/hf/guard/guard.json"
PAGE = ROOT / "docs/results/guard.md"
LIMIT = 0.10
MANY = 50  # questions of a kind whose interval rules a collapse out
# Records of each model, with the benchmark's kinds of questions for each kind of the guard. The first model defines the
# methods and keeps.
JUDGED = {
    "bench.jsonl": {
        "text": ("digits", "word", "small"), "grounding": ("position", "grounding"), "counting": ("count",),
    },
    "all_methods-demo_smol.jsonl": {
        "text": ("digits", "word", "document", "chart"), "grounding": ("position",), "counting": ("count",),
    },
}  # fmt: skip


class Records(NamedTuple):
    """Measurements of a model: results by method and keep, the unpatched result, and the benchmark kinds to judge."""

    header: dict[str, Any]
    results: dict[tuple[str, float], dict[str, Any]]
    base: dict[str, Any]
    judged: dict[str, tuple[str, ...]]

    @classmethod
    def read(cls, name: str) -> Records:
        header, *rest = read_records(RESULTS / name)
        results_by_setting = {
            (record["method"], record["keep"]): record for record in rest if record["record"] == "result"
        }
        return cls(header, results_by_setting, results_by_setting.pop((UNPATCHED, 1.0)), JUDGED[name])

    @property
    def model(self) -> str:
        return self.header["environment"]["model"].removesuffix(" (shipped)")

    def losses(self, kind: str, method: str, keep: float) -> Iterator[dict[str, Any]]:
        """Yield the accuracy of each benchmark kind, if this setting was measured."""
        if (record := self.results.get((method, keep))) is not None:
            for benchmark_kind in self.judged[kind]:
                (share, low, high), (before, *_) = (
                    self._share(benchmark_kind, record),
                    self._share(benchmark_kind, self.base),
                )
                yield {"share": share, "low": low, "high": high, "unpatched": before, "model": self.model}

    def is_enough(self, kind: str, method: str, keep: float) -> bool:
        """Return whether the keep is sufficient for a kind of question."""
        asked = [
            self.header["kind_of_question"].count(self._number(benchmark_kind)) for benchmark_kind in self.judged[kind]
        ]
        return all(  # with a tolerance for rounding errors
            loss["unpatched"] - loss["share"] <= LIMIT + 1e-9
            and (count < MANY or loss["unpatched"] - loss["low"] <= COLLAPSE + 1e-9)
            for count, loss in zip(asked, self.losses(kind, method, keep), strict=False)
        )

    def _number(self, kind: str) -> str:
        return str(self.header["kinds"].index(kind))

    def _share(self, kind: str, record: dict[str, Any]) -> tuple[float, float, float]:
        """Return accuracy and interval of a benchmark kind over all seeds."""
        code = self._number(kind)
        indices = [index for index, asked in enumerate(self.header["kind_of_question"]) if asked == code]
        return pooled_interval(["".join(right[index] for index in indices) for right in record["right"]])


def records() -> list[Records]:
    return [Records.read(name) for name in JUDGED]


def table(models: list[Records]) -> dict[str, Any]:
    """Return the content of guard.json."""
    methods: dict[str, Any] = {}
    for name in dict.fromkeys(method for method, _ in models[0].results):
        keeps = sorted((keep for method, keep in models[0].results if method == name), reverse=True)
        methods[name] = {kind: _of_kind(kind, name, keeps, models) for kind in KINDS}
    return {
        "source": f"dev/guard.py, from {' and '.join(JUDGED)} in benchmarks/results",
        "models": {model.model: model.header["environment"]["weights"] for model in models},
        "limit": LIMIT,
        "methods": methods,
        "others": {
            kind: statistics.median_high(by_kind[kind]["floor"] for by_kind in methods.values()) for kind in KINDS
        },
    }


def _of_kind(kind: str, method: str, keeps: list[float], models: list[Records]) -> dict[str, Any]:
    floor, unbroken, measured = 1.0, True, []
    for keep in keeps:
        unbroken = unbroken and all(model.is_enough(kind, method, keep) for model in models)
        floor = keep if unbroken else floor
        losses = [loss for model in models for loss in model.losses(kind, method, keep)]
        worst = max(losses, key=lambda loss: loss["unpatched"] - loss["share"])
        rounded = {name: round(value, 4) if name != "model" else value for name, value in worst.items()}
        measured.append({"keep": keep} | rounded)
    return {"floor": floor, "measured": measured}


def written(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def floors(content: dict[str, Any]) -> str:
    """Return the table of floors and losses."""
    keeps = [f"{row['keep']:g}" for row in next(iter(content["methods"].values()))["text"]["measured"]]
    head = [cell for kind in KINDS for cell in (f"{kind}: floor", f"lost at {', '.join(keeps)}")]
    lines = ["| method | " + " | ".join(head) + " |", "|---" * (1 + len(head)) + "|"]
    for name, kinds in sorted(content["methods"].items()):
        cells = [f"`{name}`"]
        for kind in KINDS:
            lost = [f"{100 * (row['unpatched'] - row['share']):.0f}" for row in kinds[kind]["measured"]]
            cells += [f"**{kinds[kind]['floor']:g}**", ", ".join(lost)]
        lines.append("| " + " | ".join(cells) + " |")
    cells = [cell for kind in KINDS for cell in (f"**{content['others'][kind]:g}**", "")]
    lines.append("| any other | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(text: str, content: dict[str, Any]) -> str:
    """Return docs/results/guard.md with current tables."""
    sys.path[:0] = [str(ROOT / "benchmarks/experiments/studies"), str(ROOT / "benchmarks" / "experiments")]
    import guard_images as images
    import guard_proof as proof

    parts = {
        "floors": floors(content),
        "images": images.table(images.read()),
        "proof": proof.table(proof.read()[1]),
    }
    for name, part in parts.items():
        begin, end = f"<!-- {name}:begin (dev/guard.py) -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{part}\n\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    content = table(records())
    new_texts = {TABLE: written(content), PAGE: page(PAGE.read_text(encoding="utf-8"), content)}
    stale = [path for path, text in new_texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if args.check:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is stale: run python dev/guard.py\n")
        return int(bool(stale))
    for path in stale:
        path.write_text(new_texts[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
