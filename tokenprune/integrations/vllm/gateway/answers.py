# SPDX-License-Identifier: Apache-2.0
"""The record of what served a request, in its answer: the header `x-tokenprune`, and beside vLLM's own usage details.

vLLM has no place for a plugin to do this that is there without flags: `--middleware` and endpoint plugins have to be
asked for by the operator. So we follow the function by which it adds its own middleware, and the one that writes the
details. Where one of them is missing its half is left out.
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
    """A request over HTTP and its answer. headers: the client's, names in lower case; they may hold secrets.
    records: of each of its prompts with images or videos; a batch has several."""

    headers: Sequence[tuple[bytes, bytes]] = field(default=(), repr=False)
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def header_id(self) -> str | None:
        """The client's X-Request-Id."""
        given = dict(self.headers).get(b"x-request-id")
        return None if given is None else given.decode("latin-1")

    @property
    def single_record(self) -> RequestRecord | None:
        """The record of what served the request, if that is one thing."""
        done = [one for one in self.records if one.has_items]
        return done[0] if len(done) == 1 else None


_exchange: ContextVar[Exchange | None] = ContextVar("tokenprune_exchange", default=None)


def get_exchange() -> Exchange:
    """Return the exchange in which this runs; one that nobody reads outside of any."""
    return _exchange.get() or Exchange()


def format_header(served: RequestRecord) -> str:
    """Return the value of the header: `divprune;keep=0.25;profile=fast;by=name;in=576;out=144`, and after it
    `;aged=3` where three images are older than the keep of the newest, and `;full=rollout;shadow=144` for a request
    that is served in full though its setting would keep 144."""
    said = served.fields()
    more = "".join(f";{name}={said[name]}" for name in ("aged", "full", "shadow") if name in said)
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


_PLACES: dict[str, Any] = {"header": _add_middleware, "usage": _add_details}


def is_server() -> bool:
    """Return True in a process that has imported vLLM's server."""
    return HTTP in sys.modules


def attach() -> None:
    """Add the header and the usage details from now on, in the process of a server."""
    if not is_server():
        return
    for kind, after in _PLACES.items():
        if not missing_hooks(kind):
            call_after(*_place(kind), after)


def list_attached() -> list[str]:
    """Return "header" and "usage", as far as they are added in this process."""
    places = {kind: _place(kind) for kind in _PLACES}
    return [kind for kind, (module, name) in places.items() if is_wrapped(getattr(module, name, None))]


def _place(kind: str) -> tuple[Any, str]:
    """Return the module and the name of a hook; None for a module that nobody has imported."""
    module, _, name = next(iter(HOOKS[kind])).partition(":")
    return sys.modules.get(module), name
