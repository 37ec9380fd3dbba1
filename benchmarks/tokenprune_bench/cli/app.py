# SPDX-License-Identifier: Apache-2.0
"""`tokenprune app`: compare methods in the browser."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenprune.cli.common import ModelOption, get_console
from tokenprune.errors import TokenPruneError
from tokenprune_bench.cli.common import DeviceOption, DtypeOption, MostOption, ThreadsOption, load_model

LOCAL = ("127.0.0.1", "localhost", "::1")


def app(
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than localhost, the page is open to the network.")
    ] = LOCAL[0],
    port: Annotated[int, typer.Option(min=1, max=65535, help="A free port.")] = 7860,
    max_visual_tokens: MostOption = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Open a page in the browser to compare methods on your images."""
    from tokenprune_bench.app.loading import Loading, use_temp_folder

    console, loading = get_console(), Loading(model or "demo_vlm")
    with use_temp_folder() as folder:  # before gradio, which reads its folder at import
        try:
            from tokenprune_bench.app.page import build, launch
        except ImportError as error:
            raise TokenPruneError(f"the app needs gradio ({error}): pip install 'tokenprune-bench[app]'") from error
        page = build(loading, folder, max_visual_tokens)
        launch(page, host, port, open_, block=False)  # before the model, which loads slowly
        try:
            console.print(f"http://{host}:{port} (Ctrl+C stops it)", markup=False, highlight=False)
            if host not in LOCAL:
                console.print("Warning: the page has no password and is open to the network.", markup=False)
            loading.set_model(load_model(model, device, threads, dtype))
            page.block_thread()
        finally:
            loading.fail()
            page.close(verbose=False)
