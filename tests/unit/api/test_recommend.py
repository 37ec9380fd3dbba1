# SPDX-License-Identifier: Apache-2.0
"""A setting to start from: one table of advice feeds the command, the README and the page; its evidence is of that keep
and task, and graded by the rule that the page prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoConfig, LlavaConfig, MllamaConfig
from typer.testing import CliRunner

import tokenprune
from each import each
from tests.unit.docs.test_docs import generator
from tokenprune.cli import app
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedModelError
from tokenprune.integrations.hf.guard.floors import load_floors
from tokenprune_bench.recommend import advice
from tokenprune_bench.recommend.recommendation import TASKS, recommend

ROOT = Path(__file__).parents[3]
ADVICE = advice.load_advice()
SIZE = 7e9
GOOD = {"photographs": True, "asked": 500, "size": SIZE, "sure": True}
which = generator("which_method")


def rows_of(text: str) -> dict[str, tuple[str, float, str]]:
    """Return method, keep and what else to pass of each situation, from a table in Markdown."""
    found = {}
    for line in text.splitlines():
        call = r"\[`(\w+)`\]\([^)]*\), `keep=([\d.]+)`(?:, `(.*?)`)?"
        if cells := re.match(rf"\| .*? \| {call} \| .* \| `([\w-]+)` \|$", line):
            found[cells[4]] = cells[1], float(cells[2]), cells[3] or ""
    return found


def test_the_command_the_readme_and_the_page_say_the_same() -> None:
    config = AutoConfig.for_model("qwen2_5_vl")  # every method acts in it
    said = {task: recommend(config, task=task) for task in TASKS}
    said = {task: (one.method, one.setting["keep"], one.more) for task, one in said.items()}
    assert said == {name: (one.method, one.keep, one.more) for name, one in ADVICE.items()}
    assert rows_of((ROOT / "docs/start/choose.md").read_text()) == said
    short = re.findall(r"^\| (.*?) \| \[`(\w+)`\].*?, `keep=(.*?)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    table = {one.title: (one.method, repr(one.keep)) for one in ADVICE.values()}
    assert len(short) == 5 and all(table[title] == (method, keep) for title, method, keep in short)


def test_every_situation_is_there_and_its_reason_has_a_page() -> None:
    asked = (
        "general signs documents grounding counting video long-video long-prompts server clients follow-up "
        "no-attention tower"
    )
    assert set(TASKS) == set(asked.split())
    for one in ADVICE.values():
        page, _, anchor = one.reason_page.partition("#")
        text = (ROOT / page).read_text()
        heads = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines()}
        assert not anchor or anchor in heads, one.reason_page
        assert one.instead in ADVICE and tokenprune.method_info(one.method)
        assert not re.search(r"\b\d", one.reason), "numbers are evidence"


@each("task", TASKS)
def test_evidence_is_of_the_keep_one_step_either_way_and_of_the_task(task: str) -> None:
    row = ADVICE[task]
    near, elsewhere = row.evidence(SIZE)
    by_text = {one["figure"]: one for one in advice._entries() if one["method"] == row.method}
    assert len(near) + len(elsewhere) == len(by_text)
    for piece in near:
        one = by_text[piece.figure]
        assert one["questions"] is None or one["questions"] in row.questions
        assert one["keep"] is None or 0.5 <= one["keep"] / row.keep <= 2
        assert piece.grade == advice.grade_entry(one, SIZE) in ("strong", "weak")
        if one["kind"] == "measured by us":
            assert (ROOT / one["source"]).is_file()
    # A source is left out of these only where it says something nearer, or of other questions or keeps.
    shown = {(by_text[piece.figure]["source"], piece.about) for piece in near}
    for piece in elsewhere:
        one = by_text[piece.figure]
        assert not row._is_near(one) or (one["source"], one["about"]) in shown


def test_what_was_drawn_is_weak_and_what_two_papers_print_strong() -> None:
    grades = {(one["kind"], one["photographs"], advice.grade_entry(one, SIZE)) for one in advice._entries()}
    assert ("measured by us", False, "strong") not in grades and ("published", True, "strong") in grades
    general, _ = ADVICE["general"].evidence(SIZE)
    assert [one.grade for one in general if one.kind == "published"] == ["strong", "strong"]
    assert {one.grade for one in ADVICE["general"].evidence(1e9)[0]} == {"weak"}  # of a model of another size


def test_evidence_is_strong_only_where_all_parts_of_the_rule_hold() -> None:
    """Photographs, 500 questions, a model of about this size, and a sure loss."""
    assert advice.grade_entry(GOOD, SIZE) == advice.grade_entry(GOOD | {"asked": None}, SIZE / 2.9) == "strong"
    sizes = [{"size": size} for size in (SIZE / 3.1, SIZE * 3.1, None)]
    for change in ({"photographs": False}, {"asked": 499}, {"sure": False}, *sizes):
        assert advice.grade_entry(GOOD | change, SIZE) == "weak", change
    page = (ROOT / "docs/results/advice.md").read_text()
    assert which.rule() in page and "**strong**" in which.rule() and "500 questions" in which.rule()


@each("task", TASKS)
def test_it_fits_a_screen_and_ends_with_the_closed_form(task: str) -> None:
    found = recommend(LlavaConfig(), task=task)
    assert len(str(found).splitlines()) < 26
    assert found.evidence[-1].kind == "closed form" and found.method not in ("random", "uniform")
    assert found.candidates and "pevlm" not in found.candidates
    for model in ("demo_vlm", "demo_qwen"):
        advised = recommend(model, task=task)
        assert sum(-(-len(line) // 80) for line in advised.summary.splitlines()) <= 12
    if task in ("follow-up", "long-video"):  # advised is of demo_qwen
        assert not any(entry.about == "accuracy" and entry.grade for entry in advised.evidence)
        assert "no evidence: `tune` on your questions" in str(advised)
        assert "no evidence: `tune` on your questions" in which.pieces()


def test_the_share_of_the_tower_is_told_and_who_shortens_it() -> None:
    """A method ahead of the tower is predicted to shorten it, and gets no warning."""
    pages, photographs = (recommend("demo_qwen", task=task) for task in ("documents", "signs"))
    ratios = [
        float(re.search(r"prefill x([\d.]+) as fast", advised.evidence[-1].figure)[1])
        for advised in (pages, photographs)
    ]
    assert ratios[0] > 2 * ratios[1]
    assert not any("vision tower is" in note for note in pages.notes)
    assert any("vision tower is" in note for note in photographs.notes)
    general, tower = recommend("demo_qwen"), recommend("demo_qwen", task="tower")
    assert any("vision tower is 7" in note and 'task "tower"' in note for note in general.notes)
    assert tokenprune.method_info(tower.method).site == "IN_ENCODER" and tower.served
    assert not any("vision tower is" in note for note in tower.notes)


def test_the_three_forms_are_one_setting(model) -> None:
    found = recommend(model.config)
    assert json.loads(found.config) == found.setting
    assert json.loads(shlex.split(found.vllm)[1]) == {"tokenprune": found.setting}
    with tokenprune.patched(model, config=found.setting):
        by_config = repr(model)
    try:
        exec(found.python, {"tokenprune": tokenprune, "model": model})
        assert repr(model) == by_config and found.method in by_config
    finally:
        tokenprune.unpatch(model)


def test_a_guard_that_the_evidence_needs_is_in_the_config_and_a_higher_keep_in_vllm(tmp_path: Path) -> None:
    found, out = recommend("demo_vlm", task="counting"), tmp_path / "with blanks.json"
    row = ADVICE["counting"]
    assert json.loads(found.config) == found.setting | {"guard": "auto"} and 'guard="auto"' in found.python
    floor = load_floors().get_floor(row.method, "counting")
    assert json.loads(shlex.split(found.vllm)[1]) == {"tokenprune": found.setting | {"keep": floor}}
    assert floor > row.keep and any("vLLM does not support the guard" in one for one in found.notes)
    done = CliRunner().invoke(app, ["recommend", "demo_vlm", "--task", "counting", "--out", str(out)])
    assert done.exit_code == 0 and tokenprune.read_config(out).guard == "auto"
    model, processor = tokenprune.demo_model(device="cpu")
    for config in (out, json.loads(found.config)):
        with tokenprune.patched(model, config=config, processor=processor):
            assert 'guard="auto"' in repr(model)
    plain = recommend("demo_vlm")
    assert "guard" not in plain.config and json.loads(shlex.split(plain.vllm)[1]) == {"tokenprune": plain.setting}
    # At its keep the guard has nothing to add for what a row is about.
    for task, kind in (("signs", "text"), ("grounding", "grounding")):
        assert ADVICE[task].keep >= load_floors().get_floor(ADVICE[task].method, kind)


def test_the_same_budget_by_a_smaller_image_stands_beside_it() -> None:
    found = recommend("demo_qwen", task="signs")
    speed, accuracy, time = re.split(r"; (?=measured)", found.smaller)
    assert "image (`downsample` at keep 0.5, or max_pixels of the processor): prefill x2." in speed
    ours = re.search(r"prefill (x[\d.]+) as fast", found.evidence[-1].figure)[1]
    assert speed.endswith(f"; divprune {ours}") and "questions right at keep 0.5" in accuracy
    assert "ms from the image to the first token" in time and f"\n- {found.smaller}\n" in str(found)
    assert "max_pixels" not in recommend("demo_vlm").smaller  # whose images have one size
    assert "at this keep and task was not measured" in recommend("demo_qwen", task="long-prompts").smaller
    assert recommend("demo_qwen", task="long-video").smaller == ""  # it removes nothing
    assert "is not known" in recommend(AutoConfig.for_model("fuyu")).smaller  # its patches have no tower


def test_large_photographs_get_a_limit_before_the_method() -> None:
    """Python, vLLM and the config have the limit, and other rows say when to set it, in the words of `profile`."""
    recommendation = recommend("demo_qwen", task="clients")
    row = ADVICE["clients"]
    limit = row.max_visual_tokens
    assert (
        recommendation.setting["max_visual_tokens"]
        == json.loads(recommendation.config)["max_visual_tokens"]
        == limit
        == 320
    )
    assert json.loads(shlex.split(recommendation.vllm)[1]) == {"tokenprune": recommendation.setting}
    assert recommendation.smaller == "" and any("load_image" in note for note in recommendation.notes)
    model, processor = tokenprune.demo_model("demo_qwen", device="cpu")
    with tokenprune.patched(model, config=recommendation.setting, processor=processor):
        by_config = repr(model)
        content = [{"type": "image", "image": Image.new("RGB", (600, 600))}, {"type": "text", "text": "what?"}]
        chat = [{"role": "user", "content": content}]
        inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        model(**inputs)
        assert limit * row.keep * 0.9 < tokenprune.stats(model).visual_tokens_out <= limit * row.keep
    try:
        exec(recommendation.python, {"tokenprune": tokenprune, "model": model, "processor": processor})
        assert repr(model) == by_config and "keep=320" in by_config
    finally:
        tokenprune.unpatch(model)
    (note,) = (note for note in recommend("demo_qwen").notes if "Preprocessing is the bottleneck" in note)
    assert "over 30% of the time" in note and note.endswith(advice.describe_limit()) and "320" in note
    # pixelprune does not make images smaller, so its row has the note too.
    assert any("Preprocessing" in note for note in recommend("demo_qwen", task="documents").notes)
    for family in ("gemma3", "internvl"):
        other = recommend(AutoConfig.for_model(family), task="clients")
        assert other.method == ADVICE["general"].method and "max_visual_tokens" not in other.setting
        assert any(f"limits '{family}' depends on its processor" in note for note in other.notes)
        assert not any("Preprocessing" in note for note in other.notes)


def test_a_method_that_cannot_act_gives_way_and_says_so() -> None:
    found = recommend(AutoConfig.for_model("llava_next_video"), task="long-video")  # blocks are not tested there
    assert found.method == ADVICE["video"].method
    assert any("pevlm does not support 'llava_next_video'" in one for one in found.notes)
    found = recommend(LlavaConfig(), task="long-video")  # whose prompts hold no videos, so that neither can act
    assert found.method == ADVICE["general"].method
    for name in ("pevlm", "vidcom2"):
        assert any(f"{name} does not support 'llava'" in one for one in found.notes)
    found = recommend("demo_vlm", task="documents")
    assert (found.method, found.setting["keep"]) == (ADVICE["signs"].method, ADVICE["signs"].keep)
    assert any("pixelprune does not support 'llava'. The row 'signs' is used instead" in note for note in found.notes)
    found = recommend(AutoConfig.for_model("fuyu"), task="tower")
    assert found.method == ADVICE["general"].method and any("tome does not support" in one for one in found.notes)


def test_what_vllm_does_not_serve_says_so() -> None:
    found = recommend(AutoConfig.for_model("fuyu"))
    assert found.vllm is None and "does not support this family" in str(found)
    found = recommend("demo_qwen", task="long-prompts")
    assert found.vllm is None and "not served: dart" in str(found) and "--task server" in str(found)
    narrow = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512}
    found = recommend(AutoConfig.for_model("smolvlm", text_config=narrow), task="tower")
    assert not found.served and "not a square grid of" in found.why_not


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"task 'Receipts' is not known\. Use 'signs' \(text in photographs: signs"):
        recommend("demo_vlm", task="Receipts")
    with pytest.raises(OptionError, match=r"task 'cooking' is not known\. Use one of general"):
        recommend(LlavaConfig(), task="cooking")
    with pytest.raises(UnsupportedModelError, match="cross-attention"):
        recommend(MllamaConfig())
    with pytest.raises(TokenPruneError, match="cannot read the config"):
        recommend(tmp_path)
    with pytest.raises(OptionError, match="a model, its config"):
        recommend(3)


def test_the_command_prints_it_and_writes_the_setting(tmp_path: Path) -> None:
    out = tmp_path / "tokenprune.json"
    done = CliRunner().invoke(app, ["recommend", "demo_vlm", "--task", "documents", "--details", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = recommend("demo_vlm", task="documents")
    assert done.stdout.strip() == str(found)
    assert tokenprune.read_config(out).to_json() == found.setting
    done = CliRunner().invoke(app, ["recommend", "--details"])
    assert done.exit_code == 0 and done.stdout.strip() == str(recommend("demo_vlm"))
    assert "No model named: this is for demo_vlm" in done.stderr


def test_the_file_of_evidence_is_current() -> None:
    """`python dev/evidence.py` would change nothing."""
    made = generator("evidence")
    assert made.FILE.read_text() == made.text(), "run python dev/evidence.py, then python dev/readme.py"
