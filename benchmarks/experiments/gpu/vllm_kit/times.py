# SPDX-License-Identifier: Apache-2.0
"""Run one engine of h_vllm_times.py: a model of 7 B shape with vLLM's dummy weights, and times of its requests."""

from __future__ import annotations

import engine  # isort: skip
import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import ENGINES, Engine
from engine import TINY, say
from shapes import WORDS, image_of, write_model

MANY, ALONE, WRITE, TURNS = (6, 2, 4, 1) if TINY else (64, 8, 16, 2)


class Server:
    """An engine and its requests. `least` is the minimum number of free KV cache blocks."""

    def __init__(self, which: Engine, folder: Path) -> None:
        write_model(which.shape, folder, TINY)
        self.shape, self.seed = which.shape, 0
        limits = {"image": 1} | ({"video": 0} if which.shape == "qwen" else {})
        self.llm = engine.start(
            str(folder), which.setting, which.runner, load_format="dummy", dtype="bfloat16",
            max_model_len=1024 if which.shape == "llava" else 4096, max_num_seqs=64, max_num_batched_tokens=8192,
            limit_mm_per_prompt=limits, disable_log_stats=False, mm_processor_cache_gb=0, gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=24 * 2**30, attention_backend="FLASH_ATTN", **which.options,
        )  # fmt: skip
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.pool, self.least = scheduler.kv_cache_manager.block_pool, 0
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            out = schedule(*args, **kwargs)
            self.least = min(self.least, self.pool.get_num_free_blocks())
            return out

        scheduler.schedule = watched

    def ask(self, setting: dict[str, Any] | None, count: int, answer: int) -> tuple[list[Any], float, int]:
        """Return the outputs of requests with new images, the seconds, and the used blocks."""
        from vllm import SamplingParams

        asked = []
        for _ in range(count):
            self.seed += 1
            asked.append(engine.request(WORDS[self.shape], [image_of(self.shape, self.seed, TINY)], setting))
        self.llm.reset_prefix_cache()
        self.least = before = self.pool.get_num_free_blocks()
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return outputs, time.perf_counter() - began, before - self.least


def span(outputs: list[Any], first: str, last: str) -> float:
    """Return the seconds from the first request's time stamp `first` to the last request's `last`."""
    stats = [output.metrics for output in outputs]
    return max(getattr(stat, last) for stat in stats) - min(getattr(stat, first) for stat in stats)


def measure(server: Server, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the row of each setting. The settings take turns."""
    rows: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():  # warm-up, which compiles
        for count in (1, min(8, MANY)):
            outputs, _, _ = server.ask(setting, count, 4)
        prompt = len(outputs[0].prompt_token_ids)
        rows[name] = {"setting": name, "prompt": prompt, "alone": [], "prefill": [], "turns": []}
    for _ in range(ALONE):
        for name, setting in settings.items():
            outputs, wall, _ = server.ask(setting, 1, 1)
            rows[name]["alone"].append(1000 * wall)
            rows[name]["prefill"].append(1000 * span(outputs, "scheduled_ts", "first_token_ts"))
    for _ in range(TURNS):
        for name, setting in settings.items():
            outputs, wall, blocks = server.ask(setting, MANY, WRITE)
            engine_seconds = span(outputs, "scheduled_ts", "last_token_ts")
            rows[name]["turns"].append({"rate": MANY / engine_seconds, "whole_rate": MANY / wall, "blocks": blocks})
    return {name: finished(row) for name, row in rows.items()}


def finished(row: dict[str, Any]) -> dict[str, Any]:
    """Replace the single times of a row by medians, and the values of its turns by means."""
    singles, prefill, turns = row.pop("alone"), row.pop("prefill"), row["turns"]
    of_turns = {key: round(statistics.mean(turn[key] for turn in turns), 3) for key in turns[0]}
    return row | of_turns | {
        "first_ms": round(statistics.median(singles), 2), "prefill_ms": round(statistics.median(prefill), 2),
        "first_from_ms": round(min(singles), 2), "first_to_ms": round(max(singles), 2),
        "at_once": MANY, "answer": WRITE,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--tiny", action="store_true")
    which = ENGINES[parser.parse_args().engine]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(which, Path(folder))
        pool, size = server.pool.num_gpu_blocks, server.llm.llm_engine.vllm_config.cache_config.block_size
        for row in measure(server, which.settings).values():
            say(**row, pool=pool, block_size=size, **engine.about(server.llm))
        engine.leave()


if __name__ == "__main__":
    main()
