# SPDX-License-Identifier: Apache-2.0
"""Versions of transformers: untested newer versions are refused, and the cache is found by both of its names."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import DynamicCache

import tokenprune
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.shared import versions
from zoo import FAMILIES

ROOT = Path(__file__).parents[3]
FAMILY = FAMILIES["llava"]
MAJOR, MINOR = Version(compat.NEWEST).release
NEXT = f"{MAJOR}.{MINOR + 1}"


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(compat, "VERSION", Version(f"{NEXT}.0.dev0"))
    monkeypatch.delenv(versions.UNTESTED, raising=False)
    versions._warn.cache_clear()
    return monkeypatch


@pytest.mark.parametrize("allowed", ["", "0"])
def test_a_version_newer_than_tested_is_refused(allowed: str, newer, build) -> None:
    newer.setenv(versions.UNTESTED, allowed)
    model = build(FAMILY)
    message = rf"transformers {NEXT}.*transformers<{NEXT}.*{versions.UNTESTED}=1"
    with pytest.raises(UnsupportedSetupError, match=message):
        tokenprune.patch(model, "divprune", keep=0.5)
    assert not tokenprune.is_patched(model)


def test_an_allowed_newer_version_is_warned_about_once(newer, caplog, build) -> None:
    newer.setenv(versions.UNTESTED, "1")
    model = build(FAMILY)
    with caplog.at_level(logging.WARNING, "tokenprune"):
        for _ in range(2):
            with tokenprune.patched(model, "divprune", keep=0.5):
                pass
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        f"transformers {compat.VERSION} is newer than {compat.NEWEST}"
    ]


def test_a_later_patch_release_is_accepted(newer, build) -> None:
    newer.setattr(compat, "VERSION", Version(f"{compat.NEWEST}.9"))
    tokenprune.unpatch(tokenprune.patch(build(FAMILY), "divprune", keep=0.5))


def test_the_requirement_ends_with_the_newest_version_tested() -> None:
    project, bench = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "benchmarks")
    )
    extras = project["optional-dependencies"]
    for listed in (extras["hf"], extras["vllm"], bench["dependencies"]):
        required = next(requirement for requirement in map(Requirement, listed) if requirement.name == "transformers")
        assert required.specifier.contains(f"{compat.NEWEST}.9")
        assert not required.specifier.contains(NEXT)
    for page in ("docs/start/install.md", "dev/README.md", "CHANGELOG.md"):
        assert compat.NEWEST in (ROOT / page).read_text(), page


@pytest.mark.parametrize("name", compat.CACHE_NAMES)
@pytest.mark.parametrize("method", ["divprune", "fastv"])
def test_a_cache_is_found_by_each_of_its_names(method: str, name: str, build) -> None:
    inputs, model = FAMILY.make_inputs(), build(FAMILY)
    cache = DynamicCache(config=model.config.get_text_config())
    with tokenprune.patched(model, method, keep=0.5):
        expected = model.model(**inputs, use_cache=True)
        actual = model.model(**inputs, use_cache=True, **{name: cache})
    assert torch.equal(expected.last_hidden_state, actual.last_hidden_state)
    lengths = [[layer.keys.shape[-2] for layer in output.layers] for output in (getattr(expected, compat.CACHE), cache)]
    assert lengths[0] == lengths[1]
    assert lengths[0][-1] < inputs["input_ids"].shape[1]
