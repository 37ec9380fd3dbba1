# SPDX-License-Identifier: Apache-2.0
"""Read and write rows of results, and mark or skip rows of a loaded machine.

A row is **loaded** if its load is above the number of cores: processes then waited for a core, which affects times. The
load is the system's one-minute average, the maximum of the beginning and the end of the row. It includes the script's
threads, so a script that leaves one core free tolerates one busy process. Accuracy, tokens and bytes do not depend on
the load. Pages show them for all rows, and times for rows that are not loaded.
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
    """Track the machine's load from construction on.

    Args:
        allowed: Mark loaded rows instead of raising.

    Raises:
        SystemExit: In the constructor and in `record`, if the machine is loaded and `allowed` is false.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed, self.begin = allowed, 0.0
        self.begin = self.record()["load"]

    def record(self) -> dict[str, Any]:
        """Return the load fields of a row."""
        row = {"load": round(max(self.begin, _now()), 2), "cpus": os.cpu_count()}
        if not is_loaded(row):
            return row
        if not self.allowed:
            raise SystemExit(
                f"The load is {row['load']} on {row['cpus']} cores, so times would be wrong and no row is written. "
                f"Continue on an idle machine with --resume, or mark rows with {ALLOW}: pages omit "
                "their times."
            )
        return row | {"loaded": True}


def _now() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


class Rows:
    """A results file that is written row by row.

    With `--resume`, rows of the same measurement in the file are kept (loaded rows only if they are allowed). With
    `--missing`, rows of other code versions are kept, too.

    Args:
        path: The file.
        first: Its header.
        args: Parsed options, including those of `add_options`.
        same: Fields that identify the measurement, such as code and threads.
    """

    def __init__(self, path: Path, first: dict[str, Any], args: argparse.Namespace, **same: Any) -> None:
        self.path, self.first, self.same, self.records = path, first, same, []
        # Tiny runs check the code, and nobody uses their times.
        self.allowed = args.allow_load or getattr(args, "tiny", False)
        if (args.resume or args.missing) and path.exists():
            required = {key: value for key, value in same.items() if not (args.missing and key == "code")}
            self.records = [
                row
                for row in (read if self.allowed else quiet)(path)[1]
                if "place" in row and "failed" not in row and all(row.get(key) == required[key] for key in required)
            ]

    def known(self, key: Any) -> list[dict[str, Any]]:
        """Return the existing rows of a measurement key."""
        key = json.loads(json.dumps(key))
        return [row for row in self.records if row["place"] == key]

    def measure(self, key: Any, run: Callable[[], dict[str, Any] | list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the existing rows of a key, or run the measurement and write its rows."""
        if known := self.known(key):
            return known
        load, results = Load(self.allowed), run()
        about = {
            **self.same,
            **load.record(),
            "place": json.loads(json.dumps(key)),
            "date": datetime.date.today().isoformat(),
        }
        results = [result | about for result in ([results] if isinstance(results, dict) else results)]
        self.records += results
        write(self.path, [self.first, *self.records])
        return results


def add_options(parser: argparse.ArgumentParser, resume: bool = True) -> None:
    """Add `--allow-load`, and `--resume` and `--missing`."""
    parser.add_argument(ALLOW, action="store_true", help="write rows of a loaded machine too, and mark them")
    if not resume:
        return
    parser.add_argument("--resume", action="store_true", help="skip rows that the file has for this code version")
    parser.add_argument("--missing", action="store_true", help="skip rows that the file has for any code version")


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a results file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.part")
    half.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    half.replace(path)


def is_loaded(row: dict[str, Any], header: dict[str, Any] | None = None) -> bool:
    """Return whether the load of a row was above the cores. Missing fields come from the file's header."""
    timing = row.get("timing") or {}
    fields = (header or {}) | (row.get("environment") or {}) | {key: row[key] for key in ("load", "cpus") if key in row}
    load = timing.get("load", fields.get("load"))
    cores = fields.get("cpus", fields.get("cores"))
    return bool(row.get("loaded")) or (load is not None and cores is not None and load > cores)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a results file and all of its rows."""
    first, *records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return first, records


def quiet(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a results file and the rows that are not loaded."""
    first, records = read(path)
    return first, [row for row in records if not is_loaded(row, first)]


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows that are not loaded of a file without a header."""
    records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [row for row in records if not is_loaded(row)]
