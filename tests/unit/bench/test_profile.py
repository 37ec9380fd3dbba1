# SPDX-License-Identifier: Apache-2.0
"""Test `tokenprune profile`: the stages of a call, and the closed forms beside them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import tokenprune
from tokenprune.cli import app
from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.selection.method import Site
from tokenprune.settings import Setting
from tokenprune.settings.cost import CostModel, Load, compute_decode_limit, compute_site_limits
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.profiling.profile import Profile, SideProfile, profile_call
from tokenprune_bench.profiling.profile_tables import TO_FIRST_TOKEN, build_limit_table, build_stage_table
from tokenprune_bench.profiling.stages import FIRST_TOKEN, STAGES
from tokenprune_bench.report.flame import build_flames, make_profile_page
from tokenprune_demo.heldout import load_heldout
from zoo import FAMILIES

_SPEC = importlib.util.spec_from_file_location(
    "benchmarks_limits", Path(__file__).parents[3] / "benchmarks" / "experiments" / "limits.py"
)
limits = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(_SPEC.origin).parent))
    _SPEC.loader.exec_module(limits)

STACK = {"method": ["downsample", "divprune", "fastv"], "keep": [0.5, 0.5, 0.5]}


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_vlm")


@pytest.fixture(scope="module")
def measured(subject: Model) -> Profile:
    example = load_heldout(limit=1)[0]
    return profile_call(subject, [example.image], example.question, STACK, repeats=2, new_tokens=2)


def test_a_profile_tells_every_stage_of_both_sides(measured: Profile, subject: Model) -> None:
    for side in (measured.before, measured.after):
        assert len(side.runs) == 2 and set(side.runs[0]) == set(STAGES)
        for run, total in zip(side.runs, side.first_token(), strict=True):
            assert all(run[stage] > 0 for stage in ("processor", "tower", "prefill", "decode"))
            assert total == pytest.approx(sum(run[stage] for stage in FIRST_TOKEN))
    assert all(run["selection"] == 0 for run in measured.before.runs)
    assert all(run["selection"] > 0 for run in measured.after.runs)
    assert measured.before.visual == (256, 256, 256.0)
    entered, kept, average = measured.after.visual
    assert (
        entered < 256 and kept < average <= entered / 2 + 1 and measured.after.kv_bytes < measured.before.kv_bytes / 2
    )
    example = load_heldout(limit=1)[0]
    length = subject.inputs([example.image], [example.question])["input_ids"].numel()
    assert measured.load == Load((256,), 256, length - 256)
    assert measured.predict_speedup() > 2 and json.loads(json.dumps(measured.as_dict()))["speedup"] == measured.ratio()


def test_a_profile_leaves_the_model_as_it_was(measured: Profile, subject: Model) -> None:
    base = subject.adapter.base
    assert "get_image_features" not in vars(base) and not subject.adapter.decoder._forward_hooks
    assert not subject.adapter.decoder._forward_pre_hooks
    with pytest.raises(tokenprune.TokenPruneError):
        tokenprune.stats(subject.model)


def test_stages_add_up_to_what_a_call_takes(subject: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that ticks once per reading, so that the time of each stage is known."""
    import tokenprune_bench.profiling.profile as profiling
    import tokenprune_bench.profiling.timing as timing

    ticks = iter(range(10**6))
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(ticks) / 1000)
    example = load_heldout(limit=1)[0]
    profile = profile_call(subject, [example.image], example.question, repeats=1, new_tokens=3)
    assert timing.time.perf_counter is profiling.time.perf_counter and profile.after is None
    (run,) = profile.before.runs
    # Readings between the first and the last: start of generate, tower (2), prompt, decoder (2), first token.
    assert {stage: round(run[stage], 6) for stage in STAGES} == {
        "processor": 1.0, "tower": 1.0, "selection": 0.0, "prefill": 1.0, "rest": 4.0, "decode": 3.0,
    }  # fmt: skip


