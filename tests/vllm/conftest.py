# SPDX-License-Identifier: Apache-2.0
"""Runs in an environment of its own, which `make test-vllm` sets up. One engine at a time lives in this process.

With VLLM_USE_V2_MODEL_RUNNER=1 in the environment it runs through Model Runner V2 (`dev/check vllm-v2`); tests that are
for one of the runners are marked `only_v1(reason)` or `only_v2`.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before vllm and triton are imported.
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


# What the others add is in what they hand over: `--few-families` leaves that to who changes a family.
FEW_FAMILIES = {
    "llava": "one square of patches for each image, positions on one axis",
    "llava_onevision": "tiles of an image, videos",
    "qwen2_5_vl": "images of any shape, windows in the tower, positions on three axes, videos",
    "qwen3_vl": "features for deeper layers, time stamps between a video's frames",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    few = f"run each test on {', '.join(FEW_FAMILIES)} alone, and leave thorough ones out"
    parser.addoption("--few-families", action="store_true", help=few)


def family_of(item: pytest.Item) -> str | None:
    given = getattr(item, "callspec", None)
    values = [] if given is None else [getattr(value, "name", value) for value in given.params.values()]
    return next((value for value in values if isinstance(value, str) and value in ALL), None)


def leave_out_families(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove from `items` the variants of each test on other families than `FEW_FAMILIES`, the first if it runs on none
    of these; return them."""
    on: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if (family := family_of(item)) is not None:
            on[item.nodeid.partition("[")[0]].append(family)
    stay = {test: FEW_FAMILIES.keys() & set(families) or {families[0]} for test, families in on.items()}
    gone = [item for item in items if (family := family_of(item)) and family not in stay[item.nodeid.partition("[")[0]]]
    items[:] = [item for item in items if item not in gone]
    return gone


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
    """The checkpoint of a model type, written on first use."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = ALL[name].write(tmp_path_factory.mktemp(name))
        return written[name]

    return get


@pytest.fixture(scope="session")
def reference(folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = Reference(ALL[name], folder(name))
        return made[name]

    return get


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, nobody collects garbage by name: vLLM does as an engine starts and stops, eight times, each of which goes
    through all objects of this process and takes a tenth of the whole. `Engine.close` does it once for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield


class Engine:
    """vLLM with one checkpoint, in this process. setting: the server's."""

    def __init__(self, name: str, folder: Path, setting: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM

        self.checkpoint = ALL[name]
        self.setting = setting or {}
        self.original = self.setting.get("positions") == "original"
        kwargs = options.pop("mm_processor_kwargs", {}) | ({} if setting is None else {"tokenprune": setting})
        limits = {"image": 3} | ({"video": 1} if self.checkpoint.video else {})
        options = OPTIONS | {"limit_mm_per_prompt": limits} | options
        with uncollected():
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
        """Return the setting of a request, as `Reference.greedy` takes it. None: no tokens are removed."""
        asked = dict(override or {})
        profile = self.setting.get("profiles", {}).get(asked.pop("profile", None), {})
        setting: dict[str, Any] = {}
        for layer in (self.setting, profile, asked):
            if setting and "method" in layer:  # options belong to a method, and the share to all
                setting = {"keep": setting["keep"]}
            setting |= {key: value for key, value in layer.items() if key not in ("profiles", "positions")}
        return None if setting.get("off") else setting

    def compare(
        self, reference: Any, output: Any, prompt: str, images: list[Any], override: Any = None, videos: Any = ()
    ) -> None:
        """Check that an answer is that of the patched transformers model."""
        theirs, steps = reference(self.checkpoint.name), len(output.outputs[0].token_ids)
        setting, prompt = self.resolve(override), self.checkpoint.before + prompt
        try:
            same(output, *theirs.greedy(prompt, images, steps, setting, videos, self.original))
        except AssertionError as error:
            raise AssertionError(f"{setting}: {error}") from error

    def check(self, reference: Any, asked: Sequence[tuple], steps: int = 6) -> list[Any]:
        """Answer requests in one batch and compare the answers. Return vLLM's outputs.

        asked: arguments of `request` for each.
        """
        outputs = self.generate([self.request(*one) for one in asked], steps)
        for one, output in zip(asked, outputs, strict=True):
            self.compare(reference, output, *one)
        return outputs

    @property
    def model(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def forget(self) -> None:
        """Empty the prefix cache, the encoder's cache and that of the processor."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        with uncollected():
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
        gc.collect()
        with uncollected():
            cleanup_dist_env_and_memory()


_running: list[Engine] = []


@pytest.fixture(scope="session")
def start(folder: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """start(name, setting, checkpoint, **options): an engine; the one before is closed. checkpoint: another folder than
    that of the model type."""

    def get(name: str, setting: dict[str, Any] | None = None, checkpoint: Path | None = None, **options: Any) -> Engine:
        stop()
        _running.append(Engine(name, checkpoint or folder(name), setting, **options))
        return _running[0]

    yield get
    stop()


def stop() -> None:
    while _running:
        _running.pop().close()


def same(output: Any, tokens: list[int], logprobs: torch.Tensor, tolerance: float = 1e-4) -> float:
    """Check tokens and the log-probabilities of the five likeliest against a reference; returns the largest gap."""
    answer = output.outputs[0]
    assert list(answer.token_ids) == tokens
    gap = 0.0
    for step, likely in enumerate(answer.logprobs):
        for token, found in likely.items():
            gap = max(gap, abs(found.logprob - float(logprobs[step, token])))
    assert gap < tolerance, gap
    return gap


def check_recomputed(engine: Engine, reference: Any, preempted: list[str], override: dict[str, Any]) -> None:
    """Check long answers of requests that were preempted. A recomputed prompt contains a part of its answer."""
    engine.forget()
    checkpoint = engine.checkpoint
    asked = [(checkpoint.prompt(2, f"case {n}? "), checkpoint.images(2, seed=n), override) for n in range(4)]
    outputs = engine.generate([engine.request(*one) for one in asked], 55)
    again = {name.partition("-")[0] for name in preempted}  # the engine's names continue after a hyphen
    compared = [(output, *one) for one, output in zip(asked, outputs, strict=True) if output.request_id in again]
    assert compared
    for one in compared:
        engine.compare(reference, *one)


@contextmanager
def mlp_inputs(*blocks: Any) -> Iterator[list[list[torch.Size]]]:
    """Record the shapes of the inputs of each block's MLP."""
    shapes: list[list[torch.Size]] = [[] for _ in blocks]
    handles = [
        block.mlp.register_forward_hook(lambda module, args, out, own=own: own.append(args[0].shape))
        for block, own in zip(blocks, shapes, strict=True)
    ]
    yield shapes
    for handle in handles:
        handle.remove()


@pytest.fixture
def checkpoint(engine: Engine) -> Any:
    return engine.checkpoint


def count_items(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of the encoder adds its number of items."""
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
    """Requests that were thrown out of the KV cache to be read again, from here on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    names: list[str] = []
    original = Scheduler._preempt_request

    def spy(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(request.request_id)
        return original(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", spy)
    yield names


@pytest.fixture
def encoded(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Items in each call of the encoder, from here on; all caches are empty at the start."""
    engine.forget()
    return count_items(engine.model, monkeypatch)
