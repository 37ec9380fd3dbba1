# SPDX-License-Identifier: Apache-2.0
"""What the tables for a GPU share: command line, deadline, rows that are written as they come, and the print.

Each file of a table runs alone: `python experiments/gpu/b_llava_next.py`. It writes a row as soon as it is measured
(benchmarks/results/<device>/<file>.jsonl), and takes no row that the file has of the same code. Before the deadline it
stops, within a row if it must, says what it did not measure, and ends with 0. A row that breaks is printed and written
with its reason, the others go on, and the file ends with 1; the next run tries it again. Too little memory is a
finding, not a failure.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()  # torch takes its seconds too

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import contextmanager, suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks" / "experiments"), str(ROOT)]
import calm_threads  # noqa: E402, F401
import torch  # noqa: E402

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, which its first import settles
    os.environ.setdefault("TRITON_INTERPRET", "1")
from common import Rows, code_version, default_device, header, results_path, write  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from sheets import cells  # noqa: E402

MINUTES = 9.0  # that a file takes at most; commands on a lent machine end after ten
RESERVE = 10.0  # seconds to print and to end in
ROW = 60.0  # seconds that a row takes at most, so that none takes the others' time


class OutOfTime(BaseException):
    """A row's seconds are over, or the deadline came. Not an Exception: nothing that a row calls may swallow it."""


class Deadline:
    """The end of a file's time. began: on the clock that never goes back."""

    def __init__(self, minutes: float, began: float = BEGAN) -> None:
        self.end, self.longest = began + 60 * minutes - min(RESERVE, 6 * minutes), 0.0

    @property
    def left(self) -> float:
        """Seconds until nothing may run any more."""
        return self.end - time.monotonic()

    @property
    def room(self) -> bool:
        """Whether a row as long as the longest so far still fits."""
        return self.left > self.longest

    @contextmanager
    def row(self, seconds: float = ROW) -> Iterator[None]:
        """Raise OutOfTime inside the block after so many seconds, or when the deadline comes."""
        began = time.monotonic()

        def ring(*_: Any) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, min(seconds, self.left)))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self.longest = max(self.longest, time.monotonic() - began)


class Sheet:
    """One table: its file, its deadline, and what was measured.

    name: of its file. columns: of each its key in a row, and its name. shape: of the model, in words.
    """

    def __init__(
        self, name: str, title: str, shape: str, columns: dict[str, str], about: str | None, given: Sequence[str] | None
    ) -> None:
        self.args = args = _options(about).parse_args(given)
        self.tiny, self.device = args.tiny, torch.device(args.device)
        if self.device.type == "cpu" and not self.tiny:
            raise SystemExit("there is no GPU: only --tiny, which proves the code, makes sense here")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.deadline = Deadline(args.minutes, BEGAN if given is None else time.monotonic())
        path = results_path(self.device, name, self.tiny)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            if path.exists() and not (args.out / path.name).exists():
                shutil.copy(path, args.out)
            path = args.out / path.name
        about = {"title": title, "shape": "tiny models" if self.tiny else shape, "tiny": self.tiny, "columns": columns}
        self.rows = Rows(path, header(self.device, **about), args, code=code_version(), tiny=self.tiny)
        self.part, self.parts = map(int, args.part.split("/"))
        if self.parts > 1:  # whatever joins the parts finds no row of other code in them
            write(path, [self.rows.first, *self.rows.records])
        self.console, self.shown, self.missed, self.failed = Console(width=180), [], [], 0
        self.asked = 0

    def take(self, place: Sequence[Any], run: Callable[[], dict[str, Any]], seconds: float | None = None) -> None:
        """Measure the row of a place, unless the file has it, `--only` leaves it out, or time is up.

        seconds: that the row may take, a minute unless it is tiny; one that is cut off says so.
        """
        seconds = seconds or (60 * self.args.minutes if self.tiny else ROW)
        label = " ".join(map(str, place))
        if self.args.only and not any(one in label for one in self.args.only):
            return
        self.asked += 1
        if self.asked % self.parts != self.part:
            return
        if known := self.rows.known(place):
            self.shown += known
            return
        if not self.deadline.room:
            self.missed.append(label)
            return
        began = time.monotonic()
        try:
            made = self.rows.measure(place, lambda: self._tried(label, run, seconds))
        except OutOfTime:
            self.missed.append(label)
            return
        self.shown += made
        names, values = self.rows.first["columns"].values(), cells(self.rows.first, made[-1])
        told = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True) if value)
        told = made[-1].get("failed", told)
        self.console.print(f"{label}: {told} [{time.monotonic() - began:.1f} s]", markup=False, highlight=False)

    def _tried(self, label: str, run: Callable[[], Any], seconds: float) -> Any:
        try:
            with self.deadline.row(seconds), torch.inference_mode():
                return run()
        except OutOfTime:
            if self.deadline.left < 1:
                raise
            bound = f"cut off after {seconds:.0f} s"
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            bound = "out of memory"
        except Exception as error:
            traceback.print_exc()
            self.failed += 1
            return {"failed": f"{type(error).__name__}: {error}"[:400], "label": label}
        self.free()
        return {next(iter(self.rows.first["columns"])): label, "bound": bound}

    def free(self) -> None:
        """Give back what a row took of the GPU's memory."""
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # where a capture failed, the allocator refuses
                torch.cuda.empty_cache()

    def end(self) -> int:
        """Print the table and what is missing; return the exit status."""
        first = self.rows.first
        table = Table(title=f"{first['title']}: {first['device']}, {first['shape']}")
        for name in first["columns"].values():
            table.add_column(name, justify="left" if name in ("method", "what", "shape") else "right")
        for row in self.shown:
            if "failed" not in row:
                table.add_row(*cells(first, row))
        self.console.print(table)
        for reason in sorted({row["no_graph"] for row in self.shown if row.get("no_graph")}):
            names = [" ".join(map(str, row["place"])) for row in self.shown if row.get("no_graph") == reason]
            self.console.print(f"no graph, {reason}: {'; '.join(names)}", markup=False, soft_wrap=True)
        if self.missed:
            text = f"stopped at the deadline; not measured: {'; '.join(self.missed)}. The same command goes on"
            self.console.print(text, markup=False, soft_wrap=True)
        for row in (row for row in self.shown if "failed" in row):
            self.console.print(f"failed: {row['label']}: {row['failed']}", markup=False, soft_wrap=True)
        print(json.dumps({"file": str(self.rows.path), "rows": len(self.shown), "missed": len(self.missed),
                          "failed": self.failed, "seconds": round(time.monotonic() - BEGAN, 1)}))  # fmt: skip
        return int(self.failed > 0)


def _options(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="prove the code in seconds, on a CPU too; for no page")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which the file has ended")
    parser.add_argument("--out", type=Path, help="folder of the rows; those of benchmarks/results are taken along")
    parser.add_argument("--only", nargs="+", help="places that contain one of these words")
    parser.add_argument("--part", default="0/1", help="of the places, as 3/8: run.py has several processes share them")
    parser.add_argument("--again", dest="resume", action="store_false", help="measure what the file has, too")
    parser.add_argument("--missing", action="store_true", help="take rows that the file has of other code")
    parser.add_argument("--device", default=default_device())
    # A loaded row is marked, and pages leave it out: a lent machine does not wait for quiet.
    parser.set_defaults(allow_load=True)
    return parser
