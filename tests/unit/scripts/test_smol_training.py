# SPDX-License-Identifier: Apache-2.0
"""Test demo_smol: packed training equals separate prompts, and the assembled model is the decoder plus its change."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


@pytest.fixture(scope="module")
def training(script: Any) -> ModuleType:
    return script("smol_decoder")


@pytest.fixture(scope="module")
def smol() -> ModuleType:
    return importlib.import_module("tokenprune_demo.smol")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word per character, and SmolLM2's ids for the ends of turns."""
    names = ["<unk>", "<|im_start|>", "<|im_end|>", *LETTERS]
    tokens = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", padding_side="left", pad_token="<|im_end|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return fast


def build_decoder(words: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_questions_packed_into_one_sequence_get_the_logits_of_prompts_of_their_own(training: ModuleType) -> None:
    words = build_tokenizer()
    model, packer, visual = build_decoder(len(words)), training.Packer(words), torch.randn(1, 9, 32)
    row = [("colour", "what?", "red"), ("count", "how many stars?", "2"), ("word", "it says", "cat")]
    packed = packer.pack([row, row[:1]], 9)
    together = training.answer_logits(model, visual.expand(2, -1, -1), packed, len(packer.before))
    labelled = packed["label"] != -100
    parts = [
        together[(packed["number"][labelled] == n) & (torch.arange(2)[:, None].expand_as(labelled)[labelled] == 0)]
        for n in (1, 2, 3)
    ]
    for (_, question, answer), logits in zip(row, parts, strict=True):
        ids = [*packer.ids(question), *packer.after, *packer.ids(answer)]
        before = model.model.embed_tokens(torch.tensor([packer.before]))
        embeds = torch.cat([before, visual, model.model.embed_tokens(torch.tensor([ids]))], 1)
        separate = model(inputs_embeds=embeds).logits[0, -len(packer.ids(answer)) - 1 : -1]
        torch.testing.assert_close(logits, separate, rtol=1e-4, atol=1e-4)


def test_adapters_change_nothing_at_first_and_are_then_a_product_of_low_rank(training: ModuleType) -> None:
    model = build_decoder(99)
    ids = torch.arange(3, 20)[None]
    before = model(ids).logits
    parameters = training.adapt(model, 4)
    assert len(parameters) == 2 * 2 * 7
    assert torch.equal(model(ids).logits, before)
    layer = model.model.layers[1].mlp.up_proj
    torch.nn.init.normal_(layer.up)
    x = torch.randn(3, 32)
    expected = x @ (layer.base.weight + layer.up @ layer.down).T
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert set(training.adapters(model)) >= {"model.layers.1.mlp.up_proj.up", "model.layers.0.self_attn.q_proj.down"}


def test_the_checkpoint_is_the_decoder_with_its_change_added(
    smol: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = build_tokenizer()
    words.add_tokens([smol.IMAGE], special_tokens=True)
    base = build_decoder(len(words))
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=smol.SIZE,
        patch_size=smol.PATCH,
    )  # fmt: skip
    monkeypatch.setattr(smol, "load_decoder", lambda: (build_decoder(len(words)), words))
    model, _ = smol.assemble(base, words, vision)
    parts: dict[str, Any] = {}
    for part in ("vision_tower", "multi_modal_projector"):
        parts |= {
            f"{part}.{n}": torch.randn_like(w)
            for n, w in getattr(model.model, part).state_dict().items()
            if w.is_floating_point()
        }
    name = "decoder.layers.1.mlp.up_proj"
    parts[f"{name}.up"], parts[f"{name}.down"] = torch.randn(64, 3), torch.randn(3, 32)
    shipped = tmp_path / "here"
    shipped.mkdir()
    save_file({n: w.to(torch.bfloat16).contiguous() for n, w in parts.items()}, shipped / "parts.safetensors")
    model.config.save_pretrained(shipped)
    monkeypatch.setattr(smol, "HERE", shipped)
    monkeypatch.setenv("TOKENPRUNE_CACHE", str(tmp_path / "cache"))
    folder = smol.checkpoint()
    assert smol.checkpoint() == folder and len(list((tmp_path / "cache").iterdir())) == 1
    loaded, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    up, down = (parts[f"{name}.{direction}"].to(torch.bfloat16).float() for direction in ("up", "down"))
    expected = base.model.layers[1].mlp.up_proj.weight + up @ down
    torch.testing.assert_close(loaded.model.language_model.layers[1].mlp.up_proj.weight, expected)
    assert torch.equal(
        loaded.model.language_model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight
    )
    linear = parts["multi_modal_projector.linear_1.weight"].to(torch.bfloat16).float()
    assert torch.equal(loaded.model.multi_modal_projector.linear_1.weight, linear)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.language_model.embed_tokens.weight.data_ptr()
    assert processor.tokenizer.padding_side == "left"
    assert loaded.config.image_seq_length == 576
