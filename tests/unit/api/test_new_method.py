# SPDX-License-Identifier: Apache-2.0
"""`tokenprune new-method` and `new-family`: the written files pass their own tests, and failures leave no files."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from typer.testing import CliRunner

import tokenprune
from each import each
from families import FAMILIES as BUILT
from pruned import run_pruned
from tokenprune import OptionError, Site, UnsupportedModelError
from tokenprune.cli import app, scaffold
from tokenprune.errors import RegistrationError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.families import registry as adapters
from tokenprune.integrations.hf.families.describe import describe
from tokenprune.methods import registry
from tokenprune.models import families
from tokenprune_bench.results import UNPATCHED
from tokenprune_bench.two_pass import ESCALATE

pytestmark = pytest.mark.usefixtures("restored_imports")
SITES = [scaffold.spell_site(site) for site in Site]


def load(folder: Path) -> Any:
    """Import a written package as pip would install it, and its test; return the test's module."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    ((name, module),) = project["project"]["entry-points"][registry.ENTRY_POINT_GROUP].items()
    sys.path[:0] = [str(folder), str(folder / "tests")]
    assert [f"{module}.py"] == [one.name for one in folder.glob("*.py")] and [module] == project["tool"]["setuptools"][
        "py-modules"
    ]
    EntryPoint(name, module, registry.ENTRY_POINT_GROUP).load()
    return importlib.import_module(f"test_{name}")


def cases(test: Any) -> list[dict[str, Any]]:
    (mark,) = test.test_method_rules.pytestmark
    return mark.args[1]


@pytest.mark.parametrize("site", SITES)
def test_generated_test_passes(site: str, tmp_path: Path) -> None:
    folder = scaffold.new_method("my_method", site, tmp_path / "made")
    test = load(folder)
    info = tokenprune.method_info("my_method")
    assert scaffold.spell_site(info.site) == site and info.cls.__name__ == "MyMethod" and info.options
    assert len(cases(test)) == 2
    for options in cases(test):
        test.test_method_rules(options)
        assert options.items() <= vars(info.cls(**options)).items()
    page = (folder / "README.md").read_text()
    assert page.startswith("# my_method\n") and site_words(site) in page
    for path in folder.rglob("*.*"):
        assert path.suffix == ".pyc" or "$" not in path.read_text(), path.name


def site_words(site: str) -> str:
    return Site(site.upper().replace("-", "_")).description


def test_generated_test_finds_broken_rules(tmp_path: Path) -> None:
    folder = scaffold.new_method("broken", to=tmp_path / "made")
    file = folder / "tokenprune_broken.py"
    file.write_text(file.read_text().replace("return tokens.hidden", "return -tokens.keys"))
    test = load(folder)
    with pytest.raises(AssertionError, match="broken"):
        test.test_method_rules({})


def test_generated_method_prunes_a_model(tmp_path: Path, build: Any) -> None:
    from zoo import FAMILIES

    load(scaffold.new_method("loud", "in-llm", tmp_path / "made"))
    model, inputs = build(FAMILIES["llava"]), FAMILIES["llava"].make_inputs()
    assert run_pruned(model, inputs, "loud", 0.25, layer=1)[1].keep_ratio == pytest.approx(0.25)


@each(
    ("name", "told"),
    [
        ("divprune", "is taken by tokenprune.methods"),
        ("unpatched", "reserved name"),
        (
            "vlm",
            "tokenprune-vlm .* is installed|reserved name",
        ),  # the library's own distribution, where it is installed, else reserved
        *(
            (name, "is not a valid name")
            for name in ("", "My", "my-method", "1st", "my_", "_my", "a b", "../up", "é", "a\n")
        ),
    ],
)
def test_invalid_or_taken_name_is_rejected(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match=told):
        scaffold.new_method(name, to=tmp_path / "made")
    assert not any(tmp_path.iterdir())


def test_benchmark_names_are_reserved() -> None:
    assert {UNPATCHED, ESCALATE} < set(scaffold.RESERVED)


