# SPDX-License-Identifier: Apache-2.0
"""Change without a restart: on SIGHUP a front end reads the file again that its setting names by `reload`."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from functools import partial
from typing import Any

from tokenprune.integrations.vllm.compat import on_start
from tokenprune.integrations.vllm.front import announce, metrics
from tokenprune.integrations.vllm.log import SERVER
from tokenprune.integrations.vllm.setting.configuration import GIVEN, configured, reader
from tokenprune.serve import answers, profiles
from tokenprune.serve.offer import Offer, begin_grace, offered, replace_offer
from tokenprune.serve.policy import ServePolicy

logger = logging.getLogger(SERVER)


def attach(model_config: Any) -> None:
    """Put this package to work for a server that starts. Raises UnsupportedSetupError (see `profiles.check_hooks`)."""
    profiles.attach(offered(model_config))
    answers.attach()
    on_start(listen)


def listen(engine: Any) -> None:
    """Have SIGHUP call `reload` for an engine whose setting names a file, in the process of a server. Programs that use
    `LLM(...)` keep their signals for themselves."""
    model_config = engine.vllm_config.model_config
    if configured(model_config) is None or offered(model_config).file is None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGHUP, partial(reload, engine))


def reload(engine: Any) -> bool:
    """Read the file of a server's setting again, for requests that come from now on; those that name a profile that
    has left are served for a while as before (see `offer_of`). With a bad file all stays as it
    was, which the log and `tokenprune:reloads_total` say; return False then."""
    model_config = engine.vllm_config.model_config
    before = offered(model_config)
    try:
        layers, beside = getattr(model_config.multimodal_config, GIVEN)
        whole = reader(model_config, layers)
        after = Offer.of(beside, whole(), whole)
        profiles.check_hooks(after)
        replace_offer(model_config, after)
        engine.renderer.get_mm_processor().check_pixels()
    except Exception as error:  # a server goes on, whatever an operator's file holds
        replace_offer(model_config, before)
        metrics.add(model_config, "reloads", "refused")
        logger.warning("tokenprune: SIGHUP: %s is not taken, and the setting of before stays: %s", before.file, error)
        return False
    begin_grace(model_config, before)
    metrics.add(model_config, "reloads", "taken")
    ServePolicy(model_config).start_at_zero()
    profiles.load_of(engine.renderer).show(model_config)
    found = announce.facts(engine.vllm_config)
    metrics.inform(model_config, found)
    logger.info("tokenprune: SIGHUP: %s was read again. %s", before.file, announce.line(found))
    return True
