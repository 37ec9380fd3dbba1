# SPDX-License-Identifier: Apache-2.0
"""A line of JSON for each request and each selection, on a server whose setting says `"log": "json"`.

A line holds numbers, and names of methods and profiles: nothing that a client wrote, and no path.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from functools import cache
from typing import Any

NAME = "tokenprune.vllm"  # of the logger, which operators may configure
# Of lines about the server. Below vLLM's own logger, which it configures: our others would be held back at INFO.
SERVER = "vllm.tokenprune"
logger = logging.getLogger(NAME)
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
# What vLLM's engine makes of a request's id: which of several answers it is, and eight letters that no other has.
_IN_ENGINE = re.compile(r"(?:\d+_)?(.*)-[0-9a-f]{8}", re.DOTALL)


def log_event(event: str, **fields: Any) -> None:
    """Log one line. event: "request", "refusal" or "selection". fields: numbers and names.

    It goes to the handlers of this logger and those above it; without any, bare to stderr, since vLLM configures its
    own loggers alone. Handlers find the fields in the record's attribute `tokenprune`, too.
    """
    if logger.level == logging.NOTSET:  # as it is again whenever a logger above it is configured
        logger.setLevel(logging.INFO)  # the root's, WARNING, would hold back what the server's setting asks for
    if not logger.isEnabledFor(logging.INFO):
        return
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": now, "event": event} | fields
    extra = {"tokenprune": line}
    record = logger.makeRecord(NAME, logging.INFO, __file__, 0, json.dumps(line), (), None, "tell", extra)
    (logger if logger.hasHandlers() else _stderr()).handle(record)


def clean_id(given: Any) -> str | None:
    """Return a request's id if it is one that a log may hold, of 64 letters, digits, '.', '_', ':' and '-' at most;
    "unreadable" for others, since clients may choose theirs."""
    if given is None:
        return None
    return given if isinstance(given, str) and _ID.fullmatch(given) else "unreadable"


def get_request_id(in_engine: str) -> str:
    """Return the id by which the front end's lines know a request, of its id in the engine."""
    found = _IN_ENGINE.fullmatch(in_engine)
    return clean_id((found[1] if found else in_engine).removeprefix("chatcmpl-")) or "unreadable"


@cache
def _stderr() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
