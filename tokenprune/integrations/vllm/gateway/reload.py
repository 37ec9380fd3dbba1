# SPDX-License-Identifier: Apache-2.0
"""Reload the file that the key `reload` names on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from typing import Any

from tokenprune.integrations.vllm.compat import on_start
from tokenprune.integrations.vllm.frontend import announce, metrics
from tokenprune.integrations.vllm.gateway import answers, profiles
from tokenprune.integrations.vllm.gateway.policy import ServePolicy
from tokenprune.integrations.vllm.log import SERVER
from tokenprune.integrations.vllm.settings.configuration import LAYERS, WARM_UP, get_server_setting
from tokenprune.integrations.vllm.settings.configure import make_reader
from tokenprune.integrations.vllm.settings.server_config import (
    ServerConfig,
    begin_grace,
    get_server_config,
    set_server_config,
)

logger = logging.getLogger(SERVER)


def attach(model_config: Any) -> None:
    """Attach the gateway for a server that starts; raises UnsupportedSetupError like `profiles.check_hooks`."""
    profiles.attach(get_server_config(model_config))
    answers.attach()
    on_start(handle_reloads)


def handle_reloads(engine: Any) -> None:
    """Make SIGHUP call `reload` in a server with a `reload` file. Programs with `LLM(...)` keep their handlers."""
    model_config = engine.vllm_config.model_config
    if get_server_setting(model_config) is None or get_server_config(model_config).file is None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGHUP, _begin, engine, asyncio.Lock(), set())


def _begin(engine: Any, lock: asyncio.Lock, running: set[asyncio.Task]) -> None:
    """Start a reload after the running ones. running: keeps references to the tasks."""

    async def after_others() -> None:
        async with lock:
            await reload(engine)

    task = asyncio.get_running_loop().create_task(after_others())
    running.add(task)
    task.add_done_callback(running.discard)


async def reload(engine: Any) -> bool:
    """Read the file again, for requests that arrive from now on.

    The workers warm up new settings first, and requests see the old profiles until then. Requests that select a removed
    profile are served for a while (see `find_server_config`).

    Returns:
        True if the file was accepted. False if it was refused: then nothing changes, and the log and
        `tokenprune:reloads_total` show it.
    """
    model_config = engine.vllm_config.model_config
    before = get_server_config(model_config)
    try:
        after = _read(engine, before)
        await engine.collective_rpc(WARM_UP, args=(dict(after.profiles),))
    except Exception as error:  # an invalid file must not stop the server
        metrics.add(model_config, "reloads", "refused")
        logger.warning(
            "tokenprune: SIGHUP: %s was refused, the previous configuration stays in force: %s", before.file, error
        )
        return False
    set_server_config(model_config, after)
    begin_grace(model_config, before)
    metrics.add(model_config, "reloads", "taken")
    ServePolicy(model_config).start_at_zero()
    profiles.get_load(engine.renderer).show_step(model_config)
    facts = announce.collect_facts(engine.vllm_config)
    metrics.set_info(model_config, facts)
    logger.info("tokenprune: SIGHUP: %s was reloaded. %s", before.file, announce.format_line(facts))
    return True


def _read(engine: Any, before: ServerConfig) -> ServerConfig:
    """Return the config in the file after the same checks as at the start. `before` stays in force."""
    model_config = engine.vllm_config.model_config
    layers, server_keys = getattr(model_config.multimodal_config, LAYERS)
    read = make_reader(model_config, layers)
    after = ServerConfig.from_json(server_keys, read(), read)
    profiles.check_hooks(after)
    set_server_config(model_config, after)  # `check_pixels` reads the current settings
    try:
        engine.renderer.get_mm_processor().check_pixels()
    finally:
        set_server_config(model_config, before)
    return after
