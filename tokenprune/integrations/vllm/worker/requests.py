# SPDX-License-Identifier: Apache-2.0
"""Worker: which request the vision tower runs for, for the log alone.

A model gets the tensors of a batch and cannot tell whose they are. The runner can: it lists the items of the requests
that are due, and then batches that list. So we note the requests by the identity of their items, which live until the
batch has run.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenprune.integrations.vllm.compat import missing_hooks, wrap
from tokenprune.integrations.vllm.log import get_request_id

_of_item: dict[int, str] = {}  # requests, by the identity of their items
_batch: list[str | None] = []  # requests of the batch that the model gets next
# The runners' methods that list items, and where the items of a request are from there.
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
    """Note requests from now on, where this vLLM's runners have the hooks; elsewhere nobody is named."""
    for name, (owner, method, *_) in _LISTS.items():
        if name in sys.modules and not missing_hooks("requests", modules=(name,)):
            wrap(getattr(sys.modules[name], owner), method, functools.partial(_noting, name))


def _noting(name: str, original: Any) -> Any:
    *_, scheduled_of, items_of = _LISTS[name]

    def listed(self: Any, step: Any) -> Any:
        _of_item.clear()
        for request, places in (scheduled_of(self, step) or {}).items():
            for place in places:
                _of_item[id(items_of(self, request)[place].data)] = request
        return original(self, step)

    return listed


def track_batches(group_and_batch: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """Wrap `group_and_batch_mm_kwargs` to record the requests of each batch; see `get_batch_requests`."""

    @functools.wraps(group_and_batch)
    def batches(mm_kwargs: list[tuple[str, Any]], **options: Any) -> Iterator:
        items = iter(mm_kwargs)
        for modality, number, batch in group_and_batch(mm_kwargs, **options):
            _batch[:] = [_of_item.get(id(item)) for _, item in itertools.islice(items, number)]
            yield modality, number, batch

    return batches


def get_batch_requests(number: int) -> list[dict[str, str]]:
    """Return the field of the log that names a request, of each of the items of a batch; empty where nobody knows."""
    if len(_batch) != number:  # not by way of a runner
        return [{}] * number
    return [{} if one is None else {"request": get_request_id(one)} for one in _batch]
