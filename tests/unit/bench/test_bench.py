# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic by hand, and one small run of it on the shipped model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image

import tokenprune
from tokenprune.errors import OptionError, TokenPruneError, UnknownMethodError, UnsupportedModelError
from tokenprune_bench import paired, results, suite, tables
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.profiling.patched import patched, patched_by
from tokenprune_bench.report.png import plot_png
from tokenprune_bench.show import draw
from tokenprune_demo.scenes import KINDS

# -- marks, collapse, tables, from records made by hand ----------------------------------------------------------------


def record(method: str, keep: float, *right: str, site: str = "PRE_LLM") -> dict[str, Any]:
    stats = dict(
        visual_tokens_in=160, visual_tokens_out=40, visual_tokens_per_layer=[40, 40], visual_tokens_average=40.0,
        keep_ratio=0.25, prefill_flops_ratio=0.25, kv_bytes=2048, kv_bytes_full=8192, overhead_ms=1.0,
    )  # fmt: skip
    quantiles = dict(p20=1.0, p50=2.0, p80=3.0)
    times = dict(
        repeats=1, rows=1, load=0.5, **{f"{n}_{u}": quantiles for n in ("ttft", "token") for u in ("ms", "ratio")}
    )
    return dict(
        record="result", method=method, keep=keep, site=site, seeds=None, right=list(right), questions=20, stats=stats,
        timing=None if method == "unpatched" else times,
    )  # fmt: skip


ALL, NONE = "1" * 20, "0" * 20
HEADER = dict(
    record="header", schema=results.SCHEMA, kinds=["colour", "word"], kind_of_question="01" * 10,
    plan=dict(seeds=[0, 1, 2]), environment=dict(model="tiny", device="cpu", threads=1, dtype="float32", cores=2),
)  # fmt: skip
RECORDS = [
    HEADER,
    record("unpatched", 1.0, ALL),
    record("random", 0.25, "10" * 10, "1" * 10 + "0" * 10, "0" * 10 + "1" * 10),
    record("downsample", 0.25, ALL, site="PRE_ENCODER"),
    record("same", 0.25, "10" * 10),
    record("good", 0.25, ALL, site="IN_LLM"),
    record("bad", 0.25, NONE),
    record("lonely", 0.5, ALL),
    dict(record="skipped", method="odd", keep=0.25, reason="it cannot"),
]


def row(name: str) -> results.Row:
    return next(one for one in results.summarise(RECORDS).rows if one.method == name)


def test_marks_name_the_baselines_that_are_not_beaten() -> None:
    assert row("unpatched").marks == ()
    assert row("good").marks == ("≤down",)  # as good as `downsample` is not better
    assert row("same").marks == ("≤rnd", "≤down")
    assert row("bad").marks == ("≤rnd", "≤down")
    assert row("random").marks == ("≤down",)  # no method is compared with itself
    assert row("downsample").marks == ()
    assert row("lonely").marks == ()  # no baseline ran at this keep


def test_four_wins_are_not_enough_and_five_are() -> None:
    def answers(right: str) -> paired.Answers:
        return paired.Answers([[float(one) for one in right]], [right])

    rivals = {("random", 0.25): answers("0" * 10)}
    assert results.compute_marks("mine", 0.25, answers("1111000000"), rivals) == ("≤rnd",)
    assert results.compute_marks("mine", 0.25, answers("1111100000"), rivals) == ()


def test_a_kind_that_falls_by_more_than_twenty_points_has_collapsed() -> None:
    kinds = row("same").kinds  # every colour right, no word
    assert (kinds["colour"].value, kinds["colour"].collapsed) == (1.0, False)
    assert (kinds["word"].value, kinds["word"].collapsed) == (0.0, True)
    eight_words = record("x", 0.25, "11" * 8 + "10" * 2)
    seven_words = record("x", 0.25, "11" * 7 + "10" * 3)
    for one, collapsed in ((eight_words, False), (seven_words, True)):
        made = results.summarise([HEADER, RECORDS[1], one]).rows[-1]
        assert made.kinds["word"].collapsed is collapsed