def build_profile(after: bool = True) -> Profile:
    config = limits.SHAPES[4].build_config()
    runs = [dict.fromkeys(STAGES, 10.0) | {"tower": tower} for tower in (60.0, 60.0, 90.0)]
    pruned_runs = [{name: ms / 2 for name, ms in run.items()} for run in runs]
    environment = dict(model="<m>", device="cpu", dtype="float32", tokenprune="1", transformers="2", torch="3")
    return Profile(
        Setting.from_text("divprune", 0.25) if after else None,
        SideProfile(runs, "a", (1024, 1024, 1024.0), 4096),
        SideProfile(pruned_runs, "b", (1024, 256, 256.0), 1024) if after else None,
        CostModel.from_config(config), Load.from_config(config, tokens=1024), environment, 0.5,
    )  # fmt: skip


def test_the_table_names_the_largest_stage() -> None:
    table = build_stage_table(build_profile())
    cells = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert cells["vision tower and projector"] == ["60.0 ms", "60%", "30.0 ms", "x2.00"]
    assert cells["to the first token"] == ["100.0 ms", "", "50.0 ms", "x2.00"]
    assert cells["KV cache"][-1] == "x4.00" and cells["visual tokens, first to last layer"][2] == "1024 → 256 (25 %)"
    assert any("Largest stage now: vision tower and projector, 60%" in note for note in table.notes)
    assert any("tower (28%)" in note and "x2.06 faster" in note for note in table.notes)
    unpatched = build_stage_table(build_profile(after=False))
    assert unpatched.columns == ("stage", "unpatched", "share") and all(len(row) == 3 for row in unpatched.rows)


def test_bars_span_their_stages_on_one_scale() -> None:
    before, after = build_flames(build_profile())
    bars = {bar.name: bar for bar in before.bars}
    assert before.first_token == "100.0 ms" and after.first_token == "50.0 ms"
    parts = [STAGES[stage] for stage in FIRST_TOKEN]
    assert sum(bars[part].width for part in parts) == pytest.approx(bars[TO_FIRST_TOKEN].width)
    assert bars["a step of decoding"].x == pytest.approx(bars[TO_FIRST_TOKEN].width)
    assert bars["a step of decoding"].x + bars["a step of decoding"].width == pytest.approx(1000)
    assert [bar.width for bar in after.bars] == pytest.approx([bar.width / 2 for bar in before.bars])
    page = make_profile_page(build_profile(), 0.25)
    assert "&lt;m&gt;" in page and "<m>" not in page and page.count("<svg viewBox") == 2
    assert "http://" not in page and "https://" not in page and "style=" not in page


def test_bars_and_table_show_the_same_numbers_in_the_same_order() -> None:
    """Use runs whose stages take turns at being slow, so that medians of single stages do not add up."""
    profile = build_profile()
    for side, factor in ((profile.before, 1.0), (profile.after, 0.7)):
        stages = (
            {"tower": 60.04, "selection": 1.0},
            {"tower": 90.0, "prefill": 1.23},
            {"tower": 60.0, "prefill": 80.0},
        )
        side.runs = [
            {name: factor * ms for name, ms in (dict.fromkeys(STAGES, 10.0) | changes).items()} for changes in stages
        ]
    page = make_profile_page(profile, 0.25)
    table = page[page.index("<tbody>") : page.index("</tbody>")]
    rows = re.findall(r'<th scope="row">(.*?)</th>((?:\s*<td>[^<]*</td>)*)', table)
    cells = [(name, re.findall(r"<td>(.*?)</td>", cells_html)) for name, cells_html in rows]
    for column, figure in zip((0, 2), page.split('<figure class="flame">')[1:], strict=True):
        expected = [(name, texts[column]) for name, texts in cells if texts[column].endswith(" ms")]
        assert [name for name, _ in expected][-2:] == [TO_FIRST_TOKEN, "a step of decoding"] and len(expected) == 7
        assert re.findall(r"<li class=\"\w+\">(.*?) <b>(.*?)</b>", figure) == expected
        assert [tuple(text.split(": ")) for text in re.findall(r"<title>(.*?)</title>", figure)] == expected
        *stages, total, _ = (float(time.split()[0]) for _, time in expected)
        assert sum(stages) == pytest.approx(total, abs=0.3)
    medians = [profile.before.median(stage) for stage in FIRST_TOKEN]
    assert sum(medians) < sum(profile.before.median_run[stage] for stage in FIRST_TOKEN) - 10
    assert profile.before.median_run["tower"] == 90
    profile.before.runs.append(dict.fromkeys(STAGES, 0.1))  # the median run of four is the faster of the middle two
    assert sum(profile.before.median_run[stage] for stage in FIRST_TOKEN) == pytest.approx(91.04)


