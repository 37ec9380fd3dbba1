# SPDX-License-Identifier: Apache-2.0
"""Test the benchmark's arithmetic on handmade records, and a small run on the shipped model."""

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

# -- marks, collapse and tables, from handmade records -----------------------------------------------------------------


def build_record(method: str, keep: float, *right: str, site: str = "PRE_LLM") -> dict[str, Any]:
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
    build_record("unpatched", 1.0, ALL),
    build_record("random", 0.25, "10" * 10, "1" * 10 + "0" * 10, "0" * 10 + "1" * 10),
    build_record("downsample", 0.25, ALL, site="PRE_ENCODER"),
    build_record("same", 0.25, "10" * 10),
    build_record("good", 0.25, ALL, site="IN_LLM"),
    build_record("bad", 0.25, NONE),
    build_record("lonely", 0.5, ALL),
    dict(record="skipped", method="odd", keep=0.25, reason="it cannot"),
]


def find_row(name: str) -> results.Row:
    return next(row for row in results.summarise(RECORDS).rows if row.method == name)


def test_marks_name_the_baselines_that_are_not_beaten() -> None:
    assert find_row("unpatched").marks == ()
    assert find_row("good").marks == ("≤down",)  # equal to `downsample` is not better
    assert find_row("same").marks == ("≤rnd", "≤down")
    assert find_row("bad").marks == ("≤rnd", "≤down")
    assert find_row("random").marks == ("≤down",)  # a baseline is not compared with itself
    assert find_row("downsample").marks == ()
    assert find_row("lonely").marks == ()  # no baseline was measured at this keep


def test_four_wins_are_not_enough_and_five_are() -> None:
    def answers(right: str) -> paired.Answers:
        return paired.Answers([[float(score) for score in right]], [right])

    rivals = {("random", 0.25): answers("0" * 10)}
    assert results.compute_marks("mine", 0.25, answers("1111000000"), rivals) == ("≤rnd",)
    assert results.compute_marks("mine", 0.25, answers("1111100000"), rivals) == ()


def test_a_kind_that_falls_by_more_than_twenty_points_has_collapsed() -> None:
    kinds = find_row("same").kinds  # every color question is right, and every word question is wrong
    assert (kinds["colour"].value, kinds["colour"].collapsed) == (1.0, False)
    assert (kinds["word"].value, kinds["word"].collapsed) == (0.0, True)
    eight_words = build_record("x", 0.25, "11" * 8 + "10" * 2)
    seven_words = build_record("x", 0.25, "11" * 7 + "10" * 3)
    for record, collapsed in ((eight_words, False), (seven_words, True)):
        row = results.summarise([HEADER, RECORDS[1], record]).rows[-1]
        assert row.kinds["word"].collapsed is collapsed


def test_tables_are_written_as_markdown() -> None:
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
    image = plot_png(summary)
    assert image.startswith(b"\x89PNG")
    with matplotlib.rc_context({"font.size": 14, "axes.facecolor": "red", "savefig.bbox": "tight"}):
        assert plot_png(summary) == image


