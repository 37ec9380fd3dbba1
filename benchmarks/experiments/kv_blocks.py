# SPDX-License-Identifier: Apache-2.0
"""Count the requests that fit in the same KV cache when tokens are dropped before or inside the language model.

    .venv-vllm/bin/python benchmarks/experiments/kv_blocks.py --json benchmarks/results/kv_blocks.jsonl

The script counts requests and measures no times. For each setting, a vLLM engine gets the same KV cache and more
requests than fit, each with a different image. The result is the maximum number of running requests without preemption.
The model is a LLaVA with random weights and 576 visual tokens per image. Its decoder is narrow but has the 32 layers of
LLaVA-1.5 7B, because the share of layers after the cut decides. Answers with and without freed blocks
(`experimental_free_kv`) are compared token by token.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

# Set before vllm is imported: the engine runs in this process, with a fixed amount of KV memory.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_USE_V2_MODEL_RUNNER": "0"}

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

NARROW = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2)
PROMPT = "<image>Why?"  # short enough that no answer needs another block, which would cause preemption
INSIDE = {"method": "dart", "pivot_text": 0, "experimental_in_llm": True}


def settings(keep: float, cuts: list[int]) -> dict[str, dict[str, Any]]:
    """Return the compared settings by name."""
    by_name: dict[str, dict[str, Any]] = {
        "off": {"off": True}, f"divprune, keep {keep}": {"method": "divprune", "keep": keep}
    }  # fmt: skip
    for cut in cuts:
        setting = INSIDE | {"layer": cut, "keep": keep}
        by_name[f"dart at layer {cut}, keep {keep}"] = setting
        by_name[f"dart at layer {cut}, keep {keep}, freed"] = setting | {"experimental_free_kv": True}
    return by_name


def images(count: int, size: int = 336) -> list[Image.Image]:
    """Return distinct noise images."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 42, 42, 3), dtype=np.uint8)
    return [Image.fromarray(array).resize((size, size)) for array in pixels]


def fit(folder: Path, setting: dict[str, Any], layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run an engine and return the number of concurrent requests, with their answers."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    # A block holds tokens of all layers of a group, so smaller groups give more blocks in the same memory.
    cut = setting.get("layer", 0) if setting.get("experimental_free_kv") else 0
    group = min(cut, layers - cut) or layers
    if layers % group:
        raise SystemExit(f"--cuts {cut} does not split {layers} layers into groups of equal size.")
    llm = LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=args.requests,
        block_size=args.block_size, max_num_batched_tokens=16384, disable_chunked_mm_input=True, disable_log_stats=True,
        num_gpu_blocks_override=args.blocks * layers // group + 1, limit_mm_per_prompt={"image": 1},
        mm_processor_kwargs={"tokenprune": setting},
    )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool, schedule, steps = scheduler.kv_cache_manager.block_pool, scheduler.schedule, []

    def spy(*more: Any, **kwargs: Any) -> Any:
        output = schedule(*more, **kwargs)
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        steps.append((len(scheduler.running), used, len(output.preempted_req_ids or ())))
        return output

    scheduler.schedule = spy
    requests = [{"prompt": PROMPT, "multi_modal_data": {"image": image}} for image in images(args.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    outputs = llm.generate(requests, params, use_tqdm=False)
    max_running, used = max((running, used) for running, used, _ in steps)
    if max_running == args.requests:
        raise SystemExit(f"All {max_running} requests fit at once. Increase --requests.")
    if any(preempted for *_, preempted in steps):
        raise SystemExit("Answers outgrow their blocks and cause preemption. Decrease --tokens.")
    record = {
        "fit": max_running, "layers_a_block": group, "blocks": pool.num_gpu_blocks - 1,
        "blocks_a_request": used / max_running, "groups": len(scheduler.kv_cache_config.kv_cache_groups),
        "prompt_tokens": len(outputs[0].prompt_token_ids),
    }  # fmt: skip
    record["answers"] = [list(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cuts", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=400, help="for all layers together")
    parser.add_argument("--requests", type=int, default=96, help="number of requests, more than fit")
    parser.add_argument("--tokens", type=int, default=12, help="tokens per answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console, records = Console(), []
    from serving import write, write_model

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), num_hidden_layers=args.layers, **NARROW)
        answers: dict[str, list[list[int]]] = {}
        for name, setting in settings(args.keep, args.cuts).items():
            record = fit(Path(folder), setting, args.layers, args)
            gc.collect()  # free the engine before the next one starts
            answers[name] = record.pop("answers")
            # Freed blocks must not change an answer.
            other = answers.get(name.removesuffix(", freed")) if name.endswith(", freed") else None
            same = None if other is None else sum(a == b for a, b in zip(answers[name], other, strict=True))
            records.append({"setting": name, **record, "same_answers": same})
            console.log(records[-1])

    table = Table(title=f"{args.blocks} blocks of {args.block_size} tokens in {args.layers} layers")
    for column in ("setting", "prompt", "blocks a request", "of layers", "at once", "over off", "same answers"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for row in records:
        table.add_row(
            row["setting"], str(row["prompt_tokens"]), f"{row['blocks_a_request']:.1f}", str(row["layers_a_block"]),
            str(row["fit"]), f"{row['fit'] / records[0]['fit']:.2f}",
            "" if row["same_answers"] is None else f"{row['same_answers']} of {args.requests}",
        )  # fmt: skip
    console.print(table)
    if args.json:
        write(args.json, args, records)


if __name__ == "__main__":
    main()