def test_limits_equal_the_closed_forms() -> None:
    config = limits.SHAPES[0].build_config()
    model, prompt = CostModel.from_config(config), Load.from_config(config, text=10)
    unpruned = model.compute_cost(prompt)
    limits_by_site = {site_limit.site: site_limit for site_limit in compute_site_limits(model, prompt, 0.25)}
    decoder = model.decoder
    assert unpruned.decoder == decoder.prefill_flops([586] * 32) and unpruned.tower == model.tower.flops([576])
    assert limits_by_site[Site.PRE_LLM].at_keep == pytest.approx(
        unpruned.flops / (unpruned.tower + decoder.prefill_flops([154] * 32))
    )
    assert limits_by_site[Site.IN_LLM].limit == pytest.approx(
        unpruned.flops / (unpruned.tower + decoder.prefill_flops([586] * 2 + [10] * 30))
    )
    assert limits_by_site[Site.PRE_ENCODER].limit == pytest.approx(unpruned.flops / decoder.prefill_flops([10] * 32))
    for site_limit in limits_by_site.values():
        assert 1 < site_limit.at_keep < site_limit.limit
    half, limit = compute_decode_limit(model, prompt, 0.5)
    cache, weights = 2 * 32 * 4096, 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert half == pytest.approx((weights + 586 * cache) / (weights + 298 * cache)) and limit > half
    assert model.compute_cost(prompt).cache == 586 * cache


def test_what_methods_cost_is_predicted_as_they_run(subject: Model) -> None:
    example = load_heldout(limit=1)[0]
    inputs = subject.inputs([example.image], [example.question])
    model = CostModel.from_config(subject.model.config)
    prompt = Load.from_inputs(subject.model.config, inputs, 256)
    for setting in (
        {"method": "divprune", "keep": 0.25}, {"method": "fastv", "keep": 100},
        {"method": ["divprune", "fastv"], "keep": [0.5, 0.25]}, {"method": "fastv", "keep": {"flops_share": 0.6}},
    ):  # fmt: skip
        with tokenprune.patched(subject.model, config=setting, guard="off"):
            subject.model(**inputs)
            stats = tokenprune.stats(subject.model)
        cost = model.predict(prompt, *Setting.from_json(setting).steps())
        assert cost.decoder == pytest.approx(stats.prefill_flops, rel=1e-9), setting
        assert cost.tokens == pytest.approx(stats.visual_tokens_average)
        assert 4 * cost.cache == stats.kv_bytes


def test_methods_before_the_decoder_spare_the_tower() -> None:
    config = limits.SHAPES[4].build_config()
    model, prompt = CostModel.from_config(config), Load.from_config(config, tokens=1024)
    base = model.compute_cost(prompt)
    costs = {
        name: model.predict(prompt, *Setting.from_json({"method": name, "keep": 0.5}).steps())
        for name in ("downsample", "tome", "divprune")
    }
    assert costs["downsample"].tower < 0.55 * base.tower < costs["tome"].tower < costs["divprune"].tower == base.tower
    assert len({cost.decoder for cost in costs.values()}) == 1
    same = model.predict(prompt, *Setting.from_json({"method": ["pevlm", "view_select"], "keep": 1.0}).steps())
    assert same == base


