# SPDX-License-Identifier: Apache-2.0
"""Merging inside the towers CLIP and SigLIP, whose images have rows of their own; see base.py for what lies behind."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.encoder import EncoderMethod, Tower
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.attention.observer import Observer
from tokenprune.integrations.hf.encoded.record import record_of
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.tower.base import TowerPatch
from tokenprune.integrations.hf.tower.merge_map import feature_groups
from tokenprune.integrations.shared.attachable import with_output
from tokenprune.integrations.shared.block_merging import Block
from tokenprune.integrations.shared.observation import Observation
from tokenprune.integrations.shared.packed_features import PackRecorder, take_packed

# The blocks that are known, and how many class tokens stand before the patches.
_CLASS_TOKENS = {"CLIPEncoderLayer": 1, "SiglipEncoderLayer": 0}


class EncoderPatch(TowerPatch):
    """Merges inside the tower of `adapter`'s model, and tells which visual tokens became one.

    Raises UnsupportedSetupError for towers and projectors whose tokens cannot be merged, and for attention back ends
    that take no bias; BudgetError for a budget that cannot be reached.
    """

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget) -> None:
        family, name = adapter.config.model_type, method.name
        if adapter.unmergeable is not None:
            raise UnsupportedSetupError(f"{name} cannot act in the tower of {family!r}: {adapter.unmergeable}")
        self.tower = adapter.base.vision_tower
        self.encoder = _encoder(self.tower, name)
        layers = list(self.encoder.layers)
        self.layer = _read_layer(adapter, name)
        read = self.layer if self.layer >= 0 else len(layers) + 1 + self.layer
        blocks = [Block(layer, layer.layer_norm2, layer.mlp, "attention_mask", 1) for layer in layers]
        config, protected = adapter.config.vision_config, _CLASS_TOKENS[type(layers[0]).__name__]
        tokens = (config.image_size // config.patch_size) ** 2 + protected
        super().__init__(adapter, method, budget, blocks, Tower(tokens, protected, len(layers), read, self.tower))
        self.observers = [
            Observer(layer.self_attn, partial(self._observe, index)) for index, layer in enumerate(layers[:read])
        ]
        self._check_attention()

    def _check_attention(self) -> None:
        self.check_bias(self.observers[0].config)

    def _attach(self) -> None:
        super()._attach()
        for observer in self.observers:
            self.attach_part(observer)
        self.hook(self.tower.register_forward_pre_hook(self._enter_tower))
        self.hook(self.encoder.register_forward_hook(self._leave_encoder))
        self.hook(self.tower.register_forward_hook(self._leave_tower))
        if hasattr(self.adapter.base, "pack_image_features"):
            self.wrap(self.adapter.base, "pack_image_features", PackRecorder)

    def _observe(self, index: int, observation: Observation) -> None:
        self.note_keys(index, observation.key)

    # -- the tower's outside contract

    def _enter_tower(self, module: nn.Module, args: tuple) -> None:
        self._check_attention()  # it may have been changed after the patch
        take_packed()  # what a call that failed may have left
        self.end()

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return with_output(self.state().restore, output)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        state = self.end()
        if isinstance(output, tuple):
            raise UnsupportedSetupError(f"{self.method.name}: the tower must return an output object; use return_dict")
        if output.hidden_states is not None:
            restored = [None if x is None else state.restore(x, i) for i, x in enumerate(output.hidden_states)]
            output.hidden_states = tuple(restored)
        self.leave_tokens(output, state.owners[self.shape.read], [sum(rows) for rows in state.counts])
        return output

    # -- behind the tower

    def groups_of(self, modality: str, arguments: dict[str, Any], output: Any) -> list[Tensor]:
        asked = arguments.get("vision_feature_layer")
        if asked is not None and asked != self.layer:
            raise UnsupportedSetupError(
                f"{self.method.name} was set up for the config's vision_feature_layer={self.layer}, not for {asked}"
            )
        owners, groups = record_of(output).owners, None
        if modality == "image" and owners is not None:
            groups = feature_groups(owners, output.pooler_output, self.shape.protected)
        if groups is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: the {modality} features of {self.adapter.config.model_type!r} do not tell which "
                "patches they were made of; leave them out of the prompt, or use a method that acts behind the tower"
            )
        return groups


def _encoder(tower: nn.Module, name: str) -> nn.Module:
    """Return the module inside `tower` that runs the blocks."""
    for module in tower.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and layers and all(type(x).__name__ in _CLASS_TOKENS for x in layers):
            return module
    raise UnsupportedSetupError(
        f"{name} knows the vision towers CLIP and SigLIP of transformers, not {type(tower).__name__}"
    )


def _read_layer(adapter: Adapter, name: str) -> int:
    """Return which of the tower's hidden states the model reads; -1 is the last."""
    layer = getattr(adapter.config, "vision_feature_layer", -1)
    if not isinstance(layer, int):
        raise UnsupportedSetupError(
            f"{name}: this model joins the features of several tower layers ({layer}), which merge differently"
        )
    return layer
