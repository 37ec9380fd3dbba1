# SPDX-License-Identifier: Apache-2.0
"""A setting to start from: every number of it stands in the committed tables, and it acts on the model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from transformers import AutoConfig, LlavaConfig, MllamaConfig
from typer.testing import CliRunner

import tokenprune
from tests.docs.test_docs import generator
from tokenprune import evidence
from tokenprune.cli import app
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedModelError
from tokenprune.integrations.vllm.setting.servable import servable
from tokenprune.recommendation import GOALS, TASKS, recommend

ROOT = Path(__file__).parents[2]
ALL = [(task, goal) for task in TASKS for goal in GOALS]
which = generator("which_method")


@pytest.mark.parametrize(("task", "goal"), ALL)
def test_a_setting_acts_and_has_evidence_that_names_its_source(task: str, goal: str) -> None:
    found = recommend(LlavaConfig(), task=task, goal=goal)
    assert found.method not in ("random", "uniform", "downsample") and found.served
    assert found.method in servable() and found.method not in found.others
    with_numbers = [one for one in found.evidence if one.kind != "closed form"]
    assert with_numbers and found.evidence[-1].kind == "closed form"
    for one in with_numbers:
        assert any(letter.isdigit() for letter in one.told)
        assert one.source.startswith(("benchmarks/results/",) if one.kind == "measured by us" else ("",))
        if one.kind == "measured by us":
            assert (ROOT / one.source).is_file()
    kinds = {one.kind for one in found.evidence}
    assert ("published" in kinds) or any(note.startswith("Published: none") for note in found.notes)
    assert len(str(found).splitlines()) < 24  # one screen


def test_keeps_follow_the_goal_and_documents_keep_a_step_more() -> None:
    keeps = {place: recommend(LlavaConfig(), task=place[0], goal=place[1]).setting["keep"] for place in ALL}
    assert [keeps["chat", goal] for goal in ("quality", "ttft", "memory")] == [0.5, 0.25, 0.11]
    assert [keeps["documents", goal] for goal in ("quality", "ttft", "memory")] == [0.5, 0.5, 0.25]
    assert {keeps["video", goal] for goal in GOALS} == {0.25}  # what was measured on videos


def test_the_three_forms_are_one_setting(model) -> None:
    found = recommend(model.config, task="chat", goal="memory")
    assert json.loads(found.config) == found.setting
    assert json.loads(shlex.split(found.vllm)[1]) == {"tokenprune": found.setting}
    with tokenprune.patched(model, config=found.setting):
        by_config = repr(model)
    try:
        exec(found.python, {"tokenprune": tokenprune, "model": model})
        assert repr(model) == by_config and found.method in by_config
    finally:
        tokenprune.unpatch(model)


def test_the_best_published_goes_first_and_our_runs_break_ties() -> None:
    found = sorted(evidence.candidates("chat", 0.25, LlavaConfig()), key=lambda one: one.rank)
    best, near = found[0], [one for one in found if one.near(found[0])]
    assert best.percent == max(one.percent for one in found if one.percent)
    assert all(best.percent - one.percent <= 2 for one in near) and len(near) > 1
    chosen = min((one for one in near if one.why_not is None and one.fast), key=lambda one: -one.gap)
    assert recommend(LlavaConfig(), task="chat", goal="ttft").method == chosen.name


def test_what_is_no_better_than_random_or_needs_a_file_is_left_out() -> None:
    for task, keep in (("chat", 0.25), ("chat", 0.11), ("documents", 0.25), ("video", 0.25)):
        for one in evidence.candidates(task, keep, None):
            assert one.name not in ("dymu", "d2pruner", "fitprune", "dyrate", "random", "pool", "uniform", "frames")
            rights = [row["right"][0] for row in one.ours]
            assert not rights or sum(rights) > sum(chance for _, chance in one.beside)


def test_a_tower_that_is_most_of_the_work_gets_what_acts_in_or_before_it() -> None:
    found = recommend("demo_qwen", task="chat", goal="ttft")
    assert tokenprune.method_info(found.method).site in ("PRE_ENCODER", "IN_ENCODER")
    assert any("vision tower is 7" in note for note in found.notes)
    assert found.served and not found.why_not and f'"method": "{found.method}"' in found.vllm
    assert tokenprune.method_info(recommend("demo_qwen", task="chat", goal="memory").method).site == "PRE_LLM"
    narrow = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512}
    even = AutoConfig.for_model("smolvlm", text_config=narrow, vision_config={"image_size": 256})  # whole units
    assert recommend(even, task="chat", goal="ttft").served
    found = recommend(AutoConfig.for_model("llava_next", text_config=narrow), task="chat", goal="ttft")
    assert not found.served and "merges inside the vision tower" in found.why_not and found.vllm is None
    assert f"not served: {found.why_not}" in str(found)


def test_a_family_that_vllm_does_not_serve_says_so() -> None:
    found = recommend(AutoConfig.for_model("fuyu"), task="chat")
    assert found.vllm is None and "does not know this family" in str(found)


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="task 'cooking' is none of chat"):
        recommend(LlavaConfig(), task="cooking")
    with pytest.raises(OptionError, match="goal 'fun' is none of ttft"):
        recommend(LlavaConfig(), goal="fun")
    with pytest.raises(UnsupportedModelError, match="cross-attention"):
        recommend(MllamaConfig())
    with pytest.raises(TokenPruneError, match="cannot read the config"):
        recommend(tmp_path)
    with pytest.raises(OptionError, match="a model, its config"):
        recommend(3)


def test_the_command_prints_it_and_writes_the_setting(tmp_path: Path) -> None:
    out = tmp_path / "tokenprune.json"
    arguments = ["recommend", "demo_vlm", "--task", "documents", "--goal", "memory", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = recommend("demo_vlm", task="documents", goal="memory")
    assert done.stdout.strip() == str(found)
    assert tokenprune.read_config(out).setting == found.setting


def test_the_file_of_evidence_and_the_page_are_current() -> None:
    """`python dev/evidence.py` and `python dev/which_method.py` would change nothing."""
    made = generator("evidence")
    assert made.FILE.read_text() == made.text(), "run python dev/evidence.py, then python dev/which_method.py"
    text = which.PAGE.read_text()
    assert which.page(text) == text, "run python dev/which_method.py"
