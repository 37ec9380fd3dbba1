# SPDX-License-Identifier: Apache-2.0
"""Selections and logits do not depend on the process's default device and dtype, in prefill and decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tokenprune
from basics import METHODS, check_takes
from process_defaults import DEFAULTS, defaulting
from tests.unit.methods.test_dyrate_rates import write_predictor
from tokenprune import Site
from tokenprune.errors import TokenPruneError
from tokenprune.selection import Tower
from tokenprune_bench.calibration import Thresholds
from zoo import FAMILIES, Family

# Images; tiles and videos of equal length; images and videos of any size in a tower that packs them.
BATCHES: dict[str, list[dict[str, Any]]] = {
    "llava": [dict(images=(1, 2))],
    "llava_onevision": [dict(images=(1, 2)), dict(images=(0, 1), video=(9, 9))],
    "qwen2_vl": [dict(images=(1, 2)), dict(images=(0, 1), video=(5, 4))],
}
# Options with which a method acts on short prompts and answers.
OPTIONS: dict[str, dict[str, Any]] = {
    "dyrate": dict(layer=2, warmup=0, update_every=1),
    "earlytom": dict(layers=(0, 1), threshold=-1.0),
    "pevlm": dict(sink_frames=1, block_frames=1),
}
UNWATCHED = {"pevlm"}  # its attention masks cannot be created while operations are watched
INSIDE = [name for name in METHODS if tokenprune.method_info(name).site is not Site.PRE_ENCODER]


def configure_method(name: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> Any:
    if name != "dymu":
        return tokenprune.method(name, **OPTIONS.get(name, {}))
    monkeypatch.setattr(Thresholds, "check", lambda self, fingerprint: None)
    monkeypatch.setattr(Tower, "fingerprint", None)
    # LLaVA does not read the last block. A threshold of 1.0 merges no tokens there.
    values = {"llava": [0.3, 0.3, 1.0], "llava_onevision": [0.3] * 3, "qwen2_vl": [0.3] * 4}[family.name]
    return tokenprune.method(name, thresholds=Thresholds({0.5: torch.tensor(values)}, fingerprint=None, images=1))


def run_steps(model: Any, inputs: Any) -> tuple[list[Any], list[torch.Tensor]] | None:
    """Return the kept tokens of each cut and the logits of prefill and two steps, or None if videos are unsupported."""
    try:
        out = model(**inputs, use_cache=True)
    except TokenPruneError:  # for some towers, the patches of video features are unknown
        assert "pixel_values_videos" in inputs
        return None
    logits, (rows, length) = [out.logits], inputs["input_ids"].shape
    mask = inputs["attention_mask"]
    for step in range(2):
        # Qwen models would create positions on the default device.
        position = torch.full((rows, 1), length + step, device="cpu")
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        out = model(
            input_ids=torch.full((rows, 1), 20 + step, device="cpu"), attention_mask=mask, use_cache=True,
            position_ids=position.expand(3, -1, -1) if "mm_token_type_ids" in inputs else position,
            past_key_values=out.past_key_values,
        )  # fmt: skip
        logits.append(out.logits)
    return [cut.kept for cut in tokenprune.stats(model).cuts], logits


def check_defaults(model: Any, method: Any, batches: list[Any]) -> None:
    """Compare answers under each default. Raise TokenPruneError if the method does not support the model."""

    def compute_answers() -> list[Any]:
        with tokenprune.patched(model, method, keep=1.0 if method.site is Site.ATTENTION else 0.5, record=True):
            return [run_steps(model, inputs) for inputs in batches]

    expected = compute_answers()
    for default in DEFAULTS:
        with defaulting(default, watched=method.name not in UNWATCHED):
            actual = compute_answers()
        for want, got in zip(expected, actual, strict=True):
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                assert got[0] == want[0], default
                assert all(map(torch.equal, got[1], want[1])), default


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("family_name", BATCHES)
@torch.no_grad()
def test_a_method_inside_a_model(family_name: str, name: str, build, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[family_name]
    check_takes(family, name)
    method = configure_method(name, family, monkeypatch)
    batches = [family.make_inputs(**batch) for batch in BATCHES[family_name]]
    try:
        check_defaults(build(family, "eager"), method, batches)
    except TokenPruneError as refusal:
        pytest.skip(f"{name} refuses {family_name}: {refusal}")


@pytest.mark.parametrize("rate", ["schedule", "predictor"])
@torch.no_grad()
def test_rates_while_an_answer_is_written(rate: str, tmp_path: Path, build) -> None:
    model, options = build(FAMILIES["llava"], "eager"), {"schedule": [0.3, 0.6]}
    if rate == "predictor":
        write_predictor(model, tmp_path / "p.safetensors")
        options = dict(predictor=str(tmp_path / "p.safetensors"), grid=4, warmup=0, update_every=1)
    check_defaults(model, tokenprune.method("dyrate", rate=rate, layer=2, **options), [FAMILIES["llava"].make_inputs()])
