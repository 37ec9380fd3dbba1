# SPDX-License-Identifier: Apache-2.0
"""Each method keeps the same tokens, and the model gives the same answers, whatever the process's default device and
dtype: images and videos, in a prefill and in steps of decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tokenprune
from basics import METHODS, check_takes
from process_defaults import DEFAULTS, defaulting
from tests.unit.methods.test_dyrate_rates import made_up
from tokenprune import Site
from tokenprune.errors import TokenPruneError
from tokenprune.selection import Tower
from tokenprune_bench.calibration import Thresholds
from zoo import FAMILIES, Family

# Images alone; tiles, and videos of equal length; a tower that packs images of any shape.
BATCHES: dict[str, list[dict[str, Any]]] = {
    "llava": [dict(images=(1, 2))],
    "llava_onevision": [dict(images=(1, 2)), dict(images=(0, 1), video=(9, 9))],
    "qwen2_vl": [dict(images=(1, 2)), dict(images=(0, 1), video=(5, 4))],
}
# With these a method acts at once, and not after many tokens or frames alone.
OPTIONS: dict[str, dict[str, Any]] = {
    "dyrate": dict(layer=2, warmup=0, update_every=1),
    "earlytom": dict(layers=(0, 1), threshold=-1.0),
    "pevlm": dict(sink_frames=1, block_frames=1),
}
UNWATCHED = {"pevlm"}  # its attention takes masks of a class that cannot be made while operations are watched
INSIDE = [name for name in METHODS if tokenprune.method_info(name).site is not Site.PRE_ENCODER]


def configured(name: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> Any:
    if name != "dymu":
        return tokenprune.method(name, **OPTIONS.get(name, {}))
    monkeypatch.setattr(Thresholds, "check", lambda self, fingerprint: None)
    monkeypatch.setattr(Tower, "fingerprint", None)
    # What the model does not read of the tower merges nothing.
    values = {"llava": [0.3, 0.3, 1.0], "llava_onevision": [0.3] * 3, "qwen2_vl": [0.3] * 4}[family.name]
    return tokenprune.method(name, thresholds=Thresholds({0.5: torch.tensor(values)}, fingerprint=None, images=1))


def answered(model: Any, inputs: Any) -> tuple[list[Any], list[torch.Tensor]] | None:
    """Return what the cuts kept, and the logits of a prefill and of two steps; None if videos are refused."""
    try:
        out = model(**inputs, use_cache=True)
    except TokenPruneError:  # some towers do not tell of what the features of videos are made
        assert "pixel_values_videos" in inputs
        return None
    logits, (rows, length) = [out.logits], inputs["input_ids"].shape
    mask = inputs["attention_mask"]
    for step in range(2):
        # Qwen's models would make positions on the default device themselves.
        place = torch.full((rows, 1), length + step, device="cpu")
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        out = model(
            input_ids=torch.full((rows, 1), 20 + step, device="cpu"), attention_mask=mask, use_cache=True,
            position_ids=place.expand(3, -1, -1) if "mm_token_type_ids" in inputs else place,
            past_key_values=out.past_key_values,
        )  # fmt: skip
        logits.append(out.logits)
    return [cut.kept for cut in tokenprune.stats(model).cuts], logits


def check(model: Any, method: Any, batches: list[Any]) -> None:
    """Raise TokenPruneError if the method refuses the model, AssertionError if it does not find the same."""

    def answers() -> list[Any]:
        with tokenprune.patched(model, method, keep=1.0 if method.site is Site.ATTENTION else 0.5, record=True):
            return [answered(model, inputs) for inputs in batches]

    wanted = answers()
    for default in DEFAULTS:
        with defaulting(default, watched=method.name not in UNWATCHED):
            found = answers()
        for want, one in zip(wanted, found, strict=True):
            assert (one is None) == (want is None)
            if one is not None and want is not None:
                assert one[0] == want[0], default
                assert all(map(torch.equal, one[1], want[1])), default


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("family_name", BATCHES)
@torch.no_grad()
def test_a_method_inside_a_model(family_name: str, name: str, build, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[family_name]
    check_takes(family, name)
    method = configured(name, family, monkeypatch)
    batches = [family.make_inputs(**batch) for batch in BATCHES[family_name]]
    try:
        check(build(family, "eager"), method, batches)
    except TokenPruneError as refusal:
        pytest.skip(f"{name} refuses {family_name}: {refusal}")


@pytest.mark.parametrize("rate", ["schedule", "predictor"])
@torch.no_grad()
def test_rates_while_an_answer_is_written(rate: str, tmp_path: Path, build) -> None:
    model, options = build(FAMILIES["llava"], "eager"), {"schedule": [0.3, 0.6]}
    if rate == "predictor":
        made_up(model, tmp_path / "p.safetensors")
        options = dict(predictor=str(tmp_path / "p.safetensors"), grid=4, warmup=0, update_every=1)
    check(model, tokenprune.method("dyrate", rate=rate, layer=2, **options), [FAMILIES["llava"].make_inputs()])
