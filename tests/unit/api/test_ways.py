# SPDX-License-Identifier: Apache-2.0
"""Patched models with other dtypes, copies, checkpoints, devices, PEFT adapters, quantized weights and errors."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenprune
from basics import snapshot
from oracle import close, generate_logits, reduced
from pruned import check_generation
from quantized_weights import bitsandbytes, torchao
from tokenprune import UnsupportedSetupError
from zoo import FAMILIES, Family

# Positions with one axis, positions with three axes, and precomputed masks.
WAYS = ["llava", "qwen2_5_vl", "gemma3"]
SITES = ["divprune", "fastv"]
# All kinds of parts: cuts, recorded tower attention, merges in the tower, and cache changes while decoding.
PARTS = ["pool", "vscan", "tome", "dart", "dyrate"]

pytestmark = pytest.mark.parametrize("name", WAYS)


def is_supported(name: str, method: str, **_: Any) -> bool:
    return (name, method) != ("gemma3", "tome")


def family_for(name: str, method: str) -> Family:
    if not is_supported(name, method):
        pytest.skip("tome refuses Gemma 3's tower (test_encoder.py)")
    return FAMILIES[name]


@torch.no_grad()
def compute_logits(model: Any, inputs: Any) -> Tensor:
    return model(**inputs).logits[:, -4:]


def list_cuts(model: Any, method: str, inputs: Any) -> list:
    with tokenprune.patched(model, method, keep=0.3, record=True):
        model.generate(**inputs, max_new_tokens=1)
        return tokenprune.stats(model).cuts


def run_patched(model: Any, method: str, inputs: Any) -> tuple[Tensor, Tensor, int]:
    """Return the last logits of the prompt, the generated tokens, and the number of kept visual tokens."""
    with tokenprune.patched(model, method, keep=0.3):
        logits, tokens = compute_logits(model, inputs), model.generate(**inputs, max_new_tokens=4)
        return logits, tokens, tokenprune.stats(model).visual_tokens_out


# -- dtypes ------------------------------------------------------------------------------------------------------------


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@DTYPES
@pytest.mark.parametrize("method", SITES)
def test_autocast(method: str, dtype: torch.dtype, name: str, build: Callable) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    tolerance = 0.03 if dtype is torch.bfloat16 else 0.005
    with torch.autocast("cpu", dtype=dtype):
        actual, tokens, _ = check_generation(family, model, inputs, method, 0.3, tolerance=tolerance)
    assert not torch.equal(actual, generate_logits(model, inputs, 3, tokens=tokens)[0])


@pytest.mark.few_families
@DTYPES
@pytest.mark.parametrize("method", SITES)
def test_half_precision(method: str, dtype: torch.dtype, name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build().to(dtype), family.make_inputs(images=(2, 1))
    halves = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    tolerance = 0.03 if dtype is torch.bfloat16 else 0.005
    actual, _, _ = check_generation(family, model, halves, method, 0.3, tolerance=tolerance)
    assert actual.dtype is dtype or actual.dtype is torch.float32  # generate returns logits in float32
    with tokenprune.patched(model, method, keep=1.0):
        unpruned = compute_logits(model, halves)
    assert torch.equal(unpruned, compute_logits(model, halves))


@pytest.mark.parametrize("method", SITES)
def test_inference_mode(method: str, name: str, build: Callable) -> None:
    model, inputs = FAMILIES[name].prepare(build, images=(2, 1))
    expected = run_patched(model, method, inputs)
    with torch.inference_mode():
        actual = run_patched(model, method, inputs)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


# -- inputs of generate and forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*SITES, "tome"])
@torch.no_grad()
def test_images_encoded_by_the_caller(method: str, name: str, build: Callable) -> None:
    family = family_for(name, method)
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    pixels = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if key in inputs}
    with tokenprune.patched(model, method, keep=0.3):
        expected = compute_logits(model, inputs)
        encoded = {key: value for key, value in inputs.items() if key != "pixel_values"}
        encoded["mm_encoder_outputs"] = {"image": model.model.get_image_features(**pixels, return_dict=True)}
        assert torch.equal(compute_logits(model, encoded), expected)
        assert tokenprune.stats(model).visual_tokens_out < tokenprune.stats(model).visual_tokens_in


@pytest.mark.parametrize("method", SITES)
def test_generate_from_embeddings(method: str, name: str, build: Callable) -> None:
    family = FAMILIES[name]
    if name == "gemma3":
        pytest.skip("generate does not accept inputs_embeds for Gemma 3, patched or not")
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    embedded = {key: value for key, value in inputs.items() if key != "input_ids"}
    embedded["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]).detach()
    options = dict(max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
    for extra in ({}, {"input_ids": inputs["input_ids"]}):
        with tokenprune.patched(model, method, keep=0.3, record=True):
            actual = model.generate(**embedded, **extra, **options)
            cuts = tokenprune.stats(model).cuts
        assert [len(row) for row in cuts[0].kept] == [len(row) for row in list_cuts(model, method, inputs)[0].kept]
        with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
            expected = model.generate(**embedded, **extra, **options)
        assert torch.equal(actual.sequences, expected.sequences)
        close(torch.stack(actual.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("method", ["divprune", "dart"])
@torch.no_grad()
def test_a_second_image_in_a_later_turn(method: str, name: str, build: Callable) -> None:
    """Two turns with an image each on one cache give the logits of one long prompt."""
    family = FAMILIES[name]
    model = build(family)
    first, second = family.make_inputs(only=0), family.make_inputs(only=1, seed=7)

    def talk() -> tuple[Tensor, Tensor]:
        first_turn = model.generate(**first, max_new_tokens=3, return_dict_in_generate=True)
        num_new = first_turn.sequences.shape[1] - first["input_ids"].shape[1]
        history = first | {"input_ids": first_turn.sequences}
        combined = {}
        for key, value in second.items():
            axis = 1 if key in ("input_ids", "attention_mask", family.types) else 0
            if axis and key != "input_ids":
                history[key] = torch.nn.functional.pad(first[key], (0, num_new), value=key == "attention_mask")
            combined[key] = torch.cat([history[key], value], axis)
        turn = combined | {key: value for key, value in second.items() if key.startswith(("pixel", "image"))}
        options = dict(max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
        turns = model.generate(**turn, past_key_values=first_turn.past_key_values, **options).logits
        return torch.stack(turns), torch.stack(model.generate(**combined, **options).logits)

    try:
        unpatched = talk()
    except Exception as error:
        pytest.skip(f"the unpatched {name} does not accept an image in a later turn: {type(error).__name__}")
    if not torch.allclose(*unpatched, atol=1e-3):
        pytest.skip(f"two turns with images are not one prompt in the unpatched {name} either")
    # Without text pivots, dart does not depend on the question, so both prompts keep the same tokens.
    with tokenprune.patched(model, method, keep=0.4, **({"pivot_text": 0} if method == "dart" else {})):
        turns, combined = talk()
        assert tokenprune.stats(model).visual_tokens_in > tokenprune.stats(model).visual_tokens_out
    close(turns, combined)
    assert not torch.equal(turns, unpatched[0])


@pytest.mark.parametrize("method", SITES)
def test_prefill_in_chunks_is_refused(method: str, name: str, build: Callable) -> None:
    """In this mode transformers 5.19 loses the images, and 5.23 passes them in chunks."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    options = dict(max_new_tokens=3, prefill_chunk_size=8)
    unpatched = model.generate(**inputs, **options)
    with tokenprune.patched(model, method, keep=0.3):
        with pytest.raises(UnsupportedSetupError, match="without prefill_chunk_size"):
            model.generate(**inputs, **options)
        expected = model.generate(**inputs, max_new_tokens=3)
        text = family.make_inputs(images=(0, 0))
        assert torch.equal(model.generate(**text, **options), model.generate(**text, max_new_tokens=3))
        assert torch.equal(model.generate(**inputs, max_new_tokens=3), expected)
    with tokenprune.patched(model, method, keep=1.0):
        assert torch.equal(model.generate(**inputs, **options), unpatched)


