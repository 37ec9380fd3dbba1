# SPDX-License-Identifier: Apache-2.0
"""Around a patched model: dtypes, copies, checkpoints, devices, adapters of PEFT, quantized weights, errors, memory."""

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

# One axis of positions, three axes, masks that are ready made.
WAYS = ["llava", "qwen2_5_vl", "gemma3"]
SITES = ["divprune", "fastv"]
# All that a patch hangs on a model: cuts, reads of the tower's attention, merges in it, and the cache while decoding.
PARTS = ["pool", "vscan", "tome", "dart", "dyrate"]

pytestmark = pytest.mark.parametrize("name", WAYS)


def takes(name: str, method: str, **_: Any) -> bool:
    return (name, method) != ("gemma3", "tome")


def family_for(name: str, method: str) -> Family:
    if not takes(name, method):
        pytest.skip("tome refuses Gemma 3's tower (test_encoder.py)")
    return FAMILIES[name]


@torch.no_grad()
def end(model: Any, inputs: Any) -> Tensor:
    return model(**inputs).logits[:, -4:]


def cuts_of(model: Any, method: str, inputs: Any) -> list:
    with tokenprune.patched(model, method, keep=0.3, record=True):
        model.generate(**inputs, max_new_tokens=1)
        return tokenprune.stats(model).cuts


def seen(model: Any, method: str, inputs: Any) -> tuple[Tensor, Tensor, int]:
    """Logits at the end of the prompt, what is generated, and how many visual tokens stay."""
    with tokenprune.patched(model, method, keep=0.3):
        logits, tokens = end(model, inputs), model.generate(**inputs, max_new_tokens=4)
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
        got, tokens, _ = check_generation(family, model, inputs, method, 0.3, tolerance=tolerance)
    assert not torch.equal(got, generate_logits(model, inputs, 3, tokens=tokens)[0])


@pytest.mark.few_families
@DTYPES
@pytest.mark.parametrize("method", SITES)
def test_half_precision(method: str, dtype: torch.dtype, name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build().to(dtype), family.make_inputs(images=(2, 1))
    halves = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    tolerance = 0.03 if dtype is torch.bfloat16 else 0.005
    got, _, _ = check_generation(family, model, halves, method, 0.3, tolerance=tolerance)
    assert got.dtype is dtype or got.dtype is torch.float32  # generate keeps its logits in float32
    with tokenprune.patched(model, method, keep=1.0):
        unpruned = end(model, halves)
    assert torch.equal(unpruned, end(model, halves))


@pytest.mark.parametrize("method", SITES)
def test_inference_mode(method: str, name: str, build: Callable) -> None:
    model, inputs = FAMILIES[name].prepare(build, images=(2, 1))
    want = seen(model, method, inputs)
    with torch.inference_mode():
        got = seen(model, method, inputs)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# -- what generate and forward are given -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*SITES, "tome"])
@torch.no_grad()
def test_images_encoded_by_the_caller(method: str, name: str, build: Callable) -> None:
    family = family_for(name, method)
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    pixels = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if key in inputs}
    with tokenprune.patched(model, method, keep=0.3):
        want = end(model, inputs)
        given = {key: value for key, value in inputs.items() if key != "pixel_values"}
        given["mm_encoder_outputs"] = {"image": model.model.get_image_features(**pixels, return_dict=True)}
        assert torch.equal(end(model, given), want)
        assert tokenprune.stats(model).visual_tokens_out < tokenprune.stats(model).visual_tokens_in


