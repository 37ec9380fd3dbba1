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

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE, OPTIONS
from test_pixels import photos, processor
from tokenprune.integrations.vllm.frontend import items
from tokenprune.integrations.vllm.frontend import request as seam
from tokenprune.integrations.vllm.frontend.served import RequestRecord, ServedRequest
from tokenprune.integrations.vllm.gateway.choice import Choice
from tokenprune.integrations.vllm.settings import configuration
from tokenprune.integrations.vllm.settings.server_config import ServerConfig, get_server_config

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
    from vllm.multimodal.cache.base import MultiModalProcessorOnlyCache

    made, calls = processor(folder(NAME), DIVPRUNE | SETTINGS[key]), Counter[str]()

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
    cache = MultiModalProcessorOnlyCache(made.info.ctx.model_config)
    kwargs = {} if asked is None else {"tokenprune": asked}
    for count in (1, 3):
        images = made.info.parse_mm_data({"image": photos(CHECKPOINTS[NAME])[:count]})
        made(CHECKPOINTS[NAME].prompt(count), images, hf_processor_mm_kwargs=kwargs, cache=cache)
        assert calls.pop("family_of", 0) == (count == 1)  # what a model's items have in common, for its first request
        assert calls.pop("check_model") == 1
        assert calls.pop("setting", 0) + calls.pop("parse_request", 0) == 1
        assert calls.pop("build") <= 2 and not calls  # served, or held back and its shadow


def test_a_choice_of_an_endpoint_is_resolved_there(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = processor(folder(NAME), DIVPRUNE | {"profiles": {"fast": {"keep": 0.11}}})
    offer, asked = get_server_config(made.info.ctx.model_config), {"profile": "fast"}
    choice = Choice(asked, offer, offer.setting(asked), RequestRecord("name"))
    monkeypatch.setattr(configuration, "check_model", None)
    monkeypatch.setattr(ServerConfig, "setting", None)
    items = made.info.parse_mm_data({"image": photos(CHECKPOINTS[NAME])[:1]})
    made(CHECKPOINTS[NAME].prompt(1), items, hf_processor_mm_kwargs={"tokenprune": choice})
    assert (choice.served.profile, choice.served.keep, choice.served.images) == ("fast", 0.11, 1)


def test_threads_do_not_share_a_request(folder: Callable[[str], Path]) -> None:
    keeps = (0.1, 0.25, 0.5, 1.0)
    made, barrier, found = processor(folder(NAME), DIVPRUNE), threading.Barrier(len(keeps)), dict[float, set[int]]()
    image = made.info.get_hf_config().image_token_id

    def ask(keep: float) -> None:
        barrier.wait()
        for _ in range(8):
            items = made.info.parse_mm_data({"image": photos(CHECKPOINTS[NAME])[:2]})
            kwargs = {"tokenprune": {"keep": keep}}
            ids = made(CHECKPOINTS[NAME].prompt(2), items, hf_processor_mm_kwargs=kwargs)["prompt_token_ids"]
            found.setdefault(keep, set()).add(ids.count(image))

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
