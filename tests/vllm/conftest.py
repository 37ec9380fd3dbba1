# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the vLLM tests, which run in a separate environment (`make test-vllm`), one engine at a time.

VLLM_USE_V2_MODEL_RUNNER=1 selects Model Runner V2 (`dev/check vllm-v2`). Tests for one of the runners are marked
`only_v1(reason)` or `only_v2`.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# These must be set before vllm and triton are imported.
os.environ.update(
    {"TRITON_INTERPRET": "1"} if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else {},
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import pytest
import torch

from checkpoints import CHECKPOINTS, DEEP
from more_checkpoints import MORE
from reference import Reference
from runner import skips

ALL = CHECKPOINTS | DEEP | MORE
DIVPRUNE = {"method": "divprune", "keep": 0.25}
ORIGINAL = {"positions": "original"}
OPTIONS = dict(
    dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=4, block_size=32, max_num_batched_tokens=1024,
    limit_mm_per_prompt={"image": 3, "video": 1}, disable_log_stats=True,
)  # fmt: skip


# Families of `--few-families` and the properties they cover. Run all families after a change to a family.
FEW_FAMILIES = {
    "llava": "one square of patches for each image, positions on one axis",
    "llava_onevision": "tiles of an image, videos",
    "qwen2_5_vl": "images of any shape, windows in the tower, positions on three axes, videos",
    "qwen3_vl": "features for deeper layers, time stamps between a video's frames",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    few = f"run each test only on {', '.join(FEW_FAMILIES)}, and skip tests marked thorough"
    parser.addoption("--few-families", action="store_true", help=few)


def family_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    values = [] if callspec is None else [getattr(value, "name", value) for value in callspec.params.values()]
    return next((value for value in values if isinstance(value, str) and value in ALL), None)


def leave_out_families(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove the variants of each test outside `FEW_FAMILIES`, and return them.

    A test on other families keeps its first family.
    """
    families_by_test: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if (family := family_of(item)) is not None:
            families_by_test[item.nodeid.partition("[")[0]].append(family)
    kept_families = {
        test: FEW_FAMILIES.keys() & set(families) or {families[0]} for test, families in families_by_test.items()
    }
    removed = [
        item
        for item in items
        if (family := family_of(item)) and family not in kept_families[item.nodeid.partition("[")[0]]
    ]
    items[:] = [item for item in items if item not in removed]
    return removed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--few-families"):
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        items[:] = [item for item in items if item not in thorough]
        config.hook.pytest_deselected(items=thorough + leave_out_families(items))
    for item, skip in skips(items):
        item.add_marker(skip)
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a model type's checkpoint on first use and returns its folder."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = ALL[name].write(tmp_path_factory.mktemp(name))
        return written[name]

    return get


@pytest.fixture(scope="session")
def reference(folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    references: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in references:
            references[name] = Reference(ALL[name], folder(name))
        return references[name]

    return get


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable explicit garbage collection.

    vLLM collects eight times per engine, each time over all objects of this process, which takes a tenth of the run.
    `Engine.close` collects once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield


class Engine:
    """vLLM with one checkpoint in this process. `setting` is the server's tokenprune setting."""

    def __init__(self, name: str, folder: Path, setting: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM

        self.checkpoint = ALL[name]
        self.setting = setting or {}
        self.original = self.setting.get("positions") == "original"
        kwargs = options.pop("mm_processor_kwargs", {}) | ({} if setting is None else {"tokenprune": setting})
        limits = {"image": 3} | ({"video": 1} if self.checkpoint.video else {})
        options = OPTIONS | {"limit_mm_per_prompt": limits} | options
        with without_collection():
            self.llm = LLM(str(folder), mm_processor_kwargs=kwargs or None, **options)

    def request(
        self, prompt: str, images: list[Any], override: Any = None, videos: Sequence[Any] = ()
    ) -> dict[str, Any]:
        data: dict[str, Any] = {"image": images} if images else {}
        if videos:
            data["video"] = list(videos)
        request: dict[str, Any] = {"prompt": prompt, "multi_modal_data": data}
        if override is not None:
            request["mm_processor_kwargs"] = {"tokenprune": override}
        return request

    def generate(self, requests: list[dict[str, Any]], steps: int = 6) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=steps, logprobs=5, ignore_eos=True)
        return self.llm.generate(requests, params, use_tqdm=False)

    def resolve(self, override: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the effective setting of a request for `Reference.greedy`, or None if no tokens are dropped."""
        requested = dict(override or {})
        profile = self.setting.get("profiles", {}).get(requested.pop("profile", None), {})
        setting: dict[str, Any] = {}
        for layer in (self.setting, profile, requested):
            if setting and "method" in layer:  # options belong to a method, keep to all methods
                setting = {"keep": setting["keep"]}
            setting |= {key: value for key, value in layer.items() if key not in ("profiles", "positions")}
        return None if setting.get("off") else setting

    def compare(
        self, reference: Any, output: Any, prompt: str, images: list[Any], override: Any = None, videos: Any = ()
    ) -> None:
        """Check that an answer equals the answer of the patched transformers model."""
        reference_model, steps = reference(self.checkpoint.name), len(output.outputs[0].token_ids)
        setting, prompt = self.resolve(override), self.checkpoint.before + prompt
        try:
            check_same(output, *reference_model.greedy(prompt, images, steps, setting, videos, self.original))
        except AssertionError as error:
            raise AssertionError(f"{setting}: {error}") from error

    def check(self, reference: Any, cases: Sequence[tuple], steps: int = 6) -> list[Any]:
        """Answer requests in one batch, compare the answers, and return vLLM's outputs.

        Args:
            cases: Arguments of `request` for each request.
        """
        outputs = self.generate([self.request(*case) for case in cases], steps)
        for case, output in zip(cases, outputs, strict=True):
            self.compare(reference, output, *case)
        return outputs

    @property
    def model(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def forget(self) -> None:
        """Empty the prefix cache, the encoder cache and the processor cache."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        with without_collection():
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
        gc.collect()
        with without_collection():
            cleanup_dist_env_and_memory()


_running: list[Engine] = []


@pytest.fixture(scope="session")
def start(folder: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """Return a function that starts an engine and closes the previous one; `checkpoint` is another folder."""

    def get(name: str, setting: dict[str, Any] | None = None, checkpoint: Path | None = None, **options: Any) -> Engine:
        stop()
        _running.append(Engine(name, checkpoint or folder(name), setting, **options))
        return _running[0]

    yield get
    stop()


def stop() -> None:
    while _running:
        _running.pop().close()


def check_same(output: Any, tokens: list[int], logprobs: torch.Tensor, tolerance: float = 1e-4) -> float:
    """Compare tokens and the log-probabilities of the five likeliest with a reference; return the largest gap."""
    answer = output.outputs[0]
    assert list(answer.token_ids) == tokens
    gap = 0.0
    for step, likely in enumerate(answer.logprobs):
        for token, actual in likely.items():
            gap = max(gap, abs(actual.logprob - float(logprobs[step, token])))
    assert gap < tolerance, gap
    return gap


def check_recomputed(engine: Engine, reference: Any, preempted: list[str], override: dict[str, Any]) -> None:
    """Check long answers of preempted requests, whose recomputed prompts contain a part of the answer."""
    engine.forget()
    checkpoint = engine.checkpoint
    cases = [(checkpoint.prompt(2, f"case {n}? "), checkpoint.images(2, seed=n), override) for n in range(4)]
    outputs = engine.generate([engine.request(*case) for case in cases], 55)
    request_ids = {name.partition("-")[0] for name in preempted}  # the engine appends a suffix after a hyphen
    compared = [
        (output, *case) for case, output in zip(cases, outputs, strict=True) if output.request_id in request_ids
    ]
    assert compared
    for case in compared:
        engine.compare(reference, *case)


@contextmanager
def mlp_inputs(*blocks: Any) -> Iterator[list[list[torch.Size]]]:
    """Record the shapes of the inputs of each block's MLP."""
    shapes: list[list[torch.Size]] = [[] for _ in blocks]
    handles = [
        block.mlp.register_forward_hook(
            lambda module, args, out, block_shapes=block_shapes: block_shapes.append(args[0].shape)
        )
        for block, block_shapes in zip(blocks, shapes, strict=True)
    ]
    yield shapes
    for handle in handles:
        handle.remove()


@pytest.fixture
def checkpoint(engine: Engine) -> Any:
    return engine.checkpoint


def count_items(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of items in each call of the encoder."""
    calls: list[int] = []
    embed = type(model).embed_multimodal

    def spy(self: Any, **kwargs: Any) -> Any:
        out = embed(self, **kwargs)
        calls.append(len(out))
        return out

    monkeypatch.setattr(type(model), "embed_multimodal", spy)
    return calls


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the ids of requests that are preempted, and so recomputed, during the test."""
    from vllm.v1.core.sched.scheduler import Scheduler

    names: list[str] = []
    original = Scheduler._preempt_request

    def spy(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(request.request_id)
        return original(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", spy)
    yield names


@pytest.fixture
def encoder_calls(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Empty all caches, and record the number of items in each call of the encoder."""
    engine.forget()
    return count_items(engine.model, monkeypatch)
