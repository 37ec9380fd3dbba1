# SPDX-License-Identifier: Apache-2.0
"""Graphed prefill with CUDA graphs equals the patched model without graphs."""

from __future__ import annotations

import copy
import gc
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenprune
from oracle import close
from tokenprune.integrations.hf.graphs import Graphs, graphed, warm_up
from zoo import FAMILIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def prepare_on_gpu(
    family: Any, build: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return a model and a prompt of a family of the zoo."""
    model = copy.deepcopy(build(family)).to("cuda", dtype)
    inputs = family.make_inputs(**{"images": (1,)} | options)
    moved = {name: value.to("cuda") if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return model, {name: value.to(dtype) if _is_float(value) else value for name, value in moved.items()}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def generate(model: Any, inputs: Any, **options: Any) -> Any:
    defaults = dict(max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        return model.generate(**inputs, **defaults | options)


def check_same(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    for actual, expected in zip(got.logits[:1], want.logits[:1], strict=True):
        close(actual.float(), expected.float(), tolerance)
    if tolerance < 1e-3:
        assert torch.equal(got.sequences, want.sequences)


def get_counts(model: Any) -> Any:
    return tokenprune.stats(model).graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["divprune", "random", "fastv", "dart", "visionzip", "vtw"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_families(name: str, method: str, dtype: torch.dtype, build: Any) -> None:
    model, inputs = prepare_on_gpu(FAMILIES[name], build, dtype)
    setting: dict[str, Any] = {"keep": 0.4}
    if method == "visionzip" and name != "llava":
        pytest.skip("reads a tower that these models lack")
    with tokenprune.patched(model, method, **setting):
        want = generate(model, inputs)
    with tokenprune.patched(model, method, graphs=True, **setting):
        got = [generate(model, inputs) for _ in range(3)]
        graph_counts = get_counts(model)
    assert graph_counts.hits == 2 and graph_counts.captured >= 1 and graph_counts.bytes > 0, graph_counts
    for output in got:
        check_same(output, want, 1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("method", [None, "divprune", "fastv", "dyrate"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_steps(name: str, method: str | None, build: Any) -> None:
    """Answers of 20 tokens with one row and several, while earlier caches are kept."""
    family = FAMILIES[name]
    model, _ = prepare_on_gpu(family, build)
    prompts = [
        prepare_on_gpu(family, build, images=images, padding="left")[1] for images in ((1,), (1, 3), (2,), (1, 2))
    ]
    patched = partial(tokenprune.patched, model, method or "divprune", keep=0.4 if method else 1.0)
    with patched():
        expected = [generate(model, inputs, max_new_tokens=20) for inputs in prompts]
    with patched(graphs=Graphs(cache_step=32)):
        answers = [generate(model, inputs, max_new_tokens=20) for inputs in (*prompts, *prompts)]
        assert get_counts(model).step_hits >= 7 * 19 and get_counts(model).bytes > 0, get_counts(model)
    for got, want in zip(answers, (*expected, *expected), strict=True):
        check_same(got, want)
        for layer, other in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            close(layer.keys, other.keys, 1e-4)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_masks(name: str, options: dict[str, Any], build: Any) -> None:
    """Ragged rows, the model's masks and masks of a static cache, also in half precision."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        model, _ = prepare_on_gpu(FAMILIES[name], build, dtype)
        prompts = [prepare_on_gpu(FAMILIES[name], build, dtype, images=images, padding="left")[1]
                   for images in ((1,), (1, 3), (1, 2), (1,))]  # fmt: skip
        with tokenprune.patched(model, "divprune", keep=0.4):
            expected = [generate(model, inputs, **options) for inputs in prompts]
        with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(static=True)):
            for inputs, want in zip((*prompts, *prompts), (*expected, *expected), strict=True):
                check_same(generate(model, inputs, **options), want, tolerance)
            assert get_counts(model).hits == 7, get_counts(model)


def test_without_a_patch(build: Any) -> None:
    model, inputs = prepare_on_gpu(FAMILIES["llava"], build)
    want = generate(model, inputs)
    with graphed(model):
        for _ in range(3):
            check_same(generate(model, inputs), want)


