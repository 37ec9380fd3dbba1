# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the GPU tables: command line, deadline, incremental rows, and output.

Each table file also runs by itself: `python experiments/gpu/b_llava_next.py`. It writes each row as soon as it is
measured (benchmarks/results/DEVICE/FILE.jsonl) and skips rows that the file has for the same code. It stops before the
deadline, if necessary within a row, lists the missing rows and exits with 0. If a row raises, its error is printed and
written, the other rows continue, and the file exits with 1; the next run repeats the row. Running out of memory is a
result, not an error.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()  # before torch is imported, which takes seconds

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

if not torch.cuda.is_available():  # Triton reads the variable at its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")
from common import Rows, code_version, default_device, header, results_path, write  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from sheets import cells  # noqa: E402

MINUTES = 9.0  # maximum per file; commands on a lent machine end after ten
RESERVE = 10.0  # seconds for output before the deadline
ROW = 60.0  # maximum seconds per row


class OutOfTime(BaseException):
    """The time of a row or the deadline is over.

    Derived from BaseException, so that `except Exception` passes it on.
    """


class Deadline:
    """The end of a file's time. `began` is a time of `time.monotonic`."""

    def __init__(self, minutes: float, began: float = BEGAN) -> None:
        self.end, self.longest = began + 60 * minutes - min(RESERVE, 6 * minutes), 0.0

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.end - time.monotonic()

    @property
    def room(self) -> bool:
        """Whether a row as long as the longest so far still fits."""
        return self.left > self.longest

    @contextmanager
    def row(self, seconds: float = ROW) -> Iterator[None]:
        """Raise OutOfTime inside the block after a number of seconds or at the deadline."""
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
    """A table with its file, deadline and rows.

    Args:
        name: Stem of the file.
        title: Title of the table.
        shape: Description of the model.
        columns: Title of each key of a row.
        about: Description of the command.
        argv: Command-line arguments. None: the arguments of the process.
    """

    def __init__(
        self, name: str, title: str, shape: str, columns: dict[str, str], about: str | None, argv: Sequence[str] | None
    ) -> None:
        self.args = args = _options(about).parse_args(argv)
        self.tiny, self.device = args.tiny, torch.device(args.device)
        if self.device.type == "cpu" and not self.tiny:
            raise SystemExit("No GPU was found. Without a GPU, only --tiny is supported, which checks the code.")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.deadline = Deadline(args.minutes, BEGAN if argv is None else time.monotonic())
        path = results_path(self.device, name, self.tiny)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            if path.exists() and not (args.out / path.name).exists():
                shutil.copy(path, args.out)
            path = args.out / path.name
        about = {"title": title, "shape": "tiny models" if self.tiny else shape, "tiny": self.tiny, "columns": columns}
        self.rows = Rows(path, header(self.device, **about), args, code=code_version(), tiny=self.tiny)
        self.part, self.parts = map(int, args.part.split("/"))
        if self.parts > 1:  # create the file at once, so that run.py joins no rows of other code
            write(path, [self.rows.first, *self.rows.records])
        self.console, self.shown, self.missed, self.failed = Console(width=180), [], [], 0
        self.asked = 0

    def take(self, key: Sequence[Any], run: Callable[[], dict[str, Any]], seconds: float | None = None) -> None:
        """Measure the rows of a key, unless the file has them, `--only` excludes them, or the time is over.

        Args:
            key: The key of the rows.
            run: The measurement.
            seconds: Maximum seconds, a minute by default except in tiny runs. A row that exceeds them is marked.
        """
        seconds = seconds or (60 * self.args.minutes if self.tiny else ROW)
        label = " ".join(map(str, key))
        if self.args.only and not any(word in label for word in self.args.only):
            return
        self.asked += 1
        if self.asked % self.parts != self.part:
            return
        if known := self.rows.known(key):
            self.shown += known
            return
        if not self.deadline.room:
            self.missed.append(label)
            return
        began = time.monotonic()
        try:
            results = self.rows.measure(key, lambda: self._tried(label, run, seconds))
        except OutOfTime:
            self.missed.append(label)
            return
        self.shown += results
        names, values = self.rows.first["columns"].values(), cells(self.rows.first, results[-1])
        text = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True) if value)
        text = results[-1].get("failed", text)
        self.console.print(f"{label}: {text} [{time.monotonic() - began:.1f} s]", markup=False, highlight=False)

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
        """Free the GPU memory of a row."""
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # the allocator raises after a failed capture
                torch.cuda.empty_cache()

    def end(self) -> int:
        """Print the table and the missing rows. Return the exit status."""
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
            text = f"Stopped at the deadline. Not measured: {'; '.join(self.missed)}. Run the same command to continue."
            self.console.print(text, markup=False, soft_wrap=True)
        for row in (row for row in self.shown if "failed" in row):
            self.console.print(f"failed: {row['label']}: {row['failed']}", markup=False, soft_wrap=True)
        print(json.dumps({"file": str(self.rows.path), "rows": len(self.shown), "missed": len(self.missed),
                          "failed": self.failed, "seconds": round(time.monotonic() - BEGAN, 1)}))  # fmt: skip
        return int(self.failed > 0)


def _options(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="check the code in seconds, also on a CPU; not for pages")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="maximum minutes of the file")
    parser.add_argument("--out", type=Path, help="folder of the rows; rows in benchmarks/results are copied there")
    parser.add_argument("--only", nargs="+", help="measure only rows whose key contains a word in this list")
    parser.add_argument("--part", default="0/1", help="share of the rows, such as 3/8, for several processes (run.py)")
    parser.add_argument("--again", dest="resume", action="store_false", help="measure rows that the file has, too")
    parser.add_argument("--missing", action="store_true", help="keep the file's rows of other code versions")
    parser.add_argument("--device", default=default_device())
    # Rows of a loaded machine are marked, and pages omit them. A lent machine cannot wait.
    parser.set_defaults(allow_load=True)
    return parser
