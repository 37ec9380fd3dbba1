# SPDX-License-Identifier: Apache-2.0
"""JSON log lines for each request and selection, on servers with `"log": "json"`.

Lines contain numbers and names of methods and profiles, but no text from clients and no paths.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from functools import cache
from typing import Any

NAME = "tokenprune.vllm"  # name of the logger, which operators may configure
# Logger of lines about the server. It is a child of vLLM's logger, so that vLLM shows its INFO lines.
SERVER = "vllm.tokenprune"
logger = logging.getLogger(NAME)
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
# vLLM's engine adds the index of an answer and eight random characters to a request's id.
_ENGINE_ID = re.compile(r"(?:\d+_)?(.*)-[0-9a-f]{8}", re.DOTALL)


def log_event(event: str, **fields: Any) -> None:
    """Log one line.

    Handlers of this logger and its parents receive the line, with the fields in the record's attribute `tokenprune`.
    Without handlers the line goes to stderr, because vLLM configures only its own loggers.

    Args:
        event: "request", "refusal" or "selection".
        fields: Numbers and names.
    """
    if logger.level == logging.NOTSET:  # configuring a parent logger resets it
        logger.setLevel(logging.INFO)  # the root's WARNING would hide the requested lines
    if not logger.isEnabledFor(logging.INFO):
        return
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": now, "event": event} | fields
    extra = {"tokenprune": line}
    record = logger.makeRecord(NAME, logging.INFO, __file__, 0, json.dumps(line), (), None, "tell", extra)
    (logger if logger.hasHandlers() else _build_stderr_handler()).handle(record)


def clean_id(request_id: Any) -> str | None:
    """Return a request's id if it is safe to log: at most 64 letters, digits, '.', '_', ':' and '-'.

    Clients may choose ids, so other ids become "unreadable".
    """
    if request_id is None:
        return None
    return request_id if isinstance(request_id, str) and _ID.fullmatch(request_id) else "unreadable"


def get_request_id(engine_id: str) -> str:
    """Return the id that the front end logs for a request, from its id in the engine."""
    match = _ENGINE_ID.fullmatch(engine_id)
    return clean_id((match[1] if match else engine_id).removeprefix("chatcmpl-")) or "unreadable"


@cache
def _build_stderr_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
