# SPDX-License-Identifier: Apache-2.0
"""Convert the folder of a run to an entry of the leaderboard."""

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
from tokenprune_bench.leaderboard.checks import check_entry, get_file_name, to_json
from tokenprune_bench.leaderboard.entry import LeaderboardEntry, build_entry, get_versions
from tokenprune_bench.report.runs import read_runs
from tokenprune_bench.results import RESULTS, UNPATCHED, read_records
from tokenprune_bench.run_folder import CONFIG
from tokenprune_bench.run_folder import SCHEMA as FOLDER_SCHEMA

_SAME = ("model", "model_type", "weights", "device", "dtype", "engine")


def add_run(run: Path, to: Path, *, by: str, note: str = "", model: str = "") -> Path:
    """Check a run and write its entry.

    Args:
        run: Folder of the run.
        to: Folder of entries.
        by: Author of the run.
        note: Additional note.
        model: Name of the model. Required if the run used a local folder.

    Returns:
        The file of the entry.

    Raises:
        TokenPruneError: If the run is incomplete or inconsistent.
        OptionError: If the entry exists.
    """
    if not to.is_dir():
        raise OptionError(f"Folder {to} does not exist. Pass the folder of entries with --to.")
    entry = read_run(run, by=by, note=note, model=model)
    path = to / get_file_name(entry)
    if path.exists():
        raise OptionError(f"{path} exists already: this run was added before.")
    write_records(path, [to_json(entry)], indent=1)
    return path


def read_run(run: Path, *, by: str, note: str = "", model: str = "") -> LeaderboardEntry:
    """Return the checked entry of a run. See `add_run`."""
    config = _read_config(run)
    records = read_records(run)
    header, *results = records
    _check_whole(run, header, results)
    read_runs([run])  # raises for damaged records
    _check_same(run, config, header, results)
    _check_answers(run, header, [record for record in results if record["record"] == "result"])
    name = model or header["environment"]["model"]
    if not model and (os.path.isabs(name) or name.startswith((".", "~")) or Path(name).is_dir()):
        raise OptionError(f"The model of the run is the folder {name}. Pass its public name with --model-name.")
    digest = hashlib.sha256((run / RESULTS).read_bytes()).hexdigest()[:12]
    entry = build_entry(records, by=by, note=note, model=name, run=digest)
    entry = replace(entry, weights=entry.weights or config.get("fingerprint"))
    check_entry(entry)
    return entry


def _read_config(run: Path) -> dict[str, Any]:
    path = run / CONFIG
    if not path.is_file() or not (run / RESULTS).is_file():
        raise RunError(f"{run} is not the folder of a run. Run `tokenprune bench --run FOLDER`.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict) or config.get("schema") != FOLDER_SCHEMA:
        schema = config.get("schema") if isinstance(config, dict) else None
        raise RunError(f"{path} has schema {schema}, but this version reads {FOLDER_SCHEMA}. Run the benchmark again.")
    return config


def _check_whole(run: Path, header: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError if the run is incomplete, or has no answers or no unpatched model."""
    if header.get("evidence_only"):
        raise RunError(f"{run} has no answers (--evidence). Run the benchmark without --evidence.")
    if header["plan"].get("max_visual_tokens") is not None:
        raise RunError(f"{run} limits the tokens of an image. Run the benchmark without --max-visual-tokens.")
    if not any(record.get("method") == UNPATCHED and record.get("record") == "result" for record in results):
        raise RunError(f"{run} lacks the row of the unpatched model. Run the same command to continue.")
    num_rows = sum(record.get("record") in ("result", "skipped") for record in results)
    if num_rows != header.get("rows"):
        raise RunError(f"{run} has {num_rows} of {header.get('rows')} rows. Run the same command to continue.")


def _check_same(
    run: Path, config: Mapping[str, Any], header: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Raise RunError if results differ in model, device or versions."""
    about = header.get("environment", {})
    if config.get("versions") != get_versions(about):
        raise RunError(f"{run}: {CONFIG} and {RESULTS} have different versions, so they belong to different runs.")
    for record in results:
        theirs = record.get("environment", about)
        for name in _SAME:
            if theirs.get(name) != about.get(name):
                raise RunError(
                    f"{run}: {record['method']} ran with {name} {theirs.get(name)!r}, not {about.get(name)!r}"
                )
        if get_versions(theirs) != get_versions(about):
            raise RunError(f"{run}: {record['method']} ran with different versions. Run the benchmark again.")


def _check_answers(run: Path, header: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError unless each result has an answer to each question from each seed."""
    asked, seeds = len(header["kind_of_question"]), header["plan"].get("seeds")
    for record in results:
        where = f"{run}: {record['method']} at {record['keep']:g}"
        if record.get("questions") != asked or {len(some) for some in record["right"]} != {asked}:
            raise RunError(f"{where} does not have {asked} answers. Run the benchmark again.")
        if set("".join(record["right"])) - {"0", "1"}:
            raise RunError(f"{where} has scores that are neither 1 (right) nor 0 (wrong).")
        if record.get("seeds") not in (None, seeds) or len(record["right"]) != len(record.get("seeds") or (None,)):
            raise RunError(f"{where} lacks some of the seeds {seeds}. Run the benchmark again.")
