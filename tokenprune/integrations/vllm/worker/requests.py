# SPDX-License-Identifier: Apache-2.0
"""Worker: find the request of each item that the vision tower encodes. Only the log uses it.

A model gets the tensors of a batch without their requests. The runner lists the items of the scheduled requests and
then batches this list. This module records the request by the identity of each item, because the items exist until
the batch has run.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenprune.integrations.vllm.compat import missing_hooks, wrap
from tokenprune.integrations.vllm.log import get_request_id

_request_by_item: dict[int, str] = {}  # by `id(item)`
_batch: list[str | None] = []  # requests of the next batch of the model
# By module of a runner: class and method that lists items, and functions that return the scheduled items of a step and
# the items of a request.
_LISTS: dict[str, tuple[str, str, Callable[[Any, Any], Mapping[str, list[int]]], Callable[[Any, str], Any]]] = {
    "vllm.v1.worker.gpu_model_runner": (
        "GPUModelRunner", "_batch_mm_inputs_from_scheduler", lambda self, step: step.scheduled_encoder_inputs,
        lambda self, request: self.requests[request].mm_features,
    ),
    "vllm.v1.worker.gpu.mm.encoder_runner": (
        "EncoderRunner", "prepare_mm_inputs", lambda self, scheduled: scheduled,
        lambda self, request: self.encoder_cache.mm_features[request],
    ),
}  # fmt: skip


def track_requests() -> None:
    """Record requests from now on, if the runners of this vLLM version have the hooks."""
    for name, (owner, method, *_) in _LISTS.items():
        if name in sys.modules and not missing_hooks("requests", modules=(name,)):
            wrap(getattr(sys.modules[name], owner), method, functools.partial(_wrap_list, name))


def _wrap_list(name: str, original: Any) -> Any:
    *_, get_scheduled, get_items = _LISTS[name]

    def list_items(self: Any, step: Any) -> Any:
        _request_by_item.clear()
        for request, indices in (get_scheduled(self, step) or {}).items():
            for index in indices:
                _request_by_item[id(get_items(self, request)[index].data)] = request
        return original(self, step)

    return list_items


def track_batches(group_and_batch: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """Wrap `group_and_batch_mm_kwargs` to record the requests of each batch; see `get_batch_requests`."""

    @functools.wraps(group_and_batch)
    def batches(mm_kwargs: list[tuple[str, Any]], **options: Any) -> Iterator:
        items = iter(mm_kwargs)
        for modality, count, batch in group_and_batch(mm_kwargs, **options):
            _batch[:] = [_request_by_item.get(id(item)) for _, item in itertools.islice(items, count)]
            yield modality, count, batch

    return batches


def get_batch_requests(count: int) -> list[dict[str, str]]:
    """Return the log field with the request of each item of the current batch, empty if the request is not known."""
    if len(_batch) != count:  # the call does not come from a runner
        return [{}] * count
    return [{} if request is None else {"request": get_request_id(request)} for request in _batch]
