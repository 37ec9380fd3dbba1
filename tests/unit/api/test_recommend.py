# SPDX-License-Identifier: Apache-2.0
"""Recommended settings: the command, the README and the page share one table of advice.

The evidence has a similar keep and the same task, and is graded by the rule on the page.
"""

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


def parse_rows(text: str) -> dict[str, tuple[str, float, str]]:
    """Return {task: (method, keep, other arguments)} from a Markdown table."""
    rows = {}
    for line in text.splitlines():
        call = r"\[`(\w+)`\]\([^)]*\), `keep=([\d.]+)`(?:, `(.*?)`)?"
        if cells := re.match(rf"\| .*? \| {call} \| .* \| `([\w-]+)` \|$", line):
            rows[cells[4]] = cells[1], float(cells[2]), cells[3] or ""
    return rows


def test_command_readme_and_page_agree() -> None:
    config = AutoConfig.for_model("qwen2_5_vl")  # supports all methods
    recommended = {task: recommend(config, task=task) for task in TASKS}
    recommended = {
        task: (recommendation.method, recommendation.setting["keep"], recommendation.more)
        for task, recommendation in recommended.items()
    }
    assert recommended == {name: (row.method, row.keep, row.more) for name, row in ADVICE.items()}
    assert parse_rows((ROOT / "docs/start/choose.md").read_text()) == recommended
    short = re.findall(r"^\| (.*?) \| \[`(\w+)`\].*?, `keep=(.*?)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    table = {row.title: (row.method, repr(row.keep)) for row in ADVICE.values()}
    assert len(short) == 5 and all(table[title] == (method, keep) for title, method, keep in short)


def test_every_task_has_a_reason_with_a_page() -> None:
    expected = (
        "general signs documents grounding counting video long-video long-prompts server clients follow-up "
        "no-attention tower"
    )
    assert set(TASKS) == set(expected.split())
    for row in ADVICE.values():
        page, _, anchor = row.reason_page.partition("#")
        text = (ROOT / page).read_text()
        heads = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines()}
        assert not anchor or anchor in heads, row.reason_page
        assert row.instead in ADVICE and tokenprune.method_info(row.method)
        assert not re.search(r"\b\d", row.reason), "numbers are evidence"


@each("task", TASKS)
def test_evidence_has_a_similar_keep_and_the_same_task(task: str) -> None:
    row = ADVICE[task]
    relevant, elsewhere = row.evidence(SIZE)
    by_text = {entry["figure"]: entry for entry in advice._read_entries() if entry["method"] == row.method}
    assert len(relevant) + len(elsewhere) == len(by_text)
    for piece in relevant:
        entry = by_text[piece.figure]
        assert entry["questions"] is None or entry["questions"] in row.questions
        assert entry["keep"] is None or 0.5 <= entry["keep"] / row.keep <= 2
        assert piece.grade == advice.grade_entry(entry, SIZE) in ("strong", "weak")
        if entry["kind"] == "measured by us":
            assert (ROOT / entry["source"]).is_file()
    # Other evidence is omitted only if its source has closer evidence, or if its task or keep differs.
    shown = {(by_text[piece.figure]["source"], piece.about) for piece in relevant}
    for piece in elsewhere:
        entry = by_text[piece.figure]
        assert not row._is_near(entry) or (entry["source"], entry["about"]) in shown


def test_grades_of_synthetic_and_published_evidence() -> None:
    grades = {
        (entry["kind"], entry["photographs"], advice.grade_entry(entry, SIZE)) for entry in advice._read_entries()
    }
    assert ("measured by us", False, "strong") not in grades and ("published", True, "strong") in grades
    general, _ = ADVICE["general"].evidence(SIZE)
    assert [entry.grade for entry in general if entry.kind == "published"] == ["strong", "strong"]
    # the measured model has another size
    assert {entry.grade for entry in ADVICE["general"].evidence(1e9)[0]} == {"weak"}


