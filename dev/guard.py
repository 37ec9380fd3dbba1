# SPDX-License-Identifier: Apache-2.0
"""Make the guard's table of floors out of the shipped benchmark's records, and the tables in docs/guard.md.

python dev/guard.py            # rewrite tokenprune/assets/guard.json and docs/guard.md
python dev/guard.py --check    # exit with 1 where one of them is not what this would write

A keep is enough for a kind of question if, for each of the benchmark's kinds that belong to it, the share of right
answers is at most LIMIT below that of the unpatched model, and the lower end of its 95 % interval (Wilson) at most
COLLAPSE below: fifty questions a kind cannot tell small differences, but they rule a collapse out. A method's floor is
the lowest keep that is enough, as are all above it that were measured; 1.0 if there is none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tokenprune.bench.results import COLLAPSE, UNPATCHED, Results, read_records, summarise
from tokenprune.guard.settings import KINDS

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks/results/bench.jsonl"
TABLE = ROOT / "tokenprune/assets/guard.json"
LIMIT = 0.10
# The benchmark's kinds of questions that the guard's are judged by.
JUDGED = {"text": ("digits", "word", "small"), "grounding": ("position", "grounding"), "counting": ("count",)}


def table(results: Results) -> dict[str, Any]:
    """Return what goes into guard.json."""
    methods: dict[str, Any] = {}
    names = dict.fromkeys(row.method for row in results.rows if row.method != UNPATCHED)
    for name in names:
        rows = sorted((row for row in results.rows if row.method == name), key=lambda row: -row.keep)
        methods[name] = {kind: _of_kind(kind, rows, results.baseline) for kind in KINDS}
    others = {kind: statistics.median_high(one[kind]["floor"] for one in methods.values()) for kind in KINDS}
    return {
        "source": f"dev/guard.py, from {RECORDS.relative_to(ROOT).as_posix()}",
        "model": results.header["environment"]["weights"],
        "limit": LIMIT,
        "methods": methods,
        "others": others,
    }


def _of_kind(kind: str, rows: list[Any], base: Any) -> dict[str, Any]:
    floor, unbroken, measured = 1.0, True, []
    for row in rows:
        enough = all(_is_enough(row.kinds[one], base.kinds[one].value) for one in JUDGED[kind])
        unbroken = unbroken and enough
        floor = row.keep if unbroken else floor
        worst = max(JUDGED[kind], key=lambda one: base.kinds[one].value - row.kinds[one].value)
        share = row.kinds[worst]
        numbers = {"share": share.value, "low": share.low, "high": share.high, "unpatched": base.kinds[worst].value}
        measured.append({"keep": row.keep} | {name: round(value, 4) for name, value in numbers.items()})
    return {"floor": floor, "measured": measured}


def _is_enough(share: Any, before: float) -> bool:
    # Not a rounding error away from the limits.
    return before - share.value <= LIMIT + 1e-9 and before - share.low <= COLLAPSE + 1e-9


def written(results: Results) -> str:
    return json.dumps(table(results), indent=1) + "\n"


def floors_table(made: dict[str, Any]) -> str:
    """The floors, and what was lost at each keep."""
    keeps = [one["keep"] for one in next(iter(made["methods"].values()))["text"]["measured"]]
    lines = [
        "| method | " + " | ".join(f"{kind}: floor | lost at {', '.join(map(str, keeps))}" for kind in KINDS) + " |",
        "|---" * (1 + 2 * len(KINDS)) + "|",
    ]
    for name, kinds in sorted(made["methods"].items()):
        cells = [f"`{name}`"]
        for kind in KINDS:
            lost = ", ".join(f"{100 * (one['unpatched'] - one['share']):.0f}" for one in kinds[kind]["measured"])
            cells += [f"**{kinds[kind]['floor']:g}**", lost]
        lines.append("| " + " | ".join(cells) + " |")
    cells = [cell for kind in KINDS for cell in (f"**{made['others'][kind]:g}**", "")]
    lines.append("| any other method | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results = summarise(read_records(RECORDS))
    made = {TABLE: written(results)}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if args.check:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not what dev/guard.py writes\n")
        return int(bool(stale))
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
