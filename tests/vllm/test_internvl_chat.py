# SPDX-License-Identifier: Apache-2.0
"""InternVL in its authors' format: its tower is read and merges as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import photo
from conftest import DIVPRUNE, Engine, check_same
from front_end import config
from internvl_chat import ChatReference, write
from tokenprune import OptionError, UnsupportedSetupError
from tokenprune.selection.sites.encoder import Tower
from tokenprune_bench.calibration import Thresholds

VSCAN = {"method": "vscan", "keep": 0.4, "stage2": False}
SIZES = ((56, 112), (70, 70), (112, 56))
SETTINGS = [
    {"off": True}, VSCAN, VSCAN | {"keep": 0.7, "local": 0.2, "local_layer": -1}, {"method": "visionzip", "keep": 0.5},
    {"method": "fastervlm", "keep": 0.3}, {"method": "vispruner", "features": "projected", "keep": 0.5},
    {"method": "tome", "keep": 0.5}, {"method": "tome", "keep": 3, "proportional": False}, DIVPRUNE,
    {"method": "towerdrop", "keep": 0.5, "layer": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def chat_folder(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(folder("internvl"), tmp_path_factory.mktemp("internvl_chat"))


def prompt(images: int) -> str:
    return "look: " + " and ".join(["<image>"] * images) + " what is it? "


def test_tower_is_read_and_merges(
    start: Callable[..., Engine], folder: Any, reference: Any, chat_folder: Path, tmp_path: Path
) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    tower, path = reference("internvl").model.model.vision_tower, tmp_path / "thresholds.safetensors"
    Thresholds({0.5: torch.tensor([0.9, 0.5, 1.0])}, Tower(1, 0, 3, 3, tower, 4).fingerprint, 1).save(path)
    dymu = {"method": "dymu", "keep": 0.5, "exact": True, "thresholds": str(path)}
    profiles = {"profiles": {"dymu": dymu}}  # a request cannot name a file
    engine = start("internvl", DIVPRUNE | profiles, checkpoint=chat_folder, trust_remote_code=True)
    chat_reference = ChatReference(folder("internvl"), MULTIMODAL_REGISTRY.create_processor(engine.llm.model_config))
    cases = []
    for index, setting in enumerate([*SETTINGS, dymu]):
        count = 1 + index % 3
        cases.append((prompt(count), [photo(*SIZES[(index + i) % 3], seed=index + i) for i in range(count)], setting))
    requests = [
        engine.request(text, images, {"profile": "dymu"} if override is dymu else override)
        for text, images, override in cases
    ]
    outputs = engine.generate(requests)
    for (text, images, setting), output in zip(cases, outputs, strict=True):
        try:
            check_same(output, *chat_reference.greedy(text, images, 6, None if "off" in setting else setting))
        except AssertionError as error:
            raise AssertionError(f"{setting}: {error}") from error
    with pytest.raises(OptionError, match="block 17 does not exist"):
        engine.generate([engine.request(prompt(1), cases[0][1], VSCAN | {"local_layer": 17})])


def test_first_checkpoints_raise(folder: Any, tmp_path: Path) -> None:
    """Tokens of the first checkpoints are in column order."""
    first = write(folder("internvl"), tmp_path, ps_version="v1")
    for setting, says in (
        (VSCAN, "cannot be traced to visual tokens.*divprune"),
        ({"method": "tome"}, "after the tower"),
    ):
        with pytest.raises(UnsupportedSetupError, match=says):
            config(first, setting | {"keep": 0.5}, trust_remote_code=True)
