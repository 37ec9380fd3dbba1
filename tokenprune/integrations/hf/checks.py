# SPDX-License-Identifier: Apache-2.0
"""Check a loaded model before it is patched.

Checks of each call are in `engine.call_check`. Checks that need only the method, family, engine and cache are in
`integrations.shared.checks`.
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
from tokenprune.selection.sites.pixels import ResizeMethod

# Observables of the attention in the layer before a cut, and in the layer after it.
BEFORE, AFTER = (ObservedAt.LAYER_BEFORE, ObservedAt.UNROTATED), (ObservedAt.NEXT_LAYER,)
# Attributes under which wrappers hold the original module: torch.compile, DataParallel, FSDP, gradient checkpointing.
_WRAPPED_NAMES = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class HookedModules:
    """Modules that a patch has hooked. Detects modules that were replaced later, because replacements have no hooks."""

    def record(self, model: Any, hooked: Iterable[Any]) -> None:
        """Record the paths of the `hooked` modules in `model`."""
        hooked_ids, self._entries = {id(module) for module in hooked}, []
        for path, parent in model.named_modules():
            for name, module in parent._modules.items():
                if id(module) in hooked_ids:
                    self._entries.append((parent._modules, name, module, f"{path}.{name}"))

    def check(self) -> None:
        """Raise UnsupportedSetupError if a hooked module was replaced. Wrappers of the module are allowed."""
        for siblings, name, module, path in self._entries:
            current: Any = siblings.get(name)
            if current is not module and not any(getattr(current, attr, None) is module for attr in _WRAPPED_NAMES):
                raise UnsupportedSetupError(
                    f"{path} was replaced by a {type(current).__module__}.{type(current).__name__} after the model was "
                    "patched. Unpatch the model, and patch it again."
                )


def check_methods(steps: Iterable[Step], adapter: Adapter) -> None:
    """Raise an error for a method that is not supported for this family. See `shared.checks`."""
    for step in steps:
        method, acts = step.method, step.acts
        if isinstance(method, TowerMethod):
            acts = not method.is_identity(step.budget)
        if isinstance(method, ResizeMethod) and step.budget.tokens is not None:
            acts = False  # the processor decides whether it can limit tokens, see Resizer
        checks.check(method, adapter.family, config=adapter.config, acts=acts)


def check_steps(steps: list[Step], adapter: Adapter) -> None:
    """Check that the decoder supports the cuts of all steps.

    Raises:
        OptionError: If a layer is out of range or unsuitable, or if budgets have different `per`.
        BudgetError: If a budget needs the frames of a video, and the family does not show them.
    """
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
    """Raise OptionError if the decoder does not support a cut at the layer of `step`."""
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
    rotary = [observable.name for observable in select_observables(method.needs) if observable.rotary]
    if rotary and not hasattr(adapter.decoder, "rotary_emb"):
        raise OptionError(
            f"{method.name} reads {', '.join(rotary)}, and the decoder of {family!r} has no rotary positions. Use a "
            "method that does not need them."
        )
    if rotary and layer and not has_rotary_positions(adapter, layer - 1):
        rotated = [index for index in range(len(adapter.decoder.layers)) if has_rotary_positions(adapter, index)]
        raise OptionError(
            f"{method.name}: layer={layer} reads {', '.join(rotary)} of decoder layer {layer - 1}, which gets no "
            f"rotary positions in {family!r}. Choose a layer after one of {rotated}."
        )
    if adapter.last_cut is not None and layer > adapter.last_cut[0]:
        raise OptionError(
            f"{method.name}: layer={layer} is too late in {family!r}: {adapter.last_cut[1]}. Choose layer "
            f"{adapter.last_cut[0]} or an earlier layer."
        )


def has_rotary_positions(adapter: Adapter, layer: int) -> bool:
    """Return True if a decoder layer has rotary positions according to the config. Some models skip layers."""
    thetas = getattr(adapter.text_config, "layer_rope_theta", None)
    if thetas is not None:
        return bool(thetas[layer])
    kinds, parameters = (getattr(adapter.text_config, name, None) for name in ("layer_types", "rope_parameters"))
    if not kinds or not parameters or kinds[layer] not in parameters:
        return True
    return parameters[kinds[layer]] is not None