@pytest.mark.parametrize("method", SITES)
@torch.no_grad()
def test_attentions_have_the_width_of_the_layer_input(method: str, name: str, build: Callable) -> None:
    family = FAMILIES[name]
    model, inputs = build(family, "eager"), family.make_inputs(images=(2, 1))
    length = inputs["input_ids"].shape[1]
    with tokenprune.patched(model, method, keep=0.3, record=True):
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
        (cut,) = tokenprune.stats(model).cuts
    pruned_width = max(map(len, cut.kept))  # the cut also drops padding
    widths = [length if layer < cut.layer else pruned_width for layer in range(4)]
    assert pruned_width < length
    assert [x.shape[-2:] for x in out.attentions] == [(width, width) for width in widths]
    # Hidden states are the inputs of layers, so a cut at the input of a layer comes later.
    input_widths = [length if layer <= cut.layer > 0 else pruned_width for layer in range(4)]
    assert [x.shape[1] for x in out.hidden_states] == [*input_widths, pruned_width]
    assert out.logits.shape[1] == length


# -- errors and memory -------------------------------------------------------------------------------------------------


@pytest.mark.few_families
@pytest.mark.parametrize("method", [*SITES, *PARTS])
def test_an_error_in_the_middle_of_a_forward(method: str, name: str, build: Callable) -> None:
    """Errors in the tower, in the first or last decoder layer, or in a step do not affect the next call."""
    family = family_for(name, method)
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    layers = list(model.get_submodule(family.decoder).layers)
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
    blocks = next(m for n, m in tower.named_modules() if isinstance(m, nn.ModuleList))
    with tokenprune.patched(model, method, keep=0.3):
        before = snapshot(model)
        expected = model.generate(**inputs, max_new_tokens=3)
        for module in (blocks[1], layers[0], layers[-1]):
            for calls in (1, 3) if module in layers else (1,):
                remaining = iter(range(calls - 1))

                def fail(*_: Any, remaining=remaining) -> None:
                    if next(remaining, None) is None:
                        raise RuntimeError("out of memory")

                handle = module.register_forward_pre_hook(fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    model.generate(**inputs, max_new_tokens=3)
                handle.remove()
                assert torch.equal(model.generate(**inputs, max_new_tokens=3), expected)
        after = {key: value for key, value in snapshot(model).items() if not key.endswith(".rope_deltas")}
        assert after == {key: value for key, value in before.items() if not key.endswith(".rope_deltas")}


@pytest.mark.few_families
@pytest.mark.parametrize("method", ["divprune", "dyrate"])
def test_a_generation_leaves_no_objects(method: str, name: str, build: Callable) -> None:
    """Tensors and other objects are counted after several generations, so that a leak per generation is visible."""
    model, inputs = FAMILIES[name].prepare(build, only=0)

    def count_objects() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        return sum(type(item) is Tensor for item in objects), len(objects)

    with tokenprune.patched(model, method, keep=0.3):
        counts = []
        for times in (3, 10, 10):
            for _ in range(times):
                model.generate(**inputs, max_new_tokens=1 + (method == "dyrate"))
            counts.append(count_objects())
    tensors, objects = zip(*counts, strict=True)
    assert tensors[2] == tensors[1] == tensors[0]
    assert objects[2] - objects[1] < 10


def pickle_copy(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.few_families
@pytest.mark.pairwise(runs=is_supported)
@pytest.mark.parametrize("way", [copy.deepcopy, pickle_copy], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("method", [*SITES, *PARTS])
def test_a_copy_of_a_patched_model(method: str, way: Callable, name: str) -> None:
    family = family_for(name, method)
    # A new, unused model, because hooks that transformers adds to a used tower cannot be pickled.
    model, inputs, others = family.build(), family.make_inputs(images=(2, 1)), family.make_inputs(images=(1, 1))
    with tokenprune.patched(model, method, keep=0.3):
        other = way(model)
        expected = compute_logits(model, inputs)
        assert torch.equal(compute_logits(other, others), compute_logits(model, others))
        compute_logits(model, inputs)
        assert tokenprune.stats(other).visual_tokens_in < tokenprune.stats(model).visual_tokens_in
        tokenprune.unpatch(other)
        assert torch.equal(compute_logits(model, inputs), expected)
    assert torch.equal(compute_logits(other, inputs), compute_logits(model, inputs)) and not torch.equal(
        compute_logits(other, inputs), expected
    )


@pytest.mark.few_families
@pytest.mark.parametrize("method", PARTS)
def test_checkpoints_do_not_contain_the_patch(method: str, name: str, tmp_path) -> None:
    family = family_for(name, method)
    model, inputs = family.build(), family.make_inputs()  # a new model, because saving changes the model
    model.save_pretrained(tmp_path / "plain")
    with tokenprune.patched(model, method, keep=0.3):
        model.generate(**inputs, max_new_tokens=2)
        model.save_pretrained(tmp_path / "patched")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for file in files:
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "patched" / file).read_bytes(), file


def dispatch_parts(model: nn.Module) -> None:
    """Add hooks of device_map that move inputs, on the model and on each part."""
    from accelerate import dispatch_model

    heads = [name for name, _ in model.named_children() if name != "model"]
    parts = [f"model.{name}" for name, _ in model.model.named_children()]
    dispatch_model(model, dict.fromkeys([*heads, *parts], "cpu"), main_device="cpu", force_hooks=True)


def offload(model: nn.Module) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.few_families
@pytest.mark.pairwise(runs=is_supported)
@pytest.mark.parametrize("order", ["hooks first", "patch first"])
@pytest.mark.parametrize("hooks", [dispatch_parts, offload], ids=["device_map", "offload"])
@pytest.mark.parametrize("method", ["divprune", *PARTS])
def test_hooks_of_accelerate(method: str, hooks: Callable, order: str, name: str) -> None:
    family = family_for(name, method)
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    expected = run_patched(model, method, inputs)
    if order == "hooks first":
        hooks(model)
        actual = run_patched(model, method, inputs)
    else:
        with tokenprune.patched(model, method, keep=0.3):
            hooks(model)
            actual = compute_logits(model, inputs), model.generate(**inputs, max_new_tokens=4), expected[2]
            assert tokenprune.stats(model).visual_tokens_out == expected[2]
    assert hasattr(model, "_hf_hook") and actual[2] == expected[2]
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.few_families
@pytest.mark.pairwise(runs=is_supported)
@pytest.mark.parametrize("order", ["adapter first", "patch first"])
@pytest.mark.parametrize("method", ["divprune", *PARTS])
def test_lora(method: str, order: str, name: str) -> None:
    peft = pytest.importorskip("peft")
    family = family_for(name, method)
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    unpatched = compute_logits(model, inputs)
    config = peft.LoraConfig(target_modules=r".*language_model.*(q_proj|v_proj)", init_lora_weights=False)
    torch.manual_seed(0)
    if order == "adapter first":
        adapted = peft.get_peft_model(model, config)
        actual = run_patched(adapted, method, inputs)
    else:
        tokenprune.patch(model, method, keep=0.3)
        adapted = peft.get_peft_model(model, config)
        actual = compute_logits(adapted, inputs), adapted.generate(**inputs, max_new_tokens=4)
        tokenprune.unpatch(model)
    merged = adapted.merge_and_unload()
    expected = run_patched(merged, method, inputs)
    close(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1]) and not torch.allclose(compute_logits(merged, inputs), unpatched)


@pytest.mark.few_families
@pytest.mark.parametrize("quantize", [torchao, bitsandbytes], ids=["torchao", "bitsandbytes"])
@pytest.mark.parametrize("method", ["divprune", "dart"])
def test_quantized_weights(method: str, quantize: Callable, name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    exact = compute_logits(model, inputs)
    quantize(model)
    plain = compute_logits(model, inputs)
    assert not torch.equal(plain, exact)
    with tokenprune.patched(model, method, keep=1.0):
        assert torch.equal(compute_logits(model, inputs), plain)
    # bitsandbytes scales the activations of a batch together, and the oracle's batch has more tokens.
    check_generation(family, model, inputs, method, 0.3, tolerance=1e-4 if quantize is torchao else 0.1)
