# SPDX-License-Identifier: Apache-2.0
"""Test that lmms-eval and `tokenprune bench` agree for the shipped model, and that results have tokenprune's values."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lmms_eval.models.model_utils.gen_metrics import get_logged_metrics_history

import tokenprune
from conftest import CPU, DEMO, answers, read_values
from tokenprune import BudgetError
from tokenprune_bench.lmms_eval import model as integration
from tokenprune_bench.lmms_eval.measure import measure_calls
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.suite import Bench, BenchPlan
from tokenprune_demo.heldout import load_heldout
from tokenprune_demo.scenes import KINDS

Evaluate = Callable[..., dict[str, Any]]
IMAGES, KEEP = 3, 0.11
METHODS = ("divprune", "fastv")
RUNS = ("unpatched", "random", "downsample", *METHODS)
LLAVA = f"base=llava_hf,pretrained={DEMO},dtype=float32,{CPU}"


def arguments(method: str, keep: Any = KEEP) -> str:
    return f"{LLAVA},method={method}" + ("" if method == "unpatched" else f",keep={keep}")


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model(device="cpu")


@pytest.fixture(scope="module")
def bench(subject: Model) -> dict[str, dict[str, Any]]:
    """Return the records of `tokenprune bench` by method, with one question per batch as in lmms-eval."""
    plan = BenchPlan(methods=METHODS, keeps=(KEEP,), images=IMAGES, batch_size=1, seeds=(0,), repeats=0)
    return {record["method"]: record for record in Bench(subject, plan).records() if record["record"] == "result"}


@pytest.fixture(scope="module")
def runs(evaluate: Evaluate) -> dict[str, dict[str, Any]]:
    return {name: evaluate(arguments(name), "tokenprune_suite_plain", limit=IMAGES) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_the_accuracy_equals_bench(
    runs: dict[str, dict[str, Any]], bench: dict[str, dict[str, Any]], name: str
) -> None:
    results, record = runs[name]["results"], bench[name]
    right = {
        kind: [int(sample["exact"]) for sample in runs[name]["samples"][f"tokenprune_{kind}_plain"]] for kind in KINDS
    }
    # Image by image, in the order of the benchmark.
    assert "".join(str(right[kind][image]) for image in range(IMAGES) for kind in KINDS) == record["right"][0]
    for kind in KINDS:
        assert results[f"tokenprune_{kind}_plain"]["exact,none"] == pytest.approx(record["correct"][kind] / IMAGES)
    total = sum(record["correct"].values()) / sum(record["n"].values())
    assert results["tokenprune_suite_plain"]["exact,none"] == pytest.approx(total)


def test_the_methods_give_different_answers(runs: dict[str, dict[str, Any]]) -> None:
    """Otherwise the test above would show little."""
    assert len({str(answers(out)) for out in runs.values()}) == len(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_the_cost_equals_bench(runs: dict[str, dict[str, Any]], bench: dict[str, dict[str, Any]], name: str) -> None:
    values, stats, questions = read_values(runs[name]), bench[name]["stats"], IMAGES * len(KINDS)
    assert values["measured_requests"] == values["generate_calls"] == questions
    assert values["failed_calls"] == 0
    assert values["visual_tokens_out"] == stats["visual_tokens_out"] / questions
    assert values["visual_tokens_average"] == pytest.approx(stats["visual_tokens_average"] / questions)
    assert values["kv_bytes"] == stats["kv_bytes"] / questions
    assert 0 < values["ttft_ms"] < 60_000
    assert 0 < values["ttft_ms_p50"] < 60_000
    if name == "downsample":  # the model receives fewer tokens, and the original count is unknown
        assert values["visual_tokens_in"] == values["visual_tokens_out"]
        assert not {"keep_ratio", "prefill_flops_ratio", "kv_bytes_full"} & set(values)
        return
    assert values["visual_tokens_in"] == stats["visual_tokens_in"] / questions
    assert values["kv_bytes_full"] == stats["kv_bytes_full"] / questions
    assert values["keep_ratio"] == pytest.approx(stats["keep_ratio"])
    assert values["prefill_flops_ratio"] == pytest.approx(stats["prefill_flops_ratio"])
    assert (values["overhead_ms"] > 0) == (name != "unpatched")


def test_every_task_has_its_numbers(runs: dict[str, dict[str, Any]]) -> None:
    values = read_values(runs["divprune"])
    names = {name for name in values if "/" not in name} - {"speed", "rank"}
    for kind in KINDS:
        prefix = f"tokenprune_{kind}_plain/"
        assert {name.removeprefix(prefix) for name in values if name.startswith(prefix)} == names
        assert values[f"{prefix}measured_requests"] == IMAGES
    for name in ("visual_tokens_out", "kv_bytes", "visual_tokens_average"):
        parts = [values[f"tokenprune_{kind}_plain/{name}"] for kind in KINDS]
        assert values[name] == pytest.approx(sum(parts) / len(parts))


def test_one_task_has_no_numbers_twice(evaluate: Evaluate) -> None:
    out = evaluate(arguments("divprune"), "tokenprune_word_plain", limit=1)
    assert not [name for name in read_values(out) if "/" in name]
    assert out["throughput"]["total_gen_tokens"] > 0
    assert out["config"]["model_backend"].endswith("model.TokenPruneLlavaHf (chat)")


@pytest.mark.parametrize("force_simple", [False, True])
def test_unpatched_answers_equal_the_base(evaluate: Evaluate, force_simple: bool) -> None:
    base, tasks = LLAVA.removeprefix("base=llava_hf,"), ("tokenprune_word", "tokenprune_count")
    base_only = evaluate(base, *tasks, model="llava_hf", force_simple=force_simple)
    unpatched = evaluate(f"{LLAVA},method=none", *tasks, force_simple=force_simple)
    unpruned = evaluate(f"{LLAVA},method=dart,keep=1.0", *tasks, force_simple=force_simple)
    assert answers(base_only) == answers(unpatched) == answers(unpruned)
    assert unpatched["throughput"]["total_gen_tokens"] == unpruned["throughput"]["total_gen_tokens"]


def record_prompts(lm: Any, request: Any) -> list[list[int]]:
    """Return the ids that a model of lmms-eval passes to `generate`."""
    ids = []
    lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: ids.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    lm.generate_until([request])
    return ids[:1]


@pytest.mark.parametrize("force_simple", [False, True])
def test_the_prompt_equals_bench(subject: Model, force_simple: bool) -> None:
    from lmms_eval.api.instance import Instance

    example = load_heldout(limit=1)[0]
    lm = integration.load(
        "llava_hf", method="none", pretrained=str(DEMO), device="cpu", device_map="cpu", force_simple=force_simple
    )
    lm.task_dict = {"task": {"test": [example]}}
    settings = {"max_new_tokens": 1}
    if force_simple:
        arguments = (example.question, settings, lambda doc: [doc.image], 0, "task", "test")
    else:
        content = [{"type": "image", "url": example.image}, {"type": "text", "text": example.question}]
        arguments = (example.question, lambda doc: [{"role": "user", "content": content}], settings, 0, "task", "test")
    request = Instance("generate_until", arguments, 0, {"task": "task", "doc_id": 0, "repeats": 1})
    expected = subject.inputs([example.image], [example.question])["input_ids"][0].tolist()
    assert record_prompts(lm, request) == [expected]


def test_composed_methods(evaluate: Evaluate) -> None:
    out = evaluate(arguments("divprune+fastv", "0.5+0.5") + ",layer=3", "tokenprune_colour_plain")
    values = read_values(out)
    layers = len(load_model(device="cpu").adapter.decoder.layers)
    assert (values["visual_tokens_in"], values["visual_tokens_out"]) == (256, 64)
    assert values["visual_tokens_average"] == pytest.approx((3 * 128 + (layers - 3) * 64) / layers)


def test_a_batch_is_counted_by_its_requests(evaluate: Evaluate, folder: Any) -> None:
    args = f"base=qwen2_5_vl,method=divprune,keep=0.25,pretrained={folder('qwen2_5_vl')},{CPU}"
    single = read_values(evaluate(args, "tokenprune_colour", limit=3))
    batched = read_values(evaluate(args, "tokenprune_colour", limit=3, batch_size=2))
    assert (batched["measured_requests"], batched["generate_calls"]) == (3, 2)
    for name in ("visual_tokens_in", "visual_tokens_out", "visual_tokens_average", "keep_ratio"):
        assert batched[name] == single[name]


def test_an_error_of_ours_ends_the_run(evaluate: Evaluate, log: list[str]) -> None:
    """lmms-eval's LLaVA catches errors, and would score the empty answer as wrong."""
    with pytest.raises(BudgetError, match="cannot be reached by a cut at layer"):
        evaluate(f"{LLAVA},method=fastv,average_tokens=10", "tokenprune_colour_plain", limit=3)
    assert any("in generating" in line and "cannot be reached" in line for line in log)


