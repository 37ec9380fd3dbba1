# SPDX-License-Identifier: Apache-2.0
"""learned: its head against a naive loop, its file, and its choice inside models and sessions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tokenprune
from each import each
from greedy import SIZES, check_against, image_tokens, picked
from session_oracle import close, images_of, played, recorded
from tests.unit.methods.naive.learned import naive, naive_scores
from tokenprune import OptionError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.methods.selector import NUM_STATISTICS, Selector, describe_tokens
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.testing import visual_tokens
from tokenprune_bench.plan import BenchPlan
from tokenprune_bench.tuning import build_grid
from turns import check_turns
from zoo import FAMILIES


def draw_weights(features: int, question: bool, width: int = 5) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(4)
    inputs = features + NUM_STATISTICS
    weights = {
        "mean": torch.randn(inputs, generator=g), "std": 0.5 + torch.rand(inputs, generator=g),
        "hidden_weight": torch.randn(width, inputs, generator=g) / 4,
        "hidden_bias": torch.randn(width, generator=g), "out_weight": torch.randn(width, generator=g),
    }  # fmt: skip
    if question:
        weights |= {
            "question_mean": torch.randn(features, generator=g), "question_std": 1 + torch.rand(features, generator=g),
            "question_weight": torch.randn(width, features, generator=g),
        }  # fmt: skip
    return weights


@each("question", [False, True])
@each("diversity", [0.0, 1.0, 3.0])
def test_equals_naive_loop(question: bool, diversity: float, tmp_path: Path) -> None:
    weights, path = draw_weights(32, question), tmp_path / "s.safetensors"
    Selector(weights, "any").save(path)
    loop = partial(naive, weights=weights, diversity=diversity)
    check_against(loop, "learned", SIZES, 1e-3, selector=str(path), diversity=diversity)
    assert tokenprune.method("learned", selector=path).query_aware is question


def test_scores_read_the_grid() -> None:
    """The rows and columns of images with a known grid, beside one without."""
    x, weights = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(0)), draw_weights(8, False)
    grids = [(1, 3, 4), (1, 4, 3), None]
    tokens = visual_tokens(x, grids=grids, keep=2)
    scores = Selector(weights, "").score(describe_tokens(tokens), None)
    for row, (image, grid) in enumerate(zip(x.double(), grids, strict=True)):
        want = naive_scores(image, image[:0], weights, grid and grid[1:])
        torch.testing.assert_close(scores[row].double(), want, atol=1e-4, rtol=1e-4)


def test_without_a_file_it_chooses_like_divprune(build: Any) -> None:
    model, inputs = build(FAMILIES["llava"]), FAMILIES["llava"].make_inputs(images=(1,))
    kept = []
    for name in ("learned", "divprune"):
        with tokenprune.patched(model, name, keep=0.3, record=True), torch.no_grad():
            model(**inputs)
            kept.append(tokenprune.stats(model).cuts[0].kept)
            assert any("without a selector" in note for note in tokenprune.stats(model).notes) is (name == "learned")
    assert kept[0] == kept[1]
    assert "learned" not in {method.name for candidate in build_grid() for method in candidate.methods}
    assert "learned" not in BenchPlan().methods


def test_invalid_values_and_padding_have_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    Selector(draw_weights(32, True), "any").save(path)
    method, tokens = tokenprune.method("learned", selector=path), image_tokens([30, 20], [9, 9])
    alone = tokens.hidden[1:, :20], tokens.text.hidden[1:, :5]
    single = visual_tokens(alone[0], keep=9, text={"hidden": alone[1]})
    assert picked(method, tokens)[1] == picked(method, single)[0]
    broken = tokens.hidden.clone()
    broken[0, 3] = torch.nan
    assert len(picked(method, image_tokens([30, 20], [9, 9], hidden=broken))[0]) == 9


def test_invalid_files_raise(build: Any, tmp_path: Path) -> None:
    path, model = tmp_path / "s.safetensors", build(FAMILIES["llava"])
    with pytest.raises(OptionError, match="cannot read"):
        tokenprune.patch(model, "learned", selector=path)
    Selector(draw_weights(8, False), "another").save(path)
    with pytest.raises(OptionError, match=r"fitted to another model or dtype. Run `tokenprune fit learned`"):
        tokenprune.patch(model, "learned", selector=path)
    assert not tokenprune.is_patched(model)
    tensors = load_file(path)
    for changed in (
        {"out_weight": torch.full_like(tensors["out_weight"], torch.nan)},
        {"out_weight": tensors["out_weight"][:-1].contiguous()},
        {"hidden_weight": tensors["hidden_weight"][0].contiguous()},
        {"question_mean": tensors["mean"].clone()},
    ):
        save_file(tensors | changed, path, {"kind": "tokenprune selector", "model": "m"})
        with pytest.raises(OptionError, match=r"is damaged. Write it again"):
            tokenprune.method("learned", selector=path)
    save_file(tensors, path, {"kind": "other"})
    with pytest.raises(OptionError, match="was not written by `tokenprune fit learned`"):
        tokenprune.method("learned", selector=path)
    for content in (path.read_bytes()[:40], path.read_bytes()[:-4], b"", b"not a file of tensors"):
        path.write_bytes(content)
        with pytest.raises(OptionError, match="cannot read"):
            tokenprune.patch(model, "learned", selector=path)
    with pytest.raises(OptionError, match="cannot read"):
        tokenprune.method("learned", selector=tmp_path)
    save_file(tensors, path, {"kind": "tokenprune selector"})  # without the fingerprint of a model
    with pytest.raises(OptionError, match="cannot read"):
        tokenprune.method("learned", selector=path)
    assert not tokenprune.is_patched(model)
    with pytest.raises(OptionError, match="cannot write"):
        Selector(draw_weights(8, False), "m").save(tmp_path / "absent" / "s")


def write_selector(path: Path, model: Any, question: bool = False) -> Path:
    """Write a random selector for a model."""
    adapter = get_adapter(model)
    weights = draw_weights(adapter.text_config.hidden_size, question)
    Selector(weights, compute_fingerprint(adapter.decoder)).save(path)
    return path


@each("question", [False, True])
@each("family", ["llava", "qwen2_5_vl"])
def test_turns_of_a_chat_and_keep_of_one(family: str, question: bool, build: Any, tmp_path: Path) -> None:
    model, inputs = build(FAMILIES[family]), FAMILIES[family].make_inputs(images=(2,))
    method = tokenprune.method("learned", selector=write_selector(tmp_path / "s", model, question))
    check_turns(FAMILIES[family], model, inputs, method)
    with torch.no_grad():
        unpruned = model(**inputs).logits
        with tokenprune.patched(model, method, keep=1.0):
            assert torch.equal(model(**inputs).logits, unpruned)


def test_a_session_chooses_by_the_head(build: Any, tmp_path: Path) -> None:
    family = FAMILIES["llava"]
    model, images = build(family), images_of(family, 2)
    path = write_selector(tmp_path / "s", model)
    with tokenprune.patched(model, "learned", keep=0.5, selector=path):
        run = played(recorded(family, model, memory=10**6, policy="window"), asked=True)
        logits, visual = run.logits(), run.session.stats.visual
    assert visual == 6 * sum(round(image.count / 2) for image in images)
    assert close(logits, run.one_prefill())
    with tokenprune.patched(model, "divprune", keep=0.5):
        other = played(recorded(family, model, memory=10**6, policy="window"), asked=True).logits()
    assert not close(logits, other)
