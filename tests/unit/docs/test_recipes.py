# SPDX-License-Identifier: Apache-2.0
"""The recipes run as they stand, with the shipped models and images in the place of the reader's; and what pages call
in a shell is there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from PIL import Image
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tokenprune
from each import each
from tests.unit.docs.test_docs import GUIDES, ROOT
from tokenprune.cli import app
from tokenprune.methods import registry
from tokenprune_demo.drawn_documents import draw_document
from tokenprune_demo.heldout import FOLDER

RECIPES = sorted((ROOT / "docs/recipes").glob("*.md"))
STAND_INS = {
    "Qwen/Qwen2.5-VL-7B-Instruct": ROOT / "demo/tokenprune_demo/models/demo_qwen",
    "llava-hf/llava-1.5-7b-hf": ROOT / "demo/tokenprune_demo/models/demo_vlm",
    "photo.jpg": FOLDER / "pictures/002.jpg",
}
ELSEWHERE = "# Needs the server above."


def python_of(page: Path) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return [block for block in blocks if not block.startswith(ELSEWHERE)]


def shell_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of the blocks without a language, as a shell would part them."""
    for block in re.findall(r"^ *```\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                continue  # what a program printed
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for what recipes write; methods that they register are gone after it."""
    monkeypatch.chdir(tmp_path)
    frames = [Image.open(path).convert("RGB").resize((64, 64)) for path in sorted((FOLDER / "pictures").iterdir())[:8]]
    frames[0].save("clip.gif", save_all=True, append_images=frames[1:])
    Path("frames").mkdir()
    for number, frame in enumerate(frames):
        frame.save(f"frames/{number:03}.jpg")
    draw_document(np.random.default_rng(0), "page", (288, 320)).image.save("page.png")
    methods = dict(registry._METHODS)
    yield tmp_path
    registry._METHODS.clear()
    registry._METHODS.update(methods)


@pytest.mark.parametrize("page", [page for page in RECIPES if python_of(page)], ids=lambda page: page.stem)
def test_a_recipe_runs_and_does_what_it_says(
    page: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("kvpress", "peft"):
        if re.search(rf"^(?:import|from) {package}\b", page.read_text(), re.MULTILINE):
            pytest.importorskip(package, reason=f"{package} is not installed here")
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})  # kvpress writes over these for good
    names: dict[str, Any] = {}
    seen = []
    for number, block in enumerate(python_of(page)):
        for name, other in STAND_INS.items():
            block = block.replace(f'"{name}"', repr(str(other)))
        assert not re.search(r'https?:|"[\w.-]+/[\w.-]+"', block), "nothing here stands in for what this names"
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
        patched = repr(names["model"]) if "model" in names else ""
        seen.append(patched + capsys.readouterr().out)
    DOES[page.stem](names, seen)  # seen: behind each block the model, and what was printed


def of_documents(names: dict[str, Any], seen: list[str]) -> None:
    patches = int(names["inputs"]["image_grid_thw"].prod())
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert "pixelprune" in seen[0] and "dynres" in seen[1]
    names["tokenprune"].unpatch(names["model"])
    tokenprune.patch(names["model"], "pixelprune", processor=names["processor"])
    names["model"](**names["inputs"])
    assert 0 < tokenprune.stats(names["model"]).encoder_tokens_per_layer[0] < 0.7 * patches


def of_a_chat(names: dict[str, Any], seen: list[str]) -> None:
    counts = tokenprune.stats(names["model"]).feature_cache
    assert (counts.hits, counts.misses) == (1, 1) and len(names["chat"]) == 5
    assert tokenprune.stats(names["model"]).keep_ratio == pytest.approx(0.25)


def of_an_agent(names: dict[str, Any], seen: list[str]) -> None:
    """In the fourth turn two screenshots are new, and two have two or more after them."""
    visual = int((names["inputs"]["input_ids"] == names["model"].config.image_token_id).sum()) // 4
    stats = tokenprune.stats(names["model"])
    assert stats.visual_tokens_in == 4 * visual and stats.visual_tokens_out == 2 * visual + 2 * round(visual / 2)


def of_a_kept_cache(names: dict[str, Any], seen: list[str]) -> None:
    """The second turn wrote into the cache of the first, which holds a quarter of the image's tokens."""
    visual = int((names["ids"] == names["model"].config.image_token_id).sum())
    held = names["first"].past_key_values.layers[0].keys.shape[2]
    assert visual > 100 and names["second"].shape[1] > names["ids"].shape[1]
    assert held == names["second"].shape[1] - 1 - visual + round(0.25 * visual)


def of_a_camera(names: dict[str, Any], seen: list[str]) -> None:
    stats = names["session"].stats
    line = rf"8 frames, {stats.visual} tokens, {stats.kv_bytes / 2**20:.1f} MiB, \d+ ms \n"
    assert stats.frames_seen == 8 and "\r1 frames" in seen[0] and re.search(line, seen[0])
    assert max(len(one) for one in re.split(r"[\r\n]", seen[0]) if " MiB, " in one) < 60
    of_file, of_folder = ([np.asarray(one) for one in names["frames"](source)] for source in ("clip.gif", "frames"))
    assert np.shape(of_file) == np.shape(of_folder) == (8, 64, 64, 3)
    assert tokenprune.sessions.Session.load("gate.safetensors", names["model"], names["processor"]).stats == stats


def of_a_long_video(names: dict[str, Any], seen: list[str]) -> None:
    stats = tokenprune.stats(names["model"])
    assert stats.keep_ratio == pytest.approx(0.25, abs=0.01) and "pevlm" in seen[0]
    assert any("pevlm" in note or "frames" in note for note in stats.notes)  # eight frames are few


def of_lora(names: dict[str, Any], seen: list[str]) -> None:
    assert names["loss"].isfinite() and (Path("adapter") / "adapter_model.safetensors").is_file()
    learnt = [p for name, p in names["model"].named_parameters() if "lora_B" in name]
    assert learnt and all(p.abs().max() > 0 for p in learnt)  # they begin at zero
    assert tokenprune.stats(names["model"].base_model.model).keep_ratio == pytest.approx(0.25)


def of_kvpress(names: dict[str, Any], seen: list[str]) -> None:
    visual = int((names["inputs"]["input_ids"] == names["model"].config.image_token_id).sum())
    assert f"visual tokens {visual} -> {round(0.25 * visual)} " in seen[0]


def of_your_own_method(names: dict[str, Any], seen: list[str]) -> None:
    assert "far_from_mean()" in seen[1].splitlines()[1]


DOES = {
    "documents": of_documents,
    "chat": of_a_chat,
    "agent": of_an_agent,
    "camera": of_a_camera,
    "kept-cache": of_a_kept_cache,
    "long-video": of_a_long_video,
    "lora": of_lora,
    "kvpress": of_kvpress,
    "own-method": of_your_own_method,
}


def test_every_recipe_says_when_what_to_expect_and_what_to_watch_for() -> None:
    index = (ROOT / "docs/index.md").read_text()
    for page in RECIPES:
        if page.stem == "README":
            continue
        text = page.read_text()
        assert f"]({page.name})" in index, page.name
        parts = ("**Use it** ", "```", "## What to expect", "## What to watch for")
        assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts), page.name


