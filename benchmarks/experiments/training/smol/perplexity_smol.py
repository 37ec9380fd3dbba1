# SPDX-License-Identifier: Apache-2.0
"""Measure the language loss of demo_smol's decoder: perplexity of texts before and after training.

python experiments/training/smol/perplexity_smol.py            # writes experiments/training/smol/perplexity.json
"""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from tokenprune_demo.smol import checkpoint, load_decoder

ROOT = Path(__file__).resolve().parents[4]
TEXTS = {  # plain English of three sorts, not written by us
    "licence": ROOT / "LICENSE",
    "manual": Path(sysconfig.get_paths()["stdlib"]) / "turtle.py",
    "poem": Path(sysconfig.get_paths()["stdlib"]) / "this.py",
}
PROMPTS = ("The capital of France is", "Water boils at a temperature of", "Once upon a time, there was a")
WINDOW, MOST = 512, 2048


def read(name: str, path: Path) -> str:
    """Return the English text of a file: a module's docstring, or the poem in Python's `this`."""
    text = path.read_text(encoding="utf-8")
    if name == "poem":
        import codecs

        return codecs.decode(text.split('"""')[1], "rot13")
    return text.split('"""')[1] if path.suffix == ".py" else text


@torch.no_grad()
def perplexity(decoder, ids: list[int]) -> float:
    """Return the perplexity of a text in windows of 512 tokens."""
    total, count = 0.0, 0
    for start in range(0, min(len(ids), MOST), WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        if window.shape[1] > 1:
            n = window.shape[1] - 1
            total += float(decoder(input_ids=window, labels=window).loss) * n
            count += n
    return math.exp(total / count)


def main() -> None:
    torch.set_num_threads(1)
    before, tokenizer = load_decoder()
    trained = AutoModelForImageTextToText.from_pretrained(checkpoint(), dtype=torch.float32).eval()
    results: dict = {"perplexity": {}, "prompts": {}}
    for name, path in TEXTS.items():
        ids = tokenizer(read(name, path))["input_ids"]
        pair = [round(perplexity(model, ids), 2) for model in (before, trained)]
        results["perplexity"][name] = {"tokens": min(len(ids), MOST), "before": pair[0], "after": pair[1]}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        said = [
            tokenizer.decode(
                model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :],
                skip_special_tokens=True,
            )
            for model in (before, trained)
        ]
        results["prompts"][prompt] = {"before": said[0], "after": said[1]}
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    (Path(__file__).parent / "perplexity.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
