# SPDX-License-Identifier: Apache-2.0
"""`tokenprune capacity`: what a server bears, unpatched and pruned, before there is one."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenprune.cli.common import ModelOption, load_config, read_keeps
from tokenprune.cli.output import print_table, write_file
from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.gpus import GPUS, find_gpu
from tokenprune.models.torch_import import defer_torch
from tokenprune.selection.files import check_output

if TYPE_CHECKING:
    from tokenprune.cli.table import Table
    from tokenprune.integrations.vllm.capacity import Capacity, Server
    from tokenprune.settings.cost import Load


def capacity(
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H100",
    gpus: Annotated[int, typer.Option(help="GPUs that share the model, as if nothing were lost between them.")] = 1,
    images: Annotated[int, typer.Option(help="Images of a request.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(help="Visual tokens of an image, where images have any size; default: 1024.")
    ] = None,
    tiles: Annotated[
        int | None, typer.Option(help="Views that an image is cut into, where they have one size; default: 1.")
    ] = None,
    text: Annotated[int, typer.Option(min=0, help="Tokens of text in a prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    keep: Annotated[str, typer.Option(help="Comma-separated: shares of an image's tokens, or whole numbers.")] = "0.25",
    ttft: Annotated[str | None, typer.Option(help="Time to the first token that is asked for: 500ms, 0.5s.")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: bfloat16, float16 or float32.")] = "bfloat16",
    compute: Annotated[
        float, typer.Option(help="Assumed share of the GPU's peak FLOPs in the decoder's prefill.")
    ] = 0.65,
    tower: Annotated[float, typer.Option(help="Assumed share of the GPU's peak FLOPs in the vision tower.")] = 0.28,
    read: Annotated[float, typer.Option(help="Assumed share of its bandwidth in decoding.")] = 0.6,
    memory: Annotated[float, typer.Option(help="Assumed share of its memory for weights and KV cache.")] = 0.85,
    at_once: Annotated[int, typer.Option(help="Most requests that run together (vLLM: --max-num-seqs).")] = 256,
    host: Annotated[str, typer.Option(help="Assumed time of the host to a first token, beside the GPU's.")] = "30ms",
    each: Annotated[str, typer.Option(help="Assumed time of the host for a request among many.")] = "3ms",
    launch: Annotated[str, typer.Option(help="Time of the host for a step of decoding, without CUDA graphs.")] = "0ms",
    block: Annotated[int, typer.Option(help="Tokens in a block of the KV cache (vLLM: --block-size).")] = 16,
    measured: Annotated[
        str | None, typer.Option(help="Requests a second that you measured at two keeps: 1.0=10.7,0.25=17.7.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write numbers and assumptions as JSON.")] = None,
    model: ModelOption = None,
) -> None:
    """Say how many requests a server holds, how many a second it answers and how soon, unpatched and pruned. Closed
    forms of the model's config: nothing is loaded or measured, and every assumption is printed."""
    defer_torch()
    from tokenprune.integrations.vllm.capacity import Assumptions, Server, build_load

    keeps = read_keeps(keep)
    target = None if ttft is None else _seconds("--ttft", ttft)
    check_output(json_file)
    assumed = Assumptions(
        compute, tower, read, memory, at_once, block=block,
        host=_seconds("--host", host), each=_seconds("--each", each), launch=_seconds("--launch", launch),
    )  # fmt: skip
    found = find_gpu(gpu)
    config = load_config(model)
    server = Server.from_config(config, found, gpus, dtype, assumed)
    load = build_load(config, images, tokens=tokens, tiles=tiles, text=text)
    if measured is not None:
        server = server.fit(load, images, answer, _rates(measured))
    sides = [server.capacity(load, one, images, answer) for one in dict.fromkeys((1.0, *keeps))]
    table = _table(model or "demo_vlm", server, load, sides, images, answer, target)
    print_table(table)
    if json_file is not None:
        made = {
            "model": model or "demo_vlm",
            "server": {"gpu": dataclasses.asdict(found), "gpus": gpus, "dtype": dtype, "weights": server.numbers},
            "request": {"images": images, "visual": load.visual, "text": text, "answer": answer},
            "assumed": dataclasses.asdict(server.assumed),
            "ttft": target,
            "sides": [dataclasses.asdict(one) | {"holds": _holds(one, target)} for one in sides],
        }
        write_file(json_file, json.dumps(made, indent=1) + "\n")