def test_times_in_a_table_agree() -> None:
    """Times in ms are the ratio times the unpatched time of the table, so that a machine that changes speed between two
    rows does not distort them."""
    paces = {"random": 50.0, "downsample": 100.0, "same": 40.0, "good": 80.0, "bad": 60.0, "lonely": 80.0}
    records = json.loads(json.dumps(RECORDS))
    for record in records:
        if pace := paces.get(record.get("method")):
            ratio = dict.fromkeys(("p20", "p50", "p80"), 0.5)
            # Separate medians, not pairs.
            times = {
                name: dict.fromkeys(("p20", "p50", "p80"), time)
                for name, time in (("ms_unpatched", pace), ("ms", 0.6 * pace))
            }
            record["timing"] |= {f"{n}_{u}": values for n in ("ttft", "token") for u, values in times.items()}
            record["timing"] |= {"ttft_ratio": ratio, "token_ratio": ratio}
    summary = results.summarise(records)
    assert summary.unpatched_ms("ttft") == summary.unpatched_ms("token") == 70.0
    cost = tables.build_tables(summary)[0]
    column = cost.columns.index("TTFT, ms")
    cells = {row[0].text: [cell.text for cell in row[column : column + 2]] for row in cost.rows}
    assert cells["unpatched"] == ["70.0", "70.0"]
    assert all(cells[name] == ["35.0 (2.00x)"] * 2 for name in paces)
    # Records without times show none. Old records without the unpatched model's times still work.
    untimed = results.summarise(
        [{**record, "timing": None} if "method" in record else record for record in RECORDS[:-1]]
    )
    assert untimed.unpatched_ms() is None and tables.build_tables(untimed)[0].rows[0][column].text == ""
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
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
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
    # The unpatched model, 3 seeds of random, and 3 methods.
    assert [done for _, done, _ in steps] == list(range(1, 8))
    assert {total for _, _, total in steps} == {7}
    # Records must survive a file.
    return json.loads(json.dumps(records))


def test_a_run_gives_one_record_for_each_method_and_keep(run: list[dict[str, Any]]) -> None:
    header, *records = run
    assert header["kind_of_question"] == "01234567"
    assert [(record["method"], record["keep"]) for record in records] == [
        ("unpatched", 1.0), ("random", 0.25), ("downsample", 0.25), ("pool", 0.25), ("fastv", 0.25),
    ]  # fmt: skip
    for record in records:
        passes = 3 if record["method"] == "random" else 1
        assert record["n"] == dict.fromkeys(KINDS, passes)
        assert [len(answers) for answers in record["right"]] == [8] * passes
        assert sum(record["correct"].values()) == "".join(record["right"]).count("1")
        for name in ("device", "torch", "transformers", "tokenprune", "threads", "dtype", "model"):
            assert record["environment"][name]
    assert len(tables.build_tables(results.summarise(run))[0].rows) == 5
    for record in records[1:]:
        for name in ("ttft_ms", "token_ms", "ttft_ratio", "token_ratio", "ttft_ms_unpatched"):
            assert 0 < record["timing"][name]["p20"] <= record["timing"][name]["p50"] <= record["timing"][name]["p80"]


def test_costs_are_taken_against_the_unpatched_image(run: list[dict[str, Any]]) -> None:
    stats = {record["method"]: record["stats"] for record in run[1:]}
    unpruned = stats["unpatched"]
    assert unpruned["visual_tokens_out"] == 8 * 256
    assert unpruned["prefill_flops_ratio"] == 1
    for name in ("random", "downsample", "pool", "fastv"):
        assert stats[name]["visual_tokens_in"] == 8 * 256
        assert stats[name]["visual_tokens_out"] == 8 * 64
        # Measured on the unpatched model's cache here, computed by the engine there.
        assert stats[name]["kv_bytes_full"] == unpruned["kv_bytes"]
    # The image keeps a quarter of the tokens, before or after the vision tower.
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
    for one_pass in suite.BenchPlan(("random",), seeds=(0, 1)).passes("random", 0.25):
        with patched_by(subject, one_pass.setting, record=True):
            subject.generate(subject.inputs([image], ["what color is the circle?"]))
            kept.append(tokenprune.stats(subject.model).cuts[0].kept)
    assert kept[0] != kept[1]
    assert [one_pass.key for one_pass in suite.BenchPlan(("dart",)).passes("dart", 0.25)] == [
        {"method": "dart", "keep": 0.25, "seed": None}
    ]


def test_what_a_model_does_not_support_is_skipped_with_the_reason(subject: Model) -> None:
    # `dynres` takes a share, not a token count; the baseline `downsample` takes both.
    plan = suite.BenchPlan(methods=("dynres",), keeps=(64,), images=1, repeats=0)
    records = list(suite.Bench(subject, plan).records())
    assert [record["record"] for record in records] == ["header", "result", "result", "result", "skipped"]
    assert records[-1]["method"] == "dynres" and "a share" in records[-1]["reason"]


