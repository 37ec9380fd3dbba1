# SPDX-License-Identifier: Apache-2.0
"""Compare the methods and families of docs/serving/reference.md with the plugin."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from served_settings import served_methods
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared import checks
from tokenprune.integrations.shared.checks import reads_tower
from tokenprune.integrations.vllm.settings.towers import is_known
from tokenprune.methods.registry import build, method_class
from tokenprune.models.families import SERVED, Family
from tokenprune.selection.observable import Backend

PAGE = (Path(__file__).parents[3] / "docs/serving/reference.md").read_text()


def section(title: str) -> list[list[str]]:
    """The rows of the first table of a section, cell by cell, without its head."""
    _, _, text = PAGE.partition(f"\n## {title}\n")
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows[2:] if len(row) == len(rows[0])]


def made(kind: str) -> PretrainedConfig:
    """The config of a model type with the tower of its checkpoints."""
    tower = {"vision_config": {"model_type": "siglip_vision_model"}} if kind == "gemma3" else {}
    return CONFIG_MAPPING[kind](**tower)


def test_whose_tower_is_read() -> None:
    types = list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items())
    kinds = {architecture: kind for kind, architecture in reversed(types)}  # the first, of variants
    theirs = {name: row for name, row in SERVED.items() if row.since is not None}  # else see tests/vllm
    known = {name: name in kinds and is_known(made(kinds[name])) for name in theirs}
    assert known == {name: row.patches is not None for name, row in theirs.items()}
    assert 16 <= sum(known.values()) < len(known)


def methods(where: str) -> list[str]:
    """Methods of the rows whose last cell holds a text."""
    return [name for row in section("Methods") if where in row[2] for name in re.findall(r"`(\w+)`", row[0])]


def test_every_method_that_serves_is_named() -> None:
    assert set(served_methods()) <= set(methods(""))


def test_methods_that_need_a_class_token_name_their_families() -> None:
    rows = {name: row[2] for row in section("Methods") for name in re.findall(r"`(\w+)`", row[0])}
    for name in ("hired", "globalcom2"):
        goes = [family for family in SERVED.values() if not refused(name, family)]
        assert len(goes) == len(rows[name].split(", ")) == 6


def refused(name: str, family: Family) -> bool:
    try:
        checks.check(method_class(name)(), family, Backend.VLLM)
    except TokenPruneError:
        return True
    return False


def test_which_methods_go_with_all_families() -> None:
    assert {"visionzip", "vscan", "fastervlm"} <= set(methods("[tower is read]"))
    assert "divprune" in methods("all")
    for name in methods("all"):
        method = method_class(name)()
        assert not reads_tower(build(name, {**method.query_free, **method.fallback_options})), name
