# SPDX-License-Identifier: Apache-2.0
"""Issue forms, the release workflow and dev/try_wheel.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.docs.test_docs import generator
from tokenprune import Site

ROOT = Path(__file__).parents[3]
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
TEXTS = [*FORMS, ROOT / ".github/PULL_REQUEST_TEMPLATE.md", ROOT / "CONTRIBUTING.md"]


def read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)  # the default loader reads the key "on" as True


@pytest.fixture(scope="module")
def try_wheel() -> Any:
    return generator("try_wheel")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_have_the_keys_that_github_requires(path: Path) -> None:
    form = read_yaml(path)
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels", "title"}
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    for part in form["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        needed = {"markdown": {"value"}, "dropdown": {"label", "options"}, "checkboxes": {"label", "options"}}
        assert needed.get(part["type"], {"label"}) <= part["attributes"].keys()
    ids, labels = [part["id"] for part in questions], [part["attributes"]["label"] for part in questions]
    assert len(set(ids)) == len(ids) and len(set(labels)) == len(labels)
    assert any(part.get("validations", {}).get("required") == "true" for part in questions)


def test_the_three_forms_exist() -> None:
    assert [path.stem for path in FORMS] == ["bug", "method", "model"]
    (site,) = (
        part for part in read_yaml(ROOT / ".github/ISSUE_TEMPLATE/method.yml")["body"] if part.get("id") == "site"
    )
    assert [value.description for value in Site] == site["attributes"]["options"][:-1]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_named_files_exist(path: Path) -> None:
    for name in re.findall(r"\b(?:dev|docs|tests|tokenprune|leaderboard)/[\w/-]+\.(?:py|md)\b", path.read_text()):
        assert (ROOT / name).is_file(), name


def test_the_release_workflow_tries_the_wheel_before_publishing(try_wheel: Any) -> None:
    workflow = read_yaml(ROOT / ".github/workflows/release.yml")
    assert workflow["on"]["push"] == {"tags": ["v*"]}
    wheel, publish = workflow["jobs"]["wheel"], workflow["jobs"]["publish"]
    (command,) = (step["run"] for step in wheel["steps"] if "try_wheel.py" in step.get("run", ""))
    arguments = shlex.split(command)
    # the name of a tag is not shell code
    assert arguments[:2] == ["python", "dev/try_wheel.py"] and "${{" not in command
    args = try_wheel.parser().parse_args(arguments[2:])
    assert (str(args.out), args.extras, args.tag) == ("dist", "app", "$TAG")
    # Only the publishing job may request an identity token, and it runs no code of this repository.
    assert publish["needs"] == "wheel" and publish["permissions"] == {"id-token": "write"}
    assert workflow["permissions"] == {"contents": "read"} and "permissions" not in wheel
    assert all("run" not in step for step in publish["steps"])
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    folders = {
        step["with"]["path"] for job in (wheel, publish) for step in job["steps"] if "artifact" in step.get("uses", "")
    }
    assert folders == {"dist/"}


def test_a_wheel_must_have_the_version_of_the_tag(try_wheel: Any) -> None:
    version = try_wheel.version_of(Path("dist/tokenprune_vlm-0.2.0.dev1-py3-none-any.whl"))
    assert version == "0.2.0.dev1"
    try_wheel.check_tag(version, "")
    try_wheel.check_tag(version, "v0.2.0.dev1")
    for tag in ("v0.2.0", "0.2.0.dev1"):
        with pytest.raises(try_wheel.Failed, match=f"the tag {tag} is not v0.2.0.dev1"):
            try_wheel.check_tag(version, tag)


def test_build_requires_an_empty_folder(try_wheel: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenprune_vlm-0.1.0.tar.gz").touch()
    with pytest.raises(try_wheel.Failed, match="is not empty"):
        try_wheel.build(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_command_is_reported_with_its_output(try_wheel: Any, tmp_path: Path) -> None:
    assert try_wheel.run(["sh", "-c", "echo fine"], tmp_path) == "fine\n"
    with pytest.raises(try_wheel.Failed, match="ended with 3:\nbroken"):
        try_wheel.run(["sh", "-c", "echo broken >&2; exit 3"], tmp_path)
