# SPDX-License-Identifier: Apache-2.0
"""`patch(model, config=...)` applies the setting of a file from `tokenprune tune`. Damaged files are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenprune
from basics import snapshot
from each import each
from tokenprune import BudgetError, OptionError, Setting, UnknownMethodError
from tokenprune.errors import ConfigError
from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.integrations.vllm.settings import configure
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune_bench.calibration import Thresholds
from zoo import FAMILIES

LLAVA = FAMILIES["llava"]
SETTINGS = {
    "plain": ({"method": "divprune", "keep": 0.3}, dict(method="divprune", keep=0.3)),
    "options": ({"method": "fastv", "keep": 2, "layer": 1}, dict(method="fastv", keep=2, layer=1)),
    "default keep": ({"method": "dart"}, dict(method="dart")),
    "several": (
        {"method": [{"method": "random", "seed": 3}, "fastv"], "keep": [0.6, 0.5]},
        dict(method=[tokenprune.method("random", seed=3), "fastv"], keep=[0.6, 0.5]),
    ),
    "one keep for several": ({"method": ["pool", "fastv"], "keep": 0.6}, dict(method=["pool", "fastv"], keep=0.6)),
    "scope": (
        {"method": "divprune", "keep": 0.3, "per": "prompt"},
        dict(method="divprune", keep=tokenprune.Budget(keep=0.3, per="prompt")),
    ),
    "for vLLM": ({"method": "fastv", "keep": 0.3, "experimental_in_llm": True}, dict(method="fastv", keep=0.3)),
    "average": (
        {"method": "fastv", "keep": {"average_tokens": 20}, "layer": 1},
        dict(method="fastv", keep=tokenprune.Budget(average_tokens=20), layer=1),
    ),
    "a budget for each": (
        {"method": ["pool", {"method": "fastv", "layer": 1}], "keep": [0.6, {"kv_share": 0.8}]},
        dict(method=["pool", tokenprune.method("fastv", layer=1)], keep=[0.6, tokenprune.Budget.from_kv_share(0.8)]),
    ),
}


def build_content(setting: Any, **keys: Any) -> dict[str, Any]:
    return {"schema": 1, "setting": setting} | keys


def run_patched(model: Any, **arguments: Any) -> tuple[torch.Tensor, list[int], list[Any]]:
    with tokenprune.patched(model, record=True, **arguments), torch.no_grad():
        logits = model(**LLAVA.make_inputs(images=(2, 1))).logits
        stats = tokenprune.stats(model)
        return logits, stats.visual_tokens_per_layer, [cut.kept for cut in stats.cuts]


@each("name", SETTINGS)
def test_config_equals_patch_arguments(name: str, build: Callable, tmp_path: Path) -> None:
    """As a file and as a dict, with and without metadata."""
    model, (setting, arguments) = build(LLAVA), SETTINGS[name]
    path, plain = tmp_path / "tokenprune.json", tmp_path / "plain.json"
    tokenprune.write_config(path, Setting.from_json(setting))
    plain.write_text(json.dumps(setting))
    expected, layers, kept = run_patched(model, **arguments)
    for config in (path, str(path), build_content(setting), plain, setting):
        logits, *others = run_patched(model, config=config)
        assert torch.equal(logits, expected) and others[0] == layers and str(others[1]) == str(kept)
    with torch.no_grad():
        assert not torch.equal(expected, model(**LLAVA.make_inputs(images=(2, 1))).logits)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_byte_order_marks_and_utf16_are_read(encoding: str, tmp_path: Path) -> None:
    """Notepad and PowerShell on Windows write a byte order mark or UTF-16."""
    setting, path = {"method": "view_select", "views": ["Straße", "路"]}, tmp_path / "tokenprune.json"
    path.write_bytes(json.dumps(build_content(setting), ensure_ascii=False).replace("\n", "\r\n").encode(encoding))
    assert tokenprune.read_config(path).to_json() == setting


def test_files_that_a_setting_names_are_read_once(tmp_path: Path) -> None:
    source = Path(tokenprune.__file__).parent / "methods/encoder/data/demo_vlm.safetensors"
    path = tmp_path / "thresholds.safetensors"
    path.write_bytes(source.read_bytes())
    config = tokenprune.read_config({"method": "dymu", "keep": 0.5, "thresholds": path})
    path.unlink()
    (method,), _ = config.steps()
    assert method.thresholds.keeps == Thresholds.load(source).keeps


BAD = {
    "no file": ("gone.json", ConfigError, "cannot read gone.json"),
    "no JSON": ("{", ConfigError, "damaged: it is not JSON"),
    "torn": ('{"schema": 1, "setting": {"method": "da', ConfigError, "damaged"),
    "no text": (b"\xff\xfe\x00", ConfigError, "damaged or not UTF-8. Save it as UTF-8"),
    "latin-1": ('{"method": "dart", "x": "Straße"}'.encode("cp1252"), ConfigError, "Save it as UTF-8"),
    "zeros": (b"\0" * 9, ConfigError, "damaged"),
    "empty file": (b"", ConfigError, "damaged"),
    "too large": (b" " * (2**20 + 1), ConfigError, "larger than 1048576 bytes"),
    "deep": ("[" * 100_000, ConfigError, "damaged"),
    "deep inside": (
        '{"method": "dart", "keep": ' + "[" * 20 + "]" * 20 + "}",
        OptionError,
        "keep: lists .* 6 levels deep",
    ),
    "a number": ("3", ConfigError, "is not a configuration"),
    "a text": ('"dart"', ConfigError, "is not a configuration"),
    "schema is a text": ({"schema": "1", "setting": {"method": "dart"}}, ConfigError, "schema '1'"),
    "schema is a list": ({"schema": [1], "setting": {"method": "dart"}}, ConfigError, r"schema \[1\]"),
    "schema is true": ({"schema": True, "setting": {"method": "dart"}}, ConfigError, "schema True"),
    "setting is a text": (build_content("dart"), ConfigError, "setting and tuned must be objects"),
    "tuned is a list": (build_content({"method": "dart"}, tuned=[1]), ConfigError, "setting and tuned must be objects"),
    "model is a number": (build_content({"method": "dart"}, tuned={"model": 3}), ConfigError, "model in tuned must be"),
    "fingerprint": (
        build_content({"method": "dart"}, tuned={"model": {"fingerprint": [1]}}),
        ConfigError,
        "fingerprint .* must be a string",
    ),
    "per is a list": (build_content({"method": "dart", "keep": 0.5, "per": ["image"]}), OptionError, "per must be"),
    "off and more": (build_content({"off": True, "method": "dart"}), OptionError, "off excludes other keys"),
    "off is a number": (build_content({"off": 1, "method": "dart"}), OptionError, "true or false"),
    "keep is huge": (build_content({"method": "dart", "keep": 10**400}), BudgetError, "keep is out of range"),
    "keep inside": (build_content({"method": {"method": "dart", "keep": 0.5}}), OptionError, "keep belongs next to"),
    "a list": ([1], ConfigError, 'or {"schema": 1'),
    "no schema": ({"setting": {"method": "dart"}}, ConfigError, "is not a configuration"),
    "another schema": ({"schema": 2, "setting": {}}, ConfigError, "schema 2, but this version .* reads schema 1"),
    "no setting": ({"schema": 1}, ConfigError, "setting and tuned must be objects"),
    "option outside": ({"schema": 1, "setting": {"method": "dart"}, "keep": 1}, ConfigError, "unknown keys keep"),
    "no method": (build_content({"keep": 0.5}), OptionError, "names no method"),
    "off": (build_content({"off": True}), OptionError, "no method can be patched"),
    "unknown method": (build_content({"method": "dartt"}), UnknownMethodError, "did you mean 'dart'"),
    "unknown option": (build_content({"method": "dart", "pivots": 2}), OptionError, "has no option 'pivots'"),
    "option of a wrong type": (build_content({"method": "fastv", "layer": "x"}), OptionError, "layer"),
    "keep": (build_content({"method": "dart", "keep": 0}), BudgetError, "keeps no token"),
    "keep is a text": (build_content({"method": "dart", "keep": "half"}), BudgetError, "must be a number"),
    "keeps": (build_content({"method": ["pool", "fastv"], "keep": [0.5]}), BudgetError, "1 entries for 2 methods"),
    "per": (build_content({"method": "dart", "keep": 0.5, "per": "word"}), BudgetError, "per='word'"),
    "ambiguous": (build_content({"method": ["pool", "fastv"], "layer": 1}), OptionError, "layer are ambiguous"),
    "empty": (build_content({"method": []}), OptionError, "an empty list"),
}


@each("name", BAD)
def test_invalid_files_are_rejected(
    name: str, build: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file_content, error, message = BAD[name]
    path = Path("tokenprune.json")
    if file_content == "gone.json":
        path = Path(file_content)
    elif isinstance(file_content, bytes):
        path.write_bytes(file_content)
    else:
        path.write_text(file_content if isinstance(file_content, str) else json.dumps(file_content))
    model = build(LLAVA)
    before = snapshot(model)
    with pytest.raises(error, match=message):
        tokenprune.patch(model, config=path)
    assert snapshot(model) == before and not tokenprune.is_patched(model)


@pytest.mark.parametrize("arguments", [{"method": "dart"}, {"keep": 0.25}, {"layer": 2}], ids=str)
def test_config_excludes_other_arguments(arguments: dict[str, Any], build: Callable) -> None:
    with pytest.raises(OptionError, match="Pass either config= or these"):
        tokenprune.patch(build(LLAVA), config=build_content({"method": "pool"}), **arguments)
    with pytest.raises(ConfigError, match="must be a path or a dict"):
        tokenprune.patch(build(LLAVA), config=3)


def test_different_model_logs_a_warning(build: Callable, caplog: pytest.LogCaptureFixture) -> None:
    model = build(LLAVA)
    tuned = {"model": {"name": "mine", "fingerprint": compute_fingerprint(model)}}
    with caplog.at_level(logging.WARNING, "tokenprune"):
        with tokenprune.patched(model, config=build_content({"method": "pool"}, tuned=tuned)):
            assert tokenprune.is_patched(model)
        assert not caplog.records
        tuned["model"]["fingerprint"] = "float32:0"
        with tokenprune.patched(model, config=build_content({"method": "pool"}, tuned=tuned)):
            assert tokenprune.is_patched(model)
    (record,) = caplog.records
    assert "tuned on mine" in record.getMessage() and "tokenprune tune" in record.getMessage()


def test_file_is_written_atomically(tmp_path: Path) -> None:
    path, config = tmp_path / "tokenprune.json", Setting(("dart",), ({},), 0.5, tuned={"metric": "exact"})
    tokenprune.write_config(path, config)
    assert json.loads(path.read_text()) == {
        "schema": 1,
        "setting": {"method": "dart", "keep": 0.5},
        "tuned": {"metric": "exact"},
    }
    read = tokenprune.read_config(path)
    assert (read, read.where) == (config, "tokenprune.json")
    assert [file.name for file in tmp_path.iterdir()] == ["tokenprune.json"]
    with pytest.raises(ConfigError, match="cannot write"):
        tokenprune.write_config(tmp_path / "gone/tokenprune.json", config)


@pytest.mark.parametrize(
    "setting",
    [
        {"method": "divprune", "keep": 0.25},
        {"method": "random", "keep": 64, "seed": 3, "per": "frame"},
        {"method": [{"method": "dynres", "min_scale": 0.5}, "divprune"], "keep": [0.5, 0.25]},
        {"method": "fastv", "keep": 0.25, "layer": 2, "experimental_in_llm": True},
    ],
    ids=str,
)
def test_plugin_reads_the_same_setting(setting: dict[str, Any]) -> None:
    served = Setting.from_json(parse_setting(setting).to_json())
    assert served.steps() == Setting.from_json(setting).steps()


def test_missing_keys_use_defaults(build: Callable) -> None:
    for method_argument, name, keep in ((None, "divprune", 0.25), ("dyrate", "dyrate", 0.5)):
        with tokenprune.patched(build(LLAVA), method_argument, keep=None) as model:
            (method,), (budget,) = get_attachment(model).methods, get_attachment(model).budgets
            assert (method.name, budget) == (name, tokenprune.Budget(keep))


def test_config_contains_the_guard(build: Callable, tmp_path: Path) -> None:
    model, path = build(LLAVA), tmp_path / "with guard.json"
    setting = {"method": "random", "keep": 0.3}
    tokenprune.write_config(path, replace(Setting.from_json(setting), guard="auto"))
    assert json.loads(path.read_text()) == build_content(setting, guard="auto")
    before = snapshot(model)
    for config in (path, build_content(setting, guard="auto"), setting | {"guard": "auto"}):
        assert tokenprune.read_config(config).guard == "auto" and tokenprune.read_config(config).to_json() == setting
        with pytest.raises(OptionError, match=r'uses guard="auto", which reads prompts. Pass processor='):
            tokenprune.patch(model, config=config)
        assert snapshot(model) == before
        with tokenprune.patched(model, config=config, guard="off"):  # the argument takes precedence
            assert "guard" not in repr(model)
    with tokenprune.patched(model, config=build_content(setting, guard="warn")):
        assert 'guard="warn" checks images' in repr(model)
    for guard in ("loud", True, None):
        with pytest.raises(ConfigError, match="guard must be one of warn, auto, off, not"):
            tokenprune.read_config(build_content(setting, guard=guard))


def test_plugin_rejects_guard_auto(tmp_path: Path) -> None:
    path, model_config = tmp_path / "tokenprune.json", SimpleNamespace(hf_config=SimpleNamespace(model_type="llava"))
    for guard, is_refused in (("auto", True), ("warn", False), (None, False)):
        tokenprune.write_config(path, Setting(("divprune",), ({},), 0.3, guard=guard))
        with pytest.raises(OptionError, match="which vLLM does not support") if is_refused else nullcontext():
            assert configure._read({"config": str(path)}, model_config) == {"method": "divprune", "keep": 0.3}