@each("page", [page for page in (*GUIDES, ROOT / "CONTRIBUTING.md") if any(shell_lines(page))])
def test_commands_of_a_page_have_the_options_that_it_gives_them(page: Path) -> None:
    for words in shell_lines(page):
        if words[0] != "tokenprune":
            continue
        command, rest = typer.main.get_command(app), words[1:]
        while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
            known = command.get_command(typer.Context(command), rest[0])
            assert known is not None, f"{' '.join(words)}: there is no command {rest[0]}"
            command, rest = known, rest[1:]
        known = {"--help", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))}
        asked = {word.partition("=")[0] for word in rest if word.startswith("-") and not re.match(r"-\d", word)}
        assert asked <= known, f"{' '.join(words)}: {command.name} takes no {', '.join(sorted(asked - known))}"


def test_the_servers_profiles_are_those_that_clients_name() -> None:
    from tokenprune.integrations.vllm.settings.configuration import split_server_keys
    from tokenprune.integrations.vllm.settings.parse import parse_setting
    from tokenprune.integrations.vllm.settings.server_config import ServerConfig

    page = ROOT / "docs/serving/start.md"
    (words,) = (words for words in shell_lines(page) if words[:2] == ["vllm", "serve"])
    setting = json.loads(words[words.index("--mm-processor-kwargs") + 1])["tokenprune"]
    server, offered = split_server_keys(setting)
    offer = ServerConfig.from_json(offered, parse_setting(server), lambda profile: parse_setting(server, profile))
    first, *others = (word for word in words if word.startswith("qwen"))
    assert [f"{first}:{name}" for name in offer.names] == others
    asked = re.search(r"for model in \((.*?)\)", page.read_text())[1]
    assert re.findall(r'"(.*?)"', asked) == [first, *others]
