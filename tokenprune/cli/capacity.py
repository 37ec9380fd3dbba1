# SPDX-License-Identifier: Apache-2.0
"""`tokenprune capacity`: estimate the capacity of a server with and without pruning."""

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
    gpu: Annotated[str, typer.Option(help=f"GPU type: {', '.join(GPUS)}.")] = "H100",
    gpus: Annotated[int, typer.Option(help="GPUs per server. Communication is not included.")] = 1,
    images: Annotated[int, typer.Option(help="Images per request.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(help="Visual tokens per image, for models with any image size. Default: 1024.")
    ] = None,
    tiles: Annotated[
        int | None, typer.Option(help="Tiles per image, for models with tiles of one size. Default: 1.")
    ] = None,
    text: Annotated[int, typer.Option(min=0, help="Text tokens per prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    keep: Annotated[str, typer.Option(help="Comma-separated shares or numbers of visual tokens per image.")] = "0.25",
    ttft: Annotated[str | None, typer.Option(help="Required time to first token, such as 500ms or 0.5s.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and cache: bfloat16, float16 or float32.")] = "bfloat16",
    compute: Annotated[float, typer.Option(help="Assumed share of peak FLOPs in the prefill of the decoder.")] = 0.65,
    tower: Annotated[float, typer.Option(help="Assumed share of peak FLOPs in the vision tower.")] = 0.28,
    read: Annotated[float, typer.Option(help="Assumed share of peak bandwidth in decoding.")] = 0.6,
    memory: Annotated[float, typer.Option(help="Assumed share of memory for weights and KV cache.")] = 0.85,
    at_once: Annotated[int, typer.Option(help="Maximum number of concurrent requests (vLLM: --max-num-seqs).")] = 256,
    host: Annotated[str, typer.Option(help="Assumed host time to first token.")] = "30ms",
    each: Annotated[str, typer.Option(help="Assumed host time per request under load.")] = "3ms",
    launch: Annotated[str, typer.Option(help="Assumed host time per decode step, 0 with CUDA graphs.")] = "0ms",
    block: Annotated[int, typer.Option(help="Tokens per KV cache block (vLLM: --block-size).")] = 16,
    measured: Annotated[
        str | None, typer.Option(help="Measured requests per second at two keeps: 1.0=10.7,0.25=17.7.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write results and assumptions to a JSON file.")
    ] = None,
    model: ModelOption = None,
) -> None:
    """Estimate server capacity, throughput and time to first token, with and without pruning.

    Uses only the model configuration: no weights are loaded. All assumptions are printed.
    """
    defer_torch()
    from tokenprune.integrations.vllm.capacity import Assumptions, Server, build_load

    keeps = read_keeps(keep)
    target = None if ttft is None else _parse_seconds("--ttft", ttft)
    check_output(json_file)
    assumed = Assumptions(
        compute, tower, read, memory, at_once, block=block,
        host=_parse_seconds("--host", host), each=_parse_seconds("--each", each),
        launch=_parse_seconds("--launch", launch),
    )  # fmt: skip
    gpu_spec = find_gpu(gpu)
    config = load_config(model)
    server = Server.from_config(config, gpu_spec, gpus, dtype, assumed)
    load = build_load(config, images, tokens=tokens, tiles=tiles, text=text)
    if measured is not None:
        server = server.fit(load, images, answer, _parse_rates(measured))
    sides = [server.capacity(load, keep, images, answer) for keep in dict.fromkeys((1.0, *keeps))]
    table = _build_table(model or "demo_vlm", server, load, sides, images, answer, target)
    print_table(table)
    if json_file is not None:
        record = {
            "model": model or "demo_vlm",
            "server": {"gpu": dataclasses.asdict(gpu_spec), "gpus": gpus, "dtype": dtype, "weights": server.numbers},
            "request": {"images": images, "visual": load.visual, "text": text, "answer": answer},
            "assumed": dataclasses.asdict(server.assumed),
            "ttft": target,
            "sides": [dataclasses.asdict(side) | {"holds": _holds(side, target)} for side in sides],
        }
        write_file(json_file, json.dumps(record, indent=1) + "\n")


def _parse_seconds(option: str, text: str) -> float:
    """Return a time in seconds. Raise OptionError if it is invalid."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", text)
    if match is None:
        raise OptionError(f"{option} {text!r} is not a time. Write 500ms or 0.5s.")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def _parse_rates(text: str) -> dict[float | int, float]:
    """Return requests per second by keep. Raise OptionError if they are invalid."""
    rates: dict[float | int, float] = {}
    for part in text.split(","):
        keep, _, rate = part.partition("=")
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", rate) is None or float(rate) == 0:
            raise OptionError(f"--measured {part!r} is not a rate at a keep. Write 1.0=10.7,0.25=17.7.")
        rates[read_keeps(keep)[0]] = float(rate)
    return rates


def _holds(side: Capacity, target: float | None) -> bool | None:
    return None if target is None else side.first_token <= target


def _build_table(
    model: str, server: Server, load: Load, sides: list[Capacity], images: int, answer: int, target: float | None
) -> Table:
    from tokenprune.cli.table import Cell, Table

    rows: list[tuple[str, list[str]]] = [
        ("visual tokens per request", [f"{side.visual:,}" for side in sides]),
        ("prompt tokens, with text", [f"{side.prompt:,}" for side in sides]),
        ("KV cache per request, with answer", [f"{side.kv_bytes / 1e6:,.1f} MB" for side in sides]),
        ("requests in the KV cache", [f"{side.requests:,}" for side in sides]),
        ("FLOPs per prefill, with tower", [f"{side.prefill_flops / 1e12:.3g} T" for side in sides]),
        ("prefills per second, without decoding", [f"{side.prefills:.3g}" for side in sides]),
        ("decode step of all running requests", [f"{side.step_seconds * 1e3:.1f} ms" for side in sides]),
        ("requests per second, with decoding", [f"{side.rate:.3g}" for side in sides]),
        ("time to first token, idle server", [f"{side.first_token * 1e3:.1f} ms" for side in sides]),
    ]
    cells = [[Cell(name), *map(Cell, values)] for name, values in rows]
    if target is not None:
        answers = [Cell("yes" if _holds(side, target) else "no", bad=not _holds(side, target)) for side in sides]
        cells.append([Cell(f"within {target * 1e3:g} ms"), *answers])
    columns = ["unpatched", *(f"keep {side.keep:.3g}" for side in sides[1:])]
    title = f"{model} on {server.gpus} x {server.gpu.name}; {images} image{'s'[: images > 1]} per request"
    return Table(title, ("", *columns), cells, _format_notes(server, load, answer))


def _format_notes(server: Server, load: Load, answer: int) -> tuple[str, ...]:
    gpu, assumed = server.gpu, server.assumed
    peak = f"{gpu.flops(server.dtype) / 1e12:g} TFLOP/s"
    return (
        f"Assumed: prefill at {assumed.compute:.0%} of {peak} (--compute), tower at {assumed.tower:.0%} (--tower), "
        f"decoding at {assumed.read:.0%} of {gpu.bandwidth / 1e12:g} TB/s (--read), weights and cache in "
        f"{assumed.memory:.0%} of {server.gpus} x {gpu.memory / 1e9:g} GB (--memory), {assumed.block} tokens per block "
        f"(--block), at most {assumed.at_once} concurrent requests (--at-once). Host time: "
        f"{assumed.host * 1e3:g} ms to first token (--host), {assumed.each * 1e3:g} ms per request under load "
        f"(--each), {assumed.launch * 1e3:g} ms per decode step (--launch; 0 with CUDA graphs, 13 ms measured in eager "
        "mode on an H200).",
        f"Weights: {server.numbers / 1e9:.3g} B parameters in {server.dtype}, {server.weight_bytes / 1e9:.1f} GB. "
        f"{load.text} text tokens, {answer} answer tokens. Pruning at the decoder input, so the tower sees all tokens.",
        "Not included: queueing, encoder and prefix caches, communication between GPUs, sliding window attention. The "
        "assumed shares and times are from one server and determine the result: measure two settings with "
        "`tokenprune bench --backend vllm`, and pass them as --measured.",
    )
