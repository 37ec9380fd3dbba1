# SPDX-License-Identifier: Apache-2.0
"""`fit_learned`: its targets, its results, and how it stops, resumes and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from tokenprune import AlreadyPatchedError, BudgetError, OptionError, TokenPruneError
from tokenprune_bench.calibration import fit_learned, selector_observations, selector_training
from tokenprune_bench.calibration.rate_fitting import ForcedTokens, build_greedy_options
from tokenprune_bench.calibration.selector_observations import ObservedPrompts
from tokenprune_bench.calibration.selector_targets import compute_loss, draw_gate, join_answer
from zoo import FAMILIES, FIRST_TEXT_ID


def samples(family: str, count: int = 5) -> list[dict[str, Any]]:
    return [dict(FAMILIES[family].make_inputs(images=(1,), seed=seed)) for seed in range(count)]


@each("family", ["llava", "qwen2_5_vl"])
def test_a_closed_gate_equals_dropping_the_token(family: str, build: Any, restored_registries: None) -> None:
    """The loss of the model's own answer under hard gates, against the pruned model's logits for this answer."""
    model = build(FAMILIES[family])
    (arguments,) = samples(family, 1)
    observations = ObservedPrompts(model, [arguments], 4)
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


def test_an_answer_continues_behind_the_axes_of_an_image(build: Any) -> None:
    """The prompt ends with an image of one row: its columns have the largest position."""
    model = build(FAMILIES["qwen2_5_vl"])
    axes = [[0, 1, 2, 3], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 2, 3]]  # text, time, row, column
    call = {"inputs_embeds": torch.zeros(1, 4, model.get_input_embeddings().embedding_dim)}
    call["position_ids"] = torch.tensor(axes)[:, None]
    embeddings, positions = join_answer(model, call, torch.tensor([[FIRST_TEXT_ID] * 3]))
    assert positions[:, 0, 4:].tolist() == [[4, 5]] * 4 and embeddings.shape[1] == 6
    _, positions = join_answer(model, call | {"position_ids": call["position_ids"][1:]}, torch.zeros(1, 2).long())
    assert positions[:, 0, 4:].tolist() == [[4]] * 3


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


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lengths of the prompts that were observed, in order."""
    lengths: list[int] = []

    def observe(model: Any, arguments: dict[str, Any], *rest: Any) -> Any:
        lengths.append(arguments["input_ids"].shape[1])
        return original(model, arguments, *rest)

    original = selector_observations.observe
    monkeypatch.setattr(selector_observations, "observe", observe)
    monkeypatch.setattr(selector_training, "_SAVE_SECONDS", -1.0)
    yield lengths


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@each("target", ["attention", "gradient", "topk"])
def test_an_interrupted_fit_resumes(target: Any, build: Any, tmp_path: Path, observed: list[int]) -> None:
    model, folder, done = build(FAMILIES["llava"]), tmp_path / target, []
    path = folder / "s.safetensors"
    folder.mkdir()
    observed.clear()
    fit = partial(fit_learned, model, samples("llava"), target=target, use_question=True, epochs=3, max_new_tokens=3)
    reference = fit(progress=done.append)
    assert done[-1] == 5 and done == sorted(done) and len(observed) == 5

    class Interrupt(Exception):
        pass

    def interrupt_after(count: int) -> Any:
        calls = iter(range(count))

        def progress(_: int) -> None:
            if next(calls, None) is None:
                raise Interrupt

        return progress

    for count in (2, 7):  # while the samples are observed, and after two steps
        with pytest.raises(Interrupt):
            fit(out=path, progress=interrupt_after(count))
        assert not path.exists()
    assert sorted(file.name for file in folder.iterdir()) == [f"{path.name}.observed", f"{path.name}.partial"]
    resumed = fit(out=path)
    assert len(observed) == 10  # each sample was observed once
    assert [file.name for file in folder.iterdir()] == [path.name]
    assert equal(resumed.selector.weights, reference.selector.weights) and resumed.fit == reference.fit
    assert not equal(fit(seed=1).selector.weights, reference.selector.weights)
    assert all(parameter.requires_grad for parameter in model.parameters()) and not tokenprune.is_patched(model)
    with tokenprune.patched(model, "learned", keep=0.4, selector=path), torch.no_grad():
        model(**samples("llava")[0])


