# SPDX-License-Identifier: Apache-2.0
"""The rates of dyrate for given attention masses, the predictor and its file, and the fit of the predictor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tokenprune
from oracle import generate_logits
from tests.unit.api.test_cli import call, refused
from tokenprune import AlreadyPatchedError, OptionError, TokenPruneError
from tokenprune.methods.decode.rate_predictor import RatePredictor
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune_bench.calibration import fit_dyrate
from tokenprune_bench.calibration.rate_fitting import _regress
from zoo import FAMILIES


def make_masses(image: list[float], system: float = 0.5, heads: int = 3) -> Tensor:
    """Return attention masses (1, steps, heads, 4). image: share of the images in the attention without `system`."""
    share = torch.tensor(image)[None, :, None].expand(1, -1, heads)
    rest = (1 - share) * (1 - system)
    return torch.stack([torch.full_like(share, system), share * (1 - system), rest * 0.75, rest * 0.25], -1)


def compute_rate(image: list[float], keep: float = 0.5, **options: float) -> float:
    method = tokenprune.method("dyrate", **options)
    return float(method.next_rate(make_masses(image), torch.tensor([keep], dtype=torch.float64)))


def test_attention_mass_rate() -> None:
    assert compute_rate([0.4, 0.4, 0.4]) == compute_rate([0.4, 0.9]) == 0.5  # no smaller mass: the rate of prefill
    assert compute_rate([0.4, 0.0], ema=0.0) == 0.9  # no image mass: k_min
    assert compute_rate([0.0, 0.0]) == 0.9 and compute_rate([0.0, 0.3]) == 0.5
    assert compute_rate([0.4, 0.2], ema=0.0) == 0.7  # 1 - (0.1 + 0.4 / 2)
    # The mean is 0.4 / 4 + 0.2 / 4 + 0.1 / 2 = 0.2, half of the first value.
    assert compute_rate([0.4, 0.2, 0.1], ema=0.5, grid=1000) == pytest.approx(0.7, abs=0.002)
    assert compute_rate([0.4, 0.2], ema=0.0, grid=4) == 0.5 and compute_rate([0.4, 0.2], ema=0.0, grid=1) == 0.0
    assert compute_rate([0.4, 0.0], ema=0.0, k_min=0.8) == 0.5  # k_min is capped by keep
    assert (
        compute_rate([0.4, 0.0], ema=0.0, k_min=0.0) == 0.9
        and compute_rate([0.4, 0.0], ema=0.0, k_min=0.0, grid=100) == 0.99
    )
    # The mass of the system prompt has no effect: it grows here, and the share of the images is constant.
    grown = torch.cat([make_masses([0.4], system=0.1), make_masses([0.4], system=0.9)], dim=1)
    got = tokenprune.method("dyrate", grid=64, ema=0.0).next_rate(grown, torch.tensor([0.5], dtype=torch.float64))
    assert float(got) == 0.5


@pytest.mark.parametrize("grid", [1, 3, 10])
def test_rates_are_on_the_grid_and_rows_are_independent(grid: int) -> None:
    g = torch.Generator().manual_seed(0)
    masses = torch.rand(64, 6, 4, 4, generator=g).softmax(-1)
    share = torch.rand(64, generator=g, dtype=torch.float64)
    method = tokenprune.method("dyrate", grid=grid)
    got = method.next_rate(masses, share)
    assert torch.equal((got * grid).round() / grid, got) and got.min() >= 0 and got.max() <= (grid - 1) / grid
    for row in range(0, 64, 9):
        assert torch.equal(method.next_rate(masses[row : row + 1], share[row : row + 1]), got[row : row + 1])
    slow = masses[..., 1].mean(2) / (masses.mean(2).sum(-1) - masses[..., 0].mean(2))
    mean = slow[:, 0]
    for step in range(1, 6):
        mean = 0.5 * mean + 0.5 * slow[:, step]
    low = share.clamp(max=0.1)
    want = 1 - low - (share - low) * (mean / slow[:, 0]).clamp(max=1).double()
    assert torch.equal(got, ((want * grid + 1e-6).floor().clamp(max=grid - 1) / grid))


def test_steps_with_a_decision() -> None:
    steps = range(1, 25)
    assert [s for s in steps if tokenprune.method("dyrate").decides(s)] == [5, 13, 21]
    assert [s for s in steps if tokenprune.method("dyrate", warmup=0, update_every=10).decides(s)] == [1, 11, 21]
    schedule = tokenprune.method("dyrate", rate="schedule", schedule=[0.1, 0.3])
    assert all(map(schedule.decides, steps)) and hash(schedule) == hash(schedule)
    share = torch.tensor([0.5, 0.7])
    got = [schedule.next_rate(torch.zeros(2, 1 + step, 1, 4), share).tolist() for step in (1, 2, 3)]
    torch.testing.assert_close(torch.tensor(got), torch.tensor([[0.1] * 2, [0.3] * 2, [0.3] * 2]))


# -- predictor ---------------------------------------------------------------------------------------------------------


def write_predictor(model: torch.nn.Module, path, grid: int = 4, layer: int = 2) -> RatePredictor:
    """Write a predictor whose rate rises with the mass on the answer in head 0."""
    weight, bias = torch.zeros(grid, 16), torch.zeros(grid)
    weight[:, 3], bias[:] = torch.arange(grid) * 100.0, -torch.arange(grid) * 10.0
    predictor = RatePredictor(weight, bias, layer, compute_fingerprint(model.model.language_model))
    predictor.save(path)
    return predictor


def test_predictor_loads_from_its_file(build, tmp_path) -> None:
    model, path = build(FAMILIES["llava"]), tmp_path / "p.safetensors"
    write_predictor(model, path)
    options = dict(rate="predictor", predictor=str(path), grid=4, layer=2, warmup=0, update_every=1)
    method = tokenprune.method("dyrate", **options)
    low, high = make_masses([0.5, 0.9], system=0.9, heads=4), make_masses([0.5, 0.0], system=0.0, heads=4)
    assert method.next_rate(torch.cat([low, high]), torch.ones(2)).tolist() == [0.0, 0.75]
    with tokenprune.patched(model, method, keep=0.5):
        generate_logits(model, FAMILIES["llava"].make_inputs(), 4)
        rates = tokenprune.stats(model).decode_rates
    assert {rate for step in rates for rate in step} <= {0.5, 0.75} and len(rates) == 3
    with pytest.raises(OptionError, match="grid=4, layer=2"):
        tokenprune.method("dyrate", **options | {"layer": 1})
    other = build(FAMILIES["llava_next"])
    with pytest.raises(OptionError, match="another model"):
        tokenprune.patch(other, method, keep=0.5)
    assert not tokenprune.is_patched(other)
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    with pytest.raises(OptionError, match="cannot read"):
        tokenprune.method("dyrate", **options | {"predictor": str(tmp_path / "no.safetensors")})


def test_fingerprint() -> None:
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    second = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    assert len({compute_fingerprint(first), compute_fingerprint(second), compute_fingerprint(first.double())}) == 3
    first.float()
    second.load_state_dict(first.state_dict())
    assert compute_fingerprint(first) == compute_fingerprint(second)
    with torch.no_grad():
        second[1].bias += 1
    assert compute_fingerprint(first) != compute_fingerprint(second)


def test_regression() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(60, 5, generator=g, dtype=torch.float64) * 20
    y = (x[:, 2] > 10).long() + 2 * (x[:, 4] > 10).long()  # the last of five classes never occurs
    weight, bias = _regress(x, y, 5)
    assert ((x @ weight.T + bias).argmax(1) == y).double().mean() > 0.9
    assert all(torch.equal(*pair) for pair in zip((weight, bias), _regress(x, y, 5), strict=True))


def test_fitting(build, tmp_path) -> None:
    family, path = FAMILIES["llava"], tmp_path / "fitted.safetensors"
    model = build(family)
    samples = [family.make_inputs(), family.make_inputs(images=(0, 1), seed=1), family.make_inputs(images=(0, 0))]
    options = dict(keep=0.9, layer=2, grid=3, max_new_tokens=4, divergence=0.03)
    predictor, fit = fit_dyrate(model, samples, path, **options)
    # Naive labels: the highest rate with a small divergence from the unpruned distribution.
    want = [0, 0, 0]
    for inputs in samples[:2]:
        expected_logits, tokens, _ = generate_logits(model, inputs, 4)
        is_close = []
        for index in range(3):
            with tokenprune.patched(
                model, "dyrate", keep=0.9, layer=2, rate="schedule", schedule=[index / 3], k_min=0.0
            ):
                got = generate_logits(model, inputs, 4, tokens=tokens)[0]
            is_close.append(torch.nn.functional.kl_div(
                got.log_softmax(-1), expected_logits.log_softmax(-1), log_target=True, reduction="none"
            ).sum(-1) <= 0.03)  # fmt: skip
        for row, counts in enumerate(inputs.counts):
            for step in range(1, 4) if counts else ():
                want[max([index for index in range(3) if is_close[index][row, step]], default=0)] += 1
    assert fit.labels == want and sum(want) == 9 and 0 < want[0] < 9
    refit, _ = fit_dyrate(model, samples, **options)
    loaded = RatePredictor.load(path)
    for other in (refit, loaded):
        assert torch.equal(other.weight, predictor.weight) and torch.equal(other.bias, predictor.bias)
    assert (loaded.layer, loaded.grid, loaded.model) == (2, 3, compute_fingerprint(model.model.language_model))
    with tokenprune.patched(model, "dyrate", rate="predictor", predictor=str(path), grid=3, layer=2, keep=0.9):
        generate_logits(model, samples[0], 2)


def test_unsupported_fits_raise(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(0, 0))
    options = dict(layer=2, grid=2, max_new_tokens=2)
    with pytest.raises(TokenPruneError, match="Cannot fit"):
        fit_dyrate(model, [inputs], **options)
    for bad in ({"keep": 1.0}, {"max_new_tokens": 1}, {"grid": 0}, {"layer": 9}):
        with pytest.raises(OptionError):
            fit_dyrate(model, [family.make_inputs()], **options | bad)
    with tokenprune.patched(model, "fastv"), pytest.raises(AlreadyPatchedError):
        fit_dyrate(model, [inputs], **options)


def test_the_command(tmp_path) -> None:
    out = tmp_path / "p.safetensors"
    options = ("--grid", 2, "--max-new-tokens", 2)
    output = call("fit", "dyrate", "--out", out, "--limit", 1, *options).output
    assert "1 decode steps" in output and RatePredictor.load(out).grid == 2
    assert "no images" in refused("fit", "dyrate", "--out", out, "--images", tmp_path, *options)
    (tmp_path / "broken.png").write_bytes(b"not an image")
    assert "cannot read" in refused("fit", "dyrate", "--out", out, "--images", tmp_path, *options)
