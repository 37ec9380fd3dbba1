# SPDX-License-Identifier: Apache-2.0
"""Methods that merge inside the vision tower: answers match the patched transformers model; blocks get fewer tokens.

Towers of Qwen are in test_tower.py, which shares their engines. Tiles that are cropped are in test_tile_merging.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CHECKPOINTS, Checkpoint
from conftest import Engine, mlp_inputs
from front_end import config
from tokenprune import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.settings import parse
from tokenprune.integrations.vllm.settings.items import get_cache_key
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune_bench.calibration import Thresholds, calibrate

TOME = {"method": "tome", "keep": 0.5}


@pytest.fixture(scope="module")
def thresholds(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Thresholds calibrated on noise for keep 0.4 and 0.6, and set by hand for 0.5, for more and fewer merges."""

    def get(name: str) -> Path:
        path = tmp_path_factory.mktemp("thresholds") / f"{name}.safetensors"
        model, side = reference(name).model, CHECKPOINTS[name].config()["vision_config"]["image_size"]
        noise = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0))
        values = {}
        for keep in (0.4, 0.6):
            calibrated = calibrate(model, noise, keep=keep, progress=False)
            values |= calibrated.values
        values[0.5] = torch.tensor([0.8, 0.3, 1.0])
        Thresholds(values, calibrated.fingerprint, 4).save(path)
        return path

    return get


@pytest.fixture(scope="module", params=["llava", "llava_siglip"])
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine], thresholds: Any) -> Engine:
    setting = {"method": "dymu", "keep": 0.4, "exact": True, "thresholds": str(thresholds(request.param))}
    return start(request.param, setting)


OVERRIDES = [
    {},
    {"keep": 0.6, "proportional": False},
    TOME,
    {"off": True},
    TOME | {"proportional": False, "keep": 9},
    {"method": "divprune", "keep": 0.5},
    {"method": "vscan", "stage2": False, "keep": 0.5},
    {"keep": 0.5},
    {"keep": 0.5, "max_r": 15},
]


def test_single_requests_and_cache_hits(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    engine.forget()
    images, text = checkpoint.images(1), "what is it, and where, and why is it there at all? "
    with mlp_inputs(*engine.model.vision_tower.vision_model.encoder.layers) as inputs:
        for prompt in (checkpoint.prompt(1, text), checkpoint.prompt(1, text), checkpoint.prompt(1, "else? ")):
            engine.check(reference, [(prompt, images)])
    patches = (checkpoint.config()["vision_config"]["image_size"] // 14) ** 2
    assert [len(shapes) for shapes in inputs] == [1] * len(inputs)  # the tower ran once
    remaining = round(0.4 * patches) + (checkpoint.name == "llava")
    assert inputs[-1][0][:2] == (1, remaining)


def test_mixed_settings(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    prompt, images = checkpoint.prompt(1), checkpoint.images(1)
    for overrides in (OVERRIDES[:4], OVERRIDES[3:7], OVERRIDES[5:]):
        engine.forget()
        engine.check(reference, [(prompt, images, override) for override in overrides])
    attention = engine.model.vision_tower.vision_model.encoder.layers[0].self_attn.attn
    assert "forward" not in vars(attention), "the hooks are gone after each call"


def test_several_images(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    cases = checkpoint.cases((2, {}), (3, TOME), (3, {"keep": 0.5}), (2, {"keep": 0.6, "proportional": False}))
    for _, images, _ in cases:
        images[0] = images[0].resize((1, 1)).resize(images[0].size)
    engine.forget()
    assert len({len(output.prompt_token_ids) for output in engine.check(reference, cases)}) > 1


def test_invalid_requests_do_not_stop_the_server(engine: Engine, checkpoint: Checkpoint) -> None:
    prompt, images = checkpoint.prompt(1), checkpoint.images(1)
    wrong = [
        ({"exact": False}, OptionError, "Pass exact=True"),
        ({"vtu": "expanded"}, OptionError, "changes attention inside the language model"),
        ({"thresholds": "/etc/passwd"}, OptionError, "in the configuration of the server, not in a request"),
        ({"method": "dymu", "thresholds": "x"}, OptionError, "in the configuration of the server, not in a request"),
        ({"keep": 0.25}, BudgetError, "is not calibrated"),
        ({"method": "tome", "r": 3}, OptionError, "Pass keep instead of r"),
        ({"method": "tome", "keep": {"tokens": 1}}, BudgetError, "halves|at most half"),
        ({"keep": 0.4, "max_r": 2}, BudgetError, "max_r=2"),
    ]
    for override, error, says in wrong:
        with pytest.raises(error, match=says):
            engine.generate([engine.request(prompt, images, override)])
    engine.generate([engine.request(prompt, images)])


def test_unsupported_settings_stop_the_server(folder: Any, reference: Any, thresholds: Any, tmp_path: Path) -> None:
    dymu = {"method": "dymu", "keep": 0.4}
    path = thresholds("llava")
    loaded = Thresholds.load(path)
    short = Thresholds({0.4: torch.ones(2)}, loaded.fingerprint, 1)
    short.save(tmp_path / "short.safetensors")
    for setting, error, says in (
        (dymu, ValueError, "Pass exact=True"),
        (dymu | {"exact": True}, ValueError, "requires thresholds=PATH"),
        (dymu | {"exact": True, "thresholds": str(tmp_path / "none")}, ValueError, "cannot read"),
        (dymu | {"exact": True, "thresholds": str(tmp_path / "short.safetensors")}, ValueError, "with 2 blocks, but"),
        (dymu | {"exact": True, "thresholds": str(thresholds("llava_siglip"))}, ValueError, "Siglip.*is a CLIP"),
    ):
        with pytest.raises(error, match=says):
            config(folder("llava"), setting)
    with pytest.raises(ValueError, match=r"in float32 .*in bfloat16.*serving dtype"):
        config(folder("llava"), dymu | {"exact": True, "thresholds": str(path)}, dtype="bfloat16")
    for name in ("llava_next_video", "mistral3", "pixtral", "glm4v"):
        with pytest.raises(UnsupportedSetupError, match=r"is not known before.*after the tower"):
            config(folder(name), TOME)
    with pytest.raises(ValueError, match=r"CLIPVisionModel.*is a Qwen2VisionTransformerPretrainedModel"):
        config(folder("qwen2_vl"), dymu | {"exact": True, "thresholds": str(path)})


def test_changed_thresholds_file_changes_the_cache_key(thresholds: Any) -> None:
    """Caches may outlive a server, and the file may change for the next server."""
    path = thresholds("llava")
    setting = parse_setting({"method": "dymu", "keep": 0.4, "exact": True, "thresholds": str(path)})
    before = get_cache_key(setting)
    assert get_cache_key(parse_setting(setting.to_json())) == before
    assert json.loads(json.dumps(dict(before))) == before
    loaded = Thresholds.load(path)
    Thresholds(loaded.values | {0.4: torch.ones(3)}, loaded.fingerprint, 4).save(path)
    assert get_cache_key(parse_setting(setting.to_json())) == before  # constant while the server runs
    parse._parse.cache_clear()  # as in another process
    assert get_cache_key(parse_setting(setting.to_json())) == before
    parse._read_file.cache_clear()
    parse._parse.cache_clear()
    assert get_cache_key(parse_setting(setting.to_json())) != before
