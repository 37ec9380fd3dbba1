# SPDX-License-Identifier: Apache-2.0
"""What the README shows and promises is true: its code runs and prints that, and each row of its table holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tokenprune
from each import each
from tests.unit.docs.test_docs import ROOT, generator
from tokenprune import Site
from tokenprune.integrations.shared import checks
from tokenprune_bench.recommend.advice import load_advice
from zoo import FAMILIES

README = (ROOT / "README.md").read_text()
ADVICE = load_advice()


CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_is_in_order() -> None:
    parts = (
        "](docs/images/",
        "make demo",
        "make test",
        "## Install",
        "## Use it",
        "## What it saves",
        "headline:begin",
    )
    parts += ("## Which method", "choice:begin", "## Links", "CITATION.cff", "LICENSE")
    offsets = [README.index(part) for part in parts]
    assert offsets == sorted(offsets)


def test_the_first_code_has_eight_lines_and_prints_what_the_readme_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = CODE[0]
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) == 8
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    assert f"# prints: {capsys.readouterr().out.strip()}\n```" in README


def test_the_install_line_brings_the_packages_of_processors_and_of_device_map() -> None:
    (line,) = re.findall(r"^pip install (.*)$", README, re.MULTILINE)
    (extra,) = re.findall(r"'\.\[([\w,-]+)\]'", line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {name for part in extra.split(",") for name in project["optional-dependencies"][part]}
    assert {"torchvision", "accelerate"} <= packages and any(one.startswith("transformers") for one in packages)
    # Each torchvision requires one torch: as a dependency of the core it could make pip replace the user's torch.
    assert not any(one.startswith(("torchvision", "transformers")) for one in project["dependencies"])
    for page in ("docs/start/install.md", "demo/README.md", "benchmarks/README.md"):
        assert f"pip install {line}" in (ROOT / page).read_text(), page


def test_the_models_that_the_readme_names_load_with_their_processors() -> None:
    ran = subprocess.run([sys.executable, "-c", generator("try_readme").LOAD], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["Qwen2_5_VLProcessor 196 to 49 tokens", "Qwen2_5_VLProcessor 16 to 4 tokens"]


def test_a_slower_prefill_is_called_slower() -> None:
    gpu = generator("gpu_page")
    words = {pruned: gpu.describe_change(gpu.Line("prefill", 100.0, pruned)) for pruned in (129.0, 104.0, 50.0)}
    assert words == {129.0: "29 % slower", 104.0: "unchanged (1.0x)", 50.0: "2.0x faster"}
    eager = gpu.prefill_lines(576, 64, 1)["eager"]
    assert eager.gain < 0.95 and f"A short prompt at batch 1 is {gpu.describe_change(eager)} without" in README


def test_a_row_of_the_headline_has_speed_memory_and_accuracy_of_one_record() -> None:
    front_page = generator("front_page")
    records = front_page.read_records(front_page.HEADLINE)
    table = front_page.headline()
    assert table in README
    for one in records:
        if one["record"] != "result" or one["method"] not in ("unpatched", front_page.SHOWN):
            continue
        whole = one["method"] == "unpatched"
        name = "all tokens" if whole else f"`{one['method']}` {one['keep']:g}"
        (row,) = (row for row in table.splitlines() if row.startswith(f"| {name} |"))
        right = 100 * one["right"][0].count("1") / len(one["right"][0])
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] == f"{one['stats']['visual_tokens_average'] / one['questions']:.0f}"
        assert cells[2].startswith(f"{right:.1f} % [")
        times = "" if whole else f"{1 / one['timing']['ttft_ratio']['p50']:.2f}x faster"
        assert cells[3].endswith(" ms") if whole else cells[3] == times
        assert cells[4] == f"{one['stats']['kv_bytes'] / one['questions'] / 2**20:.1f} MiB"
        assert cells[5] == f"{one['peak_bytes'] / 2**20:.0f} MiB"


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """timed(load): the committed records, timed at so much load; returns the module that reads them."""
    front_page = generator("front_page")
    records = front_page.read_records(front_page.HEADLINE)
    monkeypatch.setattr(front_page, "ROOT", tmp_path)
    monkeypatch.setattr(front_page, "HEADLINE", tmp_path / "headline.jsonl")

    def at(load: float) -> Any:
        changed = [{**one, "load": load, "cpus": 2} if one["record"] == "result" else one for one in records]
        for one in changed:
            if "timing" in one:
                one["timing"] = one["timing"] | {"load": load}
        front_page.rows.write(front_page.HEADLINE, changed)
        return front_page

    return at


def test_a_loaded_row_stays_out_of_the_headline(timed: Any) -> None:
    assert timed(1.0).headline() in README.replace("benchmarks/results/headline.jsonl", "headline.jsonl")
    with pytest.raises(ValueError, match="only rows of a busy machine"):
        timed(9.0).headline()


@torch.no_grad()
# The row with a limit of tokens needs a processor: test_recommend.py.
@each("case", [case for case in ADVICE if "video" not in case and ADVICE[case].max_visual_tokens is None])
@each("name", ["qwen2_5_vl", "llava"])
def test_a_row_about_images_runs_and_keeps_that(case: str, name: str, build) -> None:
    row = ADVICE[case]
    if checks.find_unsupported_reason(row.setting.steps()[0][0], name):
        assert (case, name) == ("documents", "llava")
        row = ADVICE[row.instead]
    more = {"guard": "auto"} if row.more else {}  # tiny models have no processor: prompts are not read then
    model, inputs = build(FAMILIES[name]), FAMILIES[name].make_inputs()
    with tokenprune.patched(model, config=row.setting, **more):
        model(**inputs)
        assert tokenprune.stats(model).keep_ratio == pytest.approx(row.keep, abs=0.15)


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in ADVICE if "video" in case])
def test_a_row_about_videos_runs(case: str, build) -> None:
    family, row = FAMILIES["qwen2_5_vl"], ADVICE[case]
    # The tower joins two frames to one, and pevlm reads videos of fewer than 36 of these as ever.
    model, inputs = build(family), family.make_inputs(images=(0, 0), video=(80, 80))
    with tokenprune.patched(model, config=row.setting):
        model(**inputs)
        stats = tokenprune.stats(model)
        removes = tokenprune.method_info(row.method).site is not Site.ATTENTION
        assert (stats.visual_tokens_out < stats.visual_tokens_in) == removes
        assert bool(stats.attention_blocks) != removes


def test_the_choice_for_long_prompts_is_linear_in_the_tokens_and_the_other_is_not() -> None:
    records = (
        json.loads(line) for line in (ROOT / "benchmarks/results/cpu/scaling.jsonl").read_text().splitlines()[1:]
    )
    slope = {one["method"]: one["seconds_exponent"] for one in records if one["what"] == "selection"}
    assert slope[ADVICE["long-prompts"].method] < 1.2 and slope["divprune"] > 1.4


def test_the_choices_for_vllm_are_served() -> None:
    from tokenprune.integrations.vllm.settings.parse import check_method

    for name in ("server", *generator("which_method").SERVED):
        check_method(tokenprune.method(ADVICE[name].method))


def test_the_page_of_the_server_and_the_recipe_give_the_advice_of_the_table() -> None:
    shown = re.findall(
        r"^\| (.*?) \| \[`(\w+)`\].*?, `keep=(.*?)` \|$", (ROOT / "docs/serving/start.md").read_text(), re.MULTILINE
    )
    rows = {row.title: (row.method, repr(row.keep)) for row in ADVICE.values()}
    assert len(shown) == 5 and all(rows[title] == (method, keep) for title, method, keep in shown)
    pages = ADVICE["documents"]
    recipe = (ROOT / "docs/results/documents.md").read_text()
    assert f'tokenprune.patch(model, "{pages.method}", keep={pages.keep!r}' in recipe


def test_the_choice_for_pages_is_the_best_measured_on_pages() -> None:
    _, *records = (json.loads(line) for line in (ROOT / "benchmarks/results/pages.jsonl").read_text().splitlines())
    row = ADVICE["documents"]
    right = {
        one["method"]: one["right"].count("1") for one in records if one.get("keep") == row.keep and "right" in one
    }
    assert len(right) > 5 and max(right, key=right.__getitem__) == row.method


def test_the_choice_for_ocr_lost_nothing_measured_at_this_keep_and_the_one_for_counting_did() -> None:
    row = ADVICE["signs"]
    assert lost(row.method, "text", row.keep) <= 2
    assert lost(ADVICE["counting"].method, "counting", ADVICE["counting"].keep) > 10


def lost(method: str, kind: str, keep: float) -> float:
    """Return the points that a kind of question lost, as in docs/guides/guard.md."""
    table = json.loads((ROOT / "tokenprune/integrations/hf/guard/guard.json").read_text())
    one = next(one for one in table["methods"][method][kind]["measured"] if one["keep"] == keep)
    return 100 * (one["unpatched"] - one["share"])


@pytest.mark.parametrize("case", ["follow-up", "server"])
def test_a_choice_that_other_questions_share_is_safe_with_a_prefix_cache(case: str) -> None:
    info = tokenprune.method_info(ADVICE[case].method)
    assert info.prefix_cache_safe and not info.query_aware


@pytest.mark.parametrize("method", [ADVICE["no-attention"].method, ADVICE["general"].method, "dart"])
def test_choices_without_attention_weights_need_none(method: str) -> None:
    assert not [need for need in tokenprune.method_info(method).observables if "attention" in need]


def test_the_default_is_what_the_readme_says(build) -> None:
    model = build(FAMILIES["llava"])
    with tokenprune.patched(model):
        assert "tokenprune: divprune(), keep=0.25" in repr(model)
    assert "`tokenprune.patch(model)` without arguments uses `divprune` at `keep=0.25`" in " ".join(README.split())
    info = tokenprune.method_info("divprune")
    assert info.prefix_cache_safe and not info.observables and info.cls.default_keep == 0.25


def test_the_citation_names_authors_and_license_of_the_project() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["license"] == project["license"]
    assert [one["name"] for one in cited["authors"]] == [one["name"] for one in project["authors"]]


@pytest.mark.parametrize("name", ["CITATION.cff", "CONTRIBUTING.md"])
def test_a_source_distribution_has_it(name: str) -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert name in listed["only-include"] and (ROOT / name).is_file()


def test_contributing_names_commands_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for pattern, file, line in ((r"make ([a-z-]+)", "Makefile", "{}:"), (r"dev/check ([a-z-]+)", "dev/check", r"{}\)")):
        commands = (ROOT / file).read_text()
        names = re.findall(pattern, text)
        assert names and all(re.search(rf"^{line.format(one)}", commands, re.MULTILINE) for one in names), names