def test_a_plan_is_checked_before_any_work() -> None:
    assert suite.BenchPlan(methods=("dart", "random")).methods == ("random", "downsample", "dart")
    # Questions about one image do not need a method that selects between images.
    # Without a fitted file, learned chooses like divprune.
    every_method = set(tokenprune.available_methods()) - {"learned"}
    video_methods = {"pevlm"} | {name for name in every_method if "frames" in tokenprune.method_info(name).needs}
    assert set(suite.BenchPlan().methods) == every_method - {"view_select"} - video_methods
    assert set(suite.BenchPlan(videos=True).methods) == every_method - {"view_select"}
    assert set(suite.BenchPlan(several=True).methods) == every_method - video_methods
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


def draw_noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8).astype(np.uint8))


def test_drawn_patches_are_the_kept_ones(subject: Model) -> None:
    with patched(subject, "random", 0.25, record=True):
        inputs = subject.inputs([draw_noise()], ["is there a star?"])
        subject.generate(inputs)
        stats = tokenprune.stats(subject.model)
    kept, groups = draw.patches(subject, inputs, stats)
    visual = (inputs["input_ids"][0] == subject.model.config.image_token_id).nonzero().flatten().numpy()
    assert set(visual[kept]) == set(stats.cuts[0].kept[0]) & set(visual)
    assert (groups[~kept] == -1).all()
    image = Image.new("RGB", (64, 64), (200, 100, 0))
    drawn = np.asarray(draw.draw(image, kept.reshape(16, 16), groups.reshape(16, 16)))
    centers = drawn[draw.CELL // 2 :: draw.CELL, draw.CELL // 2 :: draw.CELL]
    np.testing.assert_array_equal((centers == (200, 100, 0)).all(-1), kept.reshape(16, 16))


def test_merged_patches_share_a_group(subject: Model) -> None:
    with patched(subject, "pool", 0.25, record=True):
        inputs = subject.inputs([draw_noise()], ["is there a star?"])
        subject.generate(inputs)
        kept, groups = draw.patches(subject, inputs, tokenprune.stats(subject.model))
    assert kept.sum() == 64
    assert (groups == np.arange(256))[kept].all()
    assert set(np.unique(groups, return_counts=True)[1]) == {4}  # squares of 2 x 2 patches


def test_groups_whose_token_is_dropped_later_are_dropped(subject: Model) -> None:
    with patched(subject, "vscan", 0.25, record=True):
        inputs = subject.inputs([draw_noise()], ["is there a star?"])
        subject.generate(inputs)
        merge, cut = tokenprune.stats(subject.model).cuts
        kept, groups = draw.patches(subject, inputs, tokenprune.stats(subject.model))
    first = inputs["input_ids"][0].tolist().index(subject.model.config.image_token_id)
    expected = np.full(256, -1)
    for target, sources in merge.sources[0].items():
        if target in cut.kept[0]:
            expected[[source - first for source in sources]] = target - first
    assert kept.sum() == 32 < (expected >= 0).sum() < 256
    np.testing.assert_array_equal(groups, expected)


def test_the_image_shown_is_the_crop_that_the_model_sees(subject: Model) -> None:
    wide = Image.new("RGB", (448, 224), (255, 0, 0))
    wide.paste((0, 0, 255), (112, 0, 336, 224))  # the processor keeps only the middle square
    crop = draw.seen_image(subject, subject.inputs([wide], ["is there a star?"]), wide)
    assert crop.size == (224, 224)
    assert np.asarray(crop)[10:-10, 10:-10].reshape(-1, 3).mean(0) == pytest.approx((0, 0, 255), abs=2)


def test_summary_names_skipped_methods() -> None:
    from tokenprune_bench.report.summary import describe_summary

    lines = describe_summary(results.summarise(RECORDS))
    assert "Skipped: odd." in lines[-1] and len(lines) <= 3
    measured = [record for record in RECORDS if record["record"] != "skipped"]
    assert "Skipped" not in " ".join(describe_summary(results.summarise(measured)))
