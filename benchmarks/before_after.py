# SPDX-License-Identifier: Apache-2.0
"""What a change made of choosing tokens: two trees of this repository, in turn, in one process.

    git worktree add ../before main
    python benchmarks/before_after.py --before ../before --methods scope,cdpruner

Each round of a method runs both on the same made-up features (scaling.py) and compares what they keep. The tree of
before is left out where it would take longer than --patience, by the third power of its time with fewer tokens. Times
are the best of the rounds, memory what the peak of the process rises by; --kinds: "random" features, each alike to
none, or "groups" of tokens, as images have them. The load of the machine stands beside each line.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import RESULTS, Clock, Peak, header, write
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
METHODS = "scope,tops,eadp,mmtok,cdpruner,otprune,idselection,agilepruner,prunesid,d2pruner,llava_scissor"
VIDEO = {"llava_scissor"}  # frames of 196 tokens
GROUPS, FRAME = 200, 196


def own_modules() -> dict[str, ModuleType]:
    """Return the modules of the package, and scaling.py, that are imported now."""
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("tokenprune", "scaling")}


def features(kind: str, count: int, width: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    noise = torch.randn(1, count, width, generator=g)
    if kind == "random":
        return noise
    return torch.randn(GROUPS, width, generator=g)[torch.randint(GROUPS, (1, count), generator=g)] + 0.5 * noise


class Tree:
    """The package of a checkout, as far as choosing goes."""

    def __init__(self, path: Path) -> None:
        self._modules: dict[str, ModuleType] = {}
        paths = [str(path), str(path / "benchmarks")]
        with self.active():
            sys.path[:0] = paths
            try:
                self.scaling, self.testing = (importlib.import_module(one) for one in ("scaling", "tokenprune.testing"))
            finally:
                del sys.path[: len(paths)]
            self.package = sys.modules["tokenprune"]
        if (found := Path(self.package.__file__).parents[1]) != path:
            raise SystemExit(f"the package came from {found}, not from {path}")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Have imports find the modules of this tree."""
        others = own_modules()
        for name in others:
            del sys.modules[name]
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = own_modules()
            for name in self._modules:
                del sys.modules[name]
            sys.modules.update(others)

    def prepared(self, name: str, kind: str, count: int) -> Callable[[], Any]:
        """Return what chooses once, and gives bool `[N]`, what stays (or what each joins, for a video)."""
        torch.manual_seed(0)
        with self.active():
            return self._prepared(name, features(kind, count, self.scaling.WIDTH["cpu"]))

    def _prepared(self, name: str, x: torch.Tensor) -> Callable[[], Any]:
        method, count = self.package.method(name), x.shape[1]
        if name in VIDEO:
            grid = (count // FRAME, 14, FRAME // 14)
            tokens = self.testing.visual_tokens(
                x[:, : count // FRAME * FRAME], [count // FRAME * FRAME], keep=[count // 10], grids=[grid],
                modality="video",
            )  # fmt: skip
            return lambda: self._chosen(method, tokens, "assign")
        tokens = self.scaling.visual_tokens(method, count, torch.device("cpu"))
        tokens._source.hidden[:, :count] = x
        return lambda: self._chosen(method, tokens, "keep")

    def _chosen(self, method: Any, tokens: Any, what: str) -> torch.Tensor:
        with self.active():
            return getattr(method.select(tokens), what)


def measured(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    clock, record = Clock(torch.device("cpu")), {}
    kept: dict[str, torch.Tensor] = {}
    times: dict[str, list[tuple[float, float]]] = {which: [] for which in runs}
    for _ in range(rounds):
        for which, run in runs.items():
            with Peak(torch.device("cpu")) as peak:
                times[which].append(clock(lambda run=run, which=which: kept.update({which: run()})))
            record[f"{which}_peak"] = max(record.get(f"{which}_peak", 0), peak.bytes)
    for which, taken in times.items():
        record[f"{which}_s"], record[f"{which}_cpu_s"] = (round(min(one), 4) for one in zip(*taken, strict=True))
    if len(kept) == 2:
        record["same"] = torch.equal(kept["before"], kept["after"])
        record["other_share"] = float((kept["before"] != kept["after"]).double().mean())
        record["ratio_cpu"] = round(record["before_cpu_s"] / record["after_cpu_s"], 2)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of what was before")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--counts", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--kinds", nargs="+", default=["random", "groups"], choices=["random", "groups"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a run of before may take")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/cpu/before_after.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**20)  # see scaling.py
    trees = {"before": Tree(args.before.resolve()), "after": Tree(HERE)}
    path = args.json or RESULTS / "cpu" / "before_after.jsonl"
    lines = [header(torch.device("cpu"), width=trees["after"].scaling.WIDTH["cpu"], share=trees["after"].scaling.SHARE)]
    table = Table(title="CPU seconds and MiB, before and after, one thread")
    columns = ("method", "features", "tokens", "before, s", "after, s", "ratio", "before, MiB", "after, MiB", "same")
    for column in columns:
        table.add_column(column, justify="left" if column in ("method", "features") else "right")
    for name in args.methods.split(","):
        for kind in args.kinds:
            known: tuple[int, float] | None = None
            for count in args.counts:
                record = {"method": name, "features": kind, "tokens": count, "load": round(os.getloadavg()[0], 2)}
                long = known is not None and known[1] * (count / known[0]) ** 3 > args.patience
                runs = {which: tree.prepared(name, kind, count) for which, tree in trees.items()}
                if long:
                    del runs["before"]
                record |= measured(runs, args.rounds)
                if not long:
                    known = count, record["before_s"]
                lines.append(record)
                table.add_row(
                    name, kind, str(count), *(f"{record[k]:.2f}" if k in record else "" for k in _TIMES),
                    *(f"{record[k] / 2**20:.0f}" if k in record else "" for k in ("before_peak", "after_peak")),
                    str(record.get("same", "")),
                )  # fmt: skip
                write(path, lines)
    Console(width=130).print(table)


_TIMES = ("before_cpu_s", "after_cpu_s", "ratio_cpu")

if __name__ == "__main__":
    main()
