# SPDX-License-Identifier: Apache-2.0
"""Run the code of the guides with shipped models and images, and check the commands on pages."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import tokenprune
from each import each
from tests.unit.docs.test_docs import GUIDES, ROOT
from tokenprune.cli import app
from tokenprune_demo.heldout import FOLDER

STAND_INS = {
    "Qwen/Qwen2.5-VL-7B-Instruct": ROOT / "demo/tokenprune_demo/models/demo_qwen",
    "llava-hf/llava-1.5-7b-hf": ROOT / "demo/tokenprune_demo/models/demo_vlm",
    "path-or-name-of-your-model": ROOT / "demo/tokenprune_demo/models/demo_qwen",
    "photo.jpg": FOLDER / "pictures/002.jpg",
}


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def shell_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in blocks without a language, split like a shell."""
    blocks = re.findall(r"^ *```(.*?)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for block in (text for language, text in blocks if not language):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                continue  # output of a program
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


def run_blocks(blocks: list[str]) -> dict[str, Any]:
    """Run code blocks with shipped models and images as stand-ins. Return the names that the code defines."""
    names: dict[str, Any] = {}
    for block in blocks:
        for name, stand_in in STAND_INS.items():
            block = block.replace(f'"{name}"', repr(str(stand_in)))
        assert not re.search(r'https?:|"[\w.-]+/[\w.-]+"', block), "a name in this block lacks a stand-in"
        exec(compile(block, "block", "exec"), names)
    return names


def test_quickstart_prunes_and_restores_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *_ = python_blocks(ROOT / "docs/start/quickstart.md")
    names = run_blocks([first])
    assert "divprune" in repr(names["model"])
    names = run_blocks([first, second])
    assert "visual tokens" in capsys.readouterr().out
    assert not tokenprune.is_patched(names["model"])


def test_chat_encodes_the_image_once() -> None:
    names = run_blocks(python_blocks(ROOT / "docs/guides/chats.md")[:1])
    counts = tokenprune.stats(names["model"]).feature_cache
    assert (counts.hits, counts.misses) == (1, 1) and len(names["chat"]) == 5
    assert tokenprune.stats(names["model"]).keep_ratio == pytest.approx(0.25)


def test_training_updates_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names = run_blocks(python_blocks(ROOT / "docs/guides/training.md")[:1])
    assert names["loss"].isfinite() and (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    weights = [p for name, p in names["model"].named_parameters() if "lora_B" in name]
    assert weights and all(p.abs().max() > 0 for p in weights)  # LoRA weights start at zero
    assert tokenprune.stats(names["model"].base_model.model).keep_ratio == pytest.approx(0.25)


@each("page", [page for page in (*GUIDES, ROOT / "CONTRIBUTING.md") if any(shell_lines(page))])
def test_commands_on_pages_use_existing_options(page: Path) -> None:
    for words in shell_lines(page):
        if words[0] != "tokenprune":
            continue
        command, rest = typer.main.get_command(app), words[1:]
        while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
            known = command.get_command(typer.Context(command), rest[0])
            assert known is not None, f"{' '.join(words)}: there is no command {rest[0]}"
            command, rest = known, rest[1:]
        known = {"--help", *(name for param in command.params for name in (*param.opts, *param.secondary_opts))}
        options = {word.partition("=")[0] for word in rest if word.startswith("-") and not re.match(r"-\d", word)}
        assert options <= known, f"{' '.join(words)}: {command.name} takes no {', '.join(sorted(options - known))}"


def test_clients_name_the_profiles_of_the_server() -> None:
    from tokenprune.integrations.vllm.settings.configuration import split_server_keys
    from tokenprune.integrations.vllm.settings.parse import parse_setting
    from tokenprune.integrations.vllm.settings.server_config import ServerConfig

    page = ROOT / "docs/serving/start.md"
    (words,) = (words for words in shell_lines(page) if "--served-model-name" in words)
    assert words[:2] == ["vllm", "serve"]
    setting = json.loads(words[words.index("--mm-processor-kwargs") + 1])["tokenprune"]
    server, rules = split_server_keys(setting)
    config = ServerConfig.from_json(rules, parse_setting(server), lambda profile: parse_setting(server, profile))
    first, *others = (word for word in words if word.startswith("qwen"))
    assert [f"{first}:{name}" for name in config.names] == others
