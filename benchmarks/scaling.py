# SPDX-License-Identifier: Apache-2.0
"""How time and peak memory of choosing and removing tokens grow with the visual tokens of one image.

    python benchmarks/scaling.py --resume

"selection": a method's choice alone (with the attention rows it asks for), on made-up features of width 1024 (256 on a
CPU; keys likewise), a ninth of the tokens stay. "merge": one step of a tower's merging. "engine": what the engine
adds to a prefill, as the stats tell (`overhead_ms` of `uniform` in a small model), and its keys and values against the
closed form. Memory is what the peak rises by: of a process of its own on the CPU (whose memory is limited: what needs
more says so, and would be O(N^2) at 32k), as the allocator tells on a GPU. Times: the best of a few runs.
Exponents: straight lines through the logarithms from 2880 tokens on.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import (
    AFTER,
    BEFORE,
    Clock,
    Peak,
    Rows,
    add_options,
    code_version,
    default_device,
    encoded,
    header,
    llava,
    prompt,
    results_path,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tokenprune
from tokenprune import Method, Pruner, Site, VisualTokens
from tokenprune.ops.merging import bipartite_match, threshold_match
from tokenprune.shapes.decoder import DecoderShape
from tokenprune.view.observable import ObservedAt
from tokenprune.view.registry import compares_frames, observables_of
from tokenprune.view.segments import Patches, Segments
from tokenprune.view.source import TokenSource

COUNTS = (576, 2880, 8192, 16384, 32768)
WIDTH, HEADS, TEXT, SHARE = {"cuda": 1024, "cpu": 256}, 8, 64, 9
_M_MMAP_THRESHOLD = -3  # see mallopt(3)
MERGES = {
    "tome": lambda keys: bipartite_match(keys, keys.shape[1] // 8, protected=1),
    "dymu": lambda keys: threshold_match(keys, None, threshold=0.02, protected=1),
}


def selecting_methods() -> list[str]:
    """Those that choose among visual tokens of an image that are there."""
    sites = (Site.PRE_LLM, Site.IN_LLM, Site.DECODE)
    names = [name for name in tokenprune.available_methods() if tokenprune.method_info(name).site in sites]
    return [name for name in names if not compares_frames(tokenprune.method(name)) and _fits(name)]


def _fits(name: str) -> bool:
    """Whether a method makes its cut itself, not by stages of others, and reads what is made up here."""
    about = tokenprune.method_info(name)
    itself = about.cls.select is not Pruner.select or about.cls.score is not Pruner.score
    places = (ObservedAt.ENTRY, ObservedAt.UNROTATED, ObservedAt.INPUT_BEFORE, ObservedAt.OWN)
    unknown = {"values", "value_heads", "last_row_output", "encoder_flow"}
    return itself and not about.needs & unknown and not observables_of(about.needs, *places)


@dataclass(kw_only=True)
class MadeUp(TokenSource):
    """One image of `count` tokens with text behind it; what a method reads is computed on demand, as in an engine."""

    hidden: torch.Tensor
    seen: Any
    count: int
    needs: frozenset[str]

    @property
    def before(self) -> Any:
        return self.seen

    @property
    def behind(self) -> Any:
        return self.seen

    def note(self, text: str) -> None:
        """Nobody reads what a method says here."""

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])

    def last_slot(self) -> torch.Tensor:
        return torch.tensor([[self.width - 1]], device=self.hidden.device)

    def real(self) -> torch.Tensor:
        return torch.ones(1, self.width, dtype=torch.bool, device=self.hidden.device)

    def text_after(self, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.arange(self.count, self.width, device=self.hidden.device)[None]
        return text, torch.ones_like(text, dtype=torch.bool)

    def of_tower(self, key: tuple, segments: Segments) -> torch.Tensor:
        return self.before.keys(self.width)[:, : self.count, :1].float().softmax(1)

    def patches(self, segments: Segments) -> Patches:
        place = segments.position
        size = [torch.full_like(place, n) for n in (*segments.grids[0][1:], 1)]
        return Patches(torch.zeros_like(place), place // size[1], place % size[1], *size, tiles=1)


def visual_tokens(method: Method, count: int, device: torch.device) -> VisualTokens:
    """Return one image of `count` tokens, with everything that `method` may read of it."""
    from tokenprune.integrations.shared.observation import Observation

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    channels = WIDTH[device.type]
    hidden, keys = (torch.randn(1, count + TEXT, channels, device=device, dtype=dtype) for _ in range(2))
    by_head = keys.view(1, count + TEXT, HEADS, -1).transpose(1, 2)
    before = Observation(by_head, by_head, None, (channels // HEADS) ** -0.5)
    source = MadeUp(hidden=hidden, seen=before, count=count, needs=method.needs)
    place = torch.arange(count, device=device)[None]
    width = max(w for w in range(1, math.isqrt(count) + 1) if count % w == 0)
    mask = torch.ones_like(place, dtype=torch.bool)
    segments = Segments([0], [0], [count], place, mask, [(1, count // width, width)], ["image"])
    return VisualTokens(segments, [count // SHARE], source)


def prepared(what: str, name: str, count: int, device: torch.device) -> Callable[[], Any]:
    """Return a function that does once what is measured."""
    torch.manual_seed(0)
    if what == "merge":
        keys = torch.randn(1, count, 64, device=device)
        return partial(MERGES[name], keys)
    if what == "selection":
        method = tokenprune.method(name)
        tokens = visual_tokens(method, count, device)

        def select() -> Any:
            tokens.__dict__.pop("last_row_attention", None)
            for held in ("last_row", "text_rows"):
                tokens._source.__dict__.pop(held, None)
            return method.select(tokens)

        return select
    model = llava("tiny", device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    ids = prompt(count, device)
    images = encoded([torch.randn(count, model.config.text_config.hidden_size, device=device, dtype=model.dtype)])
    tokenprune.patch(model, name, keep=count // SHARE, guard="off")

    def run() -> Any:
        model(input_ids=ids, mm_encoder_outputs={"image": images}, use_cache=True, logits_to_keep=1)
        stats = tokenprune.stats(model)
        shape = DecoderShape.from_config(model.config.text_config)
        tokens = [BEFORE + AFTER + visual for visual in stats.visual_tokens_per_layer]
        return {
            "overhead_ms": stats.overhead_ms, "kv_bytes": stats.kv_bytes,
            "kv_bytes_predicted": shape.kv_bytes(tokens, model.dtype.itemsize),
        }  # fmt: skip

    return run


def one(what: str, name: str, count: int, device: torch.device, threads: int, limit: int | None) -> dict[str, Any]:
    """Measure one point. limit: bytes that the process may take, if it is one of its own."""
    torch.set_num_threads(threads)
    if limit is not None:
        # glibc keeps large blocks that were freed, more of them the longer a loop runs. Give them back at once, so that
        # the peak is what was in use.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    clock = Clock(device)
    try:
        with torch.inference_mode():
            prepared(what, name, min(count, 64 * SHARE), device)()  # what is loaded once
            run = prepared(what, name, count, device)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_AS, (limit + _address_space(), resource.RLIM_INFINITY))
            told: dict[str, Any] = {}
            with Peak(device) as peak:
                seconds = [clock(lambda: told.update(result=run()))[0]]
            if seconds[0] < 1:
                seconds += [clock(run)[0] for _ in range(3)]
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        return {"failed": "more memory than the limit"}
    if what == "engine":
        return told["result"] | {"seconds": told["result"]["overhead_ms"] / 1000, "peak": None}
    return {"seconds": min(seconds), "peak": peak.bytes}


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def exponent(values: dict[int, float]) -> float | None:
    """b of the line log(value) = a + b log(tokens) through the points from 2880 tokens on."""
    points = {n: v for n, v in values.items() if v and n >= 2880}
    if len(points) < 2:
        return None
    x, y = ([math.log(v) for v in side] for side in (points.keys(), points.values()))
    return statistics.linear_regression(x, y).slope


def record(what: str, name: str, counts: Sequence[int], args: argparse.Namespace, limit: int | None) -> dict[str, Any]:
    """Measure one row: a method at all counts, up to the first that needs more memory than the limit."""
    device, points = torch.device(args.device), {}
    for count in counts:
        if limit is None:
            points[count] = one(what, name, count, device, args.threads, None)
            torch.cuda.empty_cache()
        else:
            # Forked before this process computed anything: nothing of torch's is shared but its code.
            with multiprocessing.get_context("fork").Pool(1) as pool:
                points[count] = pool.apply(one, (what, name, count, device, args.threads, limit))
        if "failed" in points[count]:
            break
    ran = {count: point for count, point in points.items() if "failed" not in point}
    if what == "engine" and any(p["kv_bytes"] != p["kv_bytes_predicted"] for p in ran.values()):
        raise SystemExit(f"keys and values take other bytes than the closed form says: {ran}")
    made = {"what": what, "method": name, "points": {str(count): point for count, point in points.items()}}
    for key in ("seconds", "peak"):
        values = {count: point[key] for count, point in ran.items()}
        if any(values.values()):
            made[f"{key}_exponent"] = exponent(values)
    return made


def rows_of(made: dict[str, Any], counts: Sequence[int]) -> Iterator[list[str]]:
    """Yield the lines of the printed table for a row: of time, and of memory."""
    for key, unit, digits, label in (("seconds", 1e-3, 2, "ms"), ("peak", 2**20, 1, "MiB")):
        if f"{key}_exponent" not in made:
            continue
        found = [made["points"].get(str(count)) for count in counts]
        cells = ["" if p is None else ">" if "failed" in p else f"{p[key] / unit:.{digits}f}" for p in found]
        slope = made[f"{key}_exponent"]
        yield [f"{made['what']}, {label}", made["method"], *cells, "" if slope is None else f"{slope:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--methods", default=",".join(selecting_methods()))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=3.0, help="GiB that a measurement on the CPU may take")
    parser.add_argument("--device", default=default_device())
    add_options(parser)
    parser.add_argument("--tiny", action="store_true", help="prove the code in seconds")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/scaling.jsonl")
    args = parser.parse_args()
    device, console = torch.device(args.device), Console()
    counts = (576, 2880) if args.tiny else args.counts
    whats = [("selection", name) for name in args.methods.split(",")] + [("merge", name) for name in MERGES]
    limit = None if device.type == "cuda" else int(args.limit * 2**30)
    first = header(
        device, threads=args.threads, width=WIDTH[device.type], heads=HEADS, share=SHARE, limit=limit, counts=counts
    )
    path = args.json or results_path(device, "scaling", args.tiny)
    known = Rows(path, first, args, code=code_version(), threads=args.threads, counts=list(counts))
    table = Table(title=f"One image, {first['device']}, {args.threads} threads")
    for column in ("", "method", *map(str, counts), "exponent"):
        table.add_column(column, justify="right" if column.isdigit() or column == "exponent" else "left")
    for what, name in track([*whats, ("engine", "uniform")], description="scaling", console=console):
        (made,) = known.measure((what, name), partial(record, what, name, counts, args, limit))
        for cells in rows_of(made, counts):
            table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
