# SPDX-License-Identifier: Apache-2.0
"""Test the papers' table: published numbers, settings and commands."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import tokenprune
from each import each
from papers_results import ROOT, find_setting
from tokenprune import Budget

FOLDER = ROOT / "benchmarks/experiments/papers"


# -- published numbers -------------------------------------------------------------------------------------------------


def test_every_published_row_is_sound(papers: Any) -> None:
    data = papers.published.published()
    titles = {*tokenprune.available_methods(), *data.others, "unpatched"}
    sets = {*papers.sets.SETS, *data.other_sets}
    keys = set()
    for row in data.rows:
        row_key = (row.source, row.method, row.budget)
        assert row_key not in keys
        keys.add(row_key)
        assert row.source in data.sources and row.method in titles and row.means in data.means, row_key
        assert row.budget == 576 if row.method == "unpatched" else row.budget in (192, 128, 64), row_key
        assert (row.means == "all") == (row.method == "unpatched"), row_key
        assert row.values or row.average is not None, row_key
        assert row.values.keys() <= sets and row.doubt.keys() <= row.values.keys(), row_key
        for key, value in row.values.items():
            low, high = (1200, 2000) if key == "mme" else (20, 100)
            assert type(value) in (int, float) and low <= value <= high, (row_key, key)
        assert row.average is None or 70 <= row.average <= 101, row_key
        assert row.sets is None or row.average is not None, row_key
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
    """A typing error in a number would move the mean of its row away from the average in the paper."""
    data = papers.published.published()
    checked = 0
    for row in data.rows:
        base = data.unpruned(row.source)
        shared = [key for key in row.values if key in base]
        if row.average is None or len(shared) < (row.sets or 6):
            continue
        mean = sum(100 * row.values[key] / base[key] for key in shared) / len(shared)
        # VisionZip, SparseVLM and VScan do not state how they average. Each is within 1.6 of the plain mean.
        assert mean == pytest.approx(row.average, abs=1.6), (row.source, row.method, row.budget)
        checked += 1
    assert checked > 12


def test_two_sources_that_disagree_both_stay(papers: Any) -> None:
    rows = papers.published.published().get_rows("sparsevlm", 192)
    assert [(row.source, row.values["gqa"]) for row in rows if row.values] == [
        ("sparsevlm-v4", 59.5),
        ("sparsevlm-v1", 57.6),
    ]
    assert "sqa" not in papers.published.published().get_rows("dart", 192)[0].values  # 69.x


# -- settings and commands ---------------------------------------------------------------------------------------------


def test_every_method_is_in_the_table_or_left_out_with_a_reason(papers: Any) -> None:
    methods = {setting.method for setting in papers.settings.settings()} - {"unpatched"}
    assert not methods & papers.settings.LEFT_OUT.keys()
    modules = {name: tokenprune.method_info(name).cls.__module__ for name in tokenprune.available_methods()}
    ours = {name for name, module in modules.items() if module.startswith("tokenprune.methods.")}
    assert methods | papers.settings.LEFT_OUT.keys() == ours
    names = [setting.name for setting in papers.settings.settings()]
    assert len(set(names)) == len(names)


def test_budgets_are_hit(papers: Any) -> None:
    for candidate in papers.settings.settings():
        if candidate.means == "cut":
            assert candidate.average == (2 * 576 + 30 * (candidate.budget + 4)) / 32
        elif candidate.method == "downsample":
            assert candidate.average == {192: 14**2, 128: 11**2, 64: 8**2}[candidate.budget]
        else:
            assert candidate.average == pytest.approx(candidate.budget, abs=0.5), candidate.name
    assert find_setting(papers, "fastv-192").keep == round((192 * 32 - 2 * 576) / 30) == 166
    assert find_setting(papers, "dyrate-64").keep == round((64 * 32 - 3 * 576) / 29) == 11
    assert find_setting(papers, "vscan-64").tokens == "96, 32 from layer 16 on"


def test_downsample_keeps_the_average_of_its_setting(papers: Any) -> None:
    from tokenprune.integrations.shared.resizing import _find_side

    for budget in (192, 128, 64):
        downsample = find_setting(papers, f"downsample-{budget}")
        assert _find_side(24, downsample.keep) ** 2 == downsample.average


def test_settings_reach_their_average_in_a_model_of_this_shape(papers: Any) -> None:
    """Use 24 x 24 patches, 24 blocks and 32 layers, as in LLaVA-1.5-7B, with tiny widths. Only some settings run, for
    speed."""
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
    checked = set()
    for candidate in papers.settings.settings():
        if candidate.budget != 64 or candidate.method in ("downsample", "dymu"):  # these need a processor or thresholds
            continue
        with (
            tokenprune.patched(model, candidate.method, keep=candidate.keep, **candidate.options),
            torch.inference_mode(),
        ):
            model(**inputs, use_cache=True)
            assert tokenprune.stats(model).visual_tokens_average == pytest.approx(candidate.average), candidate.name
        checked.add(candidate.name)
    assert len(checked) >= 10


def parse_arguments(command: list[str]) -> dict[str, Any]:
    """Parse `--model_args` like lmms-eval."""
    arguments = dict(part.split("=", 1) for part in command[command.index("--model_args") + 1].split(","))
    for name, value in arguments.items():
        if re.fullmatch(r"(?i)true|false|-?[\d.e-]+", value):
            arguments[name] = ast.literal_eval(value.capitalize())
    return arguments


def parse_commands(output: str) -> list[list[str]]:
    lines = [shlex.split(line) for line in output.splitlines() if not line.startswith("#")]
    return [line for line in lines if line[:3] == ["python", "-m", "lmms_eval"]]


def test_every_command_is_a_setting_that_the_method_accepts(papers: Any, call: Any) -> None:
    code, output, _ = call("commands", "--out", "somewhere")
    parsed = parse_commands(output)
    assert code == 0 and len(parsed) == len(papers.settings.settings())
    for command, expected in zip(parsed, papers.settings.settings(), strict=True):
        arguments = parse_arguments(command)
        assert arguments.pop("base") == "llava_hf" and arguments.pop("pretrained") == "llava-hf/llava-1.5-7b-hf"
        assert arguments.pop("device") == arguments.pop("device_map") == "cuda"
        assert command[command.index("--output_path") + 1] == f"somewhere/{expected.name}"
        name, keep = arguments.pop("method"), arguments.pop("keep", None)
        if name == "none":
            assert (expected.name, keep, arguments) == ("unpatched", None, {})
            continue
        if name == "dymu":
            assert arguments.pop("thresholds") == "thresholds.safetensors"
            assert isinstance(keep, float)  # calibration supports shares only
        method, budget = tokenprune.method(name, **arguments), Budget.from_keep(keep)
        assert (
            method.name == expected.method and budget.keep == expected.keep and type(budget.keep) is type(expected.keep)
        )
    assert (
        f"# fastv-192: visual tokens 166 from layer 2 on; averaged over layers {(2 * 576 + 30 * 166) / 32:.1f}"
        in output
    )


def test_the_entry_point_for_lmms_eval_accepts_every_command(papers: Any, call: Any) -> None:
    parse = pytest.importorskip(
        "tokenprune_bench.lmms_eval.arguments", reason="tokenprune_bench.lmms_eval is not available"
    ).parse_arguments
    for command in parse_commands(call("commands")[1]):
        arguments = parse_arguments(command)
        arguments.pop("thresholds", None)
        parsed = parse(arguments, arguments.pop("base"), {"pretrained", "device", "device_map"})
        assert parsed.rest == {"pretrained": "llava-hf/llava-1.5-7b-hf", "device": "cuda", "device_map": "cuda"}


def test_commands_choose(papers: Any, call: Any) -> None:
    code, output, _ = call("commands", "--methods", "dart", "--budgets", "64", "--sets", "gqa,vqav2_val_lite")
    parsed = parse_commands(output)
    assert code == 0 and [command[-1] for command in parsed] == [
        "results/unpatched",
        "results/dart-64",
        "results/dart-64-cut",
    ]
    assert {command[command.index("--tasks") + 1] for command in parsed} == {"gqa,vqav2_val_lite"}
    assert not any("--include_path" in command for command in parsed)  # only TextVQA needs it
    output = call("commands", "--methods", "random", "--budgets", "64", "--sets", "gqa,textvqa", "--split")[1]
    tasks = [(command[command.index("--tasks") + 1], "--include_path" in command) for command in parse_commands(output)]
    assert tasks == [("gqa", False), ("textvqa_val_ocr", True)] * 2


def test_dymu_is_calibrated_for_the_shares_that_it_is_run_with(papers: Any, call: Any) -> None:
    output = call("commands", "--methods", "dymu", "--thresholds", "t.safetensors")[1]
    (line,) = (shlex.split(line) for line in output.splitlines() if line.startswith("tokenprune fit dymu"))
    keeps = [float(part) for part in line[line.index("--keep") + 1].split(",")]
    assert keeps == [parse_arguments(command)["keep"] for command in parse_commands(output)[1:]]
    assert line[-2:] == ["--out", "t.safetensors"]


@each(
    ("arguments", "message"),
    [
        (["--methods", "dartt"], "'dartt' is unknown"),
        (["--methods", "pevlm"], "it removes no tokens"),
        (["--budgets", "96"], "--budgets '96' is invalid. Choose from: 192, 128, 64"),
        (["--budgets", ""], "Choose from: 192"),
        (["--sets", "okvqa"], "'okvqa' is not a benchmark"),
        (["--sets", "vqav2,vqav2_val_lite"], "each only once"),
        (["--pretrained", "a,b"], "has a comma"),
    ],
)
def test_unknown_arguments_are_refused(call: Any, arguments: list[str], message: str) -> None:
    code, out, error = call("commands", *arguments)
    assert code == 2 and message in error and not parse_commands(out)


def find_lmms_eval_tasks() -> Path:
    installed = importlib.util.find_spec("lmms_eval")
    if installed is None:
        pytest.skip("lmms-eval is not installed, so its tasks cannot be read (make test-lmms does it)")
    return Path(installed.submodule_search_locations[0]) / "tasks"


def test_our_task_differs_from_lmms_evals_only_in_the_ocr_tokens(papers: Any) -> None:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    load = functools.partial(yaml.load, Loader=Loader)
    path = papers.sets.TASK_FOLDER / "textvqa_val_ocr.yaml"
    our_task = load(path.read_text())
    assert our_task["task"] == path.stem == papers.sets.SETS["textvqa"].tasks[0]
    assert our_task["lmms_eval_specific_kwargs"]["default"]["ocr"] is True
    folder = find_lmms_eval_tasks() / "textvqa"
    names = ("_default_template_textvqa_yaml", "textvqa_val.yaml")
    original = {key: value for name in names for key, value in load((folder / name).read_text()).items()}
    same = "dataset_path test_split output_type doc_to_target generation_kwargs doc_to_text doc_to_visual".split()
    assert {name: our_task[name] for name in same} == {name: original[name] for name in same}
    default = original["lmms_eval_specific_kwargs"]["default"]
    assert our_task["lmms_eval_specific_kwargs"]["default"] == default | {"ocr": True}


def test_lmms_eval_has_the_tasks_and_their_metrics(papers: Any) -> None:
    tasks = find_lmms_eval_tasks()
    for task_set in papers.sets.SETS.values():
        for task in task_set.tasks:
            if (papers.sets.TASK_FOLDER / f"{task}.yaml").exists():
                continue
            (text,) = (path.read_text() for path in tasks.glob(f"*/{task}.yaml"))
            assert re.search(rf"^task: \"?{task}\"?$", text, re.MULTILINE), task
            assert all(f"metric: {metric}\n" in text for metric in task_set.metrics), task