def test_tables_say_it_in_each_form() -> None:
    summary = results.summarise(RECORDS)
    cost, kinds, against = tables.build_tables(summary)
    assert [len(row) for row in (*cost.rows, *kinds.rows, *against.rows)] == [11] * 7 + [4] * 7 + [11] * 6
    markdown = tables.to_markdown(cost)
    assert "| same | 0.25 | 8 → 2 | 2 | 25% | 0 KiB (25%) | 2.0 (0.50x) | 2.0 (0.50x) | 50.0 |" in markdown
    assert "**≤rnd ≤down**" in markdown
    assert "IN_LLM methods (good) process all tokens" in markdown
    assert "Skipped odd at keep 0.25: it cannot" in markdown
    assert "| same | 0.25 | 100 [72–100] | **0▼ [0–28]** |" in tables.to_markdown(kinds)


def test_a_plot_has_the_same_bytes_whatever_the_user_set_matplotlib_to() -> None:
    summary = results.summarise(RECORDS)
    drawn = plot_png(summary)
    assert drawn.startswith(b"\x89PNG")
    with matplotlib.rc_context({"font.size": 14, "axes.facecolor": "red", "savefig.bbox": "tight"}):
        assert plot_png(summary) == drawn


def test_times_in_a_table_agree() -> None:
    """ms = ratio x the unpatched model's ms, which its own row says: a machine that changes its pace between two rows
    must not show in them."""
    paces = {"random": 50.0, "downsample": 100.0, "same": 40.0, "good": 80.0, "bad": 60.0, "lonely": 80.0}
    records = json.loads(json.dumps(RECORDS))
    for one in records:
        if pace := paces.get(one.get("method")):
            ratio = dict.fromkeys(("p20", "p50", "p80"), 0.5)
            times = {
                name: dict.fromkeys(("p20", "p50", "p80"), time)
                for name, time in (("ms_unpatched", pace), ("ms", 0.6 * pace))
            }  # medians of each, not in pairs
            one["timing"] |= {f"{n}_{u}": values for n in ("ttft", "token") for u, values in times.items()}
            one["timing"] |= {"ttft_ratio": ratio, "token_ratio": ratio}
    summary = results.summarise(records)
    assert summary.unpatched_ms("ttft") == summary.unpatched_ms("token") == 70.0
    cost = tables.build_tables(summary)[0]
    place = cost.columns.index("TTFT, ms")
    shown = {row[0].text: [cell.text for cell in row[place : place + 2]] for row in cost.rows}
    assert shown["unpatched"] == ["70.0", "70.0"]
    assert all(shown[name] == ["35.0 (2.00x)"] * 2 for name in paces)
    # Records without times show none, and records of old, without the unpatched model's times, still work out.
    untimed = results.summarise([{**one, "timing": None} if "method" in one else one for one in RECORDS[:-1]])
    assert untimed.unpatched_ms() is None and tables.build_tables(untimed)[0].rows[0][place].text == ""
    assert results.summarise(RECORDS).unpatched_ms() == 1.0  # 2 ms at a ratio of 2


def test_a_busy_machine_is_named() -> None:
    def notes(load: float) -> str:
        busy = json.loads(json.dumps(RECORDS))
        busy[4]["timing"]["load"] = load
        return " ".join(tables.build_tables(results.summarise(busy))[0].notes)

    assert "busy" in notes(2.6)
    assert "busy" not in notes(2.4)


def test_records_are_read_back_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    assert results.read_records(path) == RECORDS
    for text, message in (
        ("", "first line is not a header"),
        ("{", "not a file of JSON lines"),
        ('{"record": "result"}', "first line is not a header"),
        ('{"record": "header", "schema": 99}', "schema 99"),
    ):
        path.write_text(text)
        with pytest.raises(TokenPruneError, match=message):
            results.read_records(path)
    with pytest.raises(TokenPruneError, match="Cannot read"):
        results.read_records(tmp_path / "none.jsonl")
    with pytest.raises(TokenPruneError, match="unpatched"):
        results.summarise([HEADER, RECORDS[2]])


# -- the shipped model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model(device="cpu")


@pytest.fixture(scope="module")
def run(subject: Model) -> list[dict[str, Any]]:
    plan = suite.BenchPlan(methods=("pool", "fastv"), keeps=(0.25,), images=1, repeats=1)
    steps: list[tuple] = []
    records = list(suite.Bench(subject, plan, lambda *step: steps.append(step)).records())
    assert [done for _, done, _ in steps] == list(range(1, 8))  # unpatched, 3 seeds of random, and 3 methods
    assert {total for _, _, total in steps} == {7}
    # What goes to a file is what comes back from it.
    return json.loads(json.dumps(records))


