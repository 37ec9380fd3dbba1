# SPDX-License-Identifier: Apache-2.0
"""learned: its head against a naive loop, its file, and the fit of its head to a model's own answers."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import selector_fitting
import torch
from safetensors.torch import load_file, save_file
from selector_fitting import fit_learned
from selector_head import NUM_STATISTICS, Selector, describe_tokens
from selector_targets import Observations, compute_loss, draw_gate
from torch import Tensor

import tokenprune
from each import each
from greedy import SIZES, check_against, image_tokens, picked
from naive_selector import naive, naive_scores
from tokenprune import AlreadyPatchedError, BudgetError, OptionError, TokenPruneError
from tokenprune.testing import visual_tokens
from tokenprune_bench.calibration.rate_fitting import ForcedTokens, build_greedy_options
from zoo import FAMILIES


@pytest.fixture(autouse=True)
def registered(restored_registries: None) -> None:
    """Register the method of the experiment for one test."""
    sys.modules.pop("selector_method", None)
    importlib.import_module("selector_method")


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
    with pytest.raises(OptionError, match=r"fitted to another model or dtype. Run `python benchmarks"):
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
    with pytest.raises(OptionError, match="was not written by"):
        tokenprune.method("learned", selector=path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(OptionError, match="cannot read"):
        tokenprune.method("learned", selector=path)
    with pytest.raises(OptionError, match="cannot write"):
        Selector(draw_weights(8, False), "m").save(tmp_path / "absent" / "s")


def samples(family: str, count: int = 5) -> list[dict[str, Any]]:
    return [dict(FAMILIES[family].make_inputs(images=(1,), seed=seed)) for seed in range(count)]


@each("family", ["llava", "qwen2_5_vl"])
def test_a_closed_gate_equals_dropping_the_token(family: str, build: Any) -> None:
    """The loss of the model's own answer under hard gates, against the pruned model's logits for this answer."""
    model = build(FAMILIES[family])
    (arguments,) = samples(family, 1)
    observations = Observations(model, [arguments], 4)
    sample = observations.get(0, "topk")
    assert sample is not None and sample.mask.sum() > 4
    keep = torch.arange(sample.mask.shape[1]) % 3 == 0

    @tokenprune.register("fixed_mask", site="PRE_LLM")
    @dataclass(frozen=True)
    class Fixed(tokenprune.Pruner):
        """Keep each third token."""

        def select(self, tokens: Any) -> tokenprune.Selection:
            return tokenprune.Selection(keep[None] & tokens.mask)

        def resolve_count(self, count: int, keep_count: int) -> int:
            return int(keep.sum())

    with tokenprune.patched(model, Fixed(), keep=int(keep.sum()), guard="off"):
        forced = [ForcedTokens(sample.top[None, :, 0])]
        logits = model.generate(**arguments, **build_greedy_options(4), logits_processor=forced).logits
    likely = torch.cat(logits).log_softmax(1).gather(1, sample.top)
    with torch.no_grad():
        loss = compute_loss(model, sample, torch.where(keep, 0.0, -torch.inf)[None])
        unpruned = compute_loss(model, sample, torch.zeros(sample.mask.shape))
    torch.testing.assert_close(loss, -(sample.likely * likely).sum(1).mean(), atol=1e-4, rtol=1e-4)
    assert abs(float(loss - unpruned)) > 1e-3


def test_gates_sum_to_the_budget_and_have_its_gradient() -> None:
    logit = torch.randn(2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    count = torch.tensor([[5.0], [2.0]], dtype=torch.float64)

    def draw(logit: Tensor) -> Tensor:
        return draw_gate(logit, mask, count, 0.5, torch.Generator().manual_seed(1)).exp() * mask

    torch.testing.assert_close(draw(logit).sum(1, keepdim=True), count)
    moved = logit.clone()
    moved[0, 3] += 1e-5
    weight = torch.randn(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logit.requires_grad_()
    ((draw(logit) * weight).sum()).backward()
    slope = ((draw(moved) - draw(logit.detach())) * weight).sum() / 1e-5
    torch.testing.assert_close(logit.grad[0, 3], slope, atol=1e-4, rtol=1e-3)
    assert logit.grad[1, 13:].eq(0).all()


@each("target", ["attention", "gradient", "topk"])
def test_fit_is_deterministic_and_resumes(target: Any, build: Any, tmp_path: Path) -> None:
    model, path, done = build(FAMILIES["llava"]), tmp_path / f"{target}.safetensors", []
    fit = partial(fit_learned, model, samples("llava"), target=target, use_question=True, epochs=3, max_new_tokens=3)
    reference = fit(progress=done.append).weights
    assert done[-1] == 5 and done == sorted(done)
    partial_file = tmp_path / f"{target}.safetensors.partial"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selector_fitting, "_SAVE_SECONDS", -1.0)
        calls = iter(range(2))
        with pytest.raises(StopIteration):
            fit(out=path, progress=lambda count: next(calls))
    assert partial_file.exists() and not path.exists()
    resumed = fit(out=path).weights
    assert not partial_file.exists() and set(reference) == set(resumed)
    assert all(torch.equal(reference[name], resumed[name]) for name in reference)
    assert not torch.equal(fit(seed=1).weights["out_weight"], reference["out_weight"])
    assert all(parameter.requires_grad for parameter in model.parameters()) and not tokenprune.is_patched(model)
    with tokenprune.patched(model, "learned", keep=0.4, selector=path), torch.no_grad():
        model(**samples("llava")[0])


def test_a_limit_of_time_stores_the_state(build: Any, tmp_path: Path) -> None:
    model, path = build(FAMILIES["llava"]), tmp_path / "s.safetensors"
    fit = partial(fit_learned, model, samples("llava"), path, target="attention", max_new_tokens=3)
    fit(minutes=0.0)
    assert path.exists() and path.with_name("s.safetensors.partial").exists()
    with pytest.raises(OptionError, match="belongs to a fit with other seed"):
        fit(seed=3)
    fit(seed=3, restart=True, epochs=1)
    assert not path.with_name("s.safetensors.partial").exists()


def test_fit_errors(build: Any) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(TokenPruneError, match="no sample has an image"):
        fit_learned(model, [])
    with pytest.raises(BudgetError, match=r"keep=1.5 cannot be fitted"):
        fit_learned(model, samples("llava"), keep=1.5)
    with pytest.raises(BudgetError, match="keep is empty"):
        fit_learned(model, samples("llava"), keep=[])
    with pytest.raises(OptionError, match="single prompt"):
        fit_learned(model, [FAMILIES["llava"].make_inputs(images=(1, 1))])
    with tokenprune.patched(model, "fastv"), pytest.raises(AlreadyPatchedError):
        fit_learned(model, [])
    gemma = FAMILIES["gemma3"]
    with pytest.raises(OptionError, match="learned cannot be fitted to this decoder"):
        fit_learned(build(gemma), [gemma.make_inputs(images=(1,))])


@each("name", ["demo_vlm", "demo_qwen"])
def test_a_head_has_at_most_one_percent_of_the_parameters(name: str) -> None:
    from tokenprune_bench.profiling.model import load_model
    from tokenprune_demo.heldout import load_heldout

    subject = load_model(name, device="cpu")
    example = load_heldout(limit=1, folder=subject.heldout)[0]
    arguments = [subject.inputs([example.image], [example.question])]
    parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    for question in (False, True):
        fitted = fit_learned(subject.model, arguments, use_question=question, epochs=1, target="attention")
        assert 0.002 < sum(weight.numel() for weight in fitted.weights.values()) / parameters <= 0.01
