# SPDX-License-Identifier: Apache-2.0
"""The record of a request in its answer: the header `x-tokenprune`, and a field in vLLM's usage details.

vLLM's extension points for this (`--middleware` and endpoint plugins) need command-line flags. The plugin therefore
wraps the function that adds vLLM's own middleware, and the function that writes the usage details. If one function is
missing, its half is omitted.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tokenprune.integrations.vllm.compat import HOOKS, call_after, is_wrapped, missing_hooks
from tokenprune.integrations.vllm.frontend.served import RequestRecord
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.server_config import HTTP

HEADER = "x-tokenprune"
_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass
class Exchange:
    """An HTTP request and its answer.

    Attributes:
        headers: Headers of the client, with lower-case names. They may contain secrets.
        records: Record of each prompt with images or videos. A batch has several prompts.
    """

    headers: Sequence[tuple[bytes, bytes]] = field(default=(), repr=False)
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def header_id(self) -> str | None:
        """The client's X-Request-Id."""
        value = dict(self.headers).get(b"x-request-id")
        return None if value is None else value.decode("latin-1")

    @property
    def single_record(self) -> RequestRecord | None:
        """The record of the only prompt with images or videos, or None."""
        records = [record for record in self.records if record.has_items]
        return records[0] if len(records) == 1 else None


_exchange: ContextVar[Exchange | None] = ContextVar("tokenprune_exchange", default=None)


def get_exchange() -> Exchange:
    """Return the current exchange, or an empty one outside of a request."""
    return _exchange.get() or Exchange()


def format_header(served: RequestRecord) -> str:
    """Format a record as `divprune;keep=0.25;profile=fast;by=name;in=576;out=144`.

    `;aged=3` is appended if three images keep fewer tokens than the newest image, and `;full=rollout;shadow=144` if the
    request is served unpruned although its setting would keep 144 tokens.
    """
    fields = served.fields()
    more = "".join(f";{name}={fields[name]}" for name in ("aged", "full", "shadow") if name in fields)
    return (
        f"{served.method};keep={served.keep};profile={served.profile};by={served.by};in={served.tokens_in};"
        f"out={served.tokens_out}{more}"
    )


class ServedHeader:
    """ASGI middleware that adds the header to answers of requests with images or videos."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: _Message, receive: Any, send: _Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(tuple(scope.get("headers") or ()))

        async def with_header(message: _Message) -> None:
            if message["type"] == "http.response.start" and (served := exchange.single_record) is not None:
                message["headers"] = [*message.get("headers", ()), (HEADER.encode(), format_header(served).encode())]
            await send(message)

        token = _exchange.set(exchange)
        try:
            await self.app(scope, receive, with_header)
        finally:
            _exchange.reset(token)


def _add_middleware(result: Any, args: Any, app: Any, supported_tasks: Any) -> Any:
    app.add_middleware(ServedHeader)
    return result


def _add_details(details: Any, *_: Any, **__: Any) -> Any:
    if details is not None and (served := get_exchange().single_record) is not None:
        setattr(details, KEY, served.fields())
    return details


_HANDLERS: dict[str, Any] = {"header": _add_middleware, "usage": _add_details}


def is_server() -> bool:
    """Return True in a process that has imported vLLM's server."""
    return HTTP in sys.modules


def attach() -> None:
    """Add the header and the usage details in the process of a server."""
    if not is_server():
        return
    for kind, after in _HANDLERS.items():
        if not missing_hooks(kind):
            call_after(*_find_hook(kind), after)


def list_attached() -> list[str]:
    """Return the attached hooks of this process, a subset of "header" and "usage"."""
    hooks = {kind: _find_hook(kind) for kind in _HANDLERS}
    return [kind for kind, (module, name) in hooks.items() if is_wrapped(getattr(module, name, None))]


def _find_hook(kind: str) -> tuple[Any, str]:
    """Return the module (None if not imported) and the name of a hook."""
    module, _, name = next(iter(HOOKS[kind])).partition(":")
    return sys.modules.get(module), name
