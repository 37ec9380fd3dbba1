# SPDX-License-Identifier: Apache-2.0
"""Profiles, limits and the policy under load are reloaded from a file while the server runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import DIVPRUNE
from front_end import FrontEnd, config, engine_parts, processor, samples
from tokenprune.integrations.vllm.gateway import profiles, reload
from tokenprune.integrations.vllm.gateway.in_flight import RequestLoad
from tokenprune.integrations.vllm.settings import server_config
from tokenprune.integrations.vllm.settings.rules import LimitError
from tokenprune.integrations.vllm.settings.server_config import ProfileError, get_server_config

NAME = "qwen2_5_vl"
FAST = {"profiles": {"fast": {"keep": 0.11}}, "min_keep": 0.1}
LESS = {"profiles": {"fast": {"keep": 0.5, "min_keep": 0.4}, "slow": {"off": True}}, "min_keep": 0.2,
        "overload": {"in_flight": [4], "profiles": ["fast"]}}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "offer.json"
    path.write_text(json.dumps(FAST))
    return path


@pytest.fixture
def engine(folder: Callable[[str], Path], file: Path, request: pytest.FixtureRequest) -> Any:
    """Return the parts of an engine that a reload uses."""
    name = request.node.name.partition("[")[0]
    front = FrontEnd(folder, NAME, DIVPRUNE | {"reload": str(file)}, name)
    parts = engine_parts(front.processor, name=name, front=front, calls=[])

    async def collective_rpc(method: str, args: tuple) -> list[int]:
        """Record the call, and the profiles that requests see at that time."""
        parts.calls.append((method, *args, get_server_config(front.model_config).names))
        return [0]

    parts.collective_rpc = collective_rpc
    return parts


def count_image_tokens(engine: Any, override: Any) -> int:
    """Image tokens in the prompt of a request."""
    return engine.front.count(1, override, cached=False)


def test_reload_applies_the_file(engine: Any, file: Path) -> None:
    model_config = engine.vllm_config.model_config
    offer = get_server_config(model_config)
    assert offer.names == ["fast"] and offer.rules["default"].min_keep == 0.1
    full, before = count_image_tokens(engine, {"off": True}), count_image_tokens(engine, {"profile": "fast"})
    with pytest.raises(ProfileError):
        count_image_tokens(engine, {"profile": "slow"})
    file.write_text(json.dumps(LESS))
    assert count_image_tokens(engine, {"profile": "fast"}) == before, "read without a signal"
    assert asyncio.run(reload.reload(engine)) is True
    assert get_server_config(model_config).overload.steps == (4,)
    assert (
        count_image_tokens(engine, {"profile": "slow"})
        == full
        > count_image_tokens(engine, {"profile": "fast"})
        > 2 * before
    )
    with pytest.raises(LimitError):
        count_image_tokens(engine, {"keep": 0.15})
    with pytest.raises(LimitError, match=r"below min_keep=0\.4 of profile 'fast'"):
        count_image_tokens(engine, {"profile": "fast", "keep": 0.3})
    assert samples("tokenprune:reloads_total", engine.name) == {("taken",): 1, ("refused",): 0}
    assert [labels[1:3] for labels, value in samples("tokenprune:info", engine.name).items() if value] == [
        ("min_keep 0.2; fast: min_keep 0.4", "fast,slow")
    ]
    pickle.dumps(model_config.multimodal_config)  # it must reach the engine's process


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read"),
        ("[]", "in an object"),
        ('{"method": "pool"}', "may hold profiles, min_keep, methods, rollout, on_error, callers, overload"),
        ('{"min_keep": 0.5}', "profile 'default': .*below min_keep=0.5 of this server"),
        ('{"profiles": {"fast": {"keep": 0}}}', "fast"),
        (None, "cannot read"),
    ],
)
def test_a_bad_file_changes_nothing(
    engine: Any, file: Path, text: str | None, says: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Use a separate logger, because engines of other tests configure vLLM's loggers.
    monkeypatch.setattr(reload, "logger", logging.getLogger("of this test"))
    before, counted = (
        get_server_config(engine.vllm_config.model_config),
        samples("tokenprune:reloads_total", engine.name),
    )
    file.unlink() if text is None else file.write_text(text)
    assert asyncio.run(reload.reload(engine)) is False
    assert get_server_config(engine.vllm_config.model_config) is before
    (record,) = [entry for entry in caplog.records if entry.name == "of this test"]
    assert record.levelno == logging.WARNING and "the previous configuration stays in force" in record.getMessage()
    assert re.search(says, record.getMessage())
    after = samples("tokenprune:reloads_total", engine.name)
    assert after[("refused",)] == counted.get(("refused",), 0) + 1 and not after.get(("taken",))


def test_images_that_cannot_be_smaller_are_refused_as_at_the_start(folder: Callable[[str], Path], file: Path) -> None:
    mm_processor = processor(folder("llava"), DIVPRUNE | {"reload": str(file)}, served_model_name="fixed")
    engine, model_config = (
        engine_parts(mm_processor, collective_rpc=None),
        mm_processor.info.ctx.model_config,
    )  # a call would raise
    before = get_server_config(model_config)
    file.write_text('{"profiles": {"small": {"method": "downsample", "keep": 0.5}}}')
    assert asyncio.run(reload.reload(engine)) is False and get_server_config(model_config) is before


def test_removed_profile_is_served_for_a_minute(
    engine: Any, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests by key or name get its old value, with one line in the log. Profiles that changed apply at once."""
    monkeypatch.setattr(server_config.time, "monotonic", lambda: now)
    # Use a separate logger, because other tests redirect the server's logger.
    monkeypatch.setattr(server_config, "logger", logging.getLogger("grace"))
    model_config, now = engine.vllm_config.model_config, 100.0
    file.write_text(json.dumps({"profiles": {"fast": {"keep": 0.11}, "slow": {"keep": 0.5}}}))
    assert asyncio.run(reload.reload(engine))
    before = {name: count_image_tokens(engine, {"profile": name}) for name in ("fast", "slow")}

    def by_name(name: str) -> Any:
        request = SimpleNamespace(model=f"{model_config.served_model_name}:{name}", messages=[])
        renderer = SimpleNamespace(model_config=model_config, trust_request_mm_kwargs=False)
        profiles._apply_profile(renderer, request, RequestLoad())
        return count_image_tokens(engine, request.mm_processor_kwargs["tokenprune"])

    file.write_text('{"profiles": {"slow": {"keep": 0.25}}}')
    assert asyncio.run(reload.reload(engine))
    now += 20
    file.write_text("{}")
    assert asyncio.run(reload.reload(engine))
    caplog.clear()
    now += 39
    assert count_image_tokens(engine, {"profile": "fast"}) == by_name("fast") == before["fast"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "grace"]
    assert "use the removed profile fast" in line and "for another 1 s" in line
    assert before["fast"] < count_image_tokens(engine, {"profile": "slow"}) == by_name("slow") < before["slow"]
    assert count_image_tokens(engine, {"profile": "slow"}) == count_image_tokens(engine, {})
    for unknown in ("fsat", ["fast"], None):
        with pytest.raises(ProfileError):
            count_image_tokens(engine, {"profile": unknown})
    now += 2
    for ask in (by_name, lambda name: count_image_tokens(engine, {"profile": name})):
        with pytest.raises(ProfileError, match="Use one of: default"):
            ask("fast")
    by_name("slow")
    file.write_text('{"profiles": {"fast": {"keep": 0.5}}}')
    assert asyncio.run(reload.reload(engine))
    assert count_image_tokens(engine, {"profile": "fast"}) == before["slow"]


