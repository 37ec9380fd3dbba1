# SPDX-License-Identifier: Apache-2.0
"""The seam between vLLM's request and the plugin: a setting is resolved once, a plain one without the gateway."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import DIVPRUNE, OPTIONS
from front_end import FrontEnd
from tokenprune.integrations.vllm.frontend import items
from tokenprune.integrations.vllm.frontend import request as seam
from tokenprune.integrations.vllm.frontend.served import ServedRequest
from tokenprune.integrations.vllm.settings import configuration
from tokenprune.integrations.vllm.settings.server_config import ServerConfig

NAME = "qwen2_5_vl"
AGES = {"keep": {"keep": 1.0, "age": [[0, 1.0], [1, 0.25]]}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "age": AGES,
    "rollout": {"rollout": 0.0},
    "on_error": {"on_error": "full", "profiles": {"fast": {"keep": 0.11}}},
}


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("asked", [None, {"keep": 0.5}])
def test_a_request_is_resolved_once(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, key: str, asked: Any
) -> None:
    """Whatever its steps are: hashes, items that a cache has or lacks, prompts and plans."""
    front, calls = FrontEnd(folder, NAME, DIVPRUNE | SETTINGS[key]), Counter[str]()

    def counting(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    counting(configuration, "check_model")
    counting(seam, "parse_request")
    counting(ServerConfig, "setting")
    counting(ServedRequest, "build")
    counting(items, "family_of")
    for count in (1, 3):
        front.ask(count, asked)
        assert calls.pop("family_of", 0) == (count == 1)  # what a model's items have in common, for its first request
        assert calls.pop("check_model") == 1
        assert calls.pop("setting", 0) + calls.pop("parse_request", 0) == 1
        assert calls.pop("build") <= 2 and not calls  # served, or held back and its shadow


def test_a_choice_of_an_endpoint_is_resolved_there(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    front = FrontEnd(folder, NAME, DIVPRUNE | {"profiles": {"fast": {"keep": 0.11}}})
    choice = front.choose({"profile": "fast"}, by="name")
    monkeypatch.setattr(configuration, "check_model", None)
    monkeypatch.setattr(ServerConfig, "setting", None)
    front.ask(1, choice, cached=False)
    assert (choice.served.profile, choice.served.keep, choice.served.images) == ("fast", 0.11, 1)


def test_threads_do_not_share_a_request(folder: Callable[[str], Path]) -> None:
    keeps = (0.1, 0.25, 0.5, 1.0)
    front, barrier, found = FrontEnd(folder, NAME, DIVPRUNE), threading.Barrier(len(keeps)), dict[float, set[int]]()

    def ask(keep: float) -> None:
        barrier.wait()
        for _ in range(8):
            found.setdefault(keep, set()).add(front.count(2, {"keep": keep}, cached=False))

    threads = [threading.Thread(target=ask, args=(keep,)) for keep in keeps]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    numbers = [found[keep] for keep in keeps]
    assert all(len(one) == 1 for one in numbers)
    assert sorted(map(min, numbers)) == [min(one) for one in numbers] and len({min(one) for one in numbers}) == 4


def test_a_plain_setting_needs_no_tokenprune_serve(folder: Callable[[str], Path]) -> None:
    """Not even for what a request writes; and a request that names a profile, or ages, is answered by it. Nor does it
    need what takes tokens out inside the language model, in a front end or a worker."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
ASIDE = ("tokenprune.integrations.vllm.gateway", "tokenprune.integrations.vllm.in_llm")
from checkpoints import CHECKPOINTS
from tokenprune.integrations.vllm.worker import models, warm_up
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
kwargs = {{"tokenprune": {DIVPRUNE | {"log": "json"}!r}}}
config = EngineArgs({str(folder(NAME))!r}, mm_processor_kwargs=kwargs, **{OPTIONS!r}).create_model_config()
made, checkpoint = MULTIMODAL_REGISTRY.create_processor(config), CHECKPOINTS[{NAME!r}]

def ask(**asked):
    items = made.info.parse_mm_data({{"image": checkpoint.images(2)}})
    return made(checkpoint.prompt(2), items, hf_processor_mm_kwargs={{"tokenprune": asked}} if asked else {{}})

def loaded():
    return sorted(name for name in sys.modules if name.startswith(ASIDE))

ask(), ask(keep=0.5), ask(off=True)
for wrong in (7.5, {{"average_share": 7.5}}):
    try:
        ask(keep=wrong)
    except ValueError:
        assert loaded() == [], loaded()
    else:
        raise AssertionError
ask(**ASKED)
assert "tokenprune.integrations.vllm.gateway.policy" in loaded()
"""
    for asked in ("{'profile': 'default'}", repr(AGES)):
        ran = code.replace("ASKED", asked)
        done = subprocess.run([sys.executable, "-c", ran], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
