# SPDX-License-Identifier: Apache-2.0
"""The papers' table: its data are sound, its commands are ones that methods accept, results land in their cell."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import tokenprune
from tokenprune import Budget
from tokenprune.errors import OptionError, TokenPruneError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/papers"
DART_BASE = {"gqa": 61.9, "mmb": 64.7, "mme": 1862, "pope": 85.9, "sqa": 69.5, "vqav2": 78.5, "textvqa": 58.2}
DART_128 = {"gqa": 58.7, "mmb": 63.2, "mme": 1840, "pope": 80.1, "sqa": 69.1, "vqav2": 75.9, "textvqa": 56.4}


@pytest.fixture(scope="module")
def papers() -> Iterator[Any]:
    """The script, as a module, and the modules that it is made of."""
    before, names = set(sys.modules), ("published", "settings", "sets", "outcomes", "tables")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        parts = {name: importlib.import_module(f"papers.{name}") for name in names}
        yield SimpleNamespace(script=importlib.import_module("papers_table"), **parts)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("papers", "papers_table"):
            del sys.modules[name]


@pytest.fixture
def call(papers: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """call(*arguments): exit code, output and errors of the script."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["papers_table.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            papers.script.main()
        told = capsys.readouterr()
        return ended.value.code or 0, told.out, told.err

    return run


def setting(papers: Any, name: str) -> Any:
    return next(one for one in papers.settings.settings() if one.name == name)


def write_results(papers: Any, folder: Path, name: str, numbers: dict[str, float], **changes: Any) -> Path:
    """A results file as lmms-eval 0.7.3 writes it, with `numbers` in the papers' units."""
    results: dict[str, Any] = {}
    for key, number in numbers.items():
        one = papers.sets.SETS[key]
        share = number / one.scale / len(one.metrics)
        stderr = {f"{metric}_stderr,none": "N/A" for metric in one.metrics}
        task = changes.get("tasks", {}).get(key, one.tasks[0])
        results[task] = {"alias": task, **{f"{metric},none": share for metric in one.metrics}, **stderr}
    arguments = setting(papers, name).arguments("llava-hf/llava-1.5-7b-hf", "cuda", "thresholds.safetensors")
    config = {"model": "tokenprune", "model_args": arguments, "batch_size": "1", "limit": None} | changes.get(
        "config", {}
    )
    data = {"results": results, "configs": {}, "config": config, "throughput": changes.get("throughput", {})}
    path = folder / name / "llava-hf__llava-1.5-7b-hf" / f"{changes.get('date', '20260101_000000')}_results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


# -- the published numbers


def test_every_published_row_is_sound(papers: Any) -> None:
    data = papers.published.published()
    titles = {*tokenprune.available_methods(), *data.others, "unpatched"}
    sets = {*papers.sets.SETS, *data.other_sets}
    places = set()
    for row in data.rows:
        place = (row.source, row.method, row.budget)
        assert place not in places
        places.add(place)
        assert row.source in data.sources and row.method in titles and row.means in data.means, place
        assert row.budget == 576 if row.method == "unpatched" else row.budget in (192, 128, 64), place
        assert (row.means == "all") == (row.method == "unpatched"), place
        assert row.values or row.average is not None, place
        assert row.values.keys() <= sets and row.doubt.keys() <= row.values.keys(), place
        for key, value in row.values.items():
            low, high = (1200, 2000) if key == "mme" else (20, 100)
            assert type(value) in (int, float) and low <= value <= high, (place, key)
        assert row.average is None or 70 <= row.average <= 101, place
        assert row.sets is None or row.average is not None, place
    assert {row.source for row in data.rows} == data.sources.keys()
    assert {row.method for row in data.rows} >= data.others.keys()
    assert not data.others.keys() & set(tokenprune.available_methods())


def test_every_source_can_be_looked_up(papers: Any) -> None:
    data = papers.published.published()
    for name, source in data.sources.items():
        assert re.fullmatch(r"2\d(0[1-9]|1[0-2])\.\d{5}", source.arxiv), name
        assert all((source.title, source.version, source.table, source.note)), name
        assert source.proposes in {*tokenprune.available_methods(), *data.others}, name


