# SPDX-License-Identifier: Apache-2.0
"""From vLLM's request to the plugin: a setting is resolved once, and plain settings do not load the gateway."""

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
@pytest.mark.parametrize("override", [None, {"keep": 0.5}])
def test_a_request_is_resolved_once(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, key: str, override: Any
) -> None:
    """In all steps: hashes, items that a cache has or lacks, prompts and plans."""
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
        front.ask(count, override)
        assert calls.pop("family_of", 0) == (count == 1)  # properties of a model's items, at its first request
        assert calls.pop("check_model") == 1
        assert calls.pop("setting", 0) + calls.pop("parse_request", 0) == 1
        assert calls.pop("build") <= 2 and not calls  # the served request, and in shadow a second one


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
    front, barrier, counts = FrontEnd(folder, NAME, DIVPRUNE), threading.Barrier(len(keeps)), dict[float, set[int]]()

    def ask(keep: float) -> None:
        barrier.wait()
        for _ in range(8):
            counts.setdefault(keep, set()).add(front.count(2, {"keep": keep}, cached=False))

    threads = [threading.Thread(target=ask, args=(keep,)) for keep in keeps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count_sets = [counts[keep] for keep in keeps]
    assert all(len(counts_of_keep) == 1 for counts_of_keep in count_sets)
    assert (
        sorted(map(min, count_sets)) == [min(counts_of_keep) for counts_of_keep in count_sets]
        and len({min(counts_of_keep) for counts_of_keep in count_sets}) == 4
    )


def test_a_plain_setting_needs_no_tokenprune_serve(folder: Callable[[str], Path]) -> None:
    """Settings of requests do not load the gateway either, but profiles and ages do.

    Front ends and workers also do not load the code of cuts inside the language model.
    """
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
    for requested in ("{'profile': 'default'}", repr(AGES)):
        script = code.replace("ASKED", requested)
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-2000:]