def test_evidence_is_strong_only_where_all_parts_of_the_rule_hold() -> None:
    """The rule requires photographs, 500 questions, a model of similar size, and a significant loss."""
    assert advice.grade_entry(GOOD, SIZE) == advice.grade_entry(GOOD | {"asked": None}, SIZE / 2.9) == "strong"
    sizes = [{"size": size} for size in (SIZE / 3.1, SIZE * 3.1, None)]
    for change in ({"photographs": False}, {"asked": 499}, {"sure": False}, *sizes):
        assert advice.grade_entry(GOOD | change, SIZE) == "weak", change
    page = (ROOT / "docs/results/advice.md").read_text()
    assert which.rule() in page and "**strong**" in which.rule() and "500 questions" in which.rule()


@each("task", TASKS)
def test_recommendations_fit_a_screen(task: str) -> None:
    recommendation = recommend(LlavaConfig(), task=task)
    assert len(str(recommendation).splitlines()) < 26
    assert recommendation.evidence[-1].kind == "closed form" and recommendation.method not in ("random", "uniform")
    assert recommendation.candidates and "pevlm" not in recommendation.candidates
    for model in ("demo_vlm", "demo_qwen"):
        advised = recommend(model, task=task)
        assert sum(-(-len(line) // 80) for line in advised.summary.splitlines()) <= 12
    if task in ("follow-up", "long-video"):  # advised is the recommendation for demo_qwen
        assert not any(entry.about == "accuracy" and entry.grade for entry in advised.evidence)
        assert "no evidence: `tune` on your questions" in str(advised)
        assert "no evidence: `tune` on your questions" in which.pieces()


def test_notes_about_the_share_of_the_tower() -> None:
    """A method that acts before the tower is predicted to shorten it, and gets no warning."""
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


def test_config_python_and_vllm_forms_are_equal(model) -> None:
    recommendation = recommend(model.config)
    assert json.loads(recommendation.config) == recommendation.setting
    assert json.loads(shlex.split(recommendation.vllm)[1]) == {"tokenprune": recommendation.setting}
    with tokenprune.patched(model, config=recommendation.setting):
        by_config = repr(model)
    try:
        exec(recommendation.python, {"tokenprune": tokenprune, "model": model})
        assert repr(model) == by_config and recommendation.method in by_config
    finally:
        tokenprune.unpatch(model)


def test_a_required_guard_becomes_a_higher_keep_in_vllm(tmp_path: Path) -> None:
    recommendation, out = recommend("demo_vlm", task="counting"), tmp_path / "with blanks.json"
    row = ADVICE["counting"]
    assert (
        json.loads(recommendation.config) == recommendation.setting | {"guard": "auto"}
        and 'guard="auto"' in recommendation.python
    )
    floor = load_floors().get_floor(row.method, "counting")
    assert json.loads(shlex.split(recommendation.vllm)[1]) == {"tokenprune": recommendation.setting | {"keep": floor}}
    assert floor > row.keep and any("vLLM does not support the guard" in note for note in recommendation.notes)
    result = CliRunner().invoke(app, ["recommend", "demo_vlm", "--task", "counting", "--out", str(out)])
    assert result.exit_code == 0 and tokenprune.read_config(out).guard == "auto"
    model, processor = tokenprune.demo_model(device="cpu")
    for config in (out, json.loads(recommendation.config)):
        with tokenprune.patched(model, config=config, processor=processor):
            assert 'guard="auto"' in repr(model)
    plain = recommend("demo_vlm")
    assert "guard" not in plain.config and json.loads(shlex.split(plain.vllm)[1]) == {"tokenprune": plain.setting}
    # The guard does not add tokens at the keep of its row.
    for task, kind in (("signs", "text"), ("grounding", "grounding")):
        assert ADVICE[task].keep >= load_floors().get_floor(ADVICE[task].method, kind)


def test_an_equal_budget_by_a_smaller_image_is_reported() -> None:
    recommendation = recommend("demo_qwen", task="signs")
    speed, accuracy, time = re.split(r"; (?=measured)", recommendation.smaller)
    assert "image (`downsample` at keep 0.5, or max_pixels of the processor): prefill x2." in speed
    own_speed = re.search(r"prefill (x[\d.]+) as fast", recommendation.evidence[-1].figure)[1]
    assert speed.endswith(f"; divprune {own_speed}") and "questions right at keep 0.5" in accuracy
    assert "ms from the image to the first token" in time and f"\n- {recommendation.smaller}\n" in str(recommendation)
    assert "max_pixels" not in recommend("demo_vlm").smaller  # all its images have one size
    assert "at this keep and task was not measured" in recommend("demo_qwen", task="long-prompts").smaller
    assert recommend("demo_qwen", task="long-video").smaller == ""  # it drops no tokens
    assert "is not known" in recommend(AutoConfig.for_model("fuyu")).smaller  # a family without a tower


def test_large_photographs_get_a_limit_before_the_method() -> None:
    """Python, vLLM and the config contain the limit. Other rows have a note when to set it, as in `profile`."""
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
    # pixelprune does not reduce image size, so its row has the note, too.
    assert any("Preprocessing" in note for note in recommend("demo_qwen", task="documents").notes)
    for family in ("gemma3", "internvl"):
        other = recommend(AutoConfig.for_model(family), task="clients")
        assert other.method == ADVICE["general"].method and "max_visual_tokens" not in other.setting
        assert any(f"limits '{family}' depends on its processor" in note for note in other.notes)
        assert not any("Preprocessing" in note for note in other.notes)


def test_unsupported_methods_are_replaced_with_a_note() -> None:
    # blocks of this family are not tested
    recommendation = recommend(AutoConfig.for_model("llava_next_video"), task="long-video")
    assert recommendation.method == ADVICE["video"].method
    assert any("pevlm does not support 'llava_next_video'" in note for note in recommendation.notes)
    # prompts of this family contain only images, so both methods are unsupported
    recommendation = recommend(LlavaConfig(), task="long-video")
    assert recommendation.method == ADVICE["general"].method
    for name in ("pevlm", "vidcom2"):
        assert any(f"{name} does not support 'llava'" in note for note in recommendation.notes)
    recommendation = recommend("demo_vlm", task="documents")
    assert (recommendation.method, recommendation.setting["keep"]) == (ADVICE["signs"].method, ADVICE["signs"].keep)
    assert any(
        "pixelprune does not support 'llava'. The row 'signs' is used instead" in note for note in recommendation.notes
    )
    recommendation = recommend(AutoConfig.for_model("fuyu"), task="tower")
    assert recommendation.method == ADVICE["general"].method and any(
        "tome does not support" in note for note in recommendation.notes
    )


def test_settings_that_vllm_does_not_serve() -> None:
    recommendation = recommend(AutoConfig.for_model("fuyu"))
    assert recommendation.vllm is None and "does not support this family" in str(recommendation)
    recommendation = recommend("demo_qwen", task="long-prompts")
    assert (
        recommendation.vllm is None
        and "not served: dart" in str(recommendation)
        and "--task server" in str(recommendation)
    )
    narrow = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512}
    recommendation = recommend(AutoConfig.for_model("smolvlm", text_config=narrow), task="tower")
    assert not recommendation.served and "not a square grid of" in recommendation.why_not


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
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


def test_the_command_prints_the_recommendation_and_writes_the_setting(tmp_path: Path) -> None:
    out = tmp_path / "tokenprune.json"
    result = CliRunner().invoke(app, ["recommend", "demo_vlm", "--task", "documents", "--details", "--out", str(out)])
    assert result.exit_code == 0, result.output
    recommendation = recommend("demo_vlm", task="documents")
    assert result.stdout.strip() == str(recommendation)
    assert tokenprune.read_config(out).to_json() == recommendation.setting
    result = CliRunner().invoke(app, ["recommend", "--details"])
    assert result.exit_code == 0 and result.stdout.strip() == str(recommend("demo_vlm"))
    assert "No model named: this is for demo_vlm" in result.stderr


def test_the_file_of_evidence_is_current() -> None:
    """`python dev/evidence.py` changes no file."""
    evidence = generator("evidence")
    assert evidence.FILE.read_text() == evidence.text(), "run python dev/evidence.py, then python dev/readme.py"
