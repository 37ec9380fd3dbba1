# SPDX-License-Identifier: Apache-2.0
"""GPU tables stop at their deadline, resume without lost or repeated rows, and run on tiny models."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import signal
import struct
import sys
import threading
import time
import tomllib
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenprune.methods.pre_llm.divprune import DivPrune

ROOT = Path(__file__).parents[3]
KIT = ROOT / "benchmarks/experiments/gpu"
COLUMNS = {"method": "method", "ms": "ms", "bound": "bound by"}


@pytest.fixture
def sheet(script: Any, tmp_path: Path) -> Any:
    """sheet(*options): build the table of a tiny run in a temporary folder."""

    def build_sheet(*options: str) -> Any:
        arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path), *options]
        return script("kit").Sheet("z_made_up", "Made up", "7 B", COLUMNS, "", arguments)

    return build_sheet


def rows_of(folder: Path, name: str = "z_made_up") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()[1:]]


def test_a_table_stops_at_its_deadline(sheet: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    table = sheet("--minutes", "0.02")  # 1.2 s, with a tenth reserved for the end
    table.take(("first",), lambda: {"method": "first", "ms": 1.0})
    start = time.monotonic()
    table.take(("long",), lambda: time.sleep(30))
    table.take(("late",), lambda: {"method": "late", "ms": 1.0})
    assert time.monotonic() - start < 5 and [row["method"] for row in rows_of(tmp_path)] == ["first"]
    assert table.end() == 0 and "Not measured: long; late" in capsys.readouterr().out


def test_a_row_that_exceeds_the_deadline_is_not_started(sheet: Any) -> None:
    table = sheet()
    table.deadline.longest = table.deadline.left + 60
    table.take(("never",), lambda: pytest.fail("it was measured"))
    assert table.missed == ["never"]


def test_a_row_is_cut_off_at_its_own_time_limit(sheet: Any, tmp_path: Path) -> None:
    table = sheet()
    table.take(("long",), lambda: time.sleep(30), seconds=0.2)
    table.take(("next",), lambda: {"method": "next", "ms": 1.0})
    assert table.end() == 0 and not table.missed
    assert [row.get("bound", "") for row in rows_of(tmp_path)] == ["cut off after 0 s", ""]


def test_a_table_resumes_from_its_file(sheet: Any, tmp_path: Path) -> None:

    def fails() -> None:
        raise ValueError("broken")

    def no_memory() -> None:
        raise torch.OutOfMemoryError("72 GiB")

    first_run = sheet()
    first_run.take(("known",), lambda: {"method": "known", "ms": 1.0, "loaded": True})
    first_run.take(("broken",), fails)
    first_run.take(("large",), no_memory)
    assert first_run.end() == 1
    assert rows_of(tmp_path)[1]["failed"] == "ValueError: broken"
    assert rows_of(tmp_path)[2]["bound"] == "out of memory"
    second_run = sheet()
    second_run.take(("known",), lambda: pytest.fail("it was measured"))
    second_run.take(("large",), lambda: pytest.fail("it was measured"))
    second_run.take(("broken",), lambda: {"method": "broken", "ms": 2.0})
    assert second_run.end() == 0 and {row["method"] for row in rows_of(tmp_path)} == {"known", "large", "broken"}
    third_run = sheet("--again", "--only", "kno")
    third_run.take(("known",), lambda: {"method": "known", "ms": 3.0})
    third_run.take(("broken",), lambda: pytest.fail("it was not asked for"))
    assert [row["ms"] for row in third_run.shown] == [3.0]


def test_an_interrupted_write_keeps_the_old_file(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, path = script("rows"), tmp_path / "a.jsonl"
    rows.write(path, [{"first": 1}])

    def write_partially(self: Path, text: str, **_: Any) -> None:
        self.write_bytes(text[:5].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", write_partially)
    with pytest.raises(KeyboardInterrupt):
        rows.write(path, [{"first": 1}, {"row": 2}])
    assert path.read_text() == '{"first": 1}\n'


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((11.2, 10.0, 9.0, 1.0), "launches"),
        ((10.9, 10.0, 9.0, 1.0), "arithmetic"),
        ((10.9, 10.0, 1.0, 9.0), "memory"),
        ((10.9, None, 1.0, 9.0), "unknown"),
    ],
)
def test_bound_by_times(script: Any, times: tuple, expected: str) -> None:
    assert script("clocks").bound(*times) == expected


def test_pages_refuse_tiny_runs(script: Any, sheet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sheets, table = script("sheets"), sheet()
    table.take(("a",), lambda: {"method": "a", "ms": {"p50": 1.25}, "bound": "launches"})
    path = table.rows.path
    with pytest.raises(SystemExit, match="--tiny"):
        sheets.read(path)
    (tmp_path / "gpu").mkdir()
    header, row = path.read_text().splitlines()
    header = json.dumps(json.loads(header) | {"tiny": False, "shape": "7 B", "device": "GPU"})
    row = json.dumps(json.loads(row) | {"load": 0, "loaded": False})
    (tmp_path / "gpu" / path.name).write_text(f"{header}\n{row}\n")
    monkeypatch.setattr(sheets, "RESULTS", tmp_path)
    text = sheets.pages(("z_made_up",))
    assert "| method | ms | bound by |" in text and "| a | 1.25 | launches |" in text and "weights of 7 B" in text
    assert sheets.cell("peak_bytes", 2**30) == "1024" and sheets.cell("rise_share", 0.381) == "38.1%"


def test_a_full_run_requires_a_gpu(script: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="only --tiny"):
        script("g_decode").main(["--out", str(tmp_path)])


def test_page_of_published_speedups(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = script("peers")
    assert peers.page() in peers.PAGE.read_text()
    none = {"method": "none", "batch": 1, "visual": 576, "keep": 576, "ms": {"p50": 40.0}, "device_ms": 44.0,
            "kv_bytes": 640, "peak_bytes": 100, "bound": "arithmetic", "layers": [576] * 32}  # fmt: skip
    pruned = none | {"method": "divprune", "keep": 64, "ms": {"p50": 16.0}, "device_ms": 8.0, "speedup": 2.5,
                   "layers": [64] * 32, "kv_bytes": 128, "bound": "launches"}  # fmt: skip
    (row,) = peers.ours([none, pruned, pruned | {"batch": 8}, {"method": "fastv 576", "bound": "out"}])
    assert row[:2] == ["`divprune`", "5.00x"] and float(row[2][:-1]) > 4 and row[3:] == ["2.50x", "20%"]
    (row,) = peers.ours([none, pruned | {"speedup": 0.8}])
    assert row[3] == "1.25x slower"
    published = peers.published()
    assert all(claim["ratio"] > 1 and claim["source"] and claim["where"] and claim["model"] for claim in published)
    (eadp,) = (claim for claim in published if claim["source"].startswith("EADP") and claim["method"] == "divprune")
    assert eadp["ratio"] == pytest.approx(207 / 93)
    monkeypatch.setattr(peers.sheets, "found", lambda name: [])
    assert peers.MISSING in peers.page()
    files = [(tmp_path, HEADER, [none, pruned])]
    monkeypatch.setattr(peers.sheets, "found", lambda name: files if name[0] == "f" else [])
    assert peers.MISSING not in peers.page() and "| `divprune` | 5.00x |" in peers.page()


def test_busy_time_gains_do_not_exceed_flops_gains(script: Any) -> None:
    """GPU busy time cannot improve more than the FLOPs. Eager times depend on the CPU and have their own column."""
    peers = script("peers")
    rows = re.findall(r"^\| `\w+` \| ([\d.]+)x \| ([\d.]+)x \|", peers.page(), re.MULTILINE)
    assert len(rows) == 18
    assert all(float(busy) <= float(flops) for busy, flops in rows)
    assert "oracle" not in peers.PAGE.read_text().lower()


HEADER = {"device": "GPU", "torch": "2", "transformers": "5", "date": "today", "shape": "7 B"}


@pytest.mark.thorough  # also covered by the rehearsal before each GPU run
def test_video_table(script: Any, tmp_path: Path) -> None:
    module = script("d_video")
    arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "none", "evs"]
    assert module.main(arguments) == 0
    none, evs = rows_of(tmp_path, "d_video")
    assert (none["kept"], evs["kept"]) == (128, 32) and evs["kv_bytes"] * 2 == none["kv_bytes"]
    assert none["choosing_ms"] == 0 < evs["choosing_ms"] < evs["prefill_ms"]
    assert none["tower_ms"] > 0 and evs["tower_ms"] + evs["prefill_ms"] < 1.05 * evs["ms"]["p50"]
    assert evs["bound"] in ("launches", "arithmetic") and evs["tiny"]
    first_output = (tmp_path / "d_video.jsonl").read_text()
    assert module.main(arguments) == 0 and (tmp_path / "d_video.jsonl").read_text() == first_output


def test_memory_and_prefill_tables(script: Any, tmp_path: Path) -> None:
    arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--only"]
    assert script("c_memory").main([*arguments, "none", "eager", "fastv"]) == 0
    full, eager, fastv = rows_of(tmp_path, "c_memory")
    assert full["kv_bytes"] == 640 * 2 * 2 * 16 * 4 * 4 and full["weights_bytes"] == 4 * 640**2 * 4
    assert eager["peak_bytes"] > full["peak_bytes"] + eager["weights_bytes"] and eager["rise_share"] > 1
    assert fastv["peak_bytes"] < eager["peak_bytes"] and fastv["kv_bytes"] == full["kv_bytes"] * (640 + 128) // 1280
    assert script("f_llava15").main([*arguments, "none", "random"]) == 0
    full, random = rows_of(tmp_path, "f_llava15")
    assert random["layers"] == [64] * 4 and random["kv_bytes"] * 5 == full["kv_bytes"]
    assert random["speedup"] == pytest.approx(full["ms"]["p50"] / random["ms"]["p50"])
    assert random["efficiency"] == pytest.approx(random["oracle_ms"] / random["ms"]["p50"])


def test_attention_weights_equal_sdpa(script: Any) -> None:
    module, common = script("c_memory"), script("common")
    model = common.llava("tiny", torch.device("cpu"), torch.float32)
    embeds = torch.randn(1, 20, 64)
    decoder = model.model.language_model
    with torch.inference_mode():
        expected = decoder(inputs_embeds=embeds).last_hidden_state
        with module.attention_weights(model):
            assert decoder.layers[module.LAYER].self_attn.config._attn_implementation == "eager"
            torch.testing.assert_close(decoder(inputs_embeds=embeds).last_hidden_state, expected)
    assert decoder.layers[module.LAYER].self_attn.config._attn_implementation == "sdpa"


def test_largest_batch_search_is_within_a_32nd(script: Any) -> None:
    largest_batch = script("g_decode").largest_batch
    for limit in (0, 1, 2, 7, 100):
        for start in (1, 3, 90, 400):
            num_requests = largest_batch(lambda batch: batch <= limit, start)  # noqa: B023
            assert limit - limit // 32 - 1 <= num_requests <= limit and (limit > 40 or num_requests == limit)


@pytest.mark.thorough  # also covered by the rehearsal before each GPU run
def test_decode_table_has_the_largest_batch(script: Any, tmp_path: Path) -> None:
    arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "static 1", "largest"]
    assert script("g_decode").main(arguments) == 0
    rows = {(row["method"], row["what"]): row for row in rows_of(tmp_path, "g_decode")}
    divprune, fastv, none = (rows[name, "largest batch"]["batch"] for name in ("divprune", "fastv", "none"))
    assert divprune > fastv > none
    assert rows["fastv", "step, static cache"]["left"] == 32 and rows["none", "step, static cache"]["left"] == 288


def test_kept_sets_are_compared(script: Any) -> None:
    module = script("a_correctness")
    assert module.apart([{1, 2, 3}], [{1, 2, 3}]) == 0 and module.apart([{1, 2, 3}, {1}], [{1, 2, 4}, {1}]) == 2
    assert module.apart([{1, 2}], []) == 2
    clocks = script("clocks").Clocks(torch.device("cpu"), True)
    cpu, other_device = (module.Place(torch.device("cpu"), torch.float32) for _ in range(2))
    with torch.inference_mode():
        equal_row = module.kept(cpu, other_device, clocks, "divprune")
        with torch.inference_mode(False):
            other_device.image.ids = other_device.image.ids.flip(1)
        other_device._shaken = lambda x, shake: x + 1
        changed_row = module.kept(cpu, other_device, clocks, "divprune")
        assert module.identity(cpu, clocks, "fastv")["verdict"] == "equal"
    assert (equal_row["verdict"], equal_row["differ"]) == ("equal", 0)
    assert changed_row["verdict"] == "differs" and changed_row["differ"] > changed_row["ties"] == 0


def test_near_ties_differ_from_wrong_selections(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a near tie, a greedy selection may differ in many tokens. Perturbed inputs tell ties from errors."""
    module, clocks = script("a_correctness"), script("clocks").Clocks(torch.device("cpu"), True)
    simulated_gpu, cpu = (module.Place(torch.device("cpu"), torch.bfloat16) for _ in range(2))
    with torch.inference_mode():
        round_inputs = simulated_gpu._shaken
        simulated_gpu._shaken = lambda x, shake: round_inputs(x, 4)  # rounds as another device would
        ties_row = module.kept(simulated_gpu, cpu, clocks, "divprune")
        simulated_gpu._shaken = lambda x, shake: round_inputs(x, 4) + 1
        changed_row = module.kept(simulated_gpu, cpu, clocks, "divprune")
        simulated_gpu._shaken = lambda x, shake: round_inputs(x, 4)
        select, calls = DivPrune.select, itertools.count()

        def select_wrong_first(self: Any, tokens: Any) -> Any:  # the first call is the simulated GPU's
            selection = select(self, tokens)
            return selection if next(calls) else dataclasses.replace(selection, keep=selection.keep.roll(1, 1))

        monkeypatch.setattr(DivPrune, "select", select_wrong_first)
        broken_row = module.kept(simulated_gpu, cpu, clocks, "divprune")
    assert ties_row["verdict"] == "ties" and ties_row["differ"] > ties_row["ties"] and ties_row["of_same"] == 0
    assert changed_row["verdict"] == "differs" and changed_row["of_same"] == 0
    assert broken_row["verdict"] == "differs" and broken_row["of_same"] > 0


