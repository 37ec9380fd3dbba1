# SPDX-License-Identifier: Apache-2.0
"""Checks that need a loaded model, before it is patched. Checks of each call are in `engine.call_check`.

The check of method x family x engine x cache is in `integrations.shared.checks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenprune.errors import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.shared import checks
from tokenprune.selection.method import Site
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables
from tokenprune.selection.sites.encoder import TowerMethod

# Where a method reads the attention of the layer before its cut, and that which the layer after it would have.
BEFORE, AFTER = (ObservedAt.LAYER_BEFORE, ObservedAt.UNROTATED), (ObservedAt.NEXT_LAYER,)


# What others put around a module that then runs as before: torch.compile, data parallelism, sharding, checkpointing.
_AROUND = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Places:
    """The places in a model of the modules that a patch put hooks on: what replaces one later runs without them."""

    def note(self, model: Any, hooked: Iterable[Any]) -> None:
        """Note where the modules that were `hooked` stand in `model`."""
        wanted, self._places = {id(module) for module in hooked}, []
        for path, parent in model.named_modules():
            for name, module in parent._modules.items():
                if id(module) in wanted:
                    self._places.append((parent._modules, name, module, f"{path}.{name}"))

    def check(self) -> None:
        """Raise UnsupportedSetupError where another module stands in the place of one."""
        for siblings, name, module, path in self._places:
            now: Any = siblings.get(name)
            if now is not module and not any(getattr(now, one, None) is module for one in _AROUND):
                raise UnsupportedSetupError(
                    f"{path} was replaced by a {type(now).__module__}.{type(now).__name__} after the model was "
                    "patched. Unpatch the model, and patch it again."
                )


def check_methods(steps: Iterable[Step], adapter: Adapter) -> None:
    """Raise an error for a method that is not supported on this family; see `shared.checks`."""
    for step in steps:
        method, acts = step.method, step.acts
        if isinstance(method, TowerMethod):
            acts = not method.is_identity(step.budget)
        checks.check(method, adapter.family, config=adapter.config, acts=acts)


def check_steps(steps: list[Step], adapter: Adapter) -> None:
    """Raise OptionError for cuts that cannot be made in this decoder, or not together."""
    layers = len(adapter.decoder.layers)
    for step in steps:
        step.method.check_model(adapter.decoder)
        if step.method.site is not Site.PRE_LLM and not 1 <= step.layer < layers:
            raise OptionError(
                f"{step.method.name}: layer={step.layer} is out of range: this decoder has {layers} layers. Choose a "
                f"layer from 1 to {layers - 1}."
            )
        check_layers(step, adapter)
        if step.budget.video is not None and adapter.family.after_frames is None:
            raise BudgetError(
                f"{step.budget} needs the frames of a video, which are not known for {adapter.config.model_type!r}. "
                "Use keep= or tokens=."
            )
    if len({step.budget.per for step in steps}) > 1:
        raise OptionError("Composed methods have different per=. Give their budgets the same per=.")


def check_layers(step: Step, adapter: Adapter) -> None:
    """Raise OptionError for a cut that this decoder's layers do not allow where it is asked for."""
    method, layer, family = step.method, step.layer, adapter.config.model_type
    attending = [index for index in range(len(adapter.decoder.layers)) if index not in adapter.stateful]
    if select_observables(method.needs, *BEFORE) and layer - 1 in adapter.stateful:
        raise OptionError(
            f"{method.name}: layer={layer} reads the attention of decoder layer {layer - 1}, which has none in "
            f"{family!r}. Choose a layer after one of {attending}."
        )
    if select_observables(method.needs, *AFTER) and layer in adapter.stateful:
        raise OptionError(
            f"{method.name}: layer={layer} reads the attention of that decoder layer, which has none in {family!r}. "
            f"Choose one of {attending}."
        )
    rotary = [one.name for one in select_observables(method.needs) if one.rotary]
    if rotary and not hasattr(adapter.decoder, "rotary_emb"):
        raise OptionError(
            f"{method.name} reads {', '.join(rotary)}, and the decoder of {family!r} has no rotary positions. Use a "
            "method that does not need them."
        )
    if rotary and layer and not gets_rotation(adapter, layer - 1):
        rotated = [index for index in range(len(adapter.decoder.layers)) if gets_rotation(adapter, index)]
        raise OptionError(
            f"{method.name}: layer={layer} reads {', '.join(rotary)} of decoder layer {layer - 1}, which gets no "
            f"rotary positions in {family!r}. Choose a layer after one of {rotated}."
        )
    if adapter.last_cut is not None and layer > adapter.last_cut[0]:
        raise OptionError(
            f"{method.name}: layer={layer} is too late in {family!r}: {adapter.last_cut[1]}. Choose layer "
            f"{adapter.last_cut[0]} or an earlier layer."
        )


def gets_rotation(adapter: Adapter, layer: int) -> bool:
    """Return whether the config gives a decoder layer rotary positions: some models skip layers."""
    thetas = getattr(adapter.text_config, "layer_rope_theta", None)
    if thetas is not None:
        return bool(thetas[layer])
    kinds, parameters = (getattr(adapter.text_config, name, None) for name in ("layer_types", "rope_parameters"))
    if not kinds or not parameters or kinds[layer] not in parameters:
        return True
    return parameters[kinds[layer]] is not None
