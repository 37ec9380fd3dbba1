# SPDX-License-Identifier: Apache-2.0
"""Worker of test_tensor_parallel.py, in each of two processes: compare a model split in halves with the unsplit
model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForImageTextToText

import tokenprune
from oracle import close
from zoo import FAMILIES

# Methods whose observables only use the rank's own tensors, attention of all heads, or keys of all heads.
METHODS = {"llava": ("divprune", "vscan", "dyrate"), "qwen2_5_vl": ("dart",), "gemma3": ("fastv",)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    for name, methods in METHODS.items():
        family = FAMILIES[name]
        unsplit, inputs = family.build(), family.make_inputs(images=(2, 1))
        if rank == 0:
            unsplit.save_pretrained(folder / name)
        distributed.barrier()
        split = AutoModelForImageTextToText.from_pretrained(folder / name, tp_plan="auto").eval()
        split.generation_config = unsplit.generation_config
        for method in methods:
            results = []
            for model in (unsplit, split):
                with torch.no_grad(), tokenprune.patched(model, method, keep=0.3, record=True):
                    logits = model(**inputs).logits[:, -4:]
                    kept = [cut.kept for cut in tokenprune.stats(model).cuts]
                    results.append((logits, kept, model.generate(**inputs, max_new_tokens=2)))
            (expected_logits, expected_kept, expected_text), (actual_logits, kept, actual_text) = results
            if kept != expected_kept or not torch.equal(expected_text, actual_text):
                raise AssertionError(f"{name}, {method}: rank {rank} differs in kept tokens or text")
            close(actual_logits, expected_logits)
        print(f"rank {rank}: {name} agrees", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
