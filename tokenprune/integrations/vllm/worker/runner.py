# SPDX-License-Identifier: Apache-2.0
"""Worker: changes to vLLM's model runner. They are applied with the model, so other processes load no runner."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tokenprune.integrations.vllm.compat import missing_hooks, require_hooks, wrap
from tokenprune.integrations.vllm.settings.plan import Plan
from tokenprune.integrations.vllm.settings.server_config import get_server_config
from tokenprune.integrations.vllm.worker import requests
from tokenprune.integrations.vllm.worker.warm_up import add_reload_method, wrap_warm_up

# Model Runner V1's module, and V2's for the encoder.
_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.mm.encoder_runner")
# Modules of V2 that are loaded after the model.
_PRUNER, _ROPE = "vllm.v1.worker.gpu.model_states.mm_pruning", "vllm.v1.worker.gpu.mm.rope"
_WORKER_BASE = "vllm.v1.worker.worker_base"
_WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}


def prepare_runner(vllm_config: Any) -> None:
    """Limit the batches of the encoder, and wrap the methods of runners and workers.

    Runners then write the positions of kept tokens, and workers warm up the selection.

    Raises:
        UnsupportedSetupError: If the runners of this vLLM version lack a hook.
    """
    problems = missing_hooks("worker", modules=sys.modules)
    require_hooks(problems + [f"{' and '.join(_RUNNERS)}"] * (not any(map(sys.modules.get, _RUNNERS))))
    from tokenprune.integrations.vllm.worker.position_notes import wrap_init_v1, wrap_init_v2
    from tokenprune.integrations.vllm.worker.positions import wrap_gather_v1, wrap_recompute_v2

    limit = vllm_config.scheduler_config.max_num_encoder_input_tokens
    for name in _RUNNERS:
        module: Any = sys.modules.get(name)
        if module is not None:
            original = requests.track_batches(inspect.unwrap(module.group_and_batch_mm_kwargs))
            module.group_and_batch_mm_kwargs = limit_batches(original, limit)
    if get_server_config(vllm_config.model_config).log:
        requests.track_requests()
    if _RUNNERS[1] in sys.modules:
        wrap(importlib.import_module(_PRUNER).MultiModalPruner, "recompute", wrap_recompute_v2)
        wrap(importlib.import_module(_ROPE).RopeState, "init_prefill_positions", wrap_init_v2)
    if (module := sys.modules.get(_RUNNERS[0])) is not None:
        wrap(module.GPUModelRunner, "_gather_mm_embeddings", wrap_gather_v1)
        wrap(module.GPUModelRunner, "_init_mrope_positions", wrap_init_v1)
    add_reload_method(importlib.import_module(_WORKER_BASE).WorkerBase)
    for name, worker in _WORKERS.items():
        if (module := sys.modules.get(name)) is not None:
            wrap_warm_up(getattr(module, worker))


def limit_batches(group_and_batch: Callable[..., Iterator], limit: int) -> Callable[..., Iterator]:
    """Wrap `group_and_batch_mm_kwargs` so that no batch has more than `limit` tokens before pruning.

    The scheduler counts embeddings after pruning, so without a limit it would schedule more images per encoder run than
    vLLM measured memory for.
    """

    @functools.wraps(group_and_batch)
    def batches(mm_kwargs: list[tuple[str, Any]], **options: Any) -> Iterator:
        for chunk in split_by_tokens(mm_kwargs, limit):
            yield from group_and_batch(chunk, **options)

    return batches


def split_by_tokens(items: list[tuple[str, Any]], limit: int) -> Iterator[list[tuple[str, Any]]]:
    """Split a list of (modality, item) into chunks of at most `limit` tokens before pruning, or of a single item."""
    chunk: list[tuple[str, Any]] = []
    total = 0
    for modality, item in items:
        plan = Plan.from_item(item, modality)
        size = 0 if plan is None else sum(plan.counts)
        if chunk and total + size > limit:
            yield chunk
            chunk, total = [], 0
        chunk.append((modality, item))
        total += size
    if chunk:
        yield chunk