def test_a_run_gives_one_record_for_each_method_and_keep(run: list[dict[str, Any]]) -> None:
    header, *rest = run
    assert header["kind_of_question"] == "01234567"
    assert [(one["method"], one["keep"]) for one in rest] == [
        ("unpatched", 1.0), ("random", 0.25), ("downsample", 0.25), ("pool", 0.25), ("fastv", 0.25),
    ]  # fmt: skip
    for one in rest:
        passes = 3 if one["method"] == "random" else 1
        assert one["n"] == dict.fromkeys(KINDS, passes)
        assert [len(answers) for answers in one["right"]] == [8] * passes
        assert sum(one["correct"].values()) == "".join(one["right"]).count("1")
        for name in ("device", "torch", "transformers", "tokenprune", "threads", "dtype", "model"):
            assert one["environment"][name]
    assert len(tables.build_tables(results.summarise(run))[0].rows) == 5
    for one in rest[1:]:
        for name in ("ttft_ms", "token_ms", "ttft_ratio", "token_ratio", "ttft_ms_unpatched"):
            assert 0 < one["timing"][name]["p20"] <= one["timing"][name]["p50"] <= one["timing"][name]["p80"]


def test_costs_are_taken_against_the_unpatched_image(run: list[dict[str, Any]]) -> None:
    stats = {one["method"]: one["stats"] for one in run[1:]}
    full = stats["unpatched"]
    assert full["visual_tokens_out"] == 8 * 256
    assert full["prefill_flops_ratio"] == 1
    for name in ("random", "downsample", "pool", "fastv"):
        assert stats[name]["visual_tokens_in"] == 8 * 256
        assert stats[name]["visual_tokens_out"] == 8 * 64
        # Measured on the unpatched model's cache here, and worked out by the engine there.
        assert stats[name]["kv_bytes_full"] == full["kv_bytes"]
    # The image is a quarter of the tokens, whether cut before or after the vision tower.
    assert stats["downsample"]["kv_bytes"] == stats["pool"]["kv_bytes"]
    assert stats["downsample"]["prefill_flops_ratio"] == pytest.approx(stats["pool"]["prefill_flops_ratio"])
    assert stats["fastv"]["visual_tokens_average"] == pytest.approx(8 * (2 * 256 + 4 * 64) / 6)
    assert stats["pool"]["prefill_flops_ratio"] < stats["fastv"]["prefill_flops_ratio"] < 1


def test_the_model_is_left_unpatched(subject: Model, run: list[dict[str, Any]]) -> None:
    assert not tokenprune.is_patched(subject.model)
    assert "preprocess" not in vars(subject.processor.image_processor)
    assert not subject.adapter.decoder._forward_hooks


def test_seeds_draw_differently(subject: Model) -> None:
    image, kept = Image.new("RGB", (224, 224)), []
    for one in suite.BenchPlan(("random",), seeds=(0, 1)).passes("random", 0.25):
        with patched_by(subject, one.setting, record=True):
            subject.generate(subject.inputs([image], ["what color is the circle?"]))
            kept.append(tokenprune.stats(subject.model).cuts[0].kept)
    assert kept[0] != kept[1]
    assert [one.key for one in suite.BenchPlan(("dart",)).passes("dart", 0.25)] == [
        {"method": "dart", "keep": 0.25, "seed": None}
    ]


def test_what_a_model_does_not_support_is_skipped_with_the_reason(subject: Model) -> None:
    # `dynres` takes a share, not a number of tokens; `downsample`, a baseline, takes either.
    plan = suite.BenchPlan(methods=("dynres",), keeps=(64,), images=1, repeats=0)
    records = list(suite.Bench(subject, plan).records())
    assert [one["record"] for one in records] == ["header", "result", "result", "result", "skipped"]
    assert records[-1]["method"] == "dynres" and "a share" in records[-1]["reason"]


def test_a_plan_is_checked_before_any_work() -> None:
    assert suite.BenchPlan(methods=("dart", "random")).methods == ("random", "downsample", "dart")
    # Questions about one image have no use for a method that chooses between images.
    # Without a fitted file, learned chooses like divprune.
    everything = set(tokenprune.available_methods()) - {"learned"}
    of_videos = {"pevlm"} | {name for name in everything if "frames" in tokenprune.method_info(name).needs}
    assert set(suite.BenchPlan().methods) == everything - {"view_select"} - of_videos
    assert set(suite.BenchPlan(videos=True).methods) == everything - {"view_select"}
    assert set(suite.BenchPlan(several=True).methods) == everything - of_videos
    with pytest.raises(UnknownMethodError, match="did you mean 'dart'"):
        suite.BenchPlan(methods=("dartt",))
    with pytest.raises(TokenPruneError, match="keep"):
        suite.BenchPlan(keeps=(1.5,))
    with pytest.raises(OptionError, match="at least one keep"):
        suite.BenchPlan(keeps=())
    with pytest.raises(OptionError, match="batch_size"):
        suite.BenchPlan(batch_size=0)


