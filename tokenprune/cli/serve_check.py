# SPDX-License-Identifier: Apache-2.0
"""`tokenprune serve-check`: ask a running vLLM server whether the plugin acts there."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tokenprune.cli.common import say


def serve_check(
    url: Annotated[str, typer.Argument(help="Where the server listens: http://host:8000, with or without /v1.")],
    model: Annotated[str | None, typer.Option(help="Name to ask for; default: the first that is served.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key that the server asks for; default: OPENAI_API_KEY of the environment.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for each answer.")] = 120.0,
) -> None:
    """Say whether a vLLM server reduces images. It sends one drawn image, or two, and asks for one token.

    Exit code: 0 it does, or is set not to; 3 not reachable; 4 plugin not loaded; 5 no setting; 6 the image was refused
    or not reduced.
    """
    from tokenprune.integrations.vllm.check import RemoteServer, check

    key = api_key or os.environ.get("OPENAI_API_KEY")
    found = check(RemoteServer(url, key, timeout), model)
    for line in found.lines:
        say(line, error=found.code != 0)
    raise typer.Exit(found.code)
