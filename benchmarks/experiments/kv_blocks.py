# SPDX-License-Identifier: Apache-2.0
"""How many requests fit in the same KV cache at once when tokens leave before, or inside, the language model?

    .venv-vllm/bin/python benchmarks/experiments/kv_blocks.py --json benchmarks/results/kv_blocks.jsonl

Counts, no times. For each setting an engine of vLLM's gets the same memory for its KV cache and far more requests than
fit, each with an image of its own. The number that were in flight at once, none of them thrown out again, is what fits.
The model is a LLaVA with random weights and 576 visual tokens an image; its decoder is narrow, but has as many layers
as that of LLaVA-1.5 7B, since the share of layers behind the cut is what counts. Answers with and without blocks given
back (`experimental_free_kv`) are compared token by token.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

# Before vllm is imported: the engine in this process, and memory that the CPU build does not have to guess.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_USE_V2_MODEL_RUNNER": "0"}

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

NARROW = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2)
PROMPT = "<image>Why?"  # so short that no answer needs a block of its own: then nobody is thrown out
INSIDE = {"method": "dart", "pivot_text": 0, "experimental_in_llm": True}


def settings(keep: float, cuts: list[int]) -> dict[str, dict[str, Any]]:
    """What is compared, by name."""
    made: dict[str, dict[str, Any]] = {
        "off": {"off": True}, f"divprune, keep {keep}": {"method": "divprune", "keep": keep}
    }  # fmt: skip
    for cut in cuts:
        setting = INSIDE | {"layer": cut, "keep": keep}
        made[f"dart at layer {cut}, keep {keep}"] = setting
        made[f"dart at layer {cut}, keep {keep}, freed"] = setting | {"experimental_free_kv": True}
    return made


def images(count: int, size: int = 336) -> list[Image.Image]:
    """Images of noise, of which no two are equal."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 42, 42, 3), dtype=np.uint8)
    return [Image.fromarray(one).resize((size, size)) for one in pixels]


def fit(folder: Path, setting: dict[str, Any], layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine, ask it, and return how many requests were in flight at once, with their answers."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    # A block holds tokens of all layers of a group: where groups are smaller there are more blocks of the same memory.
    cut = setting.get("layer", 0) if setting.get("experimental_free_kv") else 0
    group = min(cut, layers - cut) or layers
    if layers % group:
        raise SystemExit(f"--cuts: {cut} does not split {layers} layers into groups of as many layers")
    llm = LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=args.requests,
        block_size=args.block_size, max_num_batched_tokens=16384, disable_chunked_mm_input=True, disable_log_stats=True,
        num_gpu_blocks_override=args.blocks * layers // group + 1, limit_mm_per_prompt={"image": 1},
        mm_processor_kwargs={"tokenprune": setting},
    )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool, schedule, seen = scheduler.kv_cache_manager.block_pool, scheduler.schedule, []

    def spy(*more: Any, **kwargs: Any) -> Any:
        made = schedule(*more, **kwargs)
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        seen.append((len(scheduler.running), used, len(made.preempted_req_ids or ())))
        return made

    scheduler.schedule = spy
    asked = [{"prompt": PROMPT, "multi_modal_data": {"image": one}} for one in images(args.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    outputs = llm.generate(asked, params, use_tqdm=False)
    most, used = max((running, used) for running, used, _ in seen)
    if most == args.requests:
        raise SystemExit(f"--requests: all {most} fit at once; ask more")
    if any(preempted for *_, preempted in seen):
        raise SystemExit("--tokens: answers outgrow their blocks, so requests are thrown out; ask for shorter ones")
    found = {
        "fit": most, "layers_a_block": group, "blocks": pool.num_gpu_blocks - 1, "blocks_a_request": used / most,
        "groups": len(scheduler.kv_cache_config.kv_cache_groups), "prompt_tokens": len(outputs[0].prompt_token_ids),
    }  # fmt: skip
    found["answers"] = [list(one.outputs[0].token_ids) for one in outputs]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cuts", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=400, help="of all layers together")
    parser.add_argument("--requests", type=int, default=96, help="more than fit")
    parser.add_argument("--tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console, records = Console(), []
    from serving import write, write_model

    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place), num_hidden_layers=args.layers, **NARROW)
        answers: dict[str, list[list[int]]] = {}
        for name, setting in settings(args.keep, args.cuts).items():
            found = fit(Path(place), setting, args.layers, args)
            gc.collect()  # one engine's memory at a time
            answers[name] = found.pop("answers")
            # What is given back must not change a word.
            other = answers.get(name.removesuffix(", freed")) if name.endswith(", freed") else None
            same = None if other is None else sum(a == b for a, b in zip(answers[name], other, strict=True))
            records.append({"setting": name, **found, "same_answers": same})
            console.log(records[-1])

    table = Table(title=f"{args.blocks} blocks of {args.block_size} tokens in {args.layers} layers")
    for column in ("setting", "prompt", "blocks a request", "of layers", "at once", "over off", "same answers"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for one in records:
        table.add_row(
            one["setting"], str(one["prompt_tokens"]), f"{one['blocks_a_request']:.1f}", str(one["layers_a_block"]),
            str(one["fit"]), f"{one['fit'] / records[0]['fit']:.2f}",
            "" if one["same_answers"] is None else f"{one['same_answers']} of {args.requests}",
        )  # fmt: skip
    console.print(table)
    if args.json:
        write(args.json, args, records)


if __name__ == "__main__":
    main()
