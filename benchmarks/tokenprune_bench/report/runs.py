# SPDX-License-Identifier: Apache-2.0
"""Runs of `tokenprune bench`, read for a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenprune.errors import TokenPruneError
from tokenprune_bench.report.samples import NOT_KEPT, Samples, read_samples
from tokenprune_bench.report.verdict import find_verdicts
from tokenprune_bench.report.warnings import find_warnings
from tokenprune_bench.results import Results, read_records, summarise
from tokenprune_bench.tables import build_tables


@dataclass(frozen=True)
class Run:
    """name: of its folder or file. label: one letter that tells it from the others of a report; "" for a run alone."""

    name: str
    results: Results
    samples: Samples = NOT_KEPT
    label: str = ""

    @property
    def model(self) -> str:
        return self.results.header["environment"]["model"]

    @property
    def title(self) -> str:
        """The heading of this run's section in a report."""
        return f"{self.label}: {self.name}" if self.label else self.model


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read run folders, or files of --json; several get the labels A, B, C ...

    Raises TokenPruneError for what cannot be read or was written by something else, and where two hold the same run.
    """
    runs, seen = [], []
    for number, path in enumerate(map(Path, paths)):
        records = read_records(path)
        for other, known in zip(paths, seen, strict=False):
            if records == known:
                raise TokenPruneError(f"{path} and {other} hold the same run: name each run once")
        seen.append(records)
        try:
            json.dumps(records, allow_nan=False)  # nothing of ours is infinite, or no number
            results = summarise(records)
            build_tables(results), find_warnings(results), find_verdicts(results)  # whatever is missing shows here
        except TokenPruneError as error:
            raise TokenPruneError(f"{path}: {error}") from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise TokenPruneError(
                f"{path} is damaged: its records are not as `tokenprune bench` writes them ({type(error).__name__}: "
                f"{error}); run the bench again"
            ) from error
        label = _label(number) if len(paths) > 1 else ""
        runs.append(Run(path.resolve().name, results, read_samples(path) if path.is_dir() else NOT_KEPT, label))
    return runs


def finished_run(records: Sequence[dict[str, Any]], folder: Path | None) -> Run:
    """Return a run that just ended, from its records and the folder it was kept in."""
    if folder is None:
        return Run("", summarise(records))
    return Run(folder.resolve().name, summarise(records), read_samples(folder))


def _label(number: int) -> str:
    """Return A to Z, then A2, B2 ..."""
    letter, again = chr(ord("A") + number % 26), number // 26
    return f"{letter}{again + 1}" if again else letter
