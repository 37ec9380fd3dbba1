# SPDX-License-Identifier: Apache-2.0
"""Read queries and keys inside one attention module, on any attention back end, without eager attention.

transformers looks its attention function up by name in `module.config` on every call. The observed module alone gets a
copy of its config that names our function; that calls the original with a view of the module whose config is the
original one, so outputs are bit-equal and back ends that ask for their own name (flash attention) still find it. No
other module, and no config of the model, changes. Several may stand at one module (`Tap`): those that read, and one
that computes the attention itself (attention/blockwise.py).
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

# transformers recognises flash back ends by "flash" in the name.
_NAMES = ("tokenprune_observed", "tokenprune_observed_flash")


class _ModuleView:
    """The module as the original attention function must see it: everything its own, with the original config."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.__dict__.update(_module=module, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class _Taps(list["Tap"]):
    """All that stand at one attention module, in the order in which they came, and its own config."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module
        self.config: Any = module.config
        self.join = get_head_join(module)

    def original(self) -> Callable:
        """Return the attention function that the module would use, looked up anew: it may have changed after the
        patch."""
        for cls in type(self.module).__mro__:
            eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
            if eager is not None:
                break
        return compat.get_attention_function(self.config._attn_implementation, eager)


class Tap(Attachable):
    """Stands at one attention module from `attach` to `detach`, in any order with others."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module
        if not hasattr(self.config, "_attn_implementation"):
            raise UnsupportedModelError(
                f"{type(module).__name__} does not look its attention function up in a config, so its attention can be "
                "neither read nor changed; use a method that needs none (`tokenprune methods` lists what each needs)"
            )

    @property
    def config(self) -> Any:
        """The module's own config."""
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
        """One attention call is about to be computed; return a mask to be used instead of the observed one, or None."""
        return None

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the output (`[B, Q, H, Dv]`) in the original function's place, and which keys are real (bool `[B, K]`,
        None = all); or None to leave the call to it."""
        return None


class Observer(Tap):
    """Attached to one attention module; `record` gets every `Observation` until `detach`, and may return a mask."""

    def __init__(self, module: nn.Module, record: Callable[[Observation], Tensor | None]) -> None:
        super().__init__(module)
        self._record = record

    def record(self, observation: Observation) -> Tensor | None:
        return self._record(observation)


def observed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *dropout: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Hand queries and keys to the taps of an observed module, then call its own attention function.

    dropout: its rate comes by position where another library (kvpress) wraps all attention functions.
    """
    if dropout:
        kwargs["dropout"] = dropout[0]
    taps: _Taps | None = module.__dict__.get("_tokenprune_taps")
    if taps is None:  # another thread took the last tap away after this module had looked the function up
        taps = _Taps(module)
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    answers = (tap.compute(query, key, value, attention_mask, **kwargs | {"scaling": scaling}) for tap in taps)
    computed = next((answer for answer in answers if answer is not None), None)
    mask = attention_mask if computed is None else computed[1]
    packed = kwargs.get("cu_seq_lens_q")
    seen = Observation(query, key, mask, scaling, kwargs.get("softcap"), causal, packed, taps.join, value)
    for tap in taps:
        given = tap.record(seen)
        attention_mask = attention_mask if given is None else given
    if computed is not None:
        return computed[0], None
    return taps.original()(_ModuleView(module, taps.config), query, key, value, attention_mask, **kwargs)


def get_head_join(module: nn.Module) -> Join | None:
    """Return what joins the heads (axis 1) of all processes that share a tensor-parallel `module`, None if this one has
    them all. Without it every process would choose by its own heads, and they would keep different tokens.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor, Shard

    for weight in module.parameters():
        if isinstance(weight, DTensor):
            for axis, placement in enumerate(weight.placements):
                if isinstance(placement, Shard):
                    return _join_over(weight.device_mesh.get_group(axis))
    return None


def _join_over(group: distributed.ProcessGroup) -> Join:
    def join(own: Tensor) -> Tensor:
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
        distributed.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    return join