def test_published_percentages_fit_the_published_numbers(papers: Any) -> None:
    """A slip of the pen in a number would move its row's mean away from the average that the paper prints."""
    data = papers.published.published()
    checked = 0
    for row in data.rows:
        base = data.unpruned(row.source)
        shared = [key for key in row.values if key in base]
        if row.average is None or len(shared) < (row.sets or 6):
            continue
        mean = sum(100 * row.values[key] / base[key] for key in shared) / len(shared)
        # VisionZip, SparseVLM and VScan do not say how they average; each is within this of the plain mean.
        assert mean == pytest.approx(row.average, abs=1.6), (row.source, row.method, row.budget)
        checked += 1
    assert checked > 12


def test_two_sources_that_disagree_both_stay(papers: Any) -> None:
    rows = papers.published.published().of("sparsevlm", 192)
    assert [(row.source, row.values["gqa"]) for row in rows if row.values] == [
        ("sparsevlm-v4", 59.5),
        ("sparsevlm-v1", 57.6),
    ]
    assert "sqa" not in papers.published.published().of("dart", 192)[0].values  # 69.x


# -- settings and commands


def test_every_method_is_in_the_table_or_left_out_with_a_reason(papers: Any) -> None:
    found = {one.method for one in papers.settings.settings()} - {"unpatched"}
    assert not found & papers.settings.LEFT_OUT.keys()
    ours = {
        name
        for name in tokenprune.available_methods()
        if tokenprune.method_info(name).cls.__module__.startswith("tokenprune.methods.")
    }
    assert found | papers.settings.LEFT_OUT.keys() == ours
    names = [one.name for one in papers.settings.settings()]
    assert len(set(names)) == len(names)


def test_budgets_are_hit(papers: Any) -> None:
    for one in papers.settings.settings():
        if one.means == "cut":
            assert one.average == (2 * 576 + 30 * (one.budget + 4)) / 32
        elif one.method == "downsample":
            assert one.average == {192: 14**2, 128: 11**2, 64: 8**2}[one.budget]
        else:
            assert one.average == pytest.approx(one.budget, abs=0.5), one.name
    assert setting(papers, "fastv-192").keep == round((192 * 32 - 2 * 576) / 30) == 166
    assert setting(papers, "dyrate-64").keep == round((64 * 32 - 3 * 576) / 29) == 11
    assert setting(papers, "vscan-64").tokens == "96, 32 from layer 16 on"


def test_downsample_comes_to_what_the_settings_say(papers: Any) -> None:
    """By the function that the method itself uses, for 24 x 24 patches."""
    from tokenprune.integrations.shared.resizing import _patches

    for budget in (192, 128, 64):
        one = setting(papers, f"downsample-{budget}")
        assert _patches(24, one.keep) ** 2 == one.average


def test_a_model_of_this_shape_sees_what_the_settings_say(papers: Any) -> None:
    """24 x 24 patches, 24 blocks and 32 layers, as LLaVA-1.5-7B has; all else is tiny. Some settings, for time."""
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=24, num_attention_heads=1)
    text = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=32, num_attention_heads=1, vocab_size=32)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=336, patch_size=14, **vision), image_token_id=5,
        text_config=LlamaConfig(max_position_embeddings=1024, **text), vision_feature_layer=-2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[7, *[5] * 576, 8, 9]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.rand(1, 3, 336, 336)}
    seen = set()
    for one in papers.settings.settings():
        if one.budget != 64 or one.method in ("downsample", "dymu"):  # these need a processor, or thresholds
            continue
        with tokenprune.patched(model, one.method, keep=one.keep, **one.options), torch.inference_mode():
            model(**inputs, use_cache=True)
            assert tokenprune.stats(model).visual_tokens_average == pytest.approx(one.average), one.name
        seen.add(one.name)
    assert len(seen) == 10


def arguments_of(command: list[str]) -> dict[str, Any]:
    """`--model_args` as lmms-eval reads them."""
    given = dict(part.split("=", 1) for part in command[command.index("--model_args") + 1].split(","))
    typed = {"true": True, "false": False}
    for name, value in given.items():
        kinds = (lambda text: typed[text.lower()], int, float, str)
        for kind in kinds:
            try:
                given[name] = kind(value)
                break
            except (ValueError, KeyError):
                pass
    return given


