# SPDX-License-Identifier: Apache-2.0
"""The README and the table of advice: the code runs, and each statement matches a record or the code."""

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


def test_the_readme_has_its_parts_in_order() -> None:
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


def test_the_first_code_block_prints_the_documented_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = CODE[0]
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) == 8
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    assert f"# prints: {capsys.readouterr().out.strip()}\n```" in README


def test_the_install_line_includes_torchvision_and_accelerate() -> None:
    (line,) = re.findall(r"^pip install (.*)$", README, re.MULTILINE)
    (extra,) = re.findall(r"'\.\[([\w,-]+)\]'", line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {name for part in extra.split(",") for name in project["optional-dependencies"][part]}
    assert {"torchvision", "accelerate"} <= packages and any(package.startswith("transformers") for package in packages)
    # Each torchvision requires one version of torch. As a core dependency it could make pip replace the user's torch.
    assert not any(package.startswith(("torchvision", "transformers")) for package in project["dependencies"])
    for page in ("docs/start/install.md", "demo/README.md", "benchmarks/README.md"):
        assert f"pip install {line}" in (ROOT / page).read_text(), page


def test_the_models_that_the_readme_names_load_with_their_processors() -> None:
    ran = subprocess.run([sys.executable, "-c", generator("try_readme").LOAD], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["Qwen2_5_VLProcessor 196 to 49 tokens", "Qwen2_5_VLProcessor 16 to 4 tokens"]


def test_describe_change() -> None:
    gpu = generator("gpu_page")
    words = {pruned: gpu.describe_change(gpu.Line("prefill", 100.0, pruned)) for pruned in (129.0, 104.0, 50.0)}
    assert words == {129.0: "29 % slower", 104.0: "unchanged (1.0x)", 50.0: "2.0x faster"}
    eager = gpu.prefill_lines(576, 64, 1)["eager"]
    assert eager.gain < 0.95 and f"A short prompt at batch 1 is {gpu.describe_change(eager)} without" in README


def test_each_headline_row_comes_from_one_record() -> None:
    front_page = generator("front_page")
    records = front_page.read_records(front_page.HEADLINE)
    table = front_page.headline()
    assert table in README
    for record in records:
        if record["record"] != "result" or record["method"] not in ("unpatched", front_page.SHOWN):
            continue
        is_unpruned = record["method"] == "unpatched"
        name = "all tokens" if is_unpruned else f"`{record['method']}` {record['keep']:g}"
        (row,) = (row for row in table.splitlines() if row.startswith(f"| {name} |"))
        right = 100 * record["right"][0].count("1") / len(record["right"][0])
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] == f"{record['stats']['visual_tokens_average'] / record['questions']:.0f}"
        assert cells[2].startswith(f"{right:.1f} % [")
        times = "" if is_unpruned else f"{1 / record['timing']['ttft_ratio']['p50']:.2f}x faster"
        assert cells[3].endswith(" ms") if is_unpruned else cells[3] == times
        assert cells[4] == f"{record['stats']['kv_bytes'] / record['questions'] / 2**20:.1f} MiB"
        assert cells[5] == f"{record['peak_bytes'] / 2**20:.0f} MiB"


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return timed(load), which writes the committed records with this load and returns the module that reads them."""
    front_page = generator("front_page")
    records = front_page.read_records(front_page.HEADLINE)
    monkeypatch.setattr(front_page, "ROOT", tmp_path)
    monkeypatch.setattr(front_page, "HEADLINE", tmp_path / "headline.jsonl")

    def write_and_load(load: float) -> Any:
        changed = [
            {**record, "load": load, "cpus": 2} if record["record"] == "result" else record for record in records
        ]
        for row in changed:
            if "timing" in row:
                row["timing"] = row["timing"] | {"load": load}
        front_page.rows.write(front_page.HEADLINE, changed)
        return front_page

    return write_and_load


def test_the_headline_omits_loaded_rows(timed: Any) -> None:
    assert timed(1.0).headline() in README.replace("benchmarks/results/headline.jsonl", "headline.jsonl")
    with pytest.raises(ValueError, match="only rows of a busy machine"):
        timed(9.0).headline()


@torch.no_grad()
# test_recommend.py tests the row with a token limit, which needs a processor.
@each("case", [case for case in ADVICE if "video" not in case and ADVICE[case].max_visual_tokens is None])
@each("name", ["qwen2_5_vl", "llava"])
def test_image_advice_runs_and_keeps_the_stated_share(case: str, name: str, build) -> None:
    row = ADVICE[case]
    if checks.find_unsupported_reason(row.setting.steps()[0][0], name):
        assert (case, name) == ("documents", "llava")
        row = ADVICE[row.instead]
    options = {"guard": "auto"} if row.more else {}  # tiny models lack a processor, so prompts are not read
    model, inputs = build(FAMILIES[name]), FAMILIES[name].make_inputs()
    with tokenprune.patched(model, config=row.setting, **options):
        model(**inputs)
        assert tokenprune.stats(model).keep_ratio == pytest.approx(row.keep, abs=0.15)


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in ADVICE if "video" in case])
def test_video_advice_runs(case: str, build) -> None:
    family, row = FAMILIES["qwen2_5_vl"], ADVICE[case]
    # The tower merges pairs of frames, and pevlm changes only videos of 36 or more merged frames.
    model, inputs = build(family), family.make_inputs(images=(0, 0), video=(80, 80))
    with tokenprune.patched(model, config=row.setting):
        model(**inputs)
        stats = tokenprune.stats(model)
        removes = tokenprune.method_info(row.method).site is not Site.ATTENTION
        assert (stats.visual_tokens_out < stats.visual_tokens_in) == removes
        assert bool(stats.attention_blocks) != removes


def test_the_choice_for_long_prompts_scales_linearly() -> None:
    records = (
        json.loads(line) for line in (ROOT / "benchmarks/results/cpu/scaling.jsonl").read_text().splitlines()[1:]
    )
    slope = {record["method"]: record["seconds_exponent"] for record in records if record["what"] == "selection"}
    assert slope[ADVICE["long-prompts"].method] < 1.2 and slope["divprune"] > 1.4


def test_the_choices_for_vllm_are_served() -> None:
    from tokenprune.integrations.vllm.settings.parse import check_method

    for name in ("server", *generator("which_method").SERVED):
        check_method(tokenprune.method(ADVICE[name].method))


def test_other_pages_repeat_the_advice_of_the_table() -> None:
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
        record["method"]: record["right"].count("1")
        for record in records
        if record.get("keep") == row.keep and "right" in record
    }
    assert len(right) > 5 and max(right, key=right.__getitem__) == row.method


def test_measured_losses_of_the_choices_for_ocr_and_counting() -> None:
    row = ADVICE["signs"]
    assert compute_loss(row.method, "text", row.keep) <= 2
    assert compute_loss(ADVICE["counting"].method, "counting", ADVICE["counting"].keep) > 10


def compute_loss(method: str, kind: str, keep: float) -> float:
    """Return the points that a kind of question lost, as in docs/guides/guard.md."""
    table = json.loads((ROOT / "tokenprune/integrations/hf/guard/guard.json").read_text())
    measured = next(measured for measured in table["methods"][method][kind]["measured"] if measured["keep"] == keep)
    return 100 * (measured["unpatched"] - measured["share"])


@pytest.mark.parametrize("case", ["follow-up", "server"])
def test_choices_for_shared_images_are_safe_with_a_prefix_cache(case: str) -> None:
    info = tokenprune.method_info(ADVICE[case].method)
    assert info.prefix_cache_safe and not info.query_aware


@pytest.mark.parametrize("method", [ADVICE["no-attention"].method, ADVICE["general"].method, "dart"])
def test_choices_do_not_need_attention_weights(method: str) -> None:
    assert not [need for need in tokenprune.method_info(method).observables if "attention" in need]


def test_the_default_of_patch_is_documented(build) -> None:
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
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in project["authors"]]


@pytest.mark.parametrize("name", ["CITATION.cff", "CONTRIBUTING.md"])
def test_a_source_distribution_includes_the_file(name: str) -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert name in listed["only-include"] and (ROOT / name).is_file()


def test_contributing_names_commands_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for pattern, file, line in ((r"make ([a-z-]+)", "Makefile", "{}:"), (r"dev/check ([a-z-]+)", "dev/check", r"{}\)")):
        commands = (ROOT / file).read_text()
        names = re.findall(pattern, text)
        assert names and all(re.search(rf"^{line.format(name)}", commands, re.MULTILINE) for name in names), names
