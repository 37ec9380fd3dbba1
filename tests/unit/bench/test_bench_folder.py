# SPDX-License-Identifier: Apache-2.0
"""Test the folder of a run: other runs, other processes, crashes and full disks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenprune_bench.errors import RunError
from tokenprune_bench.group import Group
from tokenprune_bench.json_lines import JsonLinesWriter, read_lines, write_records
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.run_folder import RunFolder
from tokenprune_bench.suite import Bench, BenchPlan

KEY = {"method": "uniform", "keep": 0.5, "seed": None}
BUSY = r"Another run is writing to .*\. Wait for it, or use another folder"


def list_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


# -- the lock --------------------------------------------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunFolder(folder, {"a": 1}) as run:
        run.add_batch(KEY, [0], ["x"], {})
        before = {name: (folder / name).read_bytes() for name in list_files(folder)}
        for config in ({"a": 1}, {"a": 2}):
            with pytest.raises(RunError, match=BUSY if config == {"a": 1} else "has a run with a 1"):
                RunFolder(folder, config).__enter__()
        assert {name: (folder / name).read_bytes() for name in list_files(folder)} == before
        run.add_batch(KEY, [1], ["y"], {})
    with RunFolder(folder, {"a": 1}) as run:  # the first run released the lock
        assert run.batches(KEY) == {0: (["x"], {}), 1: (["y"], {})}
    with pytest.raises(ZeroDivisionError), RunFolder(folder, {"a": 1}):
        raise ZeroDivisionError
    with RunFolder(folder, {"a": 1}):
        pass


def test_a_concurrent_run_is_detected_before_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RunFolder._lock

    def late(self: RunFolder) -> Any:
        (tmp_path / "config.json").write_text('{"a": 2}')  # another run begins and ends before this run has the lock
        return lock(self)

    monkeypatch.setattr(RunFolder, "_lock", late)
    with pytest.raises(RunError, match="has a run with a 2"):
        RunFolder(tmp_path, {"a": 1}).__enter__()
    assert list_files(tmp_path) == [".lock", "config.json"]


def test_the_lock_of_a_killed_process_holds_nobody_up(tmp_path: Path) -> None:
    with RunFolder(tmp_path, {}):
        pass
    code = "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); "
    command = [sys.executable, "-c", code + "print(1, flush=True); time.sleep(60)", str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"1\n"
            with pytest.raises(RunError, match=BUSY):
                RunFolder(tmp_path, {}).__enter__()
        finally:
            process.kill()
    with RunFolder(tmp_path, {}):
        pass


def test_a_folder_that_cannot_be_locked_raises_and_a_foreign_folder_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "run/.lock").mkdir(parents=True)
    with pytest.raises(RunError, match=r"Cannot lock .*run: "):
        RunFolder(tmp_path / "run", {}).__enter__()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder(tmp_path / "mine", {}).__enter__()
    assert list_files(tmp_path / "mine") == ["notes.txt"]


# -- several processes -----------------------------------------------------------------------------------------------


class Threads(Group):
    """A group of threads, for checks that do not need gloo."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: dict[int, Any]) -> None:
        super().__init__(rank, size)
        object.__setattr__(self, "meeting", barrier)
        object.__setattr__(self, "given", shared)

    def gather(self, value: Any) -> list[Any]:
        self.given[self.rank] = value
        self.meeting.wait(60)
        values = [self.given[rank] for rank in range(self.size)]
        self.meeting.wait(60)
        return values


def run_in_threads(work: Callable[[Group], Any], size: int = 2) -> list[Any]:
    """Return the result of each process of the group, or the error that it raised."""
    barrier, shared, results = threading.Barrier(size), {}, [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, size, barrier, shared))
        except RunError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def test_only_the_leader_locks_and_its_failure_reaches_all(tmp_path: Path) -> None:
    def work(group: Group) -> list[str]:
        with RunFolder(tmp_path, {}, group) as run:
            run.add_batch(KEY, [group.rank], ["x"], {})
            group.gather(None)
            return list_files(tmp_path)

    names = [".lock", "config.json", "predictions.1.jsonl", "predictions.jsonl", "results.jsonl"]
    assert run_in_threads(work) == [names, names]
    with RunFolder(tmp_path, {}):
        for error in run_in_threads(work):
            assert isinstance(error, RunError) and re.match(BUSY, str(error))