def commands(told: str) -> list[list[str]]:
    lines = [shlex.split(line) for line in told.splitlines() if not line.startswith("#")]
    return [line for line in lines if line[:3] == ["python", "-m", "lmms_eval"]]


def test_every_command_is_a_setting_that_the_method_accepts(papers: Any, call: Any) -> None:
    code, told, _ = call("commands", "--out", "somewhere")
    found = commands(told)
    assert code == 0 and len(found) == len(papers.settings.settings())
    for command, one in zip(found, papers.settings.settings(), strict=True):
        given = arguments_of(command)
        assert given.pop("base") == "llava_hf" and given.pop("pretrained") == "llava-hf/llava-1.5-7b-hf"
        assert given.pop("device") == given.pop("device_map") == "cuda"
        assert command[command.index("--output_path") + 1] == f"somewhere/{one.name}"
        name, keep = given.pop("method"), given.pop("keep", None)
        if name == "none":
            assert (one.name, keep, given) == ("unpatched", None, {})
            continue
        if name == "dymu":
            assert given.pop("thresholds") == "thresholds.safetensors"
            assert isinstance(keep, float)  # only shares are calibrated
        method, budget = tokenprune.method(name, **given), Budget.of(keep)
        assert method.name == one.method and budget.keep == one.keep and type(budget.keep) is type(one.keep)
    assert (
        f"# fastv-192: visual tokens 166 from layer 2 on; averaged over layers {(2 * 576 + 30 * 166) / 32:.1f}" in told
    )


def test_the_entry_point_for_lmms_eval_accepts_every_command(papers: Any, call: Any) -> None:
    read = pytest.importorskip(
        "tokenprune.lmms_eval.arguments", reason="this package has no model for lmms-eval"
    ).read
    for command in commands(call("commands")[1]):
        given = arguments_of(command)
        given.pop("thresholds", None)
        made = read(given, given.pop("base"), {"pretrained", "device", "device_map"})
        assert made.rest == {"pretrained": "llava-hf/llava-1.5-7b-hf", "device": "cuda", "device_map": "cuda"}


def test_commands_choose(papers: Any, call: Any) -> None:
    code, told, _ = call("commands", "--methods", "dart", "--budgets", "64", "--sets", "gqa,vqav2_val_lite")
    found = commands(told)
    assert code == 0 and [command[-1] for command in found] == [
        "results/unpatched",
        "results/dart-64",
        "results/dart-64-cut",
    ]
    assert {command[command.index("--tasks") + 1] for command in found} == {"gqa,vqav2_val_lite"}
    assert not any("--include_path" in command for command in found)  # that is for TextVQA alone
    told = call("commands", "--methods", "random", "--budgets", "64", "--sets", "gqa,textvqa", "--split")[1]
    tasks = [(command[command.index("--tasks") + 1], "--include_path" in command) for command in commands(told)]
    assert tasks == [("gqa", False), ("textvqa_val_ocr", True)] * 2


def test_dymu_is_calibrated_for_the_shares_that_it_is_run_with(papers: Any, call: Any) -> None:
    told = call("commands", "--methods", "dymu", "--thresholds", "t.safetensors")[1]
    (line,) = (shlex.split(line) for line in told.splitlines() if line.startswith("tokenprune calibrate"))
    keeps = [float(part) for part in line[line.index("--keep") + 1].split(",")]
    assert keeps == [arguments_of(command)["keep"] for command in commands(told)[1:]]
    assert line[-2:] == ["--out", "t.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--methods", "dartt"], "'dartt' is not in the table"),
        (["--methods", "pevlm"], "pevlm is left out: it removes no tokens"),
        (["--budgets", "96"], "'96': the papers' budgets are 192, 128, 64"),
        (["--budgets", ""], "the papers' budgets are"),
        (["--sets", "okvqa"], "'okvqa' is no benchmark of the papers' table"),
        (["--sets", "vqav2,vqav2_val_lite"], "none of them twice"),
        (["--pretrained", "a,b"], "a comma ends an argument"),
    ],
)
def test_what_is_not_there_is_said(call: Any, arguments: list[str], told: str) -> None:
    code, out, error = call("commands", *arguments)
    assert code == 2 and told in error and not commands(out)


