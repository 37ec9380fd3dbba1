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

from tokenprune.guard.settings import KINDS
from tokenprune_bench.results import COLLAPSE, UNPATCHED, read_records
from tokenprune_bench.significance import pooled_interval

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks/results/bench.jsonl"
TABLE = ROOT / "tokenprune/assets/guard.json"
PAGE = ROOT / "docs/guard.md"
LIMIT = 0.10
# The benchmark's kinds of questions that the guard's are judged by.
JUDGED = {"text": ("digits", "word", "small"), "grounding": ("position", "grounding"), "counting": ("count",)}


def table(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what goes into guard.json, from the benchmark's records."""
    header, *rest = records
    results = [record for record in rest if record["record"] == "result"]
    base = next(record for record in results if record["method"] == UNPATCHED)
    methods: dict[str, Any] = {}
    for name in dict.fromkeys(record["method"] for record in results if record is not base):
        own = sorted((one for one in results if one["method"] == name), key=lambda one: -one["keep"])
        methods[name] = {kind: _of_kind(kind, own, base, header) for kind in KINDS}
    return {
        "source": f"dev/guard.py, from {RECORDS.relative_to(ROOT).as_posix()}",
        "model": header["environment"]["weights"],
        "limit": LIMIT,
        "methods": methods,
        "others": {kind: statistics.median_high(one[kind]["floor"] for one in methods.values()) for kind in KINDS},
    }


def _of_kind(kind: str, own: list[dict], base: dict, header: dict) -> dict[str, Any]:
    floor, unbroken, measured = 1.0, True, []
    for record in own:
        judged = [(_share(one, record, header), _share(one, base, header)[0]) for one in JUDGED[kind]]
        # Not a rounding error away from the limits.
        unbroken = unbroken and all(
            before - share <= LIMIT + 1e-9 and before - low <= COLLAPSE + 1e-9 for (share, low, _), before in judged
        )
        floor = record["keep"] if unbroken else floor
        (share, low, high), before = max(judged, key=lambda one: one[1] - one[0][0])
        numbers = {"share": share, "low": low, "high": high, "unpatched": before}
        measured.append({"keep": record["keep"]} | {name: round(value, 4) for name, value in numbers.items()})
    return {"floor": floor, "measured": measured}


def _share(kind: str, record: dict, header: dict) -> tuple[float, float, float]:
    """Share right of a kind of the benchmark's questions, over all seeds, with its interval."""
    number = str(header["kinds"].index(kind))
    places = [place for place, asked in enumerate(header["kind_of_question"]) if asked == number]
    return pooled_interval(["".join(right[place] for place in places) for right in record["right"]])


def written(made: dict[str, Any]) -> str:
    return json.dumps(made, indent=1) + "\n"


def floors(made: dict[str, Any]) -> str:
    """The table of floors, and of what was lost at each keep."""
    keeps = [f"{one['keep']:g}" for one in next(iter(made["methods"].values()))["text"]["measured"]]
    head = [cell for kind in KINDS for cell in (f"{kind}: floor", f"lost at {', '.join(keeps)}")]
    lines = ["| method | " + " | ".join(head) + " |", "|---" * (1 + len(head)) + "|"]
    for name, kinds in sorted(made["methods"].items()):
        cells = [f"`{name}`"]
        for kind in KINDS:
            lost = [f"{100 * (one['unpatched'] - one['share']):.0f}" for one in kinds[kind]["measured"]]
            cells += [f"**{kinds[kind]['floor']:g}**", ", ".join(lost)]
        lines.append("| " + " | ".join(cells) + " |")
    cells = [cell for kind in KINDS for cell in (f"**{made['others'][kind]:g}**", "")]
    lines.append("| any other | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(text: str, made: dict[str, Any]) -> str:
    """Return docs/guard.md with its tables renewed."""
    sys.path[:0] = [str(ROOT / "benchmarks/studies"), str(ROOT / "benchmarks")]
    import guard_images as images
    import guard_proof as proof

    looks = images.read()
    parts = {
        "floors": floors(made),
        "images": images.table(looks),
        "limits": images.roc(looks),
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
    found = table(read_records(RECORDS))
    made = {TABLE: written(found), PAGE: page(PAGE.read_text(encoding="utf-8"), found)}
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
