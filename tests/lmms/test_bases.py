# SPDX-License-Identifier: Apache-2.0
"""Every base that we call tested, in its simple and its chat class, on a tiny checkpoint of each family it loads."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_eval.models import MODEL_REGISTRY_V2
from PIL import Image

from conftest import CPU, answers, measured
from tokenprune_bench.lmms_eval.bases import BASES, TESTED, UNTESTED

FAMILIES = {
    "gemma3": ("gemma3",),
    "idefics2": ("idefics2",),
    "internvl_hf": ("internvl",),
    "lfm2_5_vl": ("lfm2_vl",),
    "llava_hf": ("llava", "llava_next", "llava_onevision"),
    "mistral3_vl": ("mistral3",),
    "qwen2_5_vl": ("qwen2_5_vl",),
    "qwen2_vl": ("qwen2_vl",),
    "qwen3_5": ("qwen3_5",),
    "qwen3_vl": ("qwen3_vl",),
}
# What these random models write would be cut at the end of their thoughts; LFM2's class has no device_map.
ARGUMENTS = {"qwen3_5": f"{CPU},enable_thinking=False", "lfm2_5_vl": "device=cpu,attn_implementation=sdpa"}
PAGE = Path(__file__).parents[2] / "docs/measure/lmms-eval.md"


def classes(base: str) -> list[bool]:
    """The values of `force_simple` that make a difference."""
    manifest = MODEL_REGISTRY_V2.get_manifest(base)
    return [False] if manifest.simple_class_path is None or manifest.chat_class_path is None else [False, True]


@pytest.fixture(autouse=True)
def images_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's class writes images as data URLs. torchvision would decode them with its compiled library, which is
    missing beside a CPU build of torch."""

    def decode(data: torch.Tensor, mode: Any = None) -> torch.Tensor:
        image = Image.open(io.BytesIO(data.numpy().tobytes())).convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    monkeypatch.setattr("transformers.image_utils.decode_image", decode)


CASES = [(base, family, simple) for base in FAMILIES for family in FAMILIES[base] for simple in classes(base)]


@pytest.mark.parametrize("base, family, force_simple", CASES)
def test_base(
    evaluate: Callable[..., Any], folder: Callable[[str], Path], base: str, family: str, force_simple: bool
) -> None:
    args = f"pretrained={folder(family)},{ARGUMENTS.get(base, CPU)}"

    def run(setting: str) -> dict[str, Any]:
        return evaluate(f"base={base},{setting},{args}", "tokenprune_colour", force_simple=force_simple)

    alone = evaluate(args, "tokenprune_colour", model=base, force_simple=force_simple)
    none, whole, fewer = run("method=none"), run("method=divprune,keep=1.0"), run("method=divprune,keep=0.25")
    assert answers(alone) == answers(none) == answers(whole)
    assert answers(fewer) != answers(none)
    visual = measured(none)["visual_tokens_in"]
    assert visual > 0
    assert measured(none)["visual_tokens_out"] == measured(whole)["visual_tokens_out"] == visual
    assert measured(whole)["kv_bytes"] == measured(none)["kv_bytes"] == measured(none)["kv_bytes_full"]
    ours = measured(fewer)
    assert (ours["visual_tokens_in"], ours["visual_tokens_out"]) == (visual, round(0.25 * visual))
    assert ours["kv_bytes_full"] == measured(none)["kv_bytes"] > ours["kv_bytes"]
    assert ours["failed_calls"] == 0


@pytest.mark.parametrize("base", ["qwen2_5_vl", "mistral3_vl"])
def test_methods_on_pixels_find_the_processor(
    evaluate: Callable[..., Any], folder: Callable[[str], Path], base: str
) -> None:
    """Each base has it under another name."""
    args = f"pretrained={folder(FAMILIES[base][0])},{CPU}"
    whole = measured(evaluate(f"base={base},method=none,{args}", "tokenprune_colour"))
    small = measured(evaluate(f"base={base},method=downsample,keep=0.25,{args}", "tokenprune_colour"))
    assert small["visual_tokens_in"] == pytest.approx(0.25 * whole["visual_tokens_in"], rel=0.1)


def test_every_tested_base_is_tested() -> None:
    assert set(FAMILIES) == set(TESTED)
    assert not set(TESTED) & set(UNTESTED)


def test_every_base_is_one_of_lmms_evals() -> None:
    assert set(BASES) <= set(MODEL_REGISTRY_V2.list_canonical_model_ids())


@pytest.mark.parametrize("base", UNTESTED)
def test_an_untested_base_is_warned_of(base: str, log: list[str]) -> None:
    from tokenprune_bench.lmms_eval.model import _base_class

    cls = _base_class(base, False)
    assert hasattr(cls, "model")
    assert any("was not tested with" in line and base in line for line in log)


def test_the_page_has_the_bases() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (yes|no) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [(base, models, "yes" if base in TESTED else "no") for base, models in BASES.items()]
    assert rows == listed
