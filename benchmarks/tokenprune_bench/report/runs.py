# SPDX-License-Identifier: Apache-2.0
"""Read runs of `tokenprune bench` for a report."""

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
    """A run of a report.

    Attributes:
        name: Name of the folder or file.
        results: Results of the run.
        samples: Drawn questions.
        label: Letter that identifies the run, "" in a report of one run.
    """

    name: str
    results: Results
    samples: Samples = NOT_KEPT
    label: str = ""

    @property
    def model(self) -> str:
        return self.results.header["environment"]["model"]

    @property
    def title(self) -> str:
        """Heading of the section of this run."""
        return f"{self.label}: {self.name}" if self.label else self.model


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read run folders or files of --json. Several runs get the labels A, B, C ...

    Raises:
        TokenPruneError: If a run cannot be read, is damaged, or is named twice.
    """
    runs, all_records = [], []
    for index, path in enumerate(map(Path, paths)):
        records = read_records(path)
        for other, known in zip(paths, all_records, strict=False):
            if records == known:
                raise TokenPruneError(f"{path} and {other} are the same run. Name each run once.")
        all_records.append(records)
        try:
            json.dumps(records, allow_nan=False)  # records never contain NaN or infinity
            results = summarise(records)
            build_tables(results), find_warnings(results), find_verdicts(results)  # missing entries raise here
        except TokenPruneError as error:
            raise TokenPruneError(f"{path}: {error}") from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise TokenPruneError(
                f"{path} is damaged: `tokenprune bench` writes other records ({type(error).__name__}: {error}). "
                "Run the benchmark again."
            ) from error
        label = _label(index) if len(paths) > 1 else ""
        runs.append(Run(path.resolve().name, results, read_samples(path) if path.is_dir() else NOT_KEPT, label))
    return runs


def finished_run(records: Sequence[dict[str, Any]], folder: Path | None) -> Run:
    """Return a run that just finished, from its records and its folder."""
    if folder is None:
        return Run("", summarise(records))
    return Run(folder.resolve().name, summarise(records), read_samples(folder))


def _label(index: int) -> str:
    """Return A to Z, then A2, B2 ..."""
    letter, again = chr(ord("A") + index % 26), index // 26
    return f"{letter}{again + 1}" if again else letter
