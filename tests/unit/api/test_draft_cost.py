# SPDX-License-Identifier: Apache-2.0
"""When a draft pays: the closed form, its terms counted by hand, and the command that prints it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2_5_VLConfig
from typer.testing import CliRunner

import tokenprune
from families import FAMILIES
from tokenprune import Budget, DraftCost, OptionError, UnsupportedModelError
from tokenprune.cli import app

PAGE = Path(__file__).parents[3] / "docs/guides/drafts.md"
SMALL = LlamaConfig(
    vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


def qwen(**text: int) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(text_config=dict(vocab_size=152064, **text))


LARGE = dict(
    hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)
MIDDLE = dict(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4
)
VICUNA = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
# The rows of the page: target, draft, visual tokens.
ROWS = {
    "Qwen2.5-VL-72B, 7B": (qwen(**LARGE), qwen(**MIDDLE), 20_000),
    "Qwen2.5-VL-7B, its own weights": (qwen(**MIDDLE), None, 20_000),
    "LLaVA-1.5-7B, its own weights": (
        LlavaConfig(text_config=LlamaConfig(vocab_size=32064, **VICUNA), vision_config=CLIPVisionConfig()), None, 576,
    ),
}  # fmt: skip


def cost(name: str) -> DraftCost:
    config, draft, tokens = ROWS[name]
    methods, budgets = [tokenprune.method("divprune")], [Budget(keep=0.1)]
    return DraftCost.from_configs(config, draft, methods, budgets, tokens=tokens, text=256)


def test_bytes_read_per_step() -> None:
    """Every matrix once, the output head among them, and the cache: a key and a value of 4 numbers in each layer."""
    weights = 4 * 8 * (2 * 8 + 2 * 4 + 3 * 16) + 100 * 8
    full = DraftCost.from_configs(SMALL, tokens=30, text=10, bytes_per_value=2.0)
    assert full.target == full.draft == 2 * weights + 2 * 2 * 4 * 4 * 40 and full.c == 1
    method, half = tokenprune.method("fastv", layer=2), Budget(keep=0.5)
    sizes = {"bytes_per_value": 4.0, "bytes_per_weight": 1.0}
    fastv = DraftCost.from_configs(SMALL, None, [method], [half], tokens=30, text=10, **sizes)
    assert fastv.target == weights + 4 * 2 * 4 * 4 * 40
    assert fastv.draft == weights + 4 * 2 * 4 * (2 * 40 + 2 * 25)


def test_speedup_matches_simulation() -> None:
    made = DraftCost(target=1.0, draft=0.1)
    rng = np.random.default_rng(0)
    hits = rng.random((40_000, 4)) < 0.7
    words = 1 + hits.cumprod(1).sum(1).mean()
    assert made.speedup(0.7, 4) == pytest.approx(words / (4 * 0.1 + 1), rel=0.01)
    assert made.speedup(1.0, 4) == pytest.approx(5 / 1.4) and made.speedup(0.0, 4) == pytest.approx(1 / 1.4)
    assert made.speedup(made.break_even(4), 4) == pytest.approx(1, abs=1e-4)
    assert DraftCost(1.0, 1.0).break_even(4) is None


@pytest.mark.parametrize("name", ROWS)
def test_page_numbers_match_the_formula(name: str) -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    told = [cell.strip() for cell in row.strip("|").split("|")][2:]
    made = cost(name)
    speedups = [f"x{made.speedup(acceptance, 4):.2f}" for acceptance in (0.6, 0.8, 0.9)]
    assert told == [f"{made.c:.3f}", *speedups, f"a = {made.break_even(4):.0%}".replace("%", " %")]


def test_unsupported_models_are_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="experts"):
        DraftCost.from_configs(FAMILIES["qwen3_vl_moe"].build().config, tokens=10)
    for wrong in (dict(tokens=0), dict(tokens=10, text=-1), dict(tokens=10, bytes_per_value=0.0)):
        with pytest.raises(OptionError):
            DraftCost.from_configs(SMALL, **wrong)
    for wrong in ((1.1, 4), (-0.1, 4), (0.5, 0)):
        with pytest.raises(OptionError):
            DraftCost(1.0, 0.5).speedup(*wrong)


def test_the_command(tmp_path: Path) -> None:
    ROWS["Qwen2.5-VL-72B, 7B"][0].save_pretrained(tmp_path / "large")
    ROWS["Qwen2.5-VL-72B, 7B"][1].save_pretrained(tmp_path / "small")
    run = CliRunner().invoke
    given = ["--model", str(tmp_path / "large"), "--draft", str(tmp_path / "small"), "--tokens", "20000"]
    printed = run(app, ["draft", *given])
    assert printed.exit_code == 0 and "c = 0.095" in printed.output and "x2.43" in printed.output
    assert re.search(r"4 a round .* 28%", printed.output)
    assert "never" in run(app, ["draft", "--keep", "1.0"]).output  # the model that ships, drafting for itself
    wrong = run(app, ["draft", "--method", "prune"])
    assert wrong.exit_code == 2 and "prune" in wrong.output