def test_a_limit_of_time_fits_to_the_samples_so_far(build: Any, tmp_path: Path, observed: list[int]) -> None:
    model, path = build(FAMILIES["llava"]), tmp_path / "s.safetensors"
    fit = partial(fit_learned, model, samples("llava"), path, max_new_tokens=3, epochs=2)
    first = fit(minutes=1e-9)
    assert (first.fit.num_samples, first.fit.num_offered, first.fit.is_finished) == (1, 5, False)
    assert path.exists() and "The time is up" in str(first)
    stopped = path.read_bytes()
    for other, name in (({"seed": 3}, "seed"), ({"max_new_tokens": 4}, "max_new_tokens"), ({"keep": 0.5}, "keeps")):
        with pytest.raises(OptionError, match=f"belongs to a fit with other {name}. Delete it, or pass restart=True"):
            fit(**other)
    with pytest.raises(OptionError, match="with other samples"):
        fit_learned(model, samples("llava", 4), path, max_new_tokens=3)
    assert path.read_bytes() == stopped and len(observed) == 1
    file = next(path.with_name("s.safetensors.observed").glob("0*"))
    file.write_bytes(file.read_bytes()[:-1])  # a damaged sample is observed again
    last = fit()
    assert len(observed) == 6 and last.fit.is_finished and "The time is up" not in str(last)
    assert equal(last.selector.weights, fit_learned(*fit.args[:2], max_new_tokens=3, epochs=2).selector.weights)
    fit(minutes=1e-9)
    path.with_name("s.safetensors.partial").write_bytes(b"damaged")
    with pytest.raises(OptionError, match="is not a readable state of a fit"):
        fit()
    assert fit(seed=3, restart=True).fit.is_finished
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_only_changed_samples_are_observed_again(build: Any, tmp_path: Path, observed: list[int]) -> None:
    class Samples(list[Any]):
        sample_keys = list("abcde")

    model, data = build(FAMILIES["llava"]), Samples(samples("llava"))
    fit = partial(fit_learned, model, data, tmp_path / "s", max_new_tokens=3, epochs=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selector_training, "_OBSERVE", {"attention": (1e9, 0.02)})
        assert not fit(minutes=1e-9).fit.is_finished and len(observed) == 5
    data[3:4] = samples("llava", 7)[-2:]
    data.sample_keys = list("abcfge")
    resumed = fit()
    assert len(observed) == 7 and not (tmp_path / "s.observed").exists()
    assert equal(resumed.selector.weights, fit_learned(model, data, max_new_tokens=3, epochs=2).selector.weights)


def test_the_result_states_the_importance_of_the_best_tokens(build: Any) -> None:
    model, arguments = build(FAMILIES["llava"]), samples("llava", 3)
    text = {name: value[:, :4] for name, value in arguments[0].items() if name != "pixel_values"}
    text["input_ids"] = torch.full_like(text["input_ids"], FIRST_TEXT_ID)
    observations = ObservedPrompts(model, [*arguments, text], 3)
    fitted = fit_learned(model, observations, keep=[0.5, 0.2], epochs=1)
    assert (fitted.fit.num_samples, fitted.fit.num_offered, fitted.fit.is_finished) == (3, 4, True)
    for keep, share in fitted.fit.covered.items():
        want = 0.0
        for index in range(3):
            sample = observations.get(index, "attention")
            score = fitted.selector.score(sample.inputs.float(), None)[0].tolist()
            best = sorted(range(len(score)), key=lambda token, score=score: -score[token])[: round(keep * len(score))]
            want += sum(float(sample.targets["attention"][0, token]) for token in best) / 3
        assert share == pytest.approx(want, abs=1e-5)
    assert list(fitted.fit.covered) == [0.5, 0.2] and "the best 50% of the tokens hold" in str(fitted)
    assert fit_learned(model, observations, target="topk", epochs=1).fit.covered == {}


@each(
    ("options", "error", "says"),
    [
        ({"keep": 1.5}, BudgetError, r"keep=1.5 cannot be fitted. Pass a share"),
        ({"keep": [0.5, 64]}, BudgetError, r"keep=64 cannot be fitted"),
        ({"keep": "0.25"}, BudgetError, r"keep='0.25' cannot be fitted"),
        ({"keep": None}, BudgetError, r"keep=None cannot be fitted"),
        ({"keep": []}, BudgetError, r"keep is empty"),
        ({"target": "labels"}, OptionError, r"target='labels' is not valid. Use one of attention, gradient, topk"),
        ({"minutes": 0}, OptionError, r"minutes=0 is not valid"),
        ({"minutes": float("nan")}, OptionError, r"minutes=nan is not valid"),
        ({"epochs": 0}, OptionError, r"epochs=0 is not valid"),
        ({"max_new_tokens": 1.5}, OptionError, r"max_new_tokens=1.5 is not valid"),
        ({"out": "absent/s"}, OptionError, r"the folder absent does not exist"),
    ],
)
def test_invalid_options(options: dict[str, Any], error: Any, says: str, build: Any, observed: list[int]) -> None:
    with pytest.raises(error, match=says):
        fit_learned(build(FAMILIES["llava"]), samples("llava"), **options)
    assert not observed


def test_samples_and_models_that_cannot_be_fitted(build: Any, tmp_path: Path) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(TokenPruneError, match="no sample has an image"):
        fit_learned(model, [], tmp_path / "s")
    assert not any(tmp_path.iterdir())
    with pytest.raises(OptionError, match="single prompt"):
        fit_learned(model, [FAMILIES["llava"].make_inputs(images=(1, 1))])
    with tokenprune.patched(model, "fastv"), pytest.raises(AlreadyPatchedError):
        fit_learned(model, [])
    gemma = FAMILIES["gemma3"]
    model, arguments = build(gemma), [gemma.make_inputs(images=(1,))]
    with pytest.raises(OptionError, match=r"with gradients cannot repeat. Pass target=\"attention\""):
        fit_learned(model, arguments, target="topk")
    assert fit_learned(model, arguments, epochs=1, max_new_tokens=3).fit.is_finished


@each("name", ["demo_vlm", "demo_qwen"])
def test_a_head_has_at_most_one_percent_of_the_parameters(name: str) -> None:
    from tokenprune_bench.profiling.model import load_model
    from tokenprune_demo.heldout import load_heldout

    subject = load_model(name, device="cpu")
    example = load_heldout(limit=1, folder=subject.heldout)[0]
    arguments = [subject.inputs([example.image], [example.question])]
    parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    for question in (False, True):
        fitted = fit_learned(subject.model, arguments, use_question=question, epochs=1).selector
        assert 0.002 < sum(weight.numel() for weight in fitted.weights.values()) / parameters <= 0.01
