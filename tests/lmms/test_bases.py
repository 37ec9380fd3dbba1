# SPDX-License-Identifier: Apache-2.0
"""Test each base listed as tested, in its simple and its chat class, on a tiny checkpoint of each of its families."""

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

from conftest import CPU, answers, read_values
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
# The default would cut the random answers at the end of the thoughts. LFM2's class does not accept device_map.
ARGUMENTS = {"qwen3_5": f"{CPU},enable_thinking=False", "lfm2_5_vl": "device=cpu,attn_implementation=sdpa"}
PAGE = Path(__file__).parents[2] / "docs/measure/lmms-eval.md"


def list_force_simple(base: str) -> list[bool]:
    """Return the values of `force_simple` that select different classes."""
    manifest = MODEL_REGISTRY_V2.get_manifest(base)
    return [False] if manifest.simple_class_path is None or manifest.chat_class_path is None else [False, True]


@pytest.fixture(autouse=True)
def images_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode with Pillow: Gemma's class writes images as data URLs, and torchvision's compiled decoder is missing
    beside a CPU build of torch."""

    def decode(data: torch.Tensor, mode: Any = None) -> torch.Tensor:
        image = Image.open(io.BytesIO(data.numpy().tobytes())).convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    monkeypatch.setattr("transformers.image_utils.decode_image", decode)


CASES = [(base, family, simple) for base in FAMILIES for family in FAMILIES[base] for simple in list_force_simple(base)]


@pytest.mark.parametrize("base, family, force_simple", CASES)
def test_base(
    evaluate: Callable[..., Any], folder: Callable[[str], Path], base: str, family: str, force_simple: bool
) -> None:
    args = f"pretrained={folder(family)},{ARGUMENTS.get(base, CPU)}"

    def run(setting: str) -> dict[str, Any]:
        return evaluate(f"base={base},{setting},{args}", "tokenprune_colour", force_simple=force_simple)

    base_only = evaluate(args, "tokenprune_colour", model=base, force_simple=force_simple)
    unpatched, unpruned, pruned = run("method=none"), run("method=divprune,keep=1.0"), run("method=divprune,keep=0.25")
    assert answers(base_only) == answers(unpatched) == answers(unpruned)
    assert answers(pruned) != answers(unpatched)
    visual = read_values(unpatched)["visual_tokens_in"]
    assert visual > 0
    assert read_values(unpatched)["visual_tokens_out"] == read_values(unpruned)["visual_tokens_out"] == visual
    assert (
        read_values(unpruned)["kv_bytes"]
        == read_values(unpatched)["kv_bytes"]
        == read_values(unpatched)["kv_bytes_full"]
    )
    values = read_values(pruned)
    assert (values["visual_tokens_in"], values["visual_tokens_out"]) == (visual, round(0.25 * visual))
    assert values["kv_bytes_full"] == read_values(unpatched)["kv_bytes"] > values["kv_bytes"]
    assert values["failed_calls"] == 0


@pytest.mark.parametrize("base", ["qwen2_5_vl", "mistral3_vl"])
def test_methods_on_pixels_find_the_processor(
    evaluate: Callable[..., Any], folder: Callable[[str], Path], base: str
) -> None:
    """The attribute of the processor differs between bases."""
    args = f"pretrained={folder(FAMILIES[base][0])},{CPU}"
    unpruned = read_values(evaluate(f"base={base},method=none,{args}", "tokenprune_colour"))
    pruned = read_values(evaluate(f"base={base},method=downsample,keep=0.25,{args}", "tokenprune_colour"))
    assert pruned["visual_tokens_in"] == pytest.approx(0.25 * unpruned["visual_tokens_in"], rel=0.1)


def test_every_tested_base_is_tested() -> None:
    assert set(FAMILIES) == set(TESTED)
    assert not set(TESTED) & set(UNTESTED)


def test_every_base_is_one_of_lmms_evals() -> None:
    assert set(BASES) <= set(MODEL_REGISTRY_V2.list_canonical_model_ids())


@pytest.mark.parametrize("base", UNTESTED)
def test_an_untested_base_is_warned_of(base: str, log: list[str]) -> None:
    from tokenprune_bench.lmms_eval.model import _get_base_class

    cls = _get_base_class(base, False)
    assert hasattr(cls, "model")
    assert any("was not tested with" in line and base in line for line in log)


def test_the_page_has_the_bases() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (yes|no) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [(base, models, "yes" if base in TESTED else "no") for base, models in BASES.items()]
    assert rows == listed
