# SPDX-License-Identifier: Apache-2.0
"""Worker: run the methods of a server's setting and profiles on random tokens before requests can use them.

Otherwise Triton would compile kernels during a request. The warm-up runs at the start of a server and at a reload.

Kernels that hold a row at once are compiled for each power of two of its length. Other kernels are compiled for lengths
that are divisible by 16, and for all other lengths. So two lengths per power of two are run, one of each kind, up to
the largest image or video.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from tokenprune.errors import TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.shared.checks import reads_tower
from tokenprune.integrations.vllm.compat import wrap
from tokenprune.integrations.vllm.selection import before_llm
from tokenprune.integrations.vllm.selection.in_llm import rehearse
from tokenprune.integrations.vllm.settings.configuration import WARM_UP
from tokenprune.integrations.vllm.settings.items import count_requested
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import MODALITIES
from tokenprune.integrations.vllm.settings.server_config import get_profile_settings
from tokenprune.kernels.dispatch import uses_kernels
from tokenprune.kernels.host_random import normal
from tokenprune.selection.method import Pruner
from tokenprune.settings import Setting

logger = logging.getLogger(f"vllm.{KEY}")  # vLLM prints INFO lines of this name: they explain the longer start
SMALLEST = 64  # tokens
_TEXT = 16  # number of text tokens before and after the image of a random prompt


def list_lengths(largest: int) -> Iterator[int]:
    """Yield the numbers of tokens to run, up to `largest`."""
    sizes = {largest, largest - 1, largest // 16 * 16}
    for power in range(int(math.log2(SMALLEST)), max(largest, 1).bit_length()):
        low, high = 2 ** (power // 2), 2 ** (power - power // 2)
        sizes |= {low * high, (low - 1) * (high + 1)}
    yield from sorted(size for size in sizes if 0 < size <= largest)


def find_square_grid(count: int) -> tuple[int, int, int]:
    """Return the grid (frames, height, width) of an image of `count` tokens that is closest to a square."""
    height = next(side for side in range(math.isqrt(count), 0, -1) if count % side == 0)
    return 1, height, count // height


def warm_up(
    model: Any, vllm_config: Any, device: torch.device, largest: Mapping[str, int], settings: Iterable[Setting]
) -> list[tuple[str, int]]:
    """Run the method of each setting that was not run before.

    Args:
        model: A model of vLLM with a setting.
        largest: Number of tokens of the largest item of each modality.

    Returns:
        The method and the number of tokens of each run. Empty on devices without compiled kernels.

    Raises:
        UnsupportedSetupError: If a method fails, other than by refusing an item of that size. Running out of memory
            on an item larger than the largest image only logs a warning: the server may never get such a video.
    """
    if not uses_kernels(device):
        return []
    began, runs = time.perf_counter(), list[tuple[str, int]]()
    warmed = vars(model).setdefault("tokenprune_warmed", list[Setting]())
    for setting in _find_new(settings, warmed):
        method: Any = setting.method
        # In the language model an image is not longer than a prompt.
        longest = max(largest.values(), default=0)
        for count in list_lengths(
            min(longest, vllm_config.model_config.max_model_len - 1) if setting.in_llm else longest
        ):
            try:
                with torch.no_grad():
                    _run(model, vllm_config, device, setting, method, count)
            except UnsupportedSetupError:
                raise
            except TokenPruneError as error:
                logger.debug("%s refused a random item of %d tokens: %s", method.name, count, error)
                continue
            except torch.OutOfMemoryError as error:
                if count <= largest.get("image", 0):
                    raise _create_error(method, count, error) from error
                logger.warning("%s ran out of memory on a random video of %d tokens", method.name, count)
                break
            except Exception as error:
                logger.error("%s failed on a random item of %d tokens", method.name, count, exc_info=error)
                raise _create_error(method, count, error) from error
            runs.append((method.name, count))
        warmed.append(setting)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    logger.info("tokenprune: %d selections warmed up in %.1f s", len(runs), time.perf_counter() - began)
    return runs


def _create_error(method: Any, count: int, error: Exception) -> UnsupportedSetupError:
    return UnsupportedSetupError(
        f"{KEY}: {method.name} failed on a random item of {count} tokens ({type(error).__name__}: {error}). "
        "Serve smaller images or another method, or set TOKENPRUNE_KERNELS=reference."
    )


def _find_new(settings: Iterable[Setting], warmed: list[Setting]) -> Iterator[Setting]:
    """Yield each setting that selects tokens and is not in `warmed`. Other settings act on pixels or in the tower."""
    for setting in settings:
        selects = isinstance(setting.method, Pruner) and (setting.in_llm or not setting.keeps_all_tokens)
        if selects and setting not in warmed:
            yield setting


def _run(model: Any, vllm_config: Any, device: torch.device, setting: Setting, method: Pruner, count: int) -> None:
    generator = torch.Generator("cpu").manual_seed(count)
    dtype, keep = vllm_config.model_config.dtype, [count_requested(setting, count)]
    width = model.tokenprune_width
    if setting.in_llm:
        reducer = model.tokenprune_in_llm.reducer
        hidden = normal(1, count + 2 * _TEXT, width, generator=generator).to(device, dtype)
        heads = (reducer.attention.num_heads, reducer.attention.num_kv_heads, reducer.attention.head_size)
        indices = [list(range(_TEXT, _TEXT + count))]
        rehearse(method, indices, keep, hidden, heads, reducer.decoder.norm)
        return
    encoded = None
    if reads_tower(method):
        encoded = before_llm.build_tile_values(model.tokenprune_tower.rehearse(method, count, device, dtype), [count])
    rows = normal(count, width, generator=generator).to(device, dtype)
    before_llm.rehearse(method, rows, [count], keep, find_square_grid(count), model.tokenprune_norm, encoded)


def wrap_warm_up(worker: Any) -> None:
    """Wrap the warm-up of a worker class of vLLM so that it also runs the methods."""
    wrap(worker, "compile_or_warm_up_model", _wrap_compile)


def _wrap_compile(original: Any) -> Any:
    def compile_or_warm_up_model(self: Any) -> Any:
        _warm_up_worker(self, lambda: get_profile_settings(self.vllm_config.model_config).values())
        return original(self)

    return compile_or_warm_up_model


def add_reload_method(worker: Any) -> None:
    """Add the method that a reload calls to vLLM's base class of workers."""
    setattr(worker, WARM_UP, _warm_up_profiles)


def _warm_up_profiles(worker: Any, profiles: Mapping[str, Mapping[str, Any]]) -> int:
    """Warm up the settings of a reload in a worker, and return the number of runs."""
    return _warm_up_worker(worker, lambda: map(parse_setting, profiles.values()))


def _warm_up_worker(worker: Any, settings: Callable[[], Iterable[Setting]]) -> int:
    model = worker.model_runner.get_model()
    if not getattr(model, "tokenprune_active", False) or not uses_kernels(worker.device):
        return 0
    return len(warm_up(model, worker.vllm_config, worker.device, _find_largest(worker), settings()))


def _find_largest(worker: Any) -> dict[str, int]:
    """Return the number of tokens of the largest image and of the largest video of a request."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    # Only Model Runner V1 has this attribute.
    budget = getattr(worker.model_runner, "mm_budget", None) or MultiModalBudget(
        worker.vllm_config, MULTIMODAL_REGISTRY
    )
    return {modality: count for modality, count in budget.mm_max_toks_per_item.items() if modality in MODALITIES}
