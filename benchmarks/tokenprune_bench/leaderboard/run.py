# SPDX-License-Identifier: Apache-2.0
"""From the folder of a run to an entry of the leaderboard."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenprune.errors import OptionError
from tokenprune_bench.errors import RunError
from tokenprune_bench.json_lines import write_records
from tokenprune_bench.leaderboard.checks import as_plain, check_entry, file_name
from tokenprune_bench.leaderboard.entry import LeaderboardEntry, entry_of, versions_in
from tokenprune_bench.report.runs import read_runs
from tokenprune_bench.results import RESULTS, UNPATCHED, read_records
from tokenprune_bench.run_folder import CONFIG
from tokenprune_bench.run_folder import SCHEMA as FOLDER_SCHEMA

_SAME = ("model", "model_type", "weights", "device", "dtype", "engine")


def add_run(run: Path, to: Path, *, by: str, note: str = "", model: str = "") -> Path:
    """Check the folder of a run, write its entry into the folder `to`, and return the file.

    by: who ran it. model: what it shall be called; needed where the run names a folder. Raises TokenPruneError where
    the run is not whole or does not fit together, and OptionError where the entry is there already.
    """
    if not to.is_dir():
        raise OptionError(f"there is no folder {to}: name that of a checkout's entries with --to")
    entry = read_run(run, by=by, note=note, model=model)
    path = to / file_name(entry)
    if path.exists():
        raise OptionError(f"{path} is there: this run was added before")
    write_records(path, [as_plain(entry)], indent=1)
    return path


def read_run(run: Path, *, by: str, note: str = "", model: str = "") -> LeaderboardEntry:
    """Return the checked entry of a run's folder; see `add_run`."""
    config = _config(run)
    records = read_records(run)
    header, *results = records
    _check_whole(run, header, results)
    read_runs([run])  # whatever is damaged shows here
    _check_same(run, config, header, results)
    _check_answers(run, header, [one for one in results if one["record"] == "result"])
    name = model or header["environment"]["model"]
    if not model and (os.path.isabs(name) or name.startswith((".", "~")) or Path(name).is_dir()):
        raise OptionError(f"the run calls its model {name}, a folder: say what others call it, with --model-name")
    digest = hashlib.sha256((run / RESULTS).read_bytes()).hexdigest()[:12]
    entry = entry_of(records, by=by, note=note, model=name, run=digest)
    entry = replace(entry, weights=entry.weights or config.get("fingerprint"))
    check_entry(entry)
    return entry


def _config(run: Path) -> dict[str, Any]:
    path = run / CONFIG
    if not path.is_file() or not (run / RESULTS).is_file():
        raise RunError(f"{run} is no folder of a run: make one with `tokenprune bench --run FOLDER`")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict) or config.get("schema") != FOLDER_SCHEMA:
        found = config.get("schema") if isinstance(config, dict) else None
        raise RunError(f"{path} has schema {found}, and this version reads {FOLDER_SCHEMA}: run the bench again")
    return config


def _check_whole(run: Path, header: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError for a run that was not finished, lacks the unpatched model, or asked nothing for its answer."""
    if header.get("evidence_only"):
        raise RunError(f"{run} asked nothing for its answer (--evidence): run the bench without it")
    if not any(one.get("method") == UNPATCHED and one.get("record") == "result" for one in results):
        raise RunError(f"{run} has no row of the unpatched model to compare with: the same command goes on with it")
    there = sum(one.get("record") in ("result", "skipped") for one in results)
    if there != header.get("rows"):
        raise RunError(f"{run} has {there} of its {header.get('rows')} rows: the same command goes on with it")


def _check_same(
    run: Path, config: Mapping[str, Any], header: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Raise RunError where not all was asked of one model, on one device, with one set of versions."""
    about = header.get("environment", {})
    if config.get("versions") != versions_in(about):
        raise RunError(f"{run}: {CONFIG} and {RESULTS} name other versions: they are of two runs")
    for one in results:
        theirs = one.get("environment", about)
        for name in _SAME:
            if theirs.get(name) != about.get(name):
                raise RunError(f"{run}: {one['method']} ran with {name} {theirs.get(name)!r}, not {about.get(name)!r}")
        if versions_in(theirs) != versions_in(about):
            raise RunError(f"{run}: {one['method']} ran with other versions than the rest: run the bench again")


def _check_answers(run: Path, header: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError where a row has not an answer to every question, from every seed."""
    asked, seeds = len(header["kind_of_question"]), header["plan"].get("seeds")
    for one in results:
        where = f"{run}: {one['method']} at {one['keep']:g}"
        if one.get("questions") != asked or {len(some) for some in one["right"]} != {asked}:
            raise RunError(f"{where} has not {asked} answers, as the others: run the bench again")
        if set("".join(one["right"])) - {"0", "1"}:
            raise RunError(f"{where} has answers that are neither right (1) nor wrong (0)")
        if one.get("seeds") not in (None, seeds) or len(one["right"]) != len(one.get("seeds") or (None,)):
            raise RunError(f"{where} was not asked with each of the seeds {seeds}: run the bench again")
