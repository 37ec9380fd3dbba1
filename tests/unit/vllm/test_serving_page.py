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


def read_table(title: str) -> list[list[str]]:
    """Return the rows of the first table of a section, without the header."""
    _, _, text = PAGE.partition(f"\n## {title}\n")
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows[2:] if len(row) == len(rows[0])]


def build_config(model_type: str) -> PretrainedConfig:
    """Return the config of a model type with the tower of its checkpoints."""
    tower = {"vision_config": {"model_type": "siglip_vision_model"}} if model_type == "gemma3" else {}
    return CONFIG_MAPPING[model_type](**tower)


def test_the_plugin_reads_the_towers_of_families_with_patches() -> None:
    types = list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items())
    # the first of several variants
    model_types = {architecture: model_type for model_type, architecture in reversed(types)}
    rows = {name: row for name, row in SERVED.items() if row.since is not None}  # tests/vllm covers the other rows
    known = {name: name in model_types and is_known(build_config(model_types[name])) for name in rows}
    assert known == {name: row.patches is not None for name, row in rows.items()}
    assert 16 <= sum(known.values()) < len(known)


def list_methods(text: str) -> list[str]:
    """Return the methods of table rows whose last cell contains a text."""
    return [name for row in read_table("Methods") if text in row[2] for name in re.findall(r"`(\w+)`", row[0])]


def test_every_method_that_serves_is_named() -> None:
    assert set(served_methods()) <= set(list_methods(""))


def test_methods_that_need_a_class_token_name_their_families() -> None:
    rows = {name: row[2] for row in read_table("Methods") for name in re.findall(r"`(\w+)`", row[0])}
    for name in ("hired", "globalcom2"):
        supported = [family for family in SERVED.values() if not is_refused(name, family)]
        assert len(supported) == len(rows[name].split(", ")) == 6


def is_refused(name: str, family: Family) -> bool:
    try:
        checks.check(method_class(name)(), family, Backend.VLLM)
    except TokenPruneError:
        return True
    return False


def test_methods_of_all_families() -> None:
    assert {"visionzip", "vscan", "fastervlm"} <= set(list_methods("[tower is read]"))
    assert "divprune" in list_methods("all")
    for name in list_methods("all"):
        method = method_class(name)()
        assert not reads_tower(build(name, {**method.query_free, **method.fallback_options})), name