def test_installed_package_is_not_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold, "distribution", lambda name: SimpleNamespace(version=f"of {name}"))
    with pytest.raises(RegistrationError, match="tokenprune-my-method of tokenprune-my-method is installed"):
        scaffold.new_method("my_method", to=tmp_path / "made")


@pytest.mark.parametrize("name", ["pruner", "site", "none", "false", "ge", "tensor", "tower", "x1_y2"])
def test_class_name_does_not_shadow_imports(name: str, tmp_path: Path) -> None:
    for site in ("pre-llm", "in-encoder"):
        folder = scaffold.new_method(name, site, tmp_path / site)
        compile((folder / f"tokenprune_{name}.py").read_text(), name, "exec")
    test = load(tmp_path / "in-encoder")
    test.test_method_rules({})


def test_failures_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("empty", "full"):
        (tmp_path / target).mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    before = sorted(tmp_path.rglob("*"))
    for target in ("empty", "full", "nowhere", "full/notes.txt"):
        with pytest.raises(OptionError, match="already exists"):
            scaffold.new_method("my_method", to=tmp_path / target)
    with pytest.raises(OptionError, match=r"the folder .*gone does not exist"):
        scaffold.new_method("my_method", to=tmp_path / "gone/made")
    with pytest.raises(OptionError, match=r"'moon' is unknown. Use one of pre-encoder, in-encoder"):
        scaffold.new_method("my_method", "moon", tmp_path / "made")

    written = []

    def full(self: Path, text: str, **_: Any) -> None:
        written.append(self)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OptionError, match=r"cannot write .*made: No space left on device"):
        scaffold.new_method("my_method", to=tmp_path / "made")
    assert len(written) == 3 and sorted(tmp_path.rglob("*")) == before


def test_command_prints_files_and_next_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new-method", "my_method", "--site", "IN_LLM"])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "tokenprune-my-method"
    for path in ("pyproject.toml", "README.md", "tokenprune_my_method.py", "tests/test_my_method.py"):
        assert (folder / path).is_file() and f"written: tokenprune-my-method/{path}\n" in done.stdout
    assert "cd tokenprune-my-method && python -m pytest" in done.stdout
    again = CliRunner().invoke(app, ["new-method", "my_method"])
    assert again.exit_code == 2 and "error: tokenprune-my-method already exists" in again.stderr
    assert set(SITES) <= set(re.findall(r"[\w-]+", CliRunner().invoke(app, ["new-method", "--help"]).stdout))


READ = ("decoder_names", "norm_name", "tower_rows", "stateful", "static_cache")
NOT_TOLD = {"one image", "one frame"}  # values of `tower_rows` that configs and classes do not tell
# What the code of an adapter says: layers that share keys or cache latents, and OPT in a Q-Former's model.
_SHARES, _OPT = frozenset({"static_cache"}), frozenset({"decoder_names", "norm_name"})
BY_CODE = dict.fromkeys(("gemma3n", "gemma4", "gemma4_unified", "kimi_k25"), _SHARES)
BY_CODE |= dict.fromkeys(("blip-2", "instructblip_opt"), _OPT)
WITHOUT_NORM = "blip-2_without_norm"


@pytest.fixture
def unknown(build, tmp_path: Path) -> Any:
    """Return a function: name of a tiny family -> the folder of its config, and its row, which is taken out."""

    def take_out(name: str) -> tuple[Path, families.Family]:
        build(BUILT[name]).config.save_pretrained(tmp_path / "config")
        adapters.ADAPTERS.pop(BUILT[name].kind, None)
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
def test_generated_family_test_passes(name: str, unknown, tmp_path: Path) -> None:
    folder, row = unknown(name)
    done = CliRunner().invoke(app, ["new-family", str(folder), "--to", str(tmp_path / "made")])
    assert done.exit_code == 0 and "look up patches: how patches" in done.output
    sys.path.insert(0, str(tmp_path / "made"))
    test = importlib.import_module(f"test_family_{name}")
    again = families.FAMILIES[name]
    told = [field for field in READ if field != "tower_rows" or row.tower_rows not in NOT_TOLD]
    assert [getattr(again, field) for field in told] == [getattr(row, field) for field in told]
    assert adapters.ADAPTERS[name].__bases__ == (Adapter,)
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
