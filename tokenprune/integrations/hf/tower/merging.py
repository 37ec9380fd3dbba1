# SPDX-License-Identifier: Apache-2.0
"""Merging inside towers whose images have rows of their own (CLIP, SigLIP and their like, InternVL); see base.py for
what lies behind.

Where a square of patches becomes one visual token after the tower (`Family.unit_side`), such units merge as
wholes, patch by patch (squares.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.attention.observer import Observer
from tokenprune.integrations.hf.encoded.record import record_of
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.tower.base import TowerPatch
from tokenprune.integrations.hf.tower.blocks import attention_of, check_layer, find_blocks
from tokenprune.integrations.hf.tower.merge_map import feature_groups
from tokenprune.integrations.shared.attachable import with_output
from tokenprune.integrations.shared.block_merging import Block, Merging
from tokenprune.integrations.shared.observation import Observation
from tokenprune.integrations.shared.packed_features import PackRecorder, take_packed
from tokenprune.integrations.shared.patch_grid import patches_of
from tokenprune.integrations.shared.squares import Squares
from tokenprune.integrations.shared.tower_scores import block_observable
from tokenprune.sites.encoder import EncoderMethod, Tower


@dataclass(frozen=True)
class _BlockKind:
    """A kind of block. protected: class tokens before the patches. The others: see `Block`."""

    protected: int = 0
    norm: str = "layer_norm2"
    end: str = "mlp"
    scale: str = ""


_KINDS = {
    "CLIPEncoderLayer": _BlockKind(1),
    "SiglipEncoderLayer": _BlockKind(),
    "Idefics3EncoderLayer": _BlockKind(),
    "SmolVLMEncoderLayer": _BlockKind(),
    "InternVLVisionLayer": _BlockKind(1, "layernorm_after", "dropout", "lambda_2"),
    "QianfanOCRVisionLayer": _BlockKind(1, "layernorm_after", "drop_path2"),
}


class EncoderPatch(TowerPatch):
    """Merges inside the tower of `adapter`'s model, and tells which visual tokens became one.

    Raises UnsupportedSetupError for towers and projectors whose tokens cannot be merged, and for attention back ends
    that take no bias; BudgetError for a budget that cannot be reached.
    """

    shows = True

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget) -> None:
        knows = f"{method.name} knows the vision towers CLIP, SigLIP (and its like in Idefics3 and SmolVLM), InternVL "
        self.tower, self.encoder, layers = find_blocks(adapter, _KINDS, knows + "and Qwen-VL of transformers")
        self.layer = getattr(adapter.config, "vision_feature_layer", -1)
        read = self.layer if self.layer >= 0 else len(layers) + 1 + self.layer
        block = _KINDS[type(layers[0]).__name__]
        blocks = [
            Block(layer, getattr(layer, block.norm), getattr(layer, block.end), scale=block.scale) for layer in layers
        ]
        tokens, side = patches_of(adapter.config.vision_config) + block.protected, adapter.family.side(adapter.config)
        shape, units = Tower(tokens, block.protected, len(layers), read, self.tower), None
        if side > 1:
            units = Squares(side, block.protected)
            shape = Tower(units.count(tokens), 0, len(layers), read, self.tower, units.size)
        super().__init__(adapter, method, budget, blocks, shape, units)
        self.observers = [
            Observer(attention_of(layer), partial(self._observe, index)) for index, layer in enumerate(layers)
        ]
        self._check_attention()

    def _check_attention(self) -> None:
        self.check_bias(self.observers[0].config)

    def _attach(self) -> None:
        super()._attach()
        for observer in self.observers:
            self.attach_part(observer)
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower)
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)
        self.hook(self.tower.register_forward_hook, self._leave_tower)
        if hasattr(self.adapter.base, "pack_image_features"):
            self.wrap(self.adapter.base, "pack_image_features", PackRecorder)

    def _observe(self, index: int, observation: Observation) -> Tensor | None:
        state = self.state()
        if state is None:
            return None
        if self.method.reads and state.plan[index] is not None:
            padding = state.added
            if padding is not None:
                padding = padding.expand(-1, -1, observation.query.shape[2], -1)
            seen = observation if padding is None else replace(observation, mask=padding, causal=False)
            with torch.no_grad():
                shown = block_observable(self.method.reads).of_patches(seen, self.shape.protected)
            self.note_keys(index, shown.float())
        else:
            self.note_keys(index, observation.key)
        if index == 0 and observation.mask is not None:
            self._note_masked(state, observation, observation.mask)
        return state.added

    def _note_masked(self, state: Merging, observation: Observation, mask: Tensor) -> None:
        """Give masked patches the size 0: they weigh nothing in a mean, and stay masked."""
        if mask.ndim != 4:
            raise UnsupportedSetupError(
                f"{self.method.name}: some patches of these images are padding, and attention of this kind takes no "
                'mask that merging could change; load the model with attn_implementation={"vision_config": "sdpa", ...}'
            )
        rows, device = len(observation.query), observation.query.device
        first = torch.zeros(1, 1, dtype=torch.long, device=device)
        seen = observation.visible(first.expand(rows, 1))[:, 0, 0]
        state.size, state.masked = seen.float().expand(rows, -1), True

    def _with_bias(self, index: int, bias: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Nothing: `_observe` hands it to the attention, whatever arguments the block takes."""

    # -- the tower's outside contract

    def _enter_tower(self, module: nn.Module, args: tuple) -> None:
        self._check_attention()  # it may have been changed after the patch
        take_packed()  # what a call that failed may have left
        self.end()

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        state = self.state()
        assert state is not None  # the first block made it
        return with_output(state.restore, output)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        state = self.end()
        assert state is not None  # see `_leave_encoder`
        owners = state.owners[self.shape.read]
        owners = owners if self.units is None else self.units.owners(owners)
        self.leave_tokens(output, [sum(rows) for rows in state.counts], owners)
        if output.hidden_states is not None:
            restored = [None if x is None else state.restore(x, i) for i, x in enumerate(output.hidden_states)]
            output.hidden_states = tuple(restored)
        return output

    # -- after the tower

    def groups_of(self, modality: str, arguments: dict[str, Any], output: Any) -> list[Tensor]:
        check_layer(self.method.name, self.layer, arguments)
        owners, groups = record_of(output).owners, None
        if modality == "image" and isinstance(owners, Tensor):
            groups = feature_groups(owners, output.pooler_output, self.shape.protected)
        if groups is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: the {modality} features of {self.adapter.config.model_type!r} do not tell which "
                "patches they were made of; leave them out of the prompt, or use a method that acts after the tower"
            )
        return groups