def _seconds(option: str, text: str) -> float:
    """Return a time in seconds; raises OptionError for what is none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", text)
    if found is None:
        raise OptionError(f"{option} {text!r} is no time: write 500ms or 0.5s")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def _rates(text: str) -> dict[float | int, float]:
    """Return requests a second by keep; raises OptionError for what is none."""
    found: dict[float | int, float] = {}
    for one in text.split(","):
        keep, _, rate = one.partition("=")
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", rate) is None or float(rate) == 0:
            raise OptionError(f"--measured {one!r} is no rate at a keep: write 1.0=10.7,0.25=17.7")
        found[read_keeps(keep)[0]] = float(rate)
    return found


def _holds(side: Capacity, target: float | None) -> bool | None:
    return None if target is None else side.first_token <= target


def _table(
    model: str, server: Server, load: Load, sides: list[Capacity], images: int, answer: int, target: float | None
) -> Table:
    from tokenprune.cli.table import Cell, Table

    rows: list[tuple[str, list[str]]] = [
        ("visual tokens of a request", [f"{one.visual:,}" for one in sides]),
        ("prompt, with text", [f"{one.prompt:,}" for one in sides]),
        ("KV cache of a request, with its answer", [f"{one.kv_bytes / 1e6:,.1f} MB" for one in sides]),
        ("requests that the KV cache holds", [f"{one.requests:,}" for one in sides]),
        ("FLOPs of a prefill, tower included", [f"{one.prefill_flops / 1e12:.3g} T" for one in sides]),
        ("prefills a second, without decoding", [f"{one.prefills:.3g}" for one in sides]),
        ("a decoding step of all that run", [f"{one.step_seconds * 1e3:.1f} ms" for one in sides]),
        ("requests a second, with decoding", [f"{one.rate:.3g}" for one in sides]),
        ("first token, unloaded server", [f"{one.first_token * 1e3:.1f} ms" for one in sides]),
    ]
    cells = [[Cell(name), *map(Cell, values)] for name, values in rows]
    if target is not None:
        answers = [Cell("yes" if _holds(one, target) else "no", bad=not _holds(one, target)) for one in sides]
        cells.append([Cell(f"within {target * 1e3:g} ms"), *answers])
    heads = ["unpatched", *(f"keep {one.keep:.3g}" for one in sides[1:])]
    title = f"{model} on {server.gpus} x {server.gpu.name}; {images} image{'s'[: images > 1]} a request"
    return Table(title, ("", *heads), cells, _notes(server, load, answer))


def _notes(server: Server, load: Load, answer: int) -> tuple[str, ...]:
    gpu, assumed = server.gpu, server.assumed
    peak = f"{gpu.flops(server.dtype) / 1e12:g} TFLOP/s"
    return (
        f"Assumed: prefill at {assumed.compute:.0%} of {peak} (--compute), the tower at {assumed.tower:.0%} (--tower); "
        f"decoding at {assumed.read:.0%} of {gpu.bandwidth / 1e12:g} TB/s (--read); weights and cache in "
        f"{assumed.memory:.0%} of {server.gpus} x {gpu.memory / 1e9:g} GB (--memory), {assumed.block} tokens a block "
        f"(--block); at most {assumed.at_once} requests run together (--at-once). Of the host, beside the GPU: "
        f"{assumed.host * 1e3:g} ms to a first token (--host), {assumed.each * 1e3:g} ms for each of many requests "
        f"(--each), {assumed.launch * 1e3:g} ms a step (--launch; 0 is a server with CUDA graphs, and eager ones took "
        "13 ms on an H200).",
        f"Weights: {server.numbers / 1e9:.3g} B numbers in {server.dtype}, {server.weight_bytes / 1e9:.1f} GB; "
        f"{load.text} tokens of text, {answer} of answer; cut at the decoder's entry, so the tower sees all.",
        "Left out: waiting, caches that already hold an image, what several GPUs say to each other, and windows of "
        "attention, which hold less. These shares and times decide, and are of one server: measure two settings with "
        "`tokenprune bench --backend vllm` and hand them to --measured before you buy.",
    )
