# SPDX-License-Identifier: Apache-2.0
"""`tokenprune new-family`: a row that is taken out of the table comes back from the config and the class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from typer.testing import CliRunner

from families import FAMILIES as BUILT
from tokenprune import OptionError, UnsupportedModelError
from tokenprune.cli import app
from tokenprune.integrations.hf.families import Adapter, registry
from tokenprune.integrations.hf.families.describe import describe
from tokenprune.models import families

READ = ("decoder_names", "norm_name", "tower_rows", "stateful", "static_cache")
NOT_TOLD = {"one image", "one frame"}  # values of `tower_rows` that configs and classes do not tell
# What the code of an adapter says: layers that share keys or cache latents, and OPT in a Q-Former's model.
_SHARES, _OPT = frozenset({"static_cache"}), frozenset({"decoder_names", "norm_name"})
BY_CODE = dict.fromkeys(("gemma3n", "gemma4", "gemma4_unified", "kimi_k25"), _SHARES)
BY_CODE |= dict.fromkeys(("blip-2", "instructblip_opt"), _OPT)
WITHOUT_NORM = "blip-2_without_norm"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Rows, adapters and modules that a test makes are gone after it."""
    rows, adapters, modules, path = dict(families.FAMILIES), dict(registry.ADAPTERS), set(sys.modules), list(sys.path)
    yield
    for table, before in ((families.FAMILIES, rows), (registry.ADAPTERS, adapters)):
        table.clear()
        table.update(before)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("family_", "test_family_")):
            del sys.modules[name]


@pytest.fixture
def unknown(build, tmp_path: Path) -> Any:
    """Return a function: name of a tiny family -> the folder of its config, and its row, which is taken out."""

    def take_out(name: str) -> tuple[Path, families.Family]:
        build(BUILT[name]).config.save_pretrained(tmp_path / "config")
        registry.ADAPTERS.pop(BUILT[name].kind, None)
        return tmp_path / "config", families.FAMILIES.pop(BUILT[name].kind)

    return take_out


@pytest.mark.parametrize("name", [name for name in BUILT if name != WITHOUT_NORM])
def test_existing_rows_are_reproduced(name: str, unknown) -> None:
    folder, row = unknown(name)
    about = describe(folder)
    different = {field for field in READ if getattr(about.row, field) != getattr(row, field)}
    if row.tower_rows in NOT_TOLD:
        different.discard("tower_rows")
    if set(about.row.decoder_names) <= set(row.decoder_names):  # some rows name two places
        different.discard("decoder_names")
    assert different == BY_CODE.get(name, BY_CODE.get(row.name, _OPT) - _OPT)
    assert (about.row.videos == "none") == (row.videos == "none")


@pytest.mark.parametrize("name", ["video_llama_3", "lfm2_vl"])
def test_generated_test_passes(name: str, unknown, tmp_path: Path) -> None:
    folder, row = unknown(name)
    done = CliRunner().invoke(app, ["new-family", str(folder), "--to", str(tmp_path / "made")])
    assert done.exit_code == 0 and "look up patches: how patches" in done.output
    sys.path.insert(0, str(tmp_path / "made"))
    test = importlib.import_module(f"test_family_{name}")
    again = families.FAMILIES[name]
    told = [field for field in READ if field != "tower_rows" or row.tower_rows not in NOT_TOLD]
    assert [getattr(again, field) for field in told] == [getattr(row, field) for field in told]
    assert registry.ADAPTERS[name].__bases__ == (Adapter,)
    model = test.model.__wrapped__()
    test.test_decoder(model)
    for method in ("divprune", "fastv"):
        test.test_patch_and_unpatch(model, method)


def test_missing_decoder_is_reported(unknown) -> None:
    with pytest.raises(OptionError, match="has no decoder with layers and a norm"):
        describe(unknown(WITHOUT_NORM)[0])


def test_supported_family_is_rejected() -> None:
    for kind, error, says in (
        ("llava", OptionError, "'llava' is already in the family table"),
        ("mllama", UnsupportedModelError, "enter through cross-attention"),
        ("nothing", OptionError, "is neither a model type of transformers nor a folder with config.json"),
        ("llama", OptionError, "cannot build 'llama' with images from its default config"),
    ):
        with pytest.raises(error, match=says):
            describe(kind)
    assert {"llava", "mllama"} <= MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
