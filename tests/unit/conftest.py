# SPDX-License-Identifier: Apache-2.0
"""Models that are built once per session, and a check that no test leaves one patched or otherwise changed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# Without a GPU, kernels run in Triton's interpreter. Triton reads the variable at its first import, in transformers.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import PreTrainedConfig, PreTrainedModel

import tokenprune
from basics import snapshot
from selection import fast_of, lacking, leave_out_combinations, leave_out_families, leave_out_thorough, leave_out_values
from tokenprune.integrations.hf.families import list_supported_families
from tokenprune.integrations.hf.families.registry import ADAPTERS
from tokenprune.integrations.hf.sessions.policies import registry as policies
from tokenprune.methods import registry
from tokenprune.models import families as model_families
from tokenprune.selection.observable_registry import _OBSERVABLES
from zoo import FAMILIES, Family

_models: dict[tuple[str, str], PreTrainedModel] = {}
_pristine: dict[tuple[str, str], Any] = {}
_in_use: set[tuple[str, str]] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-combination", action="store_true", help="also run the variants that support/selection.py leaves out"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-combination"):
        for leave_out in (leave_out_thorough, leave_out_families, leave_out_values, leave_out_combinations):
            config.hook.pytest_deselected(items=leave_out(items))
    fast = fast_of(items)
    for item in items:
        item.add_marker("fast" if item in fast else "full")
        for reason in lacking(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Exclude the imported and collected objects, about a million, from later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise objects at the end of the process are reported as leaks


def pytest_configure() -> None:
    torch.set_num_threads(1)
    ask_each_config_once()


def ask_each_config_once() -> None:
    """Cache the generation parameters of each config for `generate`.

    transformers builds a default config to find them in every call, which takes a third of the time of a tiny model.
    """
    compute = PreTrainedConfig._get_generation_parameters
    parameters: dict[int, tuple[PreTrainedConfig, dict[str, Any]]] = {}

    def once(config: PreTrainedConfig) -> dict[str, Any]:
        if id(config) not in parameters:
            parameters[id(config)] = config, compute(config)  # keep the config alive, so that its id is not reused
        return parameters[id(config)][1]

    PreTrainedConfig._get_generation_parameters = once


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the model types of test_families.py without a failed test."""

    def types(outcome: str) -> set[str]:
        properties = [getattr(report, "user_properties", ()) for report in terminalreporter.stats.get(outcome, ())]
        return {value for test_properties in properties for name, value in test_properties if name == "model type"}

    if works := types("passed") - types("failed") - types("error"):
        terminalreporter.write_line(f"families: {len(works)} model types work: {', '.join(sorted(works))}")


@pytest.fixture
def restored_registries() -> Iterator[None]:
    """Remove the methods, observables, policies, families and adapters that a test registers."""
    # The registries are filled on first use.
    tokenprune.available_methods(), tokenprune.sessions.available_policies(), list_supported_families()
    tables = (registry._METHODS, _OBSERVABLES, policies._POLICIES, model_families.FAMILIES, ADAPTERS)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture
def restored_imports(restored_registries: None) -> Iterator[None]:
    """Remove packages that a test writes and imports from the modules, with their registered entries."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("tokenprune_", "test_", "family_")):
            del sys.modules[name]


@pytest.fixture
def kernel_device() -> Iterator[torch.device]:
    """Yield the device for kernel tests: a GPU, or the CPU with Triton's interpreter. torch.empty returns NaN (or the
    largest int), so that a missing write of a kernel is detected."""
    pytest.importorskip("triton", reason="Triton is not installed, so kernels cannot run")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def build() -> Callable[..., PreTrainedModel]:
    """Return a function that returns shared models: build(family, attn). Other attention functions apply only to the
    decoder."""

    def get(family: Family, attn: str = "sdpa") -> PreTrainedModel:
        key = (family.name, attn)
        if key not in _models:
            _models[key] = family.build(attn if attn in ("sdpa", "eager") else "sdpa")
            if attn not in ("sdpa", "eager"):
                _models[key].set_attn_implementation({"text_config": attn})
            # transformers installs hooks on first use.
            _models[key](**family.make_inputs(), output_hidden_states=True)
            if family.video is not None:
                _models[key](**family.make_inputs(images=(0, 0), video=True), output_hidden_states=True)
            _pristine[key] = snapshot(_models[key])
        _in_use.add(key)
        return _models[key]

    return get


@pytest.fixture
def model(family: Family, build: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return build(family)


@pytest.fixture(autouse=True)
def models_stay_as_they_were() -> Iterator[None]:
    _in_use.clear()
    yield
    changed_models = []
    for key in sorted(_in_use):
        model = _models[key]
        # Qwen's base model stores the deltas of its last prompt in rope_deltas.
        after = {k: v for k, v in snapshot(model).items() if not k.endswith(".rope_deltas")}
        before = {k: v for k, v in _pristine[key].items() if not k.endswith(".rope_deltas")}
        if after != before:
            del _models[key]  # so that later tests do not fail, too
            changed_models.append((key, [k for k in after.keys() | before.keys() if after.get(k) != before.get(k)][:4]))
    assert not changed_models, f"a test left its model changed: {changed_models}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield the Chromium that `dev/browser.py` finds."""
    pytest.importorskip("playwright.sync_api", reason="Playwright drives the browser: pip install playwright")
    from tests.unit.docs.test_docs import generator

    tool = generator("browser")
    try:
        with tool.started() as chromium:
            yield chromium
    except tool.NoBrowser as error:
        pytest.skip(str(error))
