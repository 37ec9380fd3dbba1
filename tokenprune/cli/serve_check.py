# SPDX-License-Identifier: Apache-2.0
"""`tokenprune serve-check`: check that the plugin is active on a running vLLM server."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tokenprune.cli.common import say


def serve_check(
    url: Annotated[str, typer.Argument(help="URL of the server, such as http://host:8000, with or without /v1.")],
    model: Annotated[str | None, typer.Option(help="Name of the served model. Default: the first one.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key of the server. Default: the environment variable OPENAI_API_KEY.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Timeout of each request in seconds.")] = 120.0,
) -> None:
    """Check that a vLLM server prunes images.

    Sends one or two synthetic images, and requests one token.

    Exit code: 0 pruning works, or is off by setting; 3 server not reachable; 4 plugin not loaded; 5 no setting; 6 image
    rejected or not pruned.
    """
    from tokenprune.integrations.vllm.check import RemoteServer, check

    key = api_key or os.environ.get("OPENAI_API_KEY")
    result = check(RemoteServer(url, key, timeout), model)
    for line in result.lines:
        say(line, error=result.code != 0)
    raise typer.Exit(result.code)