def test_running_request_keeps_its_profile(engine: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its cache key to its plan, a request uses the profile that it chose, even if that profile is removed."""
    choice = engine.front.choose({"profile": "fast"}, by="name")
    before = count_image_tokens(engine, {"profile": "fast"})
    file.write_text("{}")
    assert asyncio.run(reload.reload(engine))
    later = time.monotonic() + server_config.GRACE_SECONDS + 1
    monkeypatch.setattr(server_config.time, "monotonic", lambda: later)
    with pytest.raises(ProfileError):
        count_image_tokens(engine, {"profile": "fast"})
    assert (
        count_image_tokens(engine, choice) == before
        and choice.served.profile == "fast"
        and choice.served.tokens_out == before
    )


def test_signal_triggers_a_reload(engine: Any, file: Path) -> None:
    async def main() -> None:
        reload.handle_reloads(engine)
        file.write_text(json.dumps(LESS))
        os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(100):
            if get_server_config(engine.vllm_config.model_config).names == ["fast", "slow"]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the signal was not heard")

    asyncio.run(main())


def test_workers_warm_up_before_requests_see_new_profiles(engine: Any, file: Path) -> None:
    file.write_text(json.dumps(LESS))
    assert asyncio.run(reload.reload(engine))
    ((method, warmed, visible),) = engine.calls
    assert method == "tokenprune_warm_up" and visible == ["fast"]
    assert warmed == get_server_config(engine.vllm_config.model_config).profiles
    assert set(warmed) == {"default", "fast", "slow"}
    assert json.loads(json.dumps(warmed)) == warmed  # the workers receive it as JSON


def test_a_method_that_fails_to_warm_up_refuses_the_file(
    engine: Any, file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "logger", logging.getLogger("of this test"))
    before = get_server_config(engine.vllm_config.model_config)

    async def collective_rpc(method: str, args: tuple) -> None:
        raise RuntimeError("out of registers")

    engine.collective_rpc = collective_rpc
    file.write_text(json.dumps(LESS))
    assert asyncio.run(reload.reload(engine)) is False
    assert get_server_config(engine.vllm_config.model_config) is before
    assert "out of registers" in caplog.text


def test_signals_in_a_row_are_handled_one_after_the_other(engine: Any, file: Path) -> None:
    running: list[int] = []
    record = engine.collective_rpc

    async def collective_rpc(method: str, args: tuple) -> None:
        running.append(1)
        assert len(running) == 1
        await asyncio.sleep(0.05)
        await record(method, args)
        running.pop()

    engine.collective_rpc = collective_rpc

    async def main() -> None:
        lock, tasks = asyncio.Lock(), set[asyncio.Task]()
        for content in (LESS, {}, FAST):
            file.write_text(json.dumps(content))
            reload._begin(engine, lock, tasks)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert len(engine.calls) == 3 and get_server_config(engine.vllm_config.model_config).names == ["fast"]


def test_only_a_server_with_a_file_listens(folder: Callable[[str], Path], engine: Any) -> None:
    heard = signal.getsignal(signal.SIGHUP)
    reload.handle_reloads(engine)  # no event loop runs, as in a script
    assert signal.getsignal(signal.SIGHUP) is heard

    async def main() -> None:
        for setting in (DIVPRUNE, None):
            other = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config(folder(NAME), setting)))
            reload.handle_reloads(other)
        assert signal.getsignal(signal.SIGHUP) is heard

    asyncio.run(main())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"min_keep": 0.1}, "min_keep belongs in the reload file"),
        ({"profiles": {}, "methods": ["pool"]}, "methods, profiles belongs in the reload file"),
    ],
)
def test_key_in_setting_and_file_is_refused(folder: Callable[[str], Path], file: Path, more: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(folder("llava"), DIVPRUNE | {"reload": str(file)} | more)
    for bad in (3, "", None):
        with pytest.raises(ValueError, match="reload must be the name of a file"):
            config(folder("llava"), DIVPRUNE | {"reload": bad})