@pytest.mark.parametrize("method", SITES)
def test_generate_from_embeddings(method: str, name: str, build: Callable) -> None:
    family = FAMILIES[name]
    if name == "gemma3":
        pytest.skip("generate takes no inputs_embeds for Gemma 3, patched or not")
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    given = {key: value for key, value in inputs.items() if key != "input_ids"}
    given["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]).detach()
    options = dict(max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
    for also in ({}, {"input_ids": inputs["input_ids"]}):
        with tokenprune.patched(model, method, keep=0.3, record=True):
            got = model.generate(**given, **also, **options)
            cuts = tokenprune.stats(model).cuts
        assert [len(row) for row in cuts[0].kept] == [len(row) for row in cuts_of(model, method, inputs)[0].kept]
        with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
            want = model.generate(**given, **also, **options)
        assert torch.equal(got.sequences, want.sequences)
        close(torch.stack(got.logits), torch.stack(want.logits))


@pytest.mark.parametrize("method", ["divprune", "dart"])
@torch.no_grad()
def test_a_second_image_in_a_later_turn(method: str, name: str, build: Callable) -> None:
    """Two turns, each with an image, on one cache: the logits of one long prompt."""
    family = FAMILIES[name]
    model = build(family)
    first, second = family.make_inputs(only=0), family.make_inputs(only=1, seed=7)

    def talk() -> tuple[Tensor, Tensor]:
        kept = model.generate(**first, max_new_tokens=3, return_dict_in_generate=True)
        new = kept.sequences.shape[1] - first["input_ids"].shape[1]
        begin = first | {"input_ids": kept.sequences}
        whole = {}
        for key, value in second.items():
            along = 1 if key in ("input_ids", "attention_mask", family.types) else 0
            if along and key != "input_ids":
                begin[key] = torch.nn.functional.pad(first[key], (0, new), value=key == "attention_mask")
            whole[key] = torch.cat([begin[key], value], along)
        turn = whole | {key: value for key, value in second.items() if key.startswith(("pixel", "image"))}
        options = dict(max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
        turns = model.generate(**turn, past_key_values=kept.past_key_values, **options).logits
        return torch.stack(turns), torch.stack(model.generate(**whole, **options).logits)

    try:
        unpatched = talk()
    except Exception as error:
        pytest.skip(f"the unpatched {name} takes no image in a later turn: {type(error).__name__}")
    if not torch.allclose(*unpatched, atol=1e-3):
        pytest.skip(f"two turns with images are not one prompt in the unpatched {name} either")
    # Without text pivots dart asks nothing of the turn, so that both ways keep the same tokens.
    with tokenprune.patched(model, method, keep=0.4, **({"pivot_text": 0} if method == "dart" else {})):
        turns, whole = talk()
        assert tokenprune.stats(model).visual_tokens_in > tokenprune.stats(model).visual_tokens_out
    close(turns, whole)
    assert not torch.equal(turns, unpatched[0])


@pytest.mark.parametrize("method", SITES)
def test_prefill_in_chunks_is_refused(method: str, name: str, build: Callable) -> None:
    """transformers 5.19 loses the images then, and 5.23 hands them over in pieces."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    options = dict(max_new_tokens=3, prefill_chunk_size=8)
    plain = model.generate(**inputs, **options)
    with tokenprune.patched(model, method, keep=0.3):
        with pytest.raises(UnsupportedSetupError, match="without prefill_chunk_size"):
            model.generate(**inputs, **options)
        want = model.generate(**inputs, max_new_tokens=3)
        text = family.make_inputs(images=(0, 0))
        assert torch.equal(model.generate(**text, **options), model.generate(**text, max_new_tokens=3))
        assert torch.equal(model.generate(**inputs, max_new_tokens=3), want)
    with tokenprune.patched(model, method, keep=1.0):
        assert torch.equal(model.generate(**inputs, **options), plain)


@pytest.mark.parametrize("method", SITES)
@torch.no_grad()
def test_attentions_are_of_what_a_layer_saw(method: str, name: str, build: Callable) -> None:
    family = FAMILIES[name]
    model, inputs = build(family, "eager"), family.make_inputs(images=(2, 1))
    length = inputs["input_ids"].shape[1]
    with tokenprune.patched(model, method, keep=0.3, record=True):
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
        (cut,) = tokenprune.stats(model).cuts
    left = max(map(len, cut.kept))  # padding left with the cut
    widths = [length if layer < cut.layer else left for layer in range(4)]
    assert left < length
    assert [x.shape[-2:] for x in out.attentions] == [(width, width) for width in widths]
    # States are those that a layer is handed, so a cut at its input comes after them.
    handed = [length if layer <= cut.layer > 0 else left for layer in range(4)]
    assert [x.shape[1] for x in out.hidden_states] == [*handed, left]
    assert out.logits.shape[1] == length


# -- errors and memory -------------------------------------------------------------------------------------------------


@pytest.mark.few_families
@pytest.mark.parametrize("method", [*SITES, *PARTS])
def test_an_error_in_the_middle_of_a_forward(method: str, name: str, build: Callable) -> None:
    """In the tower, in the first and the last decoder layer, in the prompt or in a step: the next call is right."""
    family = family_for(name, method)
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    layers = list(model.get_submodule(family.decoder).layers)
    tower = model.model.visual if hasattr(model.model, "visual") else model.model.vision_tower
    blocks = next(m for n, m in tower.named_modules() if isinstance(m, nn.ModuleList))
    with tokenprune.patched(model, method, keep=0.3):
        before = snapshot(model)
        want = model.generate(**inputs, max_new_tokens=3)
        for module in (blocks[1], layers[0], layers[-1]):
            for calls in (1, 3) if module in layers else (1,):
                left = iter(range(calls - 1))

                def fail(*_: Any, left=left) -> None:
                    if next(left, None) is None:
                        raise RuntimeError("out of memory")

                handle = module.register_forward_pre_hook(fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    model.generate(**inputs, max_new_tokens=3)
                handle.remove()
                assert torch.equal(model.generate(**inputs, max_new_tokens=3), want)
        now = {key: value for key, value in snapshot(model).items() if not key.endswith(".rope_deltas")}
        assert now == {key: value for key, value in before.items() if not key.endswith(".rope_deltas")}


@pytest.mark.few_families
@pytest.mark.parametrize("method", ["divprune", "dyrate"])
def test_nothing_is_kept_of_a_generation(method: str, name: str, build: Callable) -> None:
    """No tensors, no caches, no other objects: were it one for each generation, it would show after ten."""
    model, inputs = FAMILIES[name].prepare(build, only=0)

    def held() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        return sum(type(one) is Tensor for one in objects), len(objects)

    with tokenprune.patched(model, method, keep=0.3):
        counts = []
        for times in (3, 10, 10):
            for _ in range(times):
                model.generate(**inputs, max_new_tokens=1 + (method == "dyrate"))
            counts.append(held())
    tensors, objects = zip(*counts, strict=True)
    assert tensors[2] == tensors[1] == tensors[0]
    assert objects[2] - objects[1] < 10


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
    # bitsandbytes scales the activations of a batch together, and the oracle's batch holds more of them.
    check_generation(family, model, inputs, method, 0.3, tolerance=1e-4 if quantize is torchao else 0.1)
