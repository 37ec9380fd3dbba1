# SPDX-License-Identifier: Apache-2.0
"""Run the speed benchmarks on tiny models, and check that their rows can be drawn and printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc, which only Linux has"
)


@pytest.fixture(autouse=True)
def quiet_machine(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script("rows"), "_now", lambda: 0.5)


def run(module: Any, path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    options = ["--tiny", "--device", "cpu", "--json", str(path), *arguments]
    monkeypatch.setattr(sys, "argv", [module.__name__, *options])
    module.main()


def test_efficiency(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = script("efficiency"), tmp_path / "cpu/efficiency.jsonl"
    assert {"random", "divprune", "fastv", "dart", "vscan", "dyrate"} <= set(module.dropping_methods())
    run(module, path, monkeypatch, "--cases", "576:64", "--methods", "uniform,fastv,vscan", "--threads", "1")
    header, records = script("common").read(path)
    assert {"device", "torch", "transformers", "threads", "date", "load"} <= header.keys()
    layers = {row["method"]: row["layers"] for row in records[1:]}
    assert layers["uniform"] == [64] * 4 and layers["fastv"] == [576, 576, 64, 64]
    assert sum(layers["vscan"]) / 4 == pytest.approx(64, abs=1) and len(set(layers["vscan"])) == 2
    for row in records[1:]:
        assert row["limit"]["p50"] <= 1 and row["of_limit"]["p50"] >= row["efficiency"]["p50"]
        assert {"load", "date", "code", "took"} <= row.keys() and len(row["oracle_seconds"]) == len(row["seconds"]) == 2
    # The floor of uniform is zero; vscan compares all tokens with its picks.
    assert records[2]["floor_ms"]["p50"] == 0 < records[3]["floor_ms"]["p50"]
    monkeypatch.setattr(script("performance"), "RESULTS", tmp_path)
    text = script("performance").efficiency()
    assert "576 -> 64 visual tokens" in text and "| `fastv` |" in text and "| `uniform` |" in text
    assert script("plots").efficiency(header, records).startswith(b"\x89PNG")


def test_efficiency_goes_on_where_it_stopped(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = script("efficiency"), tmp_path / "efficiency.jsonl"
    options = ("--cases", "576:64", "--threads", "1", "--resume")
    monkeypatch.setattr(module, "STEPS", 1)
    run(module, path, monkeypatch, *options, "--methods", "uniform,random")
    first = path.read_text().splitlines()
    # pyramiddrop cannot keep 64 of 576 tokens in four layers, so it uses its smallest budget; tome and dymu merge in a
    # tower whose output has exactly 64 tokens.
    run(module, path, monkeypatch, *options, "--methods", "random,uniform,pyramiddrop,tome,dymu")
    _, records = script("common").read(path)
    assert len(first) == 4 and set(first[2:]) <= set(path.read_text().splitlines())
    by_name = {record["method"]: record for record in records}
    assert by_name["pyramiddrop"]["asked"] > 64 / 576 and by_name["pyramiddrop"]["layers"][0] == 576
    assert by_name["tome"]["layers"] == by_name["dymu"]["layers"] == [64] * 4
    monkeypatch.setattr(module, "code_version", lambda: "another")
    run(module, path, monkeypatch, *options, "--methods", "uniform")
    _, records = script("common").read(path)
    again = {record["method"]: record for record in records}
    assert again.keys() == by_name.keys() and again["uniform"]["code"] == "another"
    assert all(again[name] == by_name[name] for name in by_name.keys() - {"uniform", "unpatched"})


def test_every_method_has_a_floor_and_a_row(script) -> None:
    module, floors = script("efficiency"), script("method_floors")
    assert set(module.dropping_methods()) == floors.FLOORS.keys()
    layers = (36, 36, 24, 12)
    sizes = floors.Sizes(1, 36, 12, 16, 2, 5, layers, CPU, torch.float32)
    for name in floors.FLOORS:
        if (floor := floors.floor_of(name, sizes)) is not None:
            floor()
    assert floors.floor_of("uniform", sizes) is None and len(floors.FLOORS["pyramiddrop"](sizes)) == 2
    assert module.lengths([36, 36, 24, 12]) == [12, 24, 36] and module.lengths(list(range(12))) == [0, 3, 6, 8, 11]
    times = {12: (1.0, 2.0), 36: (3.0, 6.0)}
    assert module.weighted(times, [36, 24, 12], 0) == pytest.approx(2) == module.weighted(times, [12], 1)


def test_mixed_batches(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text prompt in a batch of images does not change the widths and bytes of the image rows."""
    module, path = script("mixed_batches"), tmp_path / "cpu/mixed_batches.jsonl"
    options = ["--methods", "pool", "--repeats", "1", "--threads", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", [module.__name__, *options])
    module.main()
    _, (images, mixed) = script("common").read(path)
    assert (images["texts"], mixed["texts"]) == (0, 1) and images["length"] == mixed["length"]
    assert images["width_per_layer"] == mixed["width_per_layer"] and mixed["width_per_layer"][-1] < mixed["length"] / 3
    assert images["kv_bytes"] == mixed["kv_bytes"] and images["padding_share"] < mixed["padding_share"]


@pytest.mark.parametrize("name", ["qwen", "internvl"])
def test_first_token(script, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways to cut to the same share pass the same number of tokens to the decoder."""
    module = script("first_token")
    small = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    for sizes in (module.WIDTHS, module.NARROW):
        monkeypatch.setattr(module, next(key for key, value in vars(module).items() if value is sizes), sizes | small)
    monkeypatch.setattr(module, "TOWER", module.TOWER | dict(hidden_size=32, intermediate_size=32, num_heads=2))
    tiles = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, image_size=[112, 112])
    monkeypatch.setattr(module, "TILE_TOWER", module.TILE_TOWER | tiles)
    monkeypatch.setattr(module, "SIDE", 16)
    shape = module.SHAPES[name]
    rows = module.measure(shape, shape.model(1), 0.25, 1)
    first, *others = rows
    assert first["tokens"] == 64 and {row["tokens"] for row in others} == {16} and len(rows) == 7
    assert first["times"] == first["cpu"] == 1 and all(row["tower"] == first["tower"] > 0 for row in others)


def test_preprocessing(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = script("preprocessing"), tmp_path / "preprocessing.jsonl"
    monkeypatch.setattr(sys, "argv", [module.__name__, "--quick", "--json", str(path)])
    module.main()
    _, records = script("common").read(path)
    by_way = {record["way"]: record for record in records}
    assert by_way.keys() == module.WAYS.keys() and by_way[module.FIRST]["times"] == 1
    assert [record["equal"] for record in records if "equal" in record] == [True, True]
    for record in records:
        assert record["cpu"].keys() >= {"decode", "resize", "normalise", "other"}
        assert sum(record["cpu"].values()) == pytest.approx(record["ms"], rel=0.5)
    patches = {name: record["pixels"][0] for name, record in by_way.items() if name.startswith("Qwen")}
    assert patches["Qwen2.5-VL, downsample"] == patches["Qwen2.5-VL, a quarter"] == patches[module.FIRST] / 4
    assert patches["Qwen2.5-VL, Pillow"] == patches[module.FIRST] and "method" in by_way["Qwen2.5-VL, dynres"]["cpu"]


def test_before_pixels(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = script("before_pixels"), tmp_path / "before_pixels.jsonl"
    monkeypatch.setattr(sys, "argv", [module.__name__, "--quick", "--json", str(path)])
    monkeypatch.setattr(module, "SMALL", {1: (720, 1080)})
    module.main()
    _, records = script("common").read(path)
    assert [(row["cores"], row["way"]) for row in records] == [(cores, way) for cores in (1, 2) for way in module.WAYS]
    for unpatched, *others in (records[:3], records[3:]):
        assert unpatched["times"] == 1 and unpatched["tokens"] > module.BUDGET
        assert {row["tokens"] for row in others} == {others[0]["tokens"]} and others[0]["tokens"] <= module.BUDGET
        assert all(row["ms"] == pytest.approx(row["decode"] + row["processor"], abs=0.02) for row in records)


def test_decode(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = script("decode"), tmp_path / "cpu/decode.jsonl"
    run(module, path, monkeypatch, "--methods", "uniform")
    _, records = script("common").read(path)
    assert [(record["method"], record["cache"]) for record in records] == [
        (method, cache) for method in ("unpatched", "uniform") for cache in module.CACHES
    ]
    # 32 + 576 + 32 tokens and the generated tokens; 144 + 64 tokens are kept.
    bytes_ = {record["cache"]: record["kv_bytes"] for record in records if record["method"] == "uniform"}
    assert bytes_["compiled"] == bytes_["static"] > bytes_["dynamic"] * 0.98
    assert len({record["step_ms"]["p50"] for record in records}) == 6
    torch._dynamo.reset()


def test_scaling(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("scaling")
    for kind, name in [
        *(("selection", name) for name in module.selecting_methods()),
        *(("merge", x) for x in module.MERGES),
    ]:
        with torch.inference_mode():
            result = module.prepared(kind, name, 90, CPU)()
        if kind == "selection":
            assert 1 <= int(result.keep.sum()) <= 90
    row = module.measure_point("engine", "uniform", 576, CPU, 1, None)
    assert row["kv_bytes"] == row["kv_bytes_predicted"] == 2 * 2 * 16 * 4 * 4 * (64 + 64)
    points = {count: {"seconds": count**2, "peak": count} for count in (576, 2880, 8192)}
    slopes = [module.exponent({n: point[key] for n, point in points.items()}) for key in ("seconds", "peak")]
    assert slopes == pytest.approx([2, 1])
    assert module.exponent({2880: 1.0}) is None

    def greedy(*_: Any) -> Any:
        return lambda: torch.empty(2**50)

    monkeypatch.setattr(module, "prepared", greedy)
    assert module.measure_point("selection", "uniform", 576, CPU, 1, None) == {"failed": "more memory than the limit"}

    def endless(*_: Any) -> Any:
        return lambda: [None for _ in iter(int, 1)]

    tokens = module.choice_of("evs", 576, CPU)[1]
    assert tokens.counts == [588] and tokens.frames == [[196] * 3]
    monkeypatch.setattr(module, "prepared", lambda kind, name, count, device: endless() if count > 576 else int)
    assert module.measure_point("selection", "uniform", 600, CPU, 1, None, 0.05) == {
        "failed": "more time than the limit"
    }


def test_memory(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = script("memory"), tmp_path / "cpu/memory.jsonl"
    run(module, path, monkeypatch, "--methods", "uniform,fastv", "--threads", "1")
    _, records = script("common").read(path)
    by_case = {(row["prompt"], row["logits"], row["method"]): row for row in records}
    assert len(by_case) == len(records) == 9 and all(row["peak"] == sum(row["kinds"].values()) for row in records)
    for (prompt, logits, method), row in by_case.items():
        layers = {"unpatched": [664] * 4, "uniform": [364] * 4, "fastv": [664] * 2 + [364] * 2}[method]
        padding = [64 if length == 664 and prompt == "padded" else 0 for length in layers]
        assert row["kv"] == sum(map(sum, zip(layers, padding, strict=True))) * 2 * 64 * 4
        assert row["kinds"].get("logits", 0) >= (664 * 5000 * 4 if logits == "all" else 0)
        pairs = (prompt, method) in (("padded", "unpatched"), ("padded", "fastv"))
        assert ("pairs" in row["kinds"]) == pairs and (not pairs or row["kinds"]["pairs"] >= 728**2 * 5)
    assert (
        by_case["padded", "last", "fastv"]["kinds"]["pairs"] == by_case["padded", "last", "unpatched"]["kinds"]["pairs"]
    )
    monkeypatch.setattr(script("performance"), "RESULTS", tmp_path)
    assert "| padded | `fastv` |" in script("performance").memory()


def test_live_bytes_equal_the_bytes_of_tensors(script) -> None:
    kept = torch.zeros(1000)
    with torch.inference_mode(), script("common").Live() as peak:
        first = kept + 1  # 4000 bytes
        second = first.view(10, 100) * 2  # 8000 bytes: a view shares memory
        del first
        third = second.double()  # 4000 + 8000
        del second, third
        kept.add_(1)
    assert peak.bytes == 12000


def test_stacks_are_put_beside_the_best_method(script, tmp_path: Path) -> None:
    from tests.unit.tuning.test_stacks import SINGLES, World, candidates
    from tokenprune_bench.tuning import Promise, Tuner

    stacks = script("stacks")
    world = World(900, candidates(SINGLES))
    tuner = Tuner(world, list(world.costs), Promise(0.03), stacks=9, objective="flops")
    tuner.search_only()
    best_of = {group: stacks.best_of(group, tuner, 0.01, 6) for group in stacks.GROUPS}
    names = {group: str(best[0].candidate) for group, best in best_of.items()}
    assert names["downsample"] == "downsample 0.5" and names["single"] in ("divprune 0.5", "fastv 0.5")
    assert "+" in names["stack"] and world.costs[best_of["stack"][0].candidate] < 0.5
    assert all(drop <= 0.01 and drop < below for _, drop, below in best_of.values())
    assert all(len(world.answered_questions(trial.candidate)) == 900 for trial, _, _ in best_of.values())
    # If all lose too much, the smallest loss wins.
    assert stacks.best_of("single", tuner, 0.0, 6)[1] >= 0
    summary = {"unpatched": 0.9, "questions": 900, "source": "drawn", "repeats": 1, "max_drop": 0.01, "weights": "w"}
    side = {"stages_ms": {stage: {"p50": 10.0} for stage in stacks.STAGES}}
    line = {"group": "stack", "name": "a + b", "drop": 0.005, "drop_below": 0.02, "speedup": 3.1, "work": 0.25}
    line |= {"load": 1.5, "cpus": 2}
    lines = [script("common").header(CPU) | summary, {"trial": {}}, line | {"before": side, "after": side}]
    script("common").write(tmp_path / "s.jsonl", lines)
    table = stacks.table(tmp_path / "s.jsonl")
    (row,) = table.rows
    assert [cell.text for cell in row][:7] == ["stack", "a + b", "0.50", "2.0", "x4.00", "x3.10", "10 → 10"]
    assert "the unpatched model gets 90.0 % right" in table.notes[0] and "1 point;" in table.notes[0]
    # Times measured under load are left out; losses stay.
    lines[-1]["load"] = 2.5
    script("common").write(tmp_path / "s.jsonl", lines)
    table = stacks.table(tmp_path / "s.jsonl")
    assert [cell.text for cell in table.rows[0]] == ["stack", "a + b", "0.50", "2.0", "x4.00"]
    assert "Time" not in table.notes[0] and len(table.columns) == 5


def test_questions_about_large_images_are_784_tokens(script) -> None:
    questions = script("stacks").questions(0, 0)
    assert len(questions) == 180 and {question.image.size for question in questions} == {(448, 448)}


def test_drafts_are_counted(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = script("assisted"), tmp_path / "assisted.jsonl"
    options = ["--questions", "1", "--words", "6", "--settings", "divprune:1.0", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", [module.__name__, *options])
    module.main()
    _, (unpatched, unpruned) = script("common").read(path)
    assert unpatched["method"] is None and unpatched["equal"] == unpruned["equal"] == unpruned["same_word"] == 1
    assert unpruned["words"] == 6 and unpruned["drafted"] == unpruned["accepted"] == 4 and unpruned["forwards"] == 2
    assert [row[0].text for row in module.table(path).rows] == ["a copy, without us", "divprune, keep 1"]
    committed = module.to_markdown(module.table(module.results_path(CPU, "assisted")))
    assert committed in module.PAGE.read_text(), "run python benchmarks/experiments/assisted.py --page"