def test_our_own_task_differs_from_lmms_evals_in_the_ocr_tokens_alone(papers: Any) -> None:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    load = functools.partial(yaml.load, Loader=Loader)
    path = papers.sets.TASK_FOLDER / "textvqa_val_ocr.yaml"
    ours = load(path.read_text())
    assert ours["task"] == path.stem == papers.sets.SETS["textvqa"].tasks[0]
    assert ours["lmms_eval_specific_kwargs"]["default"]["ocr"] is True
    installed = importlib.util.find_spec("lmms_eval")
    if installed is None:
        pytest.skip("lmms-eval is not installed, so its own task cannot be compared (make test-lmms does it)")
    folder = Path(installed.submodule_search_locations[0]) / "tasks/textvqa"
    theirs = load((folder / "_default_template_textvqa_yaml").read_text()) | load(
        (folder / "textvqa_val.yaml").read_text()
    )
    same = (
        "dataset_path",
        "test_split",
        "output_type",
        "doc_to_target",
        "generation_kwargs",
        "doc_to_text",
        "doc_to_visual",
    )
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    default = theirs["lmms_eval_specific_kwargs"]["default"]
    assert ours["lmms_eval_specific_kwargs"]["default"] == default | {"ocr": True}


def test_lmms_eval_has_the_tasks_and_their_metrics(papers: Any) -> None:
    installed = importlib.util.find_spec("lmms_eval")
    if installed is None:
        pytest.skip("lmms-eval is not installed, so its tasks cannot be looked up (make test-lmms does it)")
    tasks = Path(installed.submodule_search_locations[0]) / "tasks"
    for one in papers.sets.SETS.values():
        for task in one.tasks:
            if (papers.sets.TASK_FOLDER / f"{task}.yaml").exists():
                continue
            (text,) = (path.read_text() for path in tasks.glob(f"*/{task}.yaml"))
            assert re.search(rf"^task: \"?{task}\"?$", text, re.MULTILINE), task
            assert all(f"metric: {metric}\n" in text for metric in one.metrics), task


# -- results


def cells(papers: Any, folder: Path, method: str, column: str) -> dict[str, str]:
    """A column of the table of a method, by row."""
    found = papers.outcomes.read_all(folder, papers.settings.settings())
    table = next(one for one in papers.tables.comparison(found.numbers) if one.title == method)
    place = list(table.header).index(column)
    return {row[0]: row[place] for row in table.rows}


def test_without_results_the_columns_are_empty(papers: Any) -> None:
    tables = papers.tables.comparison()
    assert {one.title for one in tables} >= {"unpatched", "dart", "fastv", "divprune", "vscan", "tome", "dymu"}
    own = 0
    for table in tables[:-1]:
        for place, title in enumerate(table.header):
            if "yours" in title:
                own += 1
                assert not any(row[place] for row in table.rows)
        assert table.header[1:] and all(len(row) == len(table.header) for row in table.rows)
    assert own + len(tables[-1].rows) == len(papers.settings.settings())
    assert not any("".join(row[2:]) for row in tables[-1].rows)


def test_results_land_beside_the_published_numbers(papers: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "unpatched", DART_BASE)
    write_results(papers, tmp_path, "dart-128-cut", DART_128)
    mine = cells(papers, tmp_path, "dart", "128 yours, at the cut")
    assert [mine[one.title] for one in papers.sets.SETS.values()] == [
        "58.7 (+0.0)", "63.2 (+0.0)", "1840 (+0.0)", "80.1 (+0.0)", "69.1 (+0.0)", "75.9 (+0.0)", "56.4 (+0.0)",
    ]  # fmt: skip
    mean = sum(100 * DART_128[key] / DART_BASE[key] for key in DART_BASE) / 7
    assert mine["mean of these, %"] == f"{mean:.1f} (+0.0)"
    assert mine["average as printed, %"] == f"**{mean:.1f} ({mean - 98.0:+.1f})**"
    # What was not measured stays empty, what is counted in another way is not compared.
    assert not any(cells(papers, tmp_path, "dart", "128 yours, average").values())
    write_results(papers, tmp_path, "dart-128", DART_128)
    assert cells(papers, tmp_path, "dart", "128 yours, average")["GQA"] == "58.7"
    base = cells(papers, tmp_path, "unpatched", "576 yours")
    assert base["GQA"] == "61.9 (+0.0)" and base["mean of these, %"] == "100.0"


