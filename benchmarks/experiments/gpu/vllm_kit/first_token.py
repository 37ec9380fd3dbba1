# SPDX-License-Identifier: Apache-2.0
"""Split the time to the first token of a single request into stages. Runs one engine of h_vllm_first_token.py.

Functions of vLLM are wrapped, and the time of a function excludes the wrapped functions inside it. Each request is
measured twice: as it runs ("ms"), and with the GPU synchronized at the start and the end of each function
("with_waits_ms"), which attributes GPU time to the function that started it.
"""

from __future__ import annotations

import engine  # isort: skip
import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from cases import ENGINES
from engine import TINY, say
from times import Server

REQUESTS, FUNCTIONS = (2, 5) if TINY else (8, 25)


class Stages:
    """Exclusive times of the wrapped functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.waits = False
        self._stack: list[list[float]] = []

    def now(self) -> float:
        import torch

        if self.waits and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def wrap(self, label: str, owner: Any, name: str) -> None:
        """Add the time of a method of a class to the stage `label`."""
        method = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.stage(label):
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        start = self.now()
        self._stack.append([0.0])
        try:
            yield
        finally:
            elapsed = self.now() - start
            [inner] = self._stack.pop()
            self.seconds[label] += elapsed - inner
            if self._stack:
                self._stack[-1][0] += elapsed


def wrap_all(stages: Stages, llm: Any) -> None:
    """Wrap the functions of a request, from the prompt to its output."""
    core = llm.llm_engine
    inner = core.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    targets = [
        ("other", type(llm), ("generate",)),
        ("read the prompt and its images", type(core.renderer), ("render_cmpl",)),
        ("process images", type(core.renderer), ("_process_multimodal",)),
        ("make the request", type(core.input_processor), ("process_inputs",)),
        ("schedule", type(inner.scheduler), ("schedule",)),
        ("run the model", type(runner), ("execute_model",)),
        ("encode images", type(runner), ("_execute_mm_encoder",)),
        ("sample", type(runner), ("sample_tokens",)),
        ("update the scheduler", type(inner.scheduler), ("update_from_output",)),
        ("make the output", type(core.output_processor), ("process_outputs",)),
    ]
    try:
        from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

        targets.append(("encode images", EncoderRunner, ("execute_mm_encoder",)))
    except ImportError:
        pass
    for label, owner, names in targets:
        for name in names:
            if hasattr(owner, name):
                stages.wrap(label, owner, name)


def measure(stages: Stages, ask: Callable[[], Any]) -> dict[str, Any]:
    """Return the medians of the stages of a request, with and without waits, and the slowest functions."""
    row: dict[str, Any] = {}
    for waits, name in ((False, "ms"), (True, "with_waits_ms")):
        stages.waits, requests = waits, []
        for _ in range(REQUESTS):
            stages.seconds.clear()
            ask()
            requests.append({label: 1000 * seconds for label, seconds in stages.seconds.items()})
        labels = dict.fromkeys(label for times in requests for label in times)
        split = {label: round(statistics.median(times.get(label, 0.0) for times in requests), 3) for label in labels}
        row |= {f"stages_{name}": split, f"first_{name}": round(sum(split.values()), 2)}
    stages.waits, profile = False, cProfile.Profile()
    profile.runcall(ask)
    entries = sorted(pstats.Stats(profile).stats.items(), key=lambda item: -item[1][2])[:FUNCTIONS]
    row["functions"] = [
        [f"{Path(file).name}:{line} {name}", calls, round(1000 * seconds, 3)]
        for (file, line, name), (_, calls, seconds, _, _) in entries
    ]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--tiny", action="store_true")
    engine_case = ENGINES[parser.parse_args().engine]
    with tempfile.TemporaryDirectory() as folder:
        server, stages = Server(engine_case, Path(folder)), Stages()
        for setting in engine_case.settings.values():
            for _ in range(2):  # compiles kernels
                server.ask(setting, 1, 1)
        wrap_all(stages, server.llm)
        for name, setting in engine_case.settings.items():
            row = measure(stages, lambda setting=setting: server.ask(setting, 1, 1))
            say(setting=name, **row, **engine.about(server.llm))
        engine.leave()


if __name__ == "__main__":
    main()