def test_an_error_of_one_process_ends_all_processes(tmp_path: Path) -> None:
    def work(group: Group, config: dict[str, Any]) -> None:
        with RunFolder(tmp_path / "run", config, group) as run:
            run.add_batch(KEY, [group.rank], ["x"], {})
            run.finish([(KEY, {0: (["x"], {}), 1: (["x"], {})}, [1.0, 1.0])])

    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    for error in run_in_threads(lambda group: work(group, {"a": 1} if group.rank else {})):
        assert isinstance(error, RunError) and "has a run with a null, but this run has 1" in str(error)
    (tmp_path / "run/config.json.new").mkdir()  # the first process cannot write
    for error in run_in_threads(lambda group: work(group, {})):
        assert isinstance(error, RunError) and "Cannot write" in str(error)
    (tmp_path / "run/config.json.new").rmdir()
    (tmp_path / "run/predictions.1.jsonl.new").touch()
    (tmp_path / "run/predictions.jsonl.new").mkdir()  # the first process cannot write here either
    for error in run_in_threads(lambda group: work(group, {})):
        assert isinstance(error, RunError) and "Cannot write" in str(error)
    assert {"predictions.jsonl", "predictions.1.jsonl"} < set(list_files(tmp_path / "run"))  # all answers are kept
    (tmp_path / "run/predictions.jsonl.new").rmdir()
    with RunFolder(tmp_path / "run", {}) as run:
        assert set(run.batches(KEY)) == {0, 1}
    assert run_in_threads(lambda group: work(group, {})) == [None, None]
    assert [record["question"] for record, _ in read_lines(tmp_path / "run/predictions.jsonl")] == [0, 1]


def test_processes_share_the_work() -> None:
    # Load one model after the other: while transformers loads, it switches torch's default device for the process.
    subjects = [load_model(device="cpu") for _ in range(2)]

    def work(group: Group) -> tuple[int, str]:
        subject, calls = subjects[group.rank], []
        generate = subject.generate
        object.__setattr__(subject, "generate", lambda inputs: calls.append(1) or generate(inputs))
        records = Bench(subject, BenchPlan(images=1, batch_size=2), group=group).records()
        _, unpatched = next(records), next(records)
        (right,) = unpatched["right"]
        return len(calls), right

    first, second = run_in_threads(work)
    assert first == second and first[0] == 2 and len(first[1]) == 8


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    write_records(path, [{"a": "ä"}])
    (tmp_path / "a.jsonl.new").write_text("of a crash")
    write_records(path, [{"b": 1}, {"c": 2}])
    assert path.read_text() == '{"b": 1}\n{"c": 2}\n' and list_files(tmp_path) == ["a.jsonl"]

    def full(self: Path, target: Path) -> None:
        assert path.read_text() == '{"b": 1}\n{"c": 2}\n'
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunError, match=r"Cannot write .*a\.jsonl: No space left on device\. The old file is kept"):
        write_records(path, [{"d": 3}])
    assert path.read_text() == '{"b": 1}\n{"c": 2}\n' and list_files(tmp_path) == ["a.jsonl"]


def test_leftovers_of_a_crash_do_not_block_a_run(tmp_path: Path) -> None:
    for name in ("config.json.new", ".lock"):  # a crash before the first config
        (tmp_path / name).touch()
    with RunFolder(tmp_path, {"a": 1}) as run:
        run.add_batch(KEY, [0], ["x"], {"n": 1})
    (tmp_path / "predictions.jsonl.new").write_text('{"method": "uni')  # a crash while the run finished
    with RunFolder(tmp_path, {"a": 1}) as run:
        assert run.batches(KEY) == {0: (["x"], {"n": 1})}
        run.finish([(KEY, {0: (["x"], {"n": 1})}, [0.25])])
    assert list_files(tmp_path) == [".lock", "config.json", "predictions.jsonl", "results.jsonl"]
    line = {"method": "uniform", "keep": 0.5, "seed": None, "question": 0, "prediction": "x"}
    assert read_lines(tmp_path / "predictions.jsonl")[0][0] == {**line, "cost": {"n": 1}, "score": 0.25}


def test_only_the_last_line_of_a_batch_has_its_cost(tmp_path: Path) -> None:
    with RunFolder(tmp_path, {}) as run:
        run.add_batch(KEY, [0, 1, 2], ["x", "y", "z"], {"n": 1})
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines(keepends=True)
    assert ["cost" in json.loads(line) for line in lines] == [False, False, True]
    (tmp_path / "predictions.jsonl").write_text("".join(lines[:2]))
    with RunFolder(tmp_path, {}) as run:
        assert run.batches(KEY) == {}
        run.add_batch(KEY, [0], ["x"], {})
    assert len(read_lines(tmp_path / "predictions.jsonl")) == 1  # the torn batch is removed
    (tmp_path / "predictions.jsonl").write_text('{"prediction": "x"}\n')
    with pytest.raises(RunError, match=r"Line 1 of .*predictions\.jsonl is damaged: it lacks question"):
        RunFolder(tmp_path, {}).__enter__()


def test_a_writer_continues_at_the_given_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}\n{"c"')
    with JsonLinesWriter(path, 9) as lines:
        assert path.read_text() == '{"a": 1}\n'  # before any write, so that a crash here leaves no torn line
        lines.write({"d": 4})
    assert path.read_text() == '{"a": 1}\n{"d": 4}\n'
    with JsonLinesWriter(path):
        assert path.read_text() == ""
