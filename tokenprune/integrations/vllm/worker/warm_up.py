# SPDX-License-Identifier: Apache-2.0
"""Worker: run the choice of a server's setting and profiles on made-up tokens before the server is ready, so that
Triton compiles its kernels then, and not within the first request with an image of each size.

Kernels that hold a row at once are compiled for each power of two of its length, others for lengths that 16 divides and
for the rest. So two lengths of each power are run, one of either kind, up to the largest image.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from tokenprune.abilities import reads_tower
from tokenprune.addons import add_on
from tokenprune.base import Pruner
from tokenprune.errors import TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.vllm.compat import wrap
from tokenprune.integrations.vllm.selection import before_llm
from tokenprune.integrations.vllm.setting.configuration import settings_of
from tokenprune.integrations.vllm.setting.settings import KEY, ServedSetting
from tokenprune.kernels.dispatch import compiles
from tokenprune.ops.drawn import normal

logger = logging.getLogger(f"vllm.{KEY}")  # whose lines of INFO vLLM shows: it says why the start takes longer
SMALLEST = 64  # tokens; there is little to choose in smaller images
_TEXT = 16  # tokens of a made-up prompt on either side of its image


def lengths(largest: int) -> Iterator[int]:
    """Yield the numbers of tokens to run, up to `largest`."""
    sizes = {largest, largest - 1, largest // 16 * 16}
    for power in range(int(math.log2(SMALLEST)), max(largest, 1).bit_length()):
        low, high = 2 ** (power // 2), 2 ** (power - power // 2)
        sizes |= {low * high, (low - 1) * (high + 1)}
    yield from sorted(size for size in sizes if 0 < size <= largest)


def grid_of(count: int) -> tuple[int, int, int]:
    """Return an image's grid of `count` tokens (frames, height, width), as near to a square as it gets."""
    height = next(one for one in range(math.isqrt(count), 0, -1) if count % one == 0)
    return 1, height, count // height


def warm_up(model: Any, vllm_config: Any, device: torch.device, largest: int) -> list[tuple[str, int]]:
    """Run each choice that the server's requests may name. Return the method and the number of tokens of each run;
    empty where nothing is compiled.

    model: vLLM's, with a setting. largest: tokens of the largest image. Raises UnsupportedSetupError for a method that
    fails otherwise than by refusing such an image.
    """
    if not compiles(device):
        return []
    began, runs = time.perf_counter(), list[tuple[str, int]]()
    for setting in _choosing(vllm_config.model_config):
        method: Any = setting.method
        # In the language model an image is no longer than a prompt.
        for count in lengths(min(largest, vllm_config.model_config.max_model_len - 1) if setting.in_llm else largest):
            try:
                with torch.no_grad():
                    _run(model, vllm_config, device, setting, method, count)
            except UnsupportedSetupError:
                raise
            except TokenPruneError as error:
                logger.debug("%s does not take a made-up image of %d tokens: %s", method.name, count, error)
                continue
            except Exception as error:
                logger.error("%s failed on a made-up image of %d tokens", method.name, count, exc_info=error)
                raise UnsupportedSetupError(
                    f"{KEY}: {method.name} failed on a made-up image of {count} tokens ({type(error).__name__}: "
                    f"{error}): serve smaller images or another method, or set TOKENPRUNE_KERNELS=reference"
                ) from error
            runs.append((method.name, count))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    logger.info("tokenprune warmed up %d choices in %.1f s", len(runs), time.perf_counter() - began)
    return runs


def _choosing(model_config: Any) -> Iterator[ServedSetting]:
    """Yield the settings of a server that choose among tokens; others act on pixels, or merge within the tower."""
    seen: list[ServedSetting] = []
    for setting in settings_of(model_config).values():
        chooses = isinstance(setting.method, Pruner) and (setting.in_llm or not setting.removes_nothing)
        if chooses and setting not in seen:
            seen.append(setting)
            yield setting


def _run(
    model: Any, vllm_config: Any, device: torch.device, setting: ServedSetting, method: Pruner, count: int
) -> None:
    generator = torch.Generator("cpu").manual_seed(count)
    dtype, keep = vllm_config.model_config.dtype, [setting.wanted(count)]
    width = model.tokenprune_width
    if setting.in_llm:
        reducer = model.tokenprune_in_llm.reducer
        hidden = normal(1, count + 2 * _TEXT, width, generator=generator).to(device, dtype)
        heads = (reducer.attention.num_heads, reducer.attention.num_kv_heads, reducer.attention.head_size)
        places = [list(range(_TEXT, _TEXT + count))]
        add_on("serve.in_llm.selection").rehearse(method, places, keep, hidden, heads, reducer.decoder.norm)
        return
    encoded = None
    if reads_tower(method):
        encoded = before_llm.in_rows(model.tokenprune_tower.rehearse(method, count, device, dtype), [count])
    rows = normal(count, width, generator=generator).to(device, dtype)
    before_llm.rehearse(method, rows, [count], keep, grid_of(count), model.tokenprune_norm, encoded)


def before_ready(worker: Any) -> None:
    """Make workers of this class warm up the choice where they warm up the rest. worker: vLLM's class."""
    wrap(worker, "compile_or_warm_up_model", _warming_up)


def _warming_up(original: Any) -> Any:
    def compile_or_warm_up_model(self: Any) -> Any:
        model = self.model_runner.get_model()
        if getattr(model, "tokenprune_active", False) and compiles(self.device):
            warm_up(model, self.vllm_config, self.device, _largest(self))
        return original(self)

    return compile_or_warm_up_model


def _largest(worker: Any) -> int:
    """Return how many tokens the largest image of a request has, or the largest video where there are no images."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    # Model Runner V1 keeps it.
    budget = getattr(worker.model_runner, "mm_budget", None) or MultiModalBudget(
        worker.vllm_config, MULTIMODAL_REGISTRY
    )
    most = budget.mm_max_toks_per_item
    return most.get("image") or most.get("video", 0)