def test_differences_are_of_percentages_and_marked_above_one_point(papers: Any, tmp_path: Path) -> None:
    # Another split: all a tenth lower, the unpatched model too. Then GQA falls by 2 more, SQA by half a point.
    write_results(papers, tmp_path, "unpatched", {key: 0.9 * value for key, value in DART_BASE.items()})
    lower = {key: 0.9 * value for key, value in DART_128.items()} | {"gqa": 0.9 * (58.7 - 0.02 * 61.9)}
    write_results(papers, tmp_path, "dart-128-cut", lower | {"sqa": 0.9 * (69.1 - 0.005 * 69.5)})
    mine = cells(papers, tmp_path, "dart", "128 yours, at the cut")
    assert mine["GQA"] == "**51.7 (-2.0)**" and mine["SQA"] == "61.9 (-0.5)" and mine["VQAv2"] == "68.3 (+0.0)"
    assert mine["mean of these, %"].endswith("(-0.4)")
    # The unpatched model itself is compared by points; MME by those of its 2800.
    write_results(papers, tmp_path, "unpatched", {"mme": 1848, "pope": 86.9}, date="20260102_000000")
    base = cells(papers, tmp_path, "unpatched", "576 yours")
    assert base["GQA"] == "**55.7 (-6.2)**" and base["MME"] == "1848 (-0.5)"
    assert base["POPE"] == "86.9 (+0.0)"  # of the published ones, DyMU's is the closest


def test_a_mean_is_over_what_both_have(papers: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "unpatched", DART_BASE)
    write_results(papers, tmp_path, "dart-128-cut", {"gqa": 61.9, "pope": 85.9})
    theirs = (58.7 / 61.9 + 80.1 / 85.9) / 2 * 100
    assert (
        cells(papers, tmp_path, "dart", "128 yours, at the cut")["mean of these, %"]
        == f"**100.0 ({100 - theirs:+.1f})**"
    )


def test_methods_without_published_numbers_have_a_table_of_their_own(papers: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "unpatched", DART_BASE)
    write_results(papers, tmp_path, "random-64", {"gqa": 0.5 * 61.9, "mme": 931})
    found = papers.outcomes.read_all(tmp_path, papers.settings.settings())
    table = papers.tables.comparison(found.numbers)[-1]
    (row,) = (row for row in table.rows if list(row[:2]) == ["`random`", "64"])
    assert list(row[2:]) == ["30.9", "", "931", "", "", "", "", "50.0"]


def test_lmms_evals_metrics_become_the_numbers_of_papers(papers: Any) -> None:
    """Parts of real results files of lmms-eval 0.7.3, with other numbers."""
    sets = papers.sets.SETS
    assert sets["gqa"].score({"alias": "gqa", "exact_match,none": 0.619, "exact_match_stderr,none": 0.004}) == 61.9
    assert sets["mmb"].score({"gpt_eval_score,none": 64.7, "submission,none": None}) == 64.7
    assert sets["mme"].score({"mme_perception_score,none": 1506.5, "mme_cognition_score,none": 355.5}) == 1862
    assert sets["mme"].score({"mme_perception_score,none": 1506.5}) is None
    assert sets["pope"].score({"pope_accuracy,none": 0.87, "pope_f1_score,none": 0.859}) == 85.9
    assert sets["textvqa"].score({"exact_match,none": 0.582, "exact_match_stderr_clt,none": 0.1}) == pytest.approx(58.2)
    assert sets["sqa"].score({"exact_match,none": True}) is None and sets["vqav2"].score({}) is None


def test_two_models_in_one_folder_are_told(papers: Any, tmp_path: Path) -> None:
    path = write_results(papers, tmp_path, "dart-128", {"gqa": 60.0})
    all_settings = papers.settings.settings()
    assert papers.outcomes.read_all(tmp_path, all_settings).notes == ["Measured on llava-hf/llava-1.5-7b-hf."]
    other = write_results(papers, tmp_path, "dart-64", {"gqa": 60.0})
    other.write_text(path.read_text().replace("keep=98", "keep=30").replace("llava-1.5-7b-hf,", "llava-1.5-13b-hf,"))
    (note,) = papers.outcomes.read_all(tmp_path, all_settings).notes
    assert note == "Measured on llava-hf/llava-1.5-13b-hf and llava-hf/llava-1.5-7b-hf: not comparable."


