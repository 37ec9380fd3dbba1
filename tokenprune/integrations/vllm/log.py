# SPDX-License-Identifier: Apache-2.0
"""A line of JSON for each request and each selection, on a server whose setting says `"log": "json"`.

A line holds numbers, and names of methods and profiles: nothing that a client wrote, and no path.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from functools import cache
from typing import Any

NAME = "tokenprune.vllm"  # of the logger, which operators may configure
# Of lines about the server. Below vLLM's own logger, which it configures: our others would be held back at INFO.
SERVER = "vllm.tokenprune"
logger = logging.getLogger(NAME)


def tell(event: str, **fields: Any) -> None:
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


@cache
def _stderr() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
