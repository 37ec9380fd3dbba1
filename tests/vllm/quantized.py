# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose language model has weights of few bits, as the tools that make such checkpoints write them, and the
same model in transformers with what these weights stand for."""

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
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # in which AWQ packs eight numbers
_WHOLE = ["vision_tower", "multi_modal_projector", "lm_head"]


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores of a weight `[out, in]`, by the end of its name, and what that stands for."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round()
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same of AWQ: 4 bits with a zero for each group of inputs."""
    inputs = weight.T.reshape(-1, _GROUP, weight.shape[0])  # [groups, 32, out]
    low, high = inputs.amin(1, keepdim=True).clamp(max=0), inputs.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    numbers = ((inputs / scale).round() + zero).clamp(0, 15)
    stored = {"qweight": _packed(numbers.flatten(0, 1)), "qzeros": _packed(zero[:, 0]), "scales": scale[:, 0].half()}
    return stored, ((numbers - zero) * scale).flatten(0, 1).T.contiguous()


def gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same of GPTQ: 4 bits around 8 for each group of inputs, of which eight stand in one number."""
    inputs = weight.T.reshape(-1, _GROUP, weight.shape[0])
    scale = (inputs.abs().amax(1, keepdim=True) / 7).half().float()
    numbers = ((inputs / scale).round() + 8).clamp(0, 15)
    zeros = torch.full_like(scale[:, 0], 7)  # the format's first version stores them less one
    stored = {
        "qweight": _packed(numbers.flatten(0, 1).T, range(8)).T, "qzeros": _packed(zeros, range(8)),
        "scales": scale[:, 0].half(), "g_idx": torch.arange(weight.shape[1]).int() // _GROUP,
    }  # fmt: skip
    return stored, ((numbers - 8) * scale).flatten(0, 1).T.contiguous()


def _packed(numbers: Tensor, order: Iterable[int] = _ORDER) -> Tensor:
    """`[n, m]` from 0 to 15 -> int32 `[n, m / 8]`."""
    eight = numbers.long().reshape(len(numbers), -1, 8)[..., list(order)]
    joined = (eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(joined >= 2**31, joined - 2**32, joined).int()


def rounded(x: Tensor) -> Tensor:
    """Activations as an int8 kernel takes them, each token by its largest."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True}
KINDS: dict[str, tuple[Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], dict[str, Any]]] = {
    "int8": (int8, {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": [f"re:.*{name}.*" for name in _WHOLE],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": _TOKENS | {"strategy": "channel", "dynamic": False},
            "input_activations": _TOKENS | {"strategy": "token", "dynamic": True},
        }},
    }),
    "awq": (awq, {
        "quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": _WHOLE,
    }),
    "gptq": (gptq, {
        "quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True, "lm_head": False,
        "dynamic": {f"-:.*{name}.*": {} for name in _WHOLE},
    }),
}  # fmt: skip


def write(kind: str, checkpoint: Checkpoint, plain: Path, folder: Path) -> Reference:
    """Write the checkpoint in `plain` to `folder` with weights of a kind of `KINDS`; return what has to be answered."""
    quantize, config = KINDS[kind]
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    stored, meant = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if _LINEAR.search(name) is None or not name.endswith(".weight"):
            stored[name] = weight
            continue
        parts, value = quantize(weight)
        stored |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
        meant[name] = value
    assert meant
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    reference = Reference(checkpoint, plain)
    modules = [m for n, m in reference.model.named_modules() if isinstance(m, nn.Linear) and _LINEAR.search(n)]
    assert len(modules) == len(meant)
    for module in modules:
        module.weight.data = quantize(module.weight.data)[1]
        if kind == "int8":
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
    return reference