def test_models_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenPruneError, match="cannot load"):
        load_model(str(tmp_path))
    with pytest.raises(TokenPruneError, match="not a torch dtype"):
        load_model(dtype="float99")
    with pytest.raises(TokenPruneError, match="cannot use device"):
        load_model(device="nowhere")
    monkeypatch.setattr("tokenprune_bench.profiling.model.get_adapter", _refuse)
    with pytest.raises(UnsupportedModelError):
        load_model(device="cpu")


def _refuse(model: Any) -> None:
    raise UnsupportedModelError("no")


# -- drawing ---------------------------------------------------------------------------------------------------------


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8).astype(np.uint8))


def test_drawn_patches_are_the_kept_ones(subject: Model) -> None:
    with patched(subject, "random", 0.25, record=True):
        inputs = subject.inputs([noise()], ["is there a star?"])
        subject.generate(inputs)
        stats = tokenprune.stats(subject.model)
    kept, groups = draw.patches(subject, inputs, stats)
    visual = (inputs["input_ids"][0] == subject.model.config.image_token_id).nonzero().flatten().numpy()
    assert set(visual[kept]) == set(stats.cuts[0].kept[0]) & set(visual)
    assert (groups[~kept] == -1).all()
    image = Image.new("RGB", (64, 64), (200, 100, 0))
    drawn = np.asarray(draw.draw(image, kept.reshape(16, 16), groups.reshape(16, 16)))
    middles = drawn[draw.CELL // 2 :: draw.CELL, draw.CELL // 2 :: draw.CELL]
    np.testing.assert_array_equal((middles == (200, 100, 0)).all(-1), kept.reshape(16, 16))


def test_merged_patches_share_a_group(subject: Model) -> None:
    with patched(subject, "pool", 0.25, record=True):
        inputs = subject.inputs([noise()], ["is there a star?"])
        subject.generate(inputs)
        kept, groups = draw.patches(subject, inputs, tokenprune.stats(subject.model))
    assert kept.sum() == 64
    assert (groups == np.arange(256))[kept].all()
    assert set(np.unique(groups, return_counts=True)[1]) == {4}  # squares of 2 x 2


def test_groups_whose_token_is_dropped_later_are_dropped(subject: Model) -> None:
    with patched(subject, "vscan", 0.25, record=True):
        inputs = subject.inputs([noise()], ["is there a star?"])
        subject.generate(inputs)
        merge, cut = tokenprune.stats(subject.model).cuts
        kept, groups = draw.patches(subject, inputs, tokenprune.stats(subject.model))
    first = inputs["input_ids"][0].tolist().index(subject.model.config.image_token_id)
    want = np.full(256, -1)
    for target, sources in merge.sources[0].items():
        if target in cut.kept[0]:
            want[[source - first for source in sources]] = target - first
    assert kept.sum() == 32 < (want >= 0).sum() < 256
    np.testing.assert_array_equal(groups, want)


def test_the_image_shown_is_the_crop_that_the_model_sees(subject: Model) -> None:
    wide = Image.new("RGB", (448, 224), (255, 0, 0))
    wide.paste((0, 0, 255), (112, 0, 336, 224))  # the middle square is all that the processor leaves
    seen = draw.seen_image(subject, subject.inputs([wide], ["is there a star?"]), wide)
    assert seen.size == (224, 224)
    assert np.asarray(seen)[10:-10, 10:-10].reshape(-1, 3).mean(0) == pytest.approx((0, 0, 255), abs=2)


def test_summary_names_skipped_methods() -> None:
    from tokenprune_bench.report.summary import describe_summary

    lines = describe_summary(results.summarise(RECORDS))
    assert "Skipped: odd." in lines[-1] and len(lines) <= 3
    measured = [record for record in RECORDS if record["record"] != "skipped"]
    assert "Skipped" not in " ".join(describe_summary(results.summarise(measured)))