def test_other_graphs_and_freed_workspaces(build: Any) -> None:
    """Replays survive freed cuBLAS workspaces, as torch.compile frees them.

    transformers compiles the steps of a static cache with CUDA graphs.
    """
    model, inputs = prepare_on_gpu(FAMILIES["llava"], build, torch.bfloat16)
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(static=True)):
        want = generate(model, inputs)
        for _ in range(3):
            check_same(generate(model, inputs), want, 0.1)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        for _ in range(4):
            check_same(generate(model, inputs, cache_implementation="static"), want, 0.1)
        assert get_counts(model).hits == 6, get_counts(model)


def test_a_capture_that_fails(build: Any) -> None:
    """A layer that waits for the device is not graphed; the reason is counted and the stream restored."""

    class ReadsValue(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor) -> Tensor:
            return self.inner(hidden) * (1 if float(hidden.sum()) < 1e30 else 2)

    ReadsValue.__module__ = "transformers.models.asking"  # modules of other packages are never graphed
    model, inputs = prepare_on_gpu(FAMILIES["llava"], build)
    layer = model.model.language_model.layers[1]
    layer.mlp = ReadsValue(layer.mlp)
    want, stream = generate(model, inputs), torch.cuda.current_stream()
    with graphed(model):
        for _ in range(3):
            check_same(generate(model, inputs), want)
    assert torch.cuda.current_stream() == stream
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        for _ in range(3):
            generate(model, inputs)
        assert get_counts(model).hits == 0
        assert any("layers could not be captured" in reason for reason in get_counts(model).misses), get_counts(model)
    other, inputs = prepare_on_gpu(FAMILIES["llava"], build)
    with tokenprune.patched(other, "divprune", keep=0.4, graphs=True):
        for _ in range(2):
            generate(other, inputs)
        assert get_counts(other).hits == 1


def test_values_of_an_earlier_prompt(build: Any) -> None:
    model, _ = prepare_on_gpu(FAMILIES["llava"], build)
    decoder = model.model.language_model
    size, seeded = decoder.config.hidden_size, torch.Generator().manual_seed(0)
    bad = torch.full((1, 60, size), float("nan"), device="cuda")
    good = torch.randn(1, 20, size, generator=seeded).cuda()
    with torch.no_grad():
        want = decoder(inputs_embeds=good, use_cache=True).last_hidden_state
        with graphed(model):
            for embeds in (bad, bad, good):
                got = decoder(inputs_embeds=embeds, use_cache=True).last_hidden_state
    close(got, want, 1e-4)


def test_threads_with_separate_streams(build: Any) -> None:
    """Prompts of several lengths use graphs that share memory on several streams."""
    model, _ = prepare_on_gpu(FAMILIES["llava"], build)
    prompts = [prepare_on_gpu(FAMILIES["llava"], build, images=(1 + seed % 2,), seed=seed)[1] for seed in range(4)]
    expected: list[Any] = []
    with tokenprune.patched(model, "divprune", keep=0.4):
        expected = [generate(model, inputs) for inputs in prompts]
    got: dict[int, list[Any]] = {}

    def ask(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            got[index] = [generate(model, prompts[index]) for _ in range(8)]
            torch.cuda.current_stream().synchronize()

    with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(step=16)):
        generate(model, prompts[0])
        torch.cuda.synchronize()
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert get_counts(model).hits == 32
    for index, want in enumerate(expected):
        assert len(got[index]) == 8
        for output in got[index]:
            check_same(output, want)


def test_memory(build: Any) -> None:
    """Limits hold in bytes of the device, and unpatching frees this memory."""
    model, inputs = prepare_on_gpu(FAMILIES["llava"], build)
    generate(model, inputs)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        warm_up(model, [60, 120, 250, 500])
        torch.cuda.empty_cache()
        grown, stated = torch.cuda.memory_reserved() - before, get_counts(model).bytes
        assert 0 < grown <= 2 * stated + (64 << 20), (grown, stated)
    gc.collect()
    torch.cuda.empty_cache()
    remaining = torch.cuda.memory_reserved() - before
    assert remaining <= 64 << 20, remaining  # workspaces of libraries
