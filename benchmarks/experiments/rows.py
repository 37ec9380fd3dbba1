# SPDX-License-Identifier: Apache-2.0
"""Rows of results: written where the machine was quiet, read without those where it was not.

**Loaded** is a row whose load is above the machine's cores: something then waited for a core, and a time tells of that
too. The load is the average over a minute that the system keeps, the larger one of the begin and the end of the row;
the threads of the script itself are in it, so a script that leaves one core free bears one busy neighbour. Accuracy,
tokens and bytes do not depend on the load: pages show them of any row, and times of quiet rows alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ALLOW = "--allow-load"


class Load:
    """The load of the machine from where it is made on. allowed: whether a loaded row may be written, marked.

    Raises SystemExit, here and in `record`, where the machine is loaded and that is not allowed.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed, self.begin = allowed, 0.0
        self.begin = self.record()["load"]

    def record(self) -> dict[str, Any]:
        """Return what a row says of the load so far."""
        row = {"load": round(max(self.begin, _now()), 2), "cpus": os.cpu_count()}
        if not is_loaded(row):
            return row
        if not self.allowed:
            raise SystemExit(
                f"the load is {row['load']} on {row['cpus']} cores: other work would be in the times, and this row is "
                f"not written. Wait for a quiet machine and go on with --resume, or mark rows with {ALLOW}: pages "
                "leave their times out"
            )
        return row | {"loaded": True}


def _now() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


class Rows:
    """A file of results that is written row by row.

    first: its header. same: what a row of the same measurement says of itself: code, threads, and the like. args: of
    the command, with what `add_options` adds.

    With `--resume` it goes on after the rows of the same measurement that the file has, quiet ones unless loaded ones
    are allowed; with `--missing` it takes rows of other code, too.
    """

    def __init__(self, path: Path, first: dict[str, Any], args: argparse.Namespace, **same: Any) -> None:
        self.path, self.first, self.same, self.records = path, first, same, []
        # A tiny run proves the code: its times are read by nobody.
        self.allowed = args.allow_load or getattr(args, "tiny", False)
        if (args.resume or args.missing) and path.exists():
            asked = {key: value for key, value in same.items() if not (args.missing and key == "code")}
            self.records = [
                one
                for one in (read if self.allowed else quiet)(path)[1]
                if "place" in one and "failed" not in one and all(one.get(key) == asked[key] for key in asked)
            ]

    def known(self, place: Any) -> list[dict[str, Any]]:
        """Return the rows of a place that need not be measured."""
        place = json.loads(json.dumps(place))
        return [one for one in self.records if one["place"] == place]

    def measure(self, place: Any, run: Callable[[], dict[str, Any] | list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the rows of a place: those that are known, or else what `run` measures, which is written at once."""
        if known := self.known(place):
            return known
        load, made = Load(self.allowed), run()
        about = {
            **self.same,
            **load.record(),
            "place": json.loads(json.dumps(place)),
            "date": datetime.date.today().isoformat(),
        }
        made = [one | about for one in ([made] if isinstance(made, dict) else made)]
        self.records += made
        write(self.path, [self.first, *self.records])
        return made


def add_options(parser: argparse.ArgumentParser, resume: bool = True) -> None:
    """Add `--allow-load`, and `--resume` and `--missing`."""
    parser.add_argument(ALLOW, action="store_true", help="write rows of a loaded machine too, marked as such")
    if not resume:
        return
    parser.add_argument("--resume", action="store_true", help="measure only what the file does not have of this code")
    parser.add_argument("--missing", action="store_true", help="measure only what the file does not have of any code")


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a file of results. Whoever is cut off meanwhile leaves the file that was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.part")
    half.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    half.replace(path)


def is_loaded(row: dict[str, Any], header: dict[str, Any] | None = None) -> bool:
    """Tell whether a row was taken at a load above the cores; what a row does not say its file's header does."""
    timing = row.get("timing") or {}
    told = (header or {}) | (row.get("environment") or {}) | {key: row[key] for key in ("load", "cpus") if key in row}
    load = timing.get("load", told.get("load"))
    cores = told.get("cpus", told.get("cores"))
    return bool(row.get("loaded")) or (load is not None and cores is not None and load > cores)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file of results and all of its rows."""
    first, *records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return first, records


def quiet(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file of times and those of its rows that are not loaded."""
    first, records = read(path)
    return first, [one for one in records if not is_loaded(one, first)]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the quiet rows of a file that has no header."""
    records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [one for one in records if not is_loaded(one)]
