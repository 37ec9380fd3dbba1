# SPDX-License-Identifier: Apache-2.0
"""Run by test_tensor_parallel.py in each of two processes: a model of which each has half, against the whole model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForImageTextToText

import tokenprune
from oracle import close
from zoo import FAMILIES

# What is asked of the ranks together: nothing, attention of heads, keys of heads.
METHODS = {"llava": ("divprune", "vscan", "dyrate"), "qwen2_5_vl": ("dart",), "gemma3": ("fastv",)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    for name, methods in METHODS.items():
        family = FAMILIES[name]
        whole, inputs = family.build(), family.make_inputs(images=(2, 1))
        if rank == 0:
            whole.save_pretrained(folder / name)
        distributed.barrier()
        shared = AutoModelForImageTextToText.from_pretrained(folder / name, tp_plan="auto").eval()
        shared.generation_config = whole.generation_config
        for method in methods:
            seen = []
            for model in (whole, shared):
                with torch.no_grad(), tokenprune.patched(model, method, keep=0.3, record=True):
                    logits = model(**inputs).logits[:, -4:]
                    kept = [cut.kept for cut in tokenprune.stats(model).cuts]
                    seen.append((logits, kept, model.generate(**inputs, max_new_tokens=2)))
            (want, wanted, text), (got, kept, said) = seen
            if kept != wanted or not torch.equal(text, said):
                raise AssertionError(f"{name}, {method}: rank {rank} keeps or says something else")
            close(got, want)
        print(f"rank {rank}: {name} agrees", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
