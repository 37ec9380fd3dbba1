# SPDX-License-Identifier: Apache-2.0
"""Commands refuse bad outputs, numbers, names and images before they load a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from each import each
from tests.unit.api.test_cli import IMAGE, refused
from tokenprune.errors import OptionError, RegistrationError, TokenPruneError
from tokenprune.methods.registry import method_class, register
from tokenprune.models.model_config import check_source, read_model_config
from tokenprune.selection.files import check_output, check_output_folder
from tokenprune_bench.profiling import model as models

LONG = "9" * 23
TUNE = ("tune", "--methods", "divprune", "--max-drop", "50%")


@pytest.fixture(autouse=True)
def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_model", load)


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "--html"), ("bench", "--json"), ("bench", "--plot"), ("profile", "--html"), ("profile", "--json"),
        (*TUNE, "--out"), ("report", "run", "--html"), ("report", "run", "--plot"), ("recommend", "demo_vlm", "--out"),
        ("capacity", "--json"), ("show", IMAGE, "--out"), ("fit", "dyrate", "--out"),
    ],
)  # fmt: skip
def test_unwritable_output_is_rejected_first(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder.png").mkdir()
    assert "the folder no where does not exist" in refused(*command, "no where/out.png")
    assert "a folder.png: it is a folder. Pass a file in it" in refused(*command, "a folder.png")
    assert "cannot write" in refused(*command, f"{'x' * 300}.png")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert "cannot write out.png: permission denied" in refused(*command, "out.png")


def test_unwritable_run_folder_is_rejected_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for command in (("bench",), TUNE):
        assert "file is a file" in refused(*command, "--run", tmp_path / "file" / "run")
    check_output_folder(tmp_path / "new" / "and new")
    check_output(None, tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(OptionError, match="permission denied"):
        check_output_folder(tmp_path / "new")


def test_image_output_needs_an_image_suffix() -> None:
    assert "called like no image: give it a name that ends in .png" in refused("show", IMAGE, "--out", "kept.xyz")
    # Pillow can read this format but not write it
    assert "called like no image" in refused("show", IMAGE, "--out", "kept.pcd")


@each(
    "arguments",
    [
        ("bench", "--limit", LONG), ("show", IMAGE, "--frames", LONG), ("tune", "--seed", LONG),
        ("profile", "--config-only", "--tokens", LONG), ("capacity", "--gpus", f"-{LONG}"), ("draft", "--tokens", LONG),
        ("fit", "dyrate", "--limit", LONG), ("demo", "--threads", LONG),
    ],
)  # fmt: skip
def test_too_large_integers_are_rejected(arguments: tuple[str, ...]) -> None:
    from typer.testing import CliRunner

    from tokenprune.cli import app

    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert "too large. The maximum is 2147483647" in result.output or "1024" in result.output


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake hub that raises the first error in the returned list. The cache is empty."""
    raised: list[Any] = []

    def answer(self: Any, name: str, timeout: float) -> None:
        assert timeout <= 10
        if raised:
            raise raised[0]

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answer)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return raised


def build_hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "said by the hub")
    return error


def test_missing_model_is_reported_first(hub: list[Any], tmp_path: Path) -> None:
    for error, message in (
        (build_hub_error(errors.RepositoryNotFoundError), "the model is missing on the hub or private"),
        (ConnectionError("no route"), r"the hub cannot be reached \(no route\); download the model"),
        (TimeoutError(), r"the hub cannot be reached \(TimeoutError\)"),
        (errors.HFValidationError("bad"), "it is not a valid hub id"),
    ):
        hub[:] = [error]
        with pytest.raises(TokenPruneError, match=f"model 'some/model' not found: .*{message}"):
            read_model_config("some/model")
    with pytest.raises(TokenPruneError, match=r"Did you mean demo_vlm\?"):
        check_source("demo_vl")
    (tmp_path / "a file").touch()
    for name, message in (
        (tmp_path / "a file", r"is a file\. Pass the folder"),
        ("./gone", "folder ./gone does not exist"),
        (tmp_path / "gone", "does not exist"),
        ("a/b/c", "folder a/b/c does not exist"),
    ):
        with pytest.raises(TokenPruneError, match=message):
            check_source(name)


def test_hub_errors_name_the_model(hub: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_source("some/model")  # the model exists
    # transformers reports the first error itself and retries the second
    for kind in (errors.GatedRepoError, errors.HfHubHTTPError):
        hub[:] = [build_hub_error(kind)]
        check_source("some/model")
    hub[:] = [AssertionError("it was asked")]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TokenPruneError, match="not in the hub's cache, and HF_HUB_OFFLINE is set"):
        check_source("some/model")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    check_source("some/model")
    check_source(tmp_path)


def test_empty_file_and_folder_have_own_messages(tmp_path: Path) -> None:
    empty, folder = tmp_path / "an empty.jpg", tmp_path / "folder.jpg"
    empty.touch(), folder.mkdir()
    rows = {name: tmp_path / f"{name}.jsonl" for name in ("image", "video")}
    for name, path in rows.items():
        path.write_text(f'{{"{name}": "an empty.jpg", "question": "q", "answer": "a"}}')
        assert "the file is empty" in refused("bench", "--data", path)
    for command in (("show", empty), ("profile", "--image", empty)):
        assert "the file is empty" in refused(*command)
    assert "it is a folder; use a file" in refused("profile", "--image", folder)
    rows["image"].write_text('{"image": "folder.jpg", "question": "q", "answer": "a"}')
    assert "it is a folder; use a file" in refused("bench", "--data", rows["image"])


def test_python_keyword_is_rejected_as_method_name() -> None:
    assert "'class' is a Python keyword. Choose another name, such as class_method" in refused("new-method", "class")
    with pytest.raises(RegistrationError, match="not a Python keyword"):
        register("lambda", site="PRE_LLM", paper="none")(method_class("divprune"))