def test_loads_are_computed_from_configs_and_invalid_arguments_raise() -> None:
    llava, qwen = (limits.SHAPES[index].build_config() for index in (1, 4))
    assert Load.from_config(llava, tiles=5) == Load((576,) * 5, 2880, 64)
    assert Load.from_config(qwen, tokens=100, text=0) == Load((400,), 100, 0)
    for config, wrong in ((llava, {"tokens": 9}), (qwen, {"tiles": 2}), (qwen, {"tokens": 0}), (llava, {"text": -1})):
        with pytest.raises(OptionError):
            Load.from_config(config, **wrong)


def test_the_page_has_the_table_that_the_script_makes() -> None:
    page = limits.PAGE.read_text()
    assert limits.table() in page
    share = {row["model"].split(",")[0]: round(100 * row["tower"]) for row in limits.rows()}
    assert share == {
        "LLaVA-1.5-7B": 5, "LLaVA-NeXT-7B": 5, "InternVL3-8B": 17, "InternVL3-2B": 48, "Qwen2.5-VL-7B": 28,
        "Qwen3-VL-8B": 27, "Qwen2.5-VL-3B": 47, "Gemma3-4B": 72, "SmolVLM-500M": 80,
    }  # fmt: skip


def test_a_tower_that_is_not_known_leaves_the_decoder() -> None:
    prompt = Load((), 100, 10)
    decoder = CostModel.from_config(limits.SHAPES[0].build_config()).decoder
    table = build_limit_table(CostModel(decoder), prompt, 0.25)
    assert [row[0].text for row in table.rows] == ["PRE_LLM", "IN_LLM", "DECODE"] and "not known" in table.notes[0]
    assert CostModel(decoder).predict(prompt, *Setting.from_json({"method": "tome", "keep": 0.5}).steps()).tower == 0


def test_the_command(tmp_path: Path) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result.output

    config_only = ("--config-only", "--details", "--model", "demo_qwen", "--tokens", "784")
    output = run(*config_only, "--method", "divprune", "--keep", "0.5")
    assert re.search(r"PRE_LLM.*x1\.19", output) and "divprune: x1.19 by FLOPs" in output and "73%" in output
    image = tmp_path / "image.png"
    Image.new("RGB", (60, 40), "red").save(image)
    html, raw = tmp_path / "p.html", tmp_path / "p.json"
    small = ("--image", str(image), "--repeats", "1", "--max-new-tokens", "2", "--threads", "1")
    output = run(*small, "--details", "--method", "divprune", "--html", str(html), "--json", str(raw))
    assert "to the first token" in output and "Maximum saving per site" in output
    assert json.loads(raw.read_text())["setting"] == {"method": "divprune", "keep": 0.25}
    assert html.read_text().count('<figure class="flame">') == 2
    for arguments, message in {
        ("--tokens", "9"): "need --config-only",
        ("--config-only", "--html", str(html)): "need measured times",
        ("--method", "nothing"): "nothing",
        ("--method", "pool+dart", "--keep", "0.1+0.2+0.3"): "3 numbers for 2 methods",
        ("--keep", "1.5"): "pass a share in",
        ("--html", str(tmp_path / "no" / "p.html")): "does not exist",
        ("--config-only", "--model", str(tmp_path)): "cannot read the config",
        ("--image", str(tmp_path / "none.png")): "none.png",
    }.items():
        assert message in run(*arguments, code=2), arguments


def test_a_config_whose_tower_lacks_a_closed_form_raises() -> None:
    config = FAMILIES["llava"].build().config
    config = type(config).from_dict(config.to_dict())
    config.model_type = "mistral3"
    with pytest.raises(UnsupportedModelError, match="closed form"):
        CostModel.from_config(config)
    assert dataclasses.replace(CostModel.from_config(limits.SHAPES[0].build_config()), tower=None).tower is None


def test_the_processor_share_prefers_the_patched_model() -> None:
    def side(processor: float) -> SideProfile:
        return SideProfile([dict.fromkeys(FIRST_TOKEN, 1.0) | {"processor": processor}])

    others = len(FIRST_TOKEN) - 1
    unused: Any = None
    profile = Profile(None, side(others), None, unused, unused, {}, None)
    assert profile.processor_share == 0.5
    profile.after = side(3 * others)
    assert profile.processor_share == 0.75