def test_methods_without_a_shared_model_are_compared(script: Any) -> None:
    module, clocks = script("a_correctness"), script("clocks").Clocks(torch.device("cpu"), True)
    cpu, other_device = (module.Place(torch.device("cpu"), torch.bfloat16) for _ in range(2))
    with torch.inference_mode():
        for name in ("earlytom", "dymu"):
            assert module.kept(cpu, other_device, clocks, name)["verdict"] == "equal"


def test_scripts_find_the_repository_root(script: Any) -> None:
    """Wheels, pieces, the environment and the plugin's metadata are read relative to the root."""
    for name in ("run", "rehearse", "wheels", "kit"):
        assert script(name).ROOT == ROOT, name


def test_wheels_are_pure_python_and_small(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = script("wheels")
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert set(tomllib.load(file)["project"]["dependencies"]) < set(wheels.required())
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(b"x" * 2**20)
    assert wheels.check(tmp_path).startswith("1 wheels, 1.00 MiB")
    monkeypatch.setattr(wheels, "LIMIT", 2**19)
    with pytest.raises(SystemExit, match="and the limit is"):
        wheels.check(tmp_path)
    (tmp_path / "b-1-cp312-cp312-manylinux_2_28_x86_64.whl").touch()
    with pytest.raises(SystemExit, match="is not pure Python"):
        wheels.check(tmp_path)


def test_tables_run_with_the_modules_in_wheels(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = script("run"), tmp_path / "gpu"
    folder.mkdir()
    with zipfile.ZipFile(tmp_path / "w-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("only_in_the_wheel.py", "answer = 42")
    source = "import sys, only_in_the_wheel as w; print(w.answer, sys.argv[1:]); sys.exit(w.answer == {})"
    (folder / "a_one.py").write_text(source.format(0))
    (folder / "b_two.py").write_text(source.format(42))
    monkeypatch.setattr(run, "HERE", folder)
    monkeypatch.setattr(run, "MINUTES", {"a_one": 1.0, "b_two": 2.0})
    arguments = ["run.py", "--wheels", str(tmp_path), "--out", str(tmp_path), "--minutes", "1.5"]
    for tables, expected in ((["a"], 0), (["a", "b"], 1)):
        monkeypatch.setattr(sys, "argv", [*arguments, *tables])
        assert run.main() == expected
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["rc"]) for entry in log] == [("a_one", 0), ("a_one", 0), ("b_two", 1)]
    assert log[0]["of"] == 60 and 80 < log[2]["of"] <= 90


def test_parts_of_a_table_are_joined(script: Any, sheet: Any, tmp_path: Path) -> None:
    run, known = script("run"), {"method": "a", "ms": 1.0}
    table = sheet()
    table.take(("a",), lambda: known)
    folders = []
    for part in range(3):
        folders.append(folder := tmp_path / str(part))
        folder.mkdir()
        (folder / "z_made_up.jsonl").write_text((tmp_path / "z_made_up.jsonl").read_text())
        part_table = sheet("--part", f"{part}/3", "--out", str(folder))
        part_table.take(("a",), lambda: pytest.fail("it was measured"))
        for name in "bcdef":
            part_rows = [{"method": name, "ms": float(part)}] * 2
            part_table.take((name,), lambda part_rows=part_rows, name=name: part_rows if name != "e" else 1 / 0)
    run.join("z_made_up", folders, tmp_path)
    rows = rows_of(tmp_path)
    assert sorted(row.get("method", "failed") for row in rows) == [*"abbccddff", "failed"]
    assert {row["ms"] for row in rows if row.get("method") in tuple("bcdf")} == {0.0, 1.0, 2.0}
    newer_code = sheet("--part", "1/2", "--out", str(tmp_path / "2"))  # written by another version of the code
    newer_code.rows.records.clear()
    script("rows").write(newer_code.rows.path, [newer_code.rows.first])
    run.join("z_made_up", [tmp_path / "2"], tmp_path)
    assert rows_of(tmp_path) == []


def test_a_table_runs_in_several_processes(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = script("run"), tmp_path / "gpu"
    folder.mkdir()
    source = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("--out", "--part", "--minutes"):
    parser.add_argument(name)
args = parser.parse_args()
lines = [{"title": "t", "columns": {"method": "method"}}, {"method": args.part, "place": [args.part]}]
pathlib.Path(args.out, "a_one.jsonl").write_text("\\n".join(map(json.dumps, lines)))
sys.exit(args.part == "2/3")
"""
    (folder / "a_one.py").write_text(source)
    monkeypatch.setattr(run, "HERE", folder)
    assert run.measured("a_one", tmp_path, dict(os.environ), 1.0, [], 3) == 1
    assert [row["method"] for row in rows_of(tmp_path, "a_one")] == ["0/3", "1/3", "2/3"]
    assert script("sheets").short(tmp_path / "a_one.jsonl").splitlines() == ["t: method", "0/3", "1/3", "2/3"]


def test_gpu_tables_come_from_the_rows(script: Any) -> None:
    page = script("gpu_page")
    prefill, requests = page.prefill_lines(576, 64, 8)["eager"], page.vllm_lines("llava7b.default")["client"]
    assert prefill.gain == pytest.approx(prefill.unpatched / prefill.pruned)
    assert requests.gain == pytest.approx(requests.pruned / requests.unpatched) and f"{requests.gain:.1f}" == "1.9"
    rows = rows_of(page.FOLDER, "i_graphs")
    graphed = next(row for row in rows if (row["method"], row["visual"], row["batch"]) == ("divprune", 2880, 1))
    assert page.prefill_lines(2880, 320, 1)["graphs"].pruned == graphed["graphs_ms"]


def test_graph_table(script: Any, tmp_path: Path) -> None:
    module = script("i_graphs")
    arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "prefill divprune", "prefill none"]
    assert module.main(arguments) == 0
    none, divprune = rows_of(tmp_path, "i_graphs")
    assert module.main([*arguments[:-2], "64 tokens divprune", "auto divprune"]) == 0
    for row in rows_of(tmp_path, "i_graphs")[2:]:
        assert (row["step_hits"] > 0 and row["why_not"] == "") or "auto" in row["what"]
    for row in (none, divprune):
        assert row["hits"] == 3 and row["why_not"] == "" and row["gap"] < 1e-5 and row["graphs_bytes"] > 0
        assert row["times"] == pytest.approx(row["eager_ms"] / row["graphs_ms"])
    assert (none["keep"], divprune["keep"]) == (576, 64)
    common, sheet = script("common"), type("Sheet", (), {"tiny": True, "device": torch.device("cpu")})
    model = common.llava("tiny", torch.device("cpu"), torch.float32, 6)
    clocks = script("clocks").Clocks(torch.device("cpu"), True)
    with torch.inference_mode():
        row = module.of_prefill(sheet, clocks, model, "random", 1152, 1100, 1)
    assert row["hits"] == 0 and "more than max_tokens=1024" in row["why_not"]


def test_vllm_engines_run_in_child_processes(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children, kit = script("children"), script("kit")
    monkeypatch.setattr(children, "FOLDER", tmp_path)
    (tmp_path / "fine.py").write_text("import sys; print('noise'); print('@@ {\"n\": 1}'); print('@@ {\"n\": 2}')")
    assert children.rows_of("fine", "x", True) == [{"n": 1}, {"n": 2}]
    (tmp_path / "broken.py").write_text("print('@@ {\"n\": 1}'); raise ValueError('no kernel')")
    with pytest.raises(RuntimeError, match="x ended with 1: ValueError: no kernel"):
        children.rows_of("broken", "x", True)
    source = """
import os, pathlib, sys, time
half = pathlib.Path(sys.argv[1] + ".half")
half.write_text(str(os.getpid()))
half.rename(sys.argv[1])
time.sleep(60)
"""
    (tmp_path / "long.py").write_text(source)

    def send_alarm() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGALRM)

    alarm = threading.Thread(target=send_alarm)
    alarm.start()
    with pytest.raises(kit.OutOfTime), kit.Deadline(1.0, time.monotonic()).row(50.0):
        children.rows_of("long", str(tmp_path / "pid"), True)
    alarm.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_compiled_cases_run_in_separate_processes(script: Any) -> None:
    cases, processes = [*script("vllm_kit.cases").CASES], script("run").PROCESSES["h_vllm_answers"]
    num_cases = Counter(index % processes for index, _ in enumerate(cases))
    assert [num_cases[index % processes] for index, name in enumerate(cases) if name.endswith("default")] == [1, 1]


def test_vllm_pieces_contain_only_code_for_the_gpu(script: Any, tmp_path: Path) -> None:
    pieces = script("vllm_kit.pieces")

    def pack_program(kind: int, arch: int, code: bytes) -> bytes:
        return struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + code

    def pack_container(*programs: bytes) -> bytes:
        body = b"".join(programs)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body

    cubins = pack_container(pack_program(2, 80, b"old!"), pack_program(2, 90, b"mine"), pack_program(1, 90, b"text"))
    ptx = pack_container(pack_program(1, 70, b"ptx7"), pack_program(1, 80, b"ptx8"), pack_program(1, 100, b"ptxA"))
    path = tmp_path / "library.so"
    path.write_bytes(b"head" + cubins + struct.pack("<I", 0xBA55ED50) + b"odd" + ptx + b"tail")
    size = path.stat().st_size
    pieces.zero_other_code(path)
    content = path.read_bytes()
    assert len(content) == size and [marker in content for marker in (b"head", b"mine", b"ptx8", b"tail")] == [True] * 4
    assert not any(marker in content for marker in (b"old!", b"text", b"ptx7", b"ptxA"))
    pieces.announce(ROOT, tmp_path)
    (distribution,) = importlib.metadata.Distribution.discover(name="tokenprune", path=[str(tmp_path)])
    assert [point.value for point in distribution.entry_points if point.group == "vllm.general_plugins"]
    with pytest.raises(SystemExit, match="has no site"):
        pieces.unpack(tmp_path, tmp_path / "to")


def test_plan_and_rehearsal_list_all_tables(script: Any) -> None:
    run = script("run")
    files = {path.stem for path in KIT.glob("[a-z]_*.py")}
    assert run.MINUTES.keys() == files == set(script("performance").GPU_TABLES)
    plan, rehearsal = (KIT / f"{name}.md" for name in ("plan", "rehearsal"))
    assert {name: float(n) for name, n in re.findall(r"\| `(\w+)` \| ([\d.]+) \|", plan.read_text())} == run.MINUTES
    steps = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| (.*) \|$", plan.read_text().partition("| file |")[0], re.M)
    starts = [index for index, (name, _, _) in enumerate(steps) if name.endswith("start")]
    for start, end in itertools.pairwise([*starts, len(steps)]):
        assert sum(float(minutes) for _, minutes, _ in steps[start:end]) == pytest.approx(15), steps[start]
    planned = set()
    for _, minutes, command in steps:
        if tables := re.search(r"run.py ([\w ]+?) --", command):
            names = [name for name in run.MINUTES if any(map(name.startswith, tables[1].split()))]
            assert round(sum(run.MINUTES[name] for name in names), 1) <= float(minutes) < 10
            planned |= set(names)
    assert planned == files
    exit_codes = dict(re.findall(r"\| `(\w+)` \| (\d+) \|", rehearsal.read_text()))
    assert exit_codes.keys() == files and set(exit_codes.values()) == {"0"}