def test_the_newest_file_counts_and_odd_ones_are_told(papers: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "dart-128", {"gqa": 50.0, "vqav2": 70.0}, date="20260101_000000")
    newest = write_results(papers, tmp_path, "dart-128", {"gqa": 60.0}, date="20260203_000000")
    write_results(papers, tmp_path, "dart-128", {"gqa": 10.0}, date="20260301_000000", config={"limit": 8})
    # A file of the task's own with a similar name, and a task that is another benchmark than the papers'.
    (newest.parent.parent / "submissions").mkdir()
    (newest.parent.parent / "submissions/mmbench_en_dev_static_results.json").write_text('{"overall_acc": 0.5}')
    write_results(
        papers,
        tmp_path,
        "dart-64",
        {"textvqa": 45.0},
        tasks={"textvqa": "textvqa_val"},
        throughput={"avg_failed_calls": 3.0},
    )
    found = papers.outcomes.read_all(tmp_path, papers.settings.settings())
    assert found.numbers == {"dart-128": {"gqa": 60.0, "vqav2": 70.0}, "dart-64": {"textvqa": 45.0}}
    assert any("--limit 8" in note for note in found.notes)
    assert any("textvqa_val, not textvqa_val_ocr" in note for note in found.notes)
    assert any("calls of generate failed" in note for note in found.notes)