def test_a_failure_of_the_model_is_counted(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlavaForConditionalGeneration

    forward, calls = LlavaForConditionalGeneration.forward, []

    @functools.wraps(forward)
    def fail_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", fail_once)
    values = read_values(evaluate(arguments("divprune"), "tokenprune_colour_plain", limit=3))
    assert (values["failed_calls"], values["generate_calls"], values["measured_requests"]) == (1, 2, 2)


def test_watching_leaves_the_model_as_it_was(subject: Model) -> None:
    model = subject.model
    before = set(vars(model)), dict(model._forward_hooks)
    inputs = subject.inputs([load_heldout(limit=1)[0].image], ["what color is the circle?"])
    with measure_calls(model) as tally:
        answers_while_measured = subject.generate(inputs)
    assert (set(vars(model)), dict(model._forward_hooks)) == before
    assert answers_while_measured == subject.generate(inputs)
    assert tally.requests == tally.calls == 1
    with pytest.raises(IndexError), measure_calls(model) as tally:
        model.generate(input_ids=torch.full((1, 1), 10**6))  # the vocabulary lacks this id
    assert (tally.failed, tally.calls) == (1, 0)
    assert (set(vars(model)), dict(model._forward_hooks)) == before


def test_the_time_to_the_first_token(subject: Model) -> None:
    """It starts before the vision tower and ends between the first and the second forward."""
    model, clock = subject.model, time.perf_counter
    towers: list[float] = []
    forwards: list[float] = []
    handles = [
        subject.adapter.base.vision_tower.register_forward_pre_hook(lambda *args: towers.append(clock())),
        model.register_forward_hook(lambda *args: forwards.append(clock())),  # runs before the hook that measures
    ]
    inputs = subject.inputs([load_heldout(limit=1)[0].image], ["what color is the circle?"])
    try:
        with measure_calls(model) as tally:
            begin = clock()
            subject.generate(inputs, min_new_tokens=4)
    finally:
        for handle in handles:
            handle.remove()
    (ttft_ms,) = tally.ttft_ms
    assert len(towers) == 1 and len(forwards) == tally.new_tokens == 4
    assert forwards[0] - towers[0] < ttft_ms / 1000 < forwards[1] - begin
    assert forwards[3] - begin < tally.seconds + 0.1


def test_tokens_are_counted_once_if_the_base_reports_them(evaluate: Evaluate) -> None:
    """LLaVA's chat class reports to lmms-eval and its simple class does not. In both cases each token counts once."""
    chat = evaluate(arguments("divprune"), "tokenprune_colour_plain")
    logged = get_logged_metrics_history()
    assert [entry["total_gen_tokens"] > 0 for entry in logged] == [True, False]
    simple = evaluate(arguments("divprune"), "tokenprune_colour_plain", force_simple=True)
    assert len(get_logged_metrics_history()) == 1
    assert simple["throughput"]["total_gen_tokens"] == chat["throughput"]["total_gen_tokens"] > 0
    assert simple["throughput"]["total_elapsed_time"] > 0


def test_the_guard_gets_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(tokenprune, "patch", lambda model, **further: options.append(further))
    for guard in ("auto", "off"):
        integration.load("llava_hf", method="dart", guard=guard, pretrained=str(DEMO), device="cpu", device_map="cpu")
    processor = options[0].pop("processor")  # for reading prompts
    assert processor.tokenizer.decode([5])
    assert [arguments.pop("config").to_json() for arguments in options] == [{"method": "dart"}, {"method": "dart"}]
    assert options == [{"guard": "auto"}, {"guard": "off", "processor": None}]


def test_the_model_is_registered_beside_other_models() -> None:
    from lmms_eval.models import get_model, list_available_models

    assert "tokenprune" in list_available_models()
    assert get_model("tokenprune") is integration.TokenPruneChat
    assert get_model("tokenprune", force_simple=True) is integration.TokenPrune
