# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with a quantized language model in the formats of common tools, and references in transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoints import Checkpoint
from reference import Reference

_LINEAR = re.compile(r"language_model\..*layers\.\d+\.(self_attn|mlp)\.\w+_proj")
_GROUP = 32
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order of eight values in AWQ
_UNQUANTIZED = ["vision_tower", "multi_modal_projector", "lm_head"]


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that compressed-tensors stores for a weight `[out, in]`, and the dequantized weight."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    quantized = (weight / scale).round()
    return {"weight": quantized.to(torch.int8), "weight_scale": scale}, quantized * scale


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Do the same for AWQ: 4 bits, with a zero point for each group of inputs."""
    inputs = weight.T.reshape(-1, _GROUP, weight.shape[0])  # [groups, 32, out]
    low, high = inputs.amin(1, keepdim=True).clamp(max=0), inputs.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    quantized = ((inputs / scale).round() + zero).clamp(0, 15)
    stored = {"qweight": _pack(quantized.flatten(0, 1)), "qzeros": _pack(zero[:, 0]), "scales": scale[:, 0].half()}
    return stored, ((quantized - zero) * scale).flatten(0, 1).T.contiguous()


def gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Do the same for GPTQ: 4 bits around 8 for each group of inputs, eight values per int32."""
    inputs = weight.T.reshape(-1, _GROUP, weight.shape[0])
    scale = (inputs.abs().amax(1, keepdim=True) / 7).half().float()
    quantized = ((inputs / scale).round() + 8).clamp(0, 15)
    zeros = torch.full_like(scale[:, 0], 7)  # version 1 of the format stores zero points minus one
    stored = {
        "qweight": _pack(quantized.flatten(0, 1).T, range(8)).T, "qzeros": _pack(zeros, range(8)),
        "scales": scale[:, 0].half(), "g_idx": torch.arange(weight.shape[1]).int() // _GROUP,
    }  # fmt: skip
    return stored, ((quantized - 8) * scale).flatten(0, 1).T.contiguous()


def _pack(values: Tensor, order: Iterable[int] = _ORDER) -> Tensor:
    """Pack `[n, m]` values from 0 to 15 into int32 `[n, m / 8]`."""
    groups = values.long().reshape(len(values), -1, 8)[..., list(order)]
    packed = (groups << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def round_activations(x: Tensor) -> Tensor:
    """Round activations as an int8 kernel does, with one scale per token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True}
KINDS: dict[str, tuple[Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], dict[str, Any]]] = {
    "int8": (int8, {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": [f"re:.*{name}.*" for name in _UNQUANTIZED],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": _TOKENS | {"strategy": "channel", "dynamic": False},
            "input_activations": _TOKENS | {"strategy": "token", "dynamic": True},
        }},
    }),
    "awq": (awq, {
        "quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": _UNQUANTIZED,
    }),
    "gptq": (gptq, {
        "quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True, "lm_head": False,
        "dynamic": {f"-:.*{name}.*": {} for name in _UNQUANTIZED},
    }),
}  # fmt: skip


def write(kind: str, checkpoint: Checkpoint, plain: Path, folder: Path) -> Reference:
    """Write the checkpoint in `plain` to `folder` with weights of a kind in `KINDS`, and return its reference."""
    quantize, config = KINDS[kind]
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    stored, dequantized = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if _LINEAR.search(name) is None or not name.endswith(".weight"):
            stored[name] = weight
            continue
        parts, value = quantize(weight)
        stored |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
        dequantized[name] = value
    assert dequantized
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    reference = Reference(checkpoint, plain)
    modules = [m for n, m in reference.model.named_modules() if isinstance(m, nn.Linear) and _LINEAR.search(n)]
    assert len(modules) == len(dequantized)
    for module in modules:
        module.weight.data = quantize(module.weight.data)[1]
        if kind == "int8":
            module.register_forward_pre_hook(lambda _, args: (round_activations(args[0]),))
    return reference
