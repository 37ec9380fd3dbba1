# SPDX-License-Identifier: Apache-2.0
"""Observe or replace the attention of one module, with any attention implementation.

transformers looks up the attention function by name in `module.config` on every call. The observed module gets a copy
of its config that names `observed_attention`. This function calls the original function with a view of the module that
has the original config, so outputs are bit-equal, and implementations that read their name (flash attention) still
work. Other modules and the configs of the model do not change. One module can have several taps: observers, and one tap
that computes the attention (attention/blockwise.py).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.kernels.observation import Join, Observation

# transformers recognises flash implementations by "flash" in the name.
_NAMES = ("tokenprune_observed", "tokenprune_observed_flash")


class _ModuleView:
    """View of a module with its original config, for the original attention function."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.__dict__.update(_module=module, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class _Taps(list["Tap"]):
    """Taps of one attention module in the order of attachment, with the module's original config."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module
        self.config: Any = module.config
        self.join = get_head_join(module)

    def original(self) -> Callable:
        """Return the original attention function. Looked up on each call, because it may change after the patch."""
        for cls in type(self.module).__mro__:
            eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
            if eager is not None:
                break
        return compat.get_attention_function(self.config._attn_implementation, eager)


class Tap(Attachable):
    """Base of objects that observe or compute the attention of one module between `attach` and `detach`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module
        if not hasattr(self.config, "_attn_implementation"):
            raise UnsupportedModelError(
                f"{type(module).__name__} does not select its attention function by a config, so its attention cannot "
                "be observed. Use a method that does not read attention (see `tokenprune methods`)."
            )

    @property
    def config(self) -> Any:
        """The original config of the module."""
        taps = self.module.__dict__.get("_tokenprune_taps")
        return getattr(self.module, "config", None) if taps is None else taps.config

    def _attach(self) -> None:
        for name in _NAMES:
            ALL_ATTENTION_FUNCTIONS.register(name, observed_attention)
        if "_tokenprune_taps" not in self.module.__dict__:
            self.module._tokenprune_taps = _Taps(self.module)
            observed = copy.copy(self.module.config)
            observed._attn_implementation_internal = _NAMES["flash" in (self.config._attn_implementation or "")]
            self.module.config = observed
        self.module._tokenprune_taps.append(self)
        self.on_detach(self._leave)

    def _leave(self) -> None:
        taps = self.module._tokenprune_taps
        taps.remove(self)
        if not taps:
            self.module.config = taps.config
            del self.module._tokenprune_taps

    def record(self, observation: Observation) -> Tensor | None:
        """Observe an attention call before it runs. Return a mask that replaces its mask, or None to keep it."""
        return None

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        """Compute the attention instead of the original function, or return None to use the original function.

        Returns:
            The output, `[B, Q, H, Dv]`, and a mask of valid keys, bool `[B, K]` (None if all keys are valid).
        """
        return None


class Observer(Tap):
    """Tap that passes each `Observation` of a module to the function `record`, which may return a mask."""

    def __init__(self, module: nn.Module, record: Callable[[Observation], Tensor | None]) -> None:
        super().__init__(module)
        self._record = record

    def record(self, observation: Observation) -> Tensor | None:
        return self._record(observation)


def observed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *dropout: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Pass queries and keys to the taps of an observed module, then call its original attention function.

    `dropout` is positional if another library (kvpress) wraps all attention functions.
    """
    if dropout:
        kwargs["dropout"] = dropout[0]
    taps: _Taps | None = module.__dict__.get("_tokenprune_taps")
    if taps is None:  # another thread detached the last tap after this module looked up the function
        taps = _Taps(module)
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    results = (tap.compute(query, key, value, attention_mask, **kwargs | {"scaling": scaling}) for tap in taps)
    computed = next((result for result in results if result is not None), None)
    mask = attention_mask if computed is None else computed[1]
    packed = kwargs.get("cu_seq_lens_q")
    observation = Observation(query, key, mask, scaling, kwargs.get("softcap"), causal, packed, taps.join, value)
    for tap in taps:
        new_mask = tap.record(observation)
        attention_mask = attention_mask if new_mask is None else new_mask
    if computed is not None:
        return computed[0], None
    return taps.original()(_ModuleView(module, taps.config), query, key, value, attention_mask, **kwargs)


def get_head_join(module: nn.Module) -> Join | None:
    """Return a function that gathers the heads (axis 1) of all tensor-parallel ranks, or None if heads are not sharded.

    Without it, each rank would select tokens by its local heads, and ranks would keep different tokens.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor, Shard

    for weight in module.parameters():
        if isinstance(weight, DTensor):
            for axis, placement in enumerate(weight.placements):
                if isinstance(placement, Shard):
                    return _build_join(weight.device_mesh.get_group(axis))
    return None


def _build_join(group: distributed.ProcessGroup) -> Join:
    def join(heads: Tensor) -> Tensor:
        parts = [torch.empty_like(heads, memory_format=torch.contiguous_format) for _ in range(group.size())]
        distributed.all_gather(parts, heads.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    return join
