# SPDX-License-Identifier: Apache-2.0
"""Engine process: an image is computed in one step, or taken from the prefix cache, as a whole."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.vllm.settings.configuration import get_server_setting
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.server_config import get_server_config

_Scheduler: Any = object  # one of vLLM's follows in the classes below


class WholeImages(_Scheduler):
    """Mixed into vLLM's schedulers. Outside a server with the reduction inside the model it is not loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups, model_config = self.kv_cache_config.kv_cache_groups, self.vllm_config.model_config
        self._holdings: Any = None
        if get_server_config(model_config).free_kv:
            from tokenprune.integrations.vllm.in_llm.kv_cache import CutBlockTracker

            block = self.cache_config.block_size if self.cache_config.enable_prefix_caching else None
            self._holdings = CutBlockTracker(self.kv_cache_manager, block)
        elif len(groups) != 1:
            raise UnsupportedSetupError(
                f"experimental_in_llm needs one group of KV caches, and this model has {len(groups)}: serve it with a "
                "method that acts before the language model"
            )
        setting = parse_setting(get_server_setting(model_config))
        self._whole_prompts = setting.method is not None and not setting.method.prefix_cache_safe
        # vLLM strips items of what the worker will not encode, but for models with M-RoPE: their plans are needed here.
        self.model_uses_mrope = True
        self._found = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._cut_back

    def _cut_back(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Shorten a hit of the prefix cache that ends inside an image to end before it: the kept tokens of that image
        are no longer known."""
        with nullcontext() if self._holdings is None else self._holdings.search(request):
            blocks, hit, boundary = self._found(request, *args, **kwargs)
        shorter = shorten_hit(hit, request.mm_features, self.cache_config.block_size)
        if shorter == hit:
            return blocks, hit, boundary
        return self.kv_cache_manager.truncate_computed_blocks(blocks, shorter), shorter, boundary

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Keep images whole, also at the very start of a chunk, where vLLM's `disable_chunked_mm_input` splits them."""
        end = num_computed_tokens + num_new_tokens
        end = max(num_computed_tokens, end - _inside(end, request.mm_features))
        found = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, end - num_computed_tokens, *args, **kwargs
        )
        if self._whole_prompts and found[1] < num_new_tokens:
            # The encoder has no room for all images of the prompt: the prompt waits for the next step.
            budget = args[0] if args else kwargs["encoder_compute_budget"]
            return [], 0, budget, [], []
        return found


def shorten_hit(hit: int, features: list[Any], block_size: int) -> int:
    """Return the last end of a block up to `hit` that is not inside an image; `hit` is the end of a block."""
    while inside := _inside(hit, features):
        hit = (hit - inside) // block_size * block_size
    return hit


def _inside(place: int, features: list[Any]) -> int:
    """Return how far inside an image the boundary before token `place` lies; 0 if it is not inside one."""
    for feature in features:
        start = feature.mm_position.offset
        if start < place < start + feature.mm_position.length:
            return place - start
    return 0


class InLLMScheduler(WholeImages, Scheduler):
    """vLLM's scheduler; see `WholeImages`."""


class AsyncInLLMScheduler(WholeImages, AsyncScheduler):
    """vLLM's asynchronous scheduler; see `WholeImages`."""
