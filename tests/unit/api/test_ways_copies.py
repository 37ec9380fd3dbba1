# SPDX-License-Identifier: Apache-2.0
"""Copies, checkpoints, devices, adapters and quantized weights of patched models."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tokenprune
from oracle import close, generate_logits, reduced
from quantized_weights import bitsandbytes, torchao
from tests.unit.api.test_ways import PARTS, SITES, WAYS, end, family_for, seen, takes
from zoo import FAMILIES

pytestmark = pytest.mark.parametrize("name", WAYS)


def _pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.few_families
@pytest.mark.pairwise(runs=takes)
@pytest.mark.parametrize("way", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("method", [*SITES, *PARTS])
def test_a_copy_of_a_patched_model(method: str, way: Callable, name: str) -> None:
    """It is patched like the first, and has hooks and statistics of its own."""
    family = family_for(name, method)
    # A model of its own and not used yet: hooks that transformers hangs on a tower in use cannot be pickled.
    model, inputs, others = family.build(), family.make_inputs(images=(2, 1)), family.make_inputs(images=(1, 1))
    with tokenprune.patched(model, method, keep=0.3):
        other = way(model)
        want = end(model, inputs)
        assert torch.equal(end(other, others), end(model, others))
        end(model, inputs)
        assert tokenprune.stats(other).visual_tokens_in < tokenprune.stats(model).visual_tokens_in
        tokenprune.unpatch(other)
        assert torch.equal(end(model, inputs), want)
    assert torch.equal(end(other, inputs), end(model, inputs)) and not torch.equal(end(other, inputs), want)


@pytest.mark.few_families
@pytest.mark.parametrize("method", PARTS)
def test_nothing_of_a_patch_is_saved(method: str, name: str, tmp_path) -> None:
    family = family_for(name, method)
    model, inputs = family.build(), family.make_inputs()  # its own model: saving leaves marks of its own
    model.save_pretrained(tmp_path / "plain")
    with tokenprune.patched(model, method, keep=0.3):
        model.generate(**inputs, max_new_tokens=2)
        model.save_pretrained(tmp_path / "patched")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for file in files:
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "patched" / file).read_bytes(), file


def _spread(model: nn.Module) -> None:
    """Hooks of device_map that move what comes in, on the model as a whole and on each part."""
    from accelerate import dispatch_model

    heads = [name for name, _ in model.named_children() if name != "model"]
    parts = [f"model.{name}" for name, _ in model.model.named_children()]
    dispatch_model(model, dict.fromkeys([*heads, *parts], "cpu"), main_device="cpu", force_hooks=True)


def _offload(model: nn.Module) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.few_families
@pytest.mark.pairwise(runs=takes)
@pytest.mark.parametrize("order", ["hooks first", "patch first"])
@pytest.mark.parametrize("hooks", [_spread, _offload], ids=["device_map", "offload"])
@pytest.mark.parametrize("method", ["divprune", *PARTS])
def test_hooks_of_accelerate(method: str, hooks: Callable, order: str, name: str) -> None:
    family = family_for(name, method)
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    want = seen(model, method, inputs)
    if order == "hooks first":
        hooks(model)
        got = seen(model, method, inputs)
    else:
        with tokenprune.patched(model, method, keep=0.3):
            hooks(model)
            got = end(model, inputs), model.generate(**inputs, max_new_tokens=4), want[2]
            assert tokenprune.stats(model).visual_tokens_out == want[2]
    assert hasattr(model, "_hf_hook") and got[2] == want[2]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.few_families
@pytest.mark.pairwise(runs=takes)
@pytest.mark.parametrize("order", ["adapter first", "patch first"])
@pytest.mark.parametrize("method", ["divprune", *PARTS])
def test_lora(method: str, order: str, name: str) -> None:
    """Adapters of PEFT, attached before or after the patch, do what they do when merged into the weights."""
    peft = pytest.importorskip("peft")
    family = family_for(name, method)
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    plain = end(model, inputs)
    config = peft.LoraConfig(target_modules=r".*language_model.*(q_proj|v_proj)", init_lora_weights=False)
    torch.manual_seed(0)
    if order == "adapter first":
        adapted = peft.get_peft_model(model, config)
        got = seen(adapted, method, inputs)
    else:
        tokenprune.patch(model, method, keep=0.3)
        adapted = peft.get_peft_model(model, config)
        got = end(adapted, inputs), adapted.generate(**inputs, max_new_tokens=4)
        tokenprune.unpatch(model)
    merged = adapted.merge_and_unload()
    want = seen(merged, method, inputs)
    close(got[0], want[0])
    assert torch.equal(got[1], want[1]) and not torch.allclose(end(merged, inputs), plain)


@pytest.mark.few_families
@pytest.mark.parametrize("quantize", [torchao, bitsandbytes], ids=["torchao", "bitsandbytes"])
@pytest.mark.parametrize("method", ["divprune", "dart"])
def test_quantized_weights(method: str, quantize: Callable, name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    exact = end(model, inputs)
    quantize(model)
    plain = end(model, inputs)
    assert not torch.equal(plain, exact)
    with tokenprune.patched(model, method, keep=1.0):
        assert torch.equal(end(model, inputs), plain)
    with tokenprune.patched(model, method, keep=0.3, record=True):
        got, tokens, _ = generate_logits(model, inputs, 3)
        cuts = tokenprune.stats(model).cuts
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    # bitsandbytes scales the activations of a batch together, and the oracle's batch holds more of them.
    close(got, want, 1e-4 if quantize is torchao else 0.1)
