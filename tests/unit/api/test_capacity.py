# SPDX-License-Identifier: Apache-2.0
"""`tokenprune capacity` and `draft`: formulas compared with hand computations and measurements, and bad arguments."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2_5_VLConfig, Qwen3VLMoeConfig
from typer.testing import CliRunner

import tokenprune
from each import each
from families import FAMILIES as EVERY_FAMILY
from tokenprune import Budget, DraftCost
from tokenprune.cli import app
from tokenprune.errors import BudgetError, OptionError, TokenPruneError, UnsupportedModelError
from tokenprune.integrations.vllm.capacity import Assumptions, Server, build_load
from tokenprune.integrations.vllm.gpus import GPU, GPUS, find_gpu
from tokenprune.models.tower_shape import FAMILY_JOINS as KNOWN
from zoo import FAMILIES

QWEN_7B = Qwen2_5_VLConfig(
    text_config=dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                     num_key_value_heads=4, vocab_size=152064),
    vision_config=dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584),
    tie_word_embeddings=False,
)  # fmt: skip
H100 = GPUS["H100"]


def run_capacity(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["capacity", *map(str, arguments)])


@each("name", [name for name in FAMILIES if name in KNOWN])
def test_weight_count_matches_the_model(build: Any, name: str) -> None:
    model = build(FAMILIES[name])
    matrices = {id(parameter): parameter.numel() for parameter in model.parameters() if parameter.ndim > 1}
    positions = sum(
        parameter.numel() for key, parameter in model.named_parameters() if parameter.ndim > 1 and "pos" in key
    )
    num_weights = Server.from_config(model.config, H100, dtype="float32").numbers
    assert num_weights == pytest.approx(sum(matrices.values()) - positions, rel=0.005)


@pytest.mark.parametrize(("config", "billions"), [(LlavaConfig(), 7.06), (QWEN_7B, 8.29)])
def test_weight_count_matches_published_checkpoints(config: Any, billions: float) -> None:
    assert Server.from_config(config, H100).numbers / 1e9 == pytest.approx(billions, rel=0.005)


def test_capacity_matches_hand_computation() -> None:
    gpu = GPU("round", 40e9, 1e12, 100e12, 10e12)
    server = Server.from_config(LlavaConfig(), gpu, assumed=Assumptions(0.5, 0.25, 0.5, 0.5, at_once=4, host=0.01))
    load = build_load(LlavaConfig(), 2, tokens=None, tiles=None, text=48)
    assert (load.visual, load.text, load.views) == (1152, 48, (576, 576))
    unpruned, pruned = (server.capacity(load, keep, 2, 100) for keep in (1.0, 0.25))
    token = 2 * 32 * 4096 * 2  # keys and values, layers, width, bytes
    assert unpruned.kv_bytes == 1312 * token and pruned.kv_bytes == 448 * token  # 1300 and 436 tokens, in blocks of 16
    assert (unpruned.visual, pruned.visual, pruned.prompt, pruned.keep) == (1152, 288, 336, 0.25)
    assert (
        unpruned.requests == int((20e9 - 2 * server.numbers) // unpruned.kv_bytes) > 4
        and pruned.requests > unpruned.requests
    )
    # The tower processes all patches at any keep.
    decoder = server.costs.decoder
    saved_flops = decoder.prefill_flops([1200] * 32) - decoder.prefill_flops([336] * 32)
    assert unpruned.prefill_flops - pruned.prefill_flops == pytest.approx(saved_flops)
    tower = server.costs.compute_cost(load).tower
    assert unpruned.prefill_seconds == pytest.approx((unpruned.prefill_flops - tower) / 50e12 + tower / 25e12)
    assert unpruned.prefills == 1 / unpruned.prefill_seconds and unpruned.first_token == unpruned.prefill_seconds > 0.01
    # The time of the host is a lower limit for the time of the GPU.
    slow_host = Assumptions(0.5, 0.25, 0.5, 0.5, at_once=4, host=9.0, each=1.0, launch=2.0)
    slow = replace(server, assumed=slow_host).capacity(load, 0.25, 2, 100)
    assert (slow.first_token, slow.prefills, slow.step_seconds) == (9.0, 1.0, 2.0)
    assert slow.rate == pytest.approx(1 / (1.0 + 99 * 2.0 / 4)) and slow.prefill_seconds == pruned.prefill_seconds
    read = 2 * (decoder.num_weights + 32000 * 4096)
    assert unpruned.step_seconds == pytest.approx((read + 4 * (1200 + 50) * token) / 0.5e12)
    assert unpruned.rate == pytest.approx(1 / (unpruned.prefill_seconds + 99 * unpruned.step_seconds / 4))
    tiny = build_load(LlavaConfig(), 1, tokens=None, tiles=None, text=0)
    memory = Server.from_config(LlavaConfig(), GPU("slow memory", 40e9, 1e10, 100e12, 1e12))
    assert memory.capacity(tiny, 1.0, 1, 1).first_token == pytest.approx(
        read / (0.6 * 1e10)
    )  # it reads the weights once


def test_capacity_grows_with_gpus() -> None:
    load = build_load(QWEN_7B, 1, tokens=1200, tiles=None, text=64)
    single, double = (Server.from_config(QWEN_7B, H100, num_gpus).capacity(load, 1.0, 1, 64) for num_gpus in (1, 2))
    assert double.requests > 2 * single.requests and double.prefills == pytest.approx(2 * single.prefills)
    float32 = Server.from_config(QWEN_7B, H100, dtype="float32").capacity(load, 1.0, 1, 64)
    assert float32.kv_bytes == 2 * single.kv_bytes and float32.prefills < single.prefills / 10


@each(
    ("make", "error", "message"),
    [
        (lambda: find_gpu("h10"), OptionError, "Did you mean H100"),
        (lambda: Server.from_config(LlavaConfig(), GPUS["A10"], 1, "float32"), UnsupportedModelError, "least 2 GPU"),
        (lambda: Server.from_config(Qwen3VLMoeConfig(), H100), UnsupportedModelError, "mixture of experts"),
        (lambda: Server.from_config(LlavaConfig(), H100, dtype="int8"), OptionError, "not one of bfloat16"),
        (lambda: Server.from_config(LlavaConfig(), H100, 0), OptionError, "at least 1 GPU"),
        (lambda: Assumptions(compute=0).check(), OptionError, r"compute: 0 is not a share"),
        (lambda: Assumptions(at_once=0).check(), OptionError, "at_once and block must be at least 1"),
        (lambda: build_load(LlavaConfig(), 0, tokens=None, tiles=None, text=1), OptionError, "at least 1 image"),
    ],
)  # fmt: skip
def test_unsupported_servers_are_rejected(make: Any, error: type[TokenPruneError], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
    assert find_gpu("h100") is H100 and find_gpu("MI300X").memory == 192e9


def test_too_large_request_is_rejected() -> None:
    server = Server.from_config(QWEN_7B, H100)
    load = build_load(QWEN_7B, 4, tokens=1_000_000, tiles=None, text=0)
    with pytest.raises(UnsupportedModelError, match="use more GPUs, or fewer images"):
        server.capacity(load, 1.0, 4, 1)
    with pytest.raises(BudgetError):
        server.capacity(load, 1.5, 4, 1)


def test_command_prints_all_assumptions(tmp_path: Path) -> None:
    QWEN_7B.save_pretrained(tmp_path / "model")
    file = tmp_path / "out.json"
    arguments = ("--model", tmp_path / "model", "--images", 2, "--tokens", 1200, "--keep", "0.25,0.1", "--json", file)
    result = run_capacity(*arguments, "--ttft", "100ms", "--compute", 0.5, "--host", "5ms")
    assert result.exit_code == 0, result.output
    for text in ("unpatched", "keep 0.25", "keep 0.1", "50% of 989.4", "60% of 3.35", "85% of 1 x 80", "256 concurrent",
                 "5 ms to first token", "8.29 B", "within 100 ms"):  # fmt: skip
        assert text in result.output
    output = json.loads(file.read_text())
    assert [side["visual"] for side in output["sides"]] == [2400, 600, 240]
    assumed = Assumptions(compute=0.5, host=0.005)
    assert output["assumed"] == vars(assumed)
    is_within = [side["first_token"] <= output["ttft"] for side in output["sides"]]
    assert [side["holds"] for side in output["sides"]] == is_within == [False, True, True]
    row = next(line for line in result.output.splitlines() if "within 100 ms" in line)
    assert row.count("no") == 1 and row.count("yes") == 2


@each(
    ("arguments", "message"),
    [
        (("--ttft", "5"), "Write 500ms or 0.5s"),
        (("--tokens", 100), "Pass a number of tiles"),
        (("--gpu", "K80"), "GPU 'K80' is not known"),
        (("--keep", "0"), "keep"),
        (("--keep", "1"), "1.0 to keep all tokens"),
        (("--measured", "1.0=fast"), "is not a rate at a keep"),
        (("--measured", "1.0=2"), "exactly two keeps, not 1"),
        (("--measured", "1.0=2,0.25=1"), "no shares of the peak reproduce both rates"),
        (("--block", 0), "at_once and block must be at least 1"),
        (("--json", "/nowhere/x.json"), "the folder /nowhere does not exist"),
        (("--model", "/nowhere"), "does not exist"),
    ],
)
def test_invalid_arguments_print_one_line(arguments: tuple[object, ...], message: str) -> None:
    result = run_capacity(*arguments)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output


MEASURED = Path(__file__).parents[3] / "benchmarks/results/nvidia-h200/h_vllm_times.jsonl"
# (config, request, host times) of each engine. Without CUDA graphs a decoding step takes 13 ms.
ENGINES: dict[str, tuple[Any, dict[str, int], dict[str, float]]] = {
    "llava7b.default": (LlavaConfig(), {"text": 39}, {"host": 0.049}),
    "llava7b.eager": (LlavaConfig(), {"text": 39}, {"host": 0.034, "launch": 0.013}),
    "qwen7b.eager": (QWEN_7B, {"text": 41, "tokens": 2116}, {"host": 0.085, "launch": 0.013}),
}


def read_rows() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()[1:]]
    return [row for row in rows if row["engine"] in ENGINES]


def build_server(engine: str, **options: float) -> tuple[Server, Any]:
    config, size, host = ENGINES[engine]
    load = build_load(config, 1, tokens=size.get("tokens"), tiles=None, text=size["text"])
    return Server.from_config(config, GPUS["H200"], assumed=Assumptions(at_once=64, **host | options)), load


def parse_keep(row: dict[str, Any]) -> float:
    return 1.0 if row["setting"] == "off" else float(row["setting"].split()[1])


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: f"{row['engine']}-{row['setting']}")
def test_estimates_match_h200_measurements(row: dict[str, Any]) -> None:
    """The shares are defaults. Host time and time of a step without CUDA graphs were measured for each engine."""
    server, load = build_server(row["engine"])
    estimate = server.capacity(load, parse_keep(row), 1, row["answer"])
    assert estimate.prompt == row["prompt"]
    assert estimate.rate == pytest.approx(row["rate"], rel=0.15)
    assert estimate.first_token == pytest.approx(row["first_ms"] / 1000, rel=0.16)
    num_cached = estimate.kv_bytes / server.costs.decoder.kv_bytes([1] * server.costs.decoder.layers, 2)
    if row["blocks"] % row["at_once"] == 0:  # all requests ran together
        assert row["blocks"] == row["at_once"] * num_cached / row["block_size"]


def test_measured_rates_fit_the_shares() -> None:
    server, load = build_server("qwen7b.eager")
    rates = {parse_keep(row): row["rate"] for row in read_rows() if row["engine"] == "qwen7b.eager"}
    fitted = server.fit(load, 1, 16, {keep: rates[keep] for keep in (1.0, 0.25)})
    for keep, rate in rates.items():
        exact = 0.06 if keep == 0.11 else 1e-6
        assert fitted.capacity(load, keep, 1, 16).rate == pytest.approx(rate, rel=exact)
    assert 0.6 < fitted.assumed.compute < 0.8 and 0.25 < fitted.assumed.tower < 0.31
    with pytest.raises(OptionError, match="two keeps with many concurrent"):
        server.fit(load, 1, 16, {1.0: 11.0, 0.25: 11.0})


PAGE = Path(__file__).parents[3] / "docs/guides/drafts.md"
SMALL = LlamaConfig(
    vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


def build_qwen(**text: int) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(text_config=dict(vocab_size=152064, **text))


LARGE = dict(
    hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)
MIDDLE = dict(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4
)
VICUNA = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
# (target config, draft config, visual tokens) of each row of the page
ROWS = {
    "Qwen2.5-VL-72B, 7B": (build_qwen(**LARGE), build_qwen(**MIDDLE), 20_000),
    "Qwen2.5-VL-7B, its own weights": (build_qwen(**MIDDLE), None, 20_000),
    "LLaVA-1.5-7B, its own weights": (
        LlavaConfig(text_config=LlamaConfig(vocab_size=32064, **VICUNA), vision_config=CLIPVisionConfig()), None, 576,
    ),
}  # fmt: skip


def build_cost(name: str) -> DraftCost:
    config, draft, tokens = ROWS[name]
    methods, budgets = [tokenprune.method("divprune")], [Budget(keep=0.1)]
    return DraftCost.from_configs(config, draft, methods, budgets, tokens=tokens, text=256)


def test_bytes_read_per_step() -> None:
    """A step reads each weight matrix, with the output head, and a key and a value of 4 numbers per token and layer."""
    weights = 4 * 8 * (2 * 8 + 2 * 4 + 3 * 16) + 100 * 8
    unpruned = DraftCost.from_configs(SMALL, tokens=30, text=10, bytes_per_value=2.0)
    assert unpruned.target == unpruned.draft == 2 * weights + 2 * 2 * 4 * 4 * 40 and unpruned.c == 1
    method, half = tokenprune.method("fastv", layer=2), Budget(keep=0.5)
    sizes = {"bytes_per_value": 4.0, "bytes_per_weight": 1.0}
    fastv = DraftCost.from_configs(SMALL, None, [method], [half], tokens=30, text=10, **sizes)
    assert fastv.target == weights + 4 * 2 * 4 * 4 * 40
    assert fastv.draft == weights + 4 * 2 * 4 * (2 * 40 + 2 * 25)


def test_speedup_matches_simulation() -> None:
    draft_cost = DraftCost(target=1.0, draft=0.1)
    rng = np.random.default_rng(0)
    hits = rng.random((40_000, 4)) < 0.7
    words = 1 + hits.cumprod(1).sum(1).mean()
    assert draft_cost.speedup(0.7, 4) == pytest.approx(words / (4 * 0.1 + 1), rel=0.01)
    assert draft_cost.speedup(1.0, 4) == pytest.approx(5 / 1.4) and draft_cost.speedup(0.0, 4) == pytest.approx(1 / 1.4)
    assert draft_cost.speedup(draft_cost.break_even(4), 4) == pytest.approx(1, abs=1e-4)
    assert DraftCost(1.0, 1.0).break_even(4) is None


@pytest.mark.parametrize("name", ROWS)
def test_page_numbers_match_the_formula(name: str) -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")][2:]
    draft_cost = build_cost(name)
    speedups = [f"x{draft_cost.speedup(acceptance, 4):.2f}" for acceptance in (0.6, 0.8, 0.9)]
    assert cells == [f"{draft_cost.c:.3f}", *speedups, f"a = {draft_cost.break_even(4):.0%}".replace("%", " %")]


def test_unsupported_models_are_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="experts"):
        DraftCost.from_configs(EVERY_FAMILY["qwen3_vl_moe"].build().config, tokens=10)
    for arguments in (dict(tokens=0), dict(tokens=10, text=-1), dict(tokens=10, bytes_per_value=0.0)):
        with pytest.raises(OptionError):
            DraftCost.from_configs(SMALL, **arguments)
    for arguments in ((1.1, 4), (-0.1, 4), (0.5, 0)):
        with pytest.raises(OptionError):
            DraftCost(1.0, 0.5).speedup(*arguments)


def test_the_command(tmp_path: Path) -> None:
    ROWS["Qwen2.5-VL-72B, 7B"][0].save_pretrained(tmp_path / "large")
    ROWS["Qwen2.5-VL-72B, 7B"][1].save_pretrained(tmp_path / "small")
    run = CliRunner().invoke
    options = ["--model", str(tmp_path / "large"), "--draft", str(tmp_path / "small"), "--tokens", "20000"]
    printed = run(app, ["draft", *options])
    assert printed.exit_code == 0 and "c = 0.095" in printed.output and "x2.43" in printed.output
    assert re.search(r"4 a round .* 28%", printed.output)
    assert "never" in run(app, ["draft", "--keep", "1.0"]).output  # the shipped model drafts for itself
    result = run(app, ["draft", "--method", "prune"])
    assert result.exit_code == 2 and "prune" in result.output
