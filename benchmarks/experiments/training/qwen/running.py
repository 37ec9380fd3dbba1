# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the training scripts: log, resumable state, learning rate, and batches from worker processes."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


class Log:
    """JSON lines of the run, its clock, and the state to continue from."""

    def __init__(self, path: Path, run: Path) -> None:
        self.path, self.state_path, self.begin, self.before = path, run / "state.pt", time.time(), 0.0
        self.steps: dict[str, int] = {}
        run.mkdir(parents=True, exist_ok=True)

    def clock(self) -> float:
        return self.before + time.time() - self.begin

    def write(self, **fields) -> None:
        line = json.dumps({"time": round(self.clock(), 1), **fields})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def save(self, stage: str, step: int, optimizer=None, **modules) -> None:
        """Save weights, optimizer, clock and the index of the next batch. The file is replaced atomically."""
        self.steps[stage] = step
        state = {name: module.state_dict() for name, module in modules.items()}
        state |= {"steps": self.steps, "clock": self.clock(), "optimizer": optimizer and optimizer.state_dict()}
        torch.save(state, self.state_path.with_suffix(".tmp"))
        os.replace(self.state_path.with_suffix(".tmp"), self.state_path)

    def load(self, **modules) -> dict:
        state = torch.load(self.state_path)
        for name, module in modules.items():
            if name in state:
                module.load_state_dict(state[name], strict=name == "model")  # a head may have more outputs than before
        self.steps, self.before = state["steps"], state["clock"]
        return state

    def start_from(self, checkpoint: Path, model: torch.nn.Module) -> dict:
        """Load the weights of an exported checkpoint, and clock and steps of the log's last line."""
        model.load_state_dict(type(model).from_pretrained(checkpoint).state_dict())
        last = json.loads(self.path.read_text(encoding="utf-8").splitlines()[-1])
        self.before, self.steps = last["time"], {last["stage"]: last["step"]}
        return {}


def rate(progress: float, step: int, decay: float, warm: int = 60) -> float:
    """Return a trapezoid: warm-up over `warm` steps, flat, then a linear fall to 3 % over the last `decay`."""
    return min(1.0, (step + 1) / warm) * max(0.03, min(1.0, (1 - progress) / decay))


def _work(queue, draw: Callable, key: tuple, start: int, settings: dict) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 5)
    torch.set_num_threads(1)
    index = start
    while True:
        queue.put(draw((*key, index), **settings))
        index += 1


class Batches:
    """Iterator over `draw(seed, **settings)` for seeds (*key, start), (*key, start + 1), ..., drawn in advance."""

    def __init__(self, draw: Callable, key: tuple, start: int, workers: int = 1, **settings) -> None:
        context = mp.get_context("spawn")
        self.queue = context.Queue(maxsize=24)
        self.processes = [
            context.Process(
                target=_work, args=(self.queue, draw, (*key, part), start, settings), daemon=True, name=f"draw{part}"
            )
            for part in range(workers)
        ]
        for process in self.processes:
            process.start()

    def __iter__(self) -> Iterator:
        while True:
            yield self.queue.get()

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
