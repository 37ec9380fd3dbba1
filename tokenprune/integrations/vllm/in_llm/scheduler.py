# SPDX-License-Identifier: Apache-2.0
"""Engine process: compute each image in one step, or take it from the prefix cache as a whole."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.vllm.settings.configuration import get_server_setting
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.server_config import get_server_config

_Scheduler: Any = object  # the classes below add a scheduler of vLLM as the next base


class WholeImages(_Scheduler):
    """Mixin for vLLM's schedulers. It is imported only if the server drops tokens inside the language model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups, model_config = self.kv_cache_config.kv_cache_groups, self.vllm_config.model_config
        self._tracker: Any = None
        if get_server_config(model_config).free_kv:
            from tokenprune.integrations.vllm.in_llm.kv_cache import CutBlockTracker

            block = self.cache_config.block_size if self.cache_config.enable_prefix_caching else None
            self._tracker = CutBlockTracker(self.kv_cache_manager, block)
        elif len(groups) != 1:
            raise UnsupportedSetupError(
                f"experimental_in_llm needs one KV cache group, and this model has {len(groups)}. Use a method that "
                "acts before the language model."
            )
        setting = parse_setting(get_server_setting(model_config))
        self._whole_prompts = setting.method is not None and not setting.method.prefix_cache_safe
        # vLLM removes the data of items that the worker will not encode, except for models with M-RoPE. Their plans are
        # needed here.
        self.model_uses_mrope = True
        self._get_computed_blocks = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._shorten_hits

    def _shorten_hits(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Shorten a prefix cache hit that ends inside an image, because its kept tokens are not known any more."""
        with nullcontext() if self._tracker is None else self._tracker.search(request):
            blocks, hit, boundary = self._get_computed_blocks(request, *args, **kwargs)
        shorter = shorten_hit(hit, request.mm_features, self.cache_config.block_size)
        if shorter == hit:
            return blocks, hit, boundary
        return self.kv_cache_manager.truncate_computed_blocks(blocks, shorter), shorter, boundary

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Keep images whole, also at the start of a chunk, where vLLM's `disable_chunked_mm_input` splits them."""
        end = num_computed_tokens + num_new_tokens
        end = max(num_computed_tokens, end - _measure_overlap(end, request.mm_features))
        scheduled = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, end - num_computed_tokens, *args, **kwargs
        )
        if self._whole_prompts and scheduled[1] < num_new_tokens:
            # The encoder's budget is too small for all images of the prompt, which waits for the next step.
            budget = args[0] if args else kwargs["encoder_compute_budget"]
            return [], 0, budget, [], []
        return scheduled


def shorten_hit(hit: int, features: list[Any], block_size: int) -> int:
    """Return the last block boundary up to `hit` that is not inside an image. `hit` is a block boundary."""
    while inside := _measure_overlap(hit, features):
        hit = (hit - inside) // block_size * block_size
    return hit


def _measure_overlap(index: int, features: list[Any]) -> int:
    """Return the number of tokens between the start of the image that contains `index` and `index`, or 0."""
    for feature in features:
        start = feature.mm_position.offset
        if start < index < start + feature.mm_position.length:
            return index - start
    return 0


class InLLMScheduler(WholeImages, Scheduler):
    """vLLM's scheduler; see `WholeImages`."""


class AsyncInLLMScheduler(WholeImages, AsyncScheduler):
    """vLLM's asynchronous scheduler; see `WholeImages`."""