def cut_short(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def changed(**metrics: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = json.loads(path.read_text())
        data["results"]["gqa"] = {"alias": "gqa"} | metrics
        path.write_text(json.dumps(data))

    return change


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (cut_short, "is cut short or no JSON"),
        (lambda path: path.write_text("[]"), "is no results file of lmms-eval"),
        (lambda path: path.write_text('{"results": {}}'), "is no results file of lmms-eval"),
        (lambda path: path.write_text('{"results": {"gqa": 1}, "config": {}}'), "not tasks with metrics"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be read"),
        (changed(), "no usable exact_match for gqa"),
        (changed(**{"exact_match,none": "N/A"}), "no usable exact_match for gqa"),
        (changed(**{"exact_match,none": float("nan")}), "no usable exact_match for gqa"),
        (changed(**{"exact_match,none": 61.9}), "between 0 and 100"),
        (lambda path: path.write_text(path.read_text().replace("keep=30", "keep=64")), "run with keep=64, not keep=30"),
        (lambda path: path.write_text(path.read_text().replace("method=dart", "method=none")), "run with method=none"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(papers: Any, call: Any, tmp_path: Path, breaks: Any, told: str) -> None:
    path = write_results(papers, tmp_path, "dart-64", {"gqa": 50.0})
    write_results(papers, tmp_path, "unpatched", {"gqa": 60.0})
    breaks(path)
    code, out, error = call("table", tmp_path)
    assert code == 2 and told in error and str(path) in error and "or delete them" in error and not out
    assert str(tmp_path / "unpatched") not in error


def test_a_folder_without_results_is_an_error(papers: Any, call: Any, tmp_path: Path) -> None:
    assert "is no folder" in call("table", tmp_path / "absent")[2]
    code, _, error = call("table", tmp_path)
    assert code == 2 and "has none of the folders" in error
    assert "ends in .md or .html" in call("table", "--out", tmp_path / "table.pdf")[2]
    assert "cannot write" in call("table", "--out", tmp_path / "absent/table.md")[2]


def test_the_table_says_what_is_missing(papers: Any, call: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "dart-64", {"gqa": 50.0})
    code, told, _ = call("table", tmp_path)
    assert code == 0 and "Without results of `unpatched` there are no percentages." in told
    assert "Not measured: unpatched, downsample-192" in told
    assert "In part: dart-64 (MMB, MME, POPE, SQA, VQAv2, TextVQA)." in told
    assert re.search(r"^\| GQA .*\| 50\.0 \|", told, re.MULTILINE)


class Page(HTMLParser):
    """Counts cells of each row, and notes what is loaded or linked."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.targets: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.targets += [value for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_html_has_the_same_cells_and_loads_nothing(papers: Any, call: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "unpatched", DART_BASE)
    write_results(papers, tmp_path, "dart-128-cut", DART_128 | {"gqa": 40.0})
    assert call("table", tmp_path, "--out", tmp_path / "table.html")[0] == 0
    text = (tmp_path / "table.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and "<b>40.0 (" in text and "<script" not in text
    assert set(page.targets) == {
        f"https://arxiv.org/abs/{one.arxiv}" for one in papers.published.published().sources.values()
    }
    found = papers.outcomes.read_all(tmp_path, papers.settings.settings())
    tables = [*papers.tables.comparison(found.numbers), papers.tables.sources()]
    cells = [list(row) for one in tables for row in (one.header, *one.rows)]
    plain = [[re.sub(r"[*`]|\]\(http[^)]*\)|\[(?=\d)", "", cell) for cell in row] for row in cells]
    assert page.rows == plain
    odd = papers.tables.to_html([papers.tables.Table("a < b", ["x & y"], [["**<script>**"]])], "t", [])
    assert "<script>" not in odd and "<b>&lt;script&gt;</b>" in odd and "x &amp; y" in odd


# -- run


@pytest.fixture
def lmms_eval(papers: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for lmms-eval: writes a results file, unless the task is in `fails`; notes what it was called with."""
    stand_in = SimpleNamespace(calls=[], fails=set(), interrupts=set())

    def run(command: list[str], **_: Any) -> Any:
        output, tasks = (
            Path(command[command.index("--output_path") + 1]),
            command[command.index("--tasks") + 1].split(","),
        )
        stand_in.calls.append((output.name, *tasks))
        if output.name in stand_in.interrupts:
            raise KeyboardInterrupt
        asked = {papers.sets.set_of(task): task for task in tasks if (output.name, task) not in stand_in.fails}
        if asked:
            numbers, date = dict.fromkeys(asked, 50.0), f"20260101_{len(stand_in.calls):06}"
            write_results(papers, output.parent, output.name, numbers, date=date, tasks=asked)
        return SimpleNamespace(returncode=0)  # lmms-eval ends with 0 even where the evaluation failed

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(papers.script, "_check_installed", lambda: None)
    return stand_in


SMALL = ("--methods", "random,dart", "--budgets", "64", "--sets", "gqa,mme")


def test_a_run_goes_on_where_it_stopped(
    papers: Any, call: Any, lmms_eval: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    lmms_eval.interrupts.add("dart-64")
    monkeypatch.setattr(sys, "argv", ["papers_table.py", "run", *SMALL, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        papers.script.main()
    assert stopped.value.code not in (0, None)
    assert lmms_eval.calls == [("unpatched", "gqa", "mme"), ("random-64", "gqa", "mme"), ("dart-64", "gqa", "mme")]
    lmms_eval.calls.clear()
    lmms_eval.interrupts.clear()
    code, told, _ = call("run", *SMALL, "--out", tmp_path)
    assert code == 0 and lmms_eval.calls == [("dart-64", "gqa", "mme"), ("dart-64-cut", "gqa", "mme")]
    assert "unpatched: finished before" in told and "all done" in told
    lmms_eval.calls.clear()
    assert call("run", *SMALL, "--out", tmp_path)[0] == 0 and lmms_eval.calls == []


def test_a_failure_is_told_and_the_others_run(papers: Any, call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    lmms_eval.fails |= {("random-64", "mme"), ("dart-64", "gqa"), ("dart-64", "mme")}
    code, told, error = call("run", *SMALL, "--out", tmp_path)
    assert code == 2 and len(lmms_eval.calls) == 4 and "all done" not in told
    assert "2 of the commands left something undone" in error
    assert "random-64: no result for mme (exit code 0)" in error and "dart-64: no result for gqa, mme" in error
    assert (
        str(tmp_path / "dart-64/log.txt") in error and "--tasks gqa,mme" in (tmp_path / "dart-64/log.txt").read_text()
    )
    lmms_eval.calls.clear()
    lmms_eval.fails.clear()
    # Only what is missing is measured again.
    assert call("run", *SMALL, "--out", tmp_path)[0] == 0
    assert lmms_eval.calls == [("random-64", "mme"), ("dart-64", "gqa", "mme")]


def test_another_task_of_a_benchmark_is_another_result(papers: Any, call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    given = ("--methods", "random", "--budgets", "64", "--out", tmp_path)
    call("run", *given, "--sets", "vqav2_val_lite")
    write_results(papers, tmp_path, "random-64", {"vqav2": 40.0}, tasks={"vqav2": "vqav2_val_lite"})
    assert any(
        "vqav2_val_lite, not" in note for note in papers.outcomes.read_all(tmp_path, papers.settings.settings()).notes
    )
    lmms_eval.calls.clear()
    call("run", *given, "--sets", "vqav2")
    assert ("random-64", "vqav2_val") in lmms_eval.calls
    # The full set wins, whichever is newer.
    write_results(
        papers, tmp_path, "random-64", {"vqav2": 40.0}, tasks={"vqav2": "vqav2_val_lite"}, date="20270101_000000"
    )
    assert papers.outcomes.read_all(tmp_path, papers.settings.settings()).numbers["random-64"] == {"vqav2": 50.0}


def test_a_folder_that_cannot_be_written_is_an_error(call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, error = call("run", *SMALL, "--out", tmp_path / "file")
    assert code == 2 and "cannot write to" in error


def test_split_runs_one_benchmark_at_a_time(call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    call("run", *SMALL, "--methods", "random", "--split", "--out", tmp_path)
    assert lmms_eval.calls == [("unpatched", "gqa"), ("unpatched", "mme"), ("random-64", "gqa"), ("random-64", "mme")]


def test_a_broken_result_is_measured_again(papers: Any, call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    call("run", *SMALL, "--methods", "random", "--out", tmp_path)
    lmms_eval.calls.clear()
    (path,) = (tmp_path / "random-64").rglob("*_results.json")
    cut_short(path)
    code, _, error = call("run", *SMALL, "--methods", "random", "--out", tmp_path)
    assert lmms_eval.calls == [("random-64", "gqa", "mme")]
    assert code == 0, error
    assert path.with_name(f"{path.name}.broken").exists() and call("table", tmp_path)[0] == 0  # nobody's file is lost


def test_dymu_without_thresholds_is_left_and_told(call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    given = (
        "--methods",
        "dymu,random",
        "--budgets",
        "64",
        "--sets",
        "gqa",
        "--out",
        tmp_path,
        "--thresholds",
        tmp_path / "t",
    )
    code, _, error = call("run", *given)
    assert code == 2 and f"dymu-64: there is no {tmp_path / 't'}; make it with `tokenprune calibrate" in error
    assert [name for name, _ in lmms_eval.calls] == ["unpatched", "random-64"]
    (tmp_path / "t").write_bytes(b"")
    assert call("run", *given)[0] == 0 and lmms_eval.calls[-1] == ("dymu-64", "gqa")


def test_running_without_lmms_eval_says_how_to_get_it(papers: Any, call: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(papers.script.importlib.util, "find_spec", lambda name: None)
    code, _, error = call("run", "--out", tmp_path)
    assert code == 2 and "pip install 'tokenprune-vlm[lmms-eval]'" in error and not list(tmp_path.iterdir())
    monkeypatch.setattr(papers.script.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(papers.script, "entry_points", lambda group: [])
    assert "does not see tokenprune" in call("run", "--out", tmp_path)[2]


# -- the page


def test_the_page_is_current(papers: Any, call: Any, tmp_path: Path, monkeypatch: Any) -> None:
    text = papers.script.PAGE.read_text()
    assert papers.script.written(text) == text, "run python benchmarks/papers_table.py page"
    assert call("page", "--check")[0] == 0
    for row in papers.published.published().rows:
        assert f"[{row.source}]" in text
    stale = tmp_path / "papers.md"
    stale.write_text(text.replace("| GQA | 61.9 |", "| GQA | 62.9 |"))
    monkeypatch.setattr(papers.script, "PAGE", stale)
    assert call("page", "--check")[0] == 1
    assert call("page")[0] == 0 and stale.read_text() == text


def test_errors_are_ours(papers: Any) -> None:
    assert issubclass(papers.outcomes.BadResultsError, TokenPruneError)
    with pytest.raises(OptionError):
        papers.sets.chosen("")
