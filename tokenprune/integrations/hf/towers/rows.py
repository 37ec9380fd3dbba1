# SPDX-License-Identifier: Apache-2.0
"""Merge or drop units inside towers with one image or tile per row (CLIP, SigLIP and variants, InternVL).

If the projector joins a square of patches into one visual token (`Family.unit_side`), whole squares merge (squares.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Encode, Encoding
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.hf.towers.base import TowerPart, build_tracing_error, check_bias
from tokenprune.integrations.hf.towers.blocks import check_layer, find_blocks, get_attention
from tokenprune.integrations.hf.towers.merge_map import find_feature_groups
from tokenprune.integrations.hf.towers.tiles import TileGoals
from tokenprune.integrations.shared.attachable import change_output
from tokenprune.integrations.shared.checks import AFTER_THE_TOWER
from tokenprune.integrations.shared.towers.packed_features import PackRecorder, pop_packed_features
from tokenprune.integrations.shared.towers.patch_grid import count_patches
from tokenprune.integrations.shared.towers.reducer import Host, TowerReducer
from tokenprune.integrations.shared.towers.rows import RowLayout, TileLayout
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.integrations.shared.towers.squares import Squares
from tokenprune.integrations.shared.towers.tower_scores import get_block_observable
from tokenprune.kernels.observation import Observation
from tokenprune.selection.sites.encoder import EncoderMethod, Tower, TowerMethod
from tokenprune.selection.sites.units import UnitDropper


@dataclass(frozen=True)
class _BlockKind:
    """Names of submodules of a class of blocks, see `Block`. `protected` is the number of class tokens."""

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


class RowTower(TowerPart):
    """Merges or drops units inside the tower of a model, and records the groups of merged visual tokens.

    Raises:
        UnsupportedSetupError: If the tower or projector is not supported, or attention takes no bias.
        BudgetError: If the budget cannot be reached.
        OptionError: If the method names a block that does not exist, or whose output is not read.
    """

    def __init__(self, adapter: Adapter, method: TowerMethod, budget: Budget) -> None:
        super().__init__(adapter, method, budget)
        supported = f"{method.name} supports the vision towers CLIP, SigLIP, Idefics3, InternVL and Qwen-VL"
        self.tower, self.encoder, layers = find_blocks(adapter, _KINDS, supported)
        self.layer = getattr(adapter.config, "vision_feature_layer", -1)
        blocks_read = self.layer if self.layer >= 0 else len(layers) + 1 + self.layer
        block = _KINDS[type(layers[0]).__name__]
        blocks = [
            Block(layer, getattr(layer, block.norm), getattr(layer, block.end), scale=block.scale) for layer in layers
        ]
        tokens = count_patches(adapter.config.vision_config) + block.protected
        side = adapter.family.get_unit_side(adapter.config)
        shape, squares = Tower(tokens, block.protected, len(layers), blocks_read, self.tower), None
        if side > 1:
            squares = Squares(side, block.protected)
            shape = Tower(squares.count_units(tokens), 0, len(layers), blocks_read, self.tower, squares.size)
        self.packs = hasattr(adapter.base, "pack_image_features")
        self.goals: TileGoals | None = None
        if self.packs and isinstance(method, EncoderMethod):
            self.goals = TileGoals(adapter, method, budget, shape)
            self.layout: RowLayout = TileLayout(method, budget, blocks, shape, squares, self.goals.take)
        else:
            self.layout = RowLayout(method, budget, blocks, shape, squares, shows=True)
        self.reducer = TowerReducer(self.layout, Host())
        self.uneven = method.ragged or (self.goals is not None and self.goals.exact)
        self.merges = not (method.reads or method.drops or isinstance(method, UnitDropper))
        self.observers = [
            Observer(get_attention(layer), partial(self._observe, index)) for index, layer in enumerate(layers)
        ]
        self._check_attention()
        if isinstance(method, UnitDropper):
            method.checked_block(blocks_read)

    def _check_attention(self) -> None:
        check_bias(self.method, self.observers[0].config, self.uneven)

    def _attach(self) -> None:
        self.attach_part(self.reducer)
        for observer in self.observers:
            self.attach_part(observer)
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower)
        self.hook(self.encoder.register_forward_hook, self._leave_encoder)
        self.hook(self.tower.register_forward_hook, self._leave_tower)
        if self.packs:
            self.wrap(self.adapter.base, "pack_image_features", PackRecorder)

    # -- attention

    def _observe(self, index: int, observation: Observation) -> Tensor | None:
        run = self.reducer.get_run()
        if run is None:
            return None
        if run.plan[index] is not None:
            run.keys = self._compute_scores(observation, run.bias) if self.method.reads else observation.key
        if index == 0 and observation.mask is not None:
            self._mask_padding(run, observation, observation.mask)
        return run.bias

    def _compute_scores(self, observation: Observation, padding: Tensor | None) -> Tensor:
        """Compute the block observable that the method reads."""
        if padding is not None:
            padding = padding.expand(-1, -1, observation.query.shape[2], -1)
            observation = replace(observation, mask=padding, causal=False)
        with torch.no_grad():
            scores = get_block_observable(self.method.reads)
            return scores.compute_per_patch(observation, self.layout.shape.protected).float()

    def _mask_padding(self, run: TowerRun, observation: Observation, mask: Tensor) -> None:
        """Give padding patches the weight 0, so that they stay masked and do not count in a mean."""
        if isinstance(self.method, UnitDropper):
            raise UnsupportedSetupError(
                f"{self.method.name}: the images contain padding patches, which dropping would mix with other patches. "
                f"{AFTER_THE_TOWER}"
            )
        if mask.ndim != 4:
            raise UnsupportedSetupError(
                f"{self.method.name}: the images contain padding patches, which this attention cannot mask after "
                'a merge. Load the model with attn_implementation={"vision_config": "sdpa", ...}.'
            )
        rows, device = len(observation.query), observation.query.device
        first = torch.zeros(1, 1, dtype=torch.long, device=device)
        visible = observation.visible_keys(first.expand(rows, 1))[:, 0, 0]
        run.units = replace(run.units, weight=visible.float().expand(rows, -1), masked=True)

    # -- input and output of the tower

    def _enter_tower(self, module: nn.Module, args: tuple) -> None:
        self._check_attention()  # the attention implementation may have changed after the patch
        # Discard the state of a failed call.
        pop_packed_features()
        self.reducer.pop_run()

    def _leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self.reducer.get_run()
        assert run is not None  # started by the first block
        return change_output(run.units.expand, output)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        run = self.reducer.pop_run()
        assert run is not None  # started by the first block
        squares, owners = self.layout.squares, [*run.history, run.units][self.layout.shape.blocks_read].owner
        owners = owners if squares is None else squares.find_unit_owners(owners)
        self.record_tokens(output, [sum(rows) for rows in run.counts], owners)
        run.restore_states(output)
        return output

    # -- the encoder

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        if self.goals is not None:
            self.goals.prepare(encoding)
        if encoding.modality != "image":  # frames of videos are pooled after the tower
            raise build_tracing_error(self.method, self.adapter, encoding.modality)
        output = encode(encoding)
        check_layer(self.method.name, self.layer, encoding.on_host)
        owners, groups = get_record(output).owners, None
        if isinstance(owners, Tensor):
            groups = find_feature_groups(owners, output.pooler_output, self.layout.shape.protected)
        if groups is None:
            raise build_tracing_error(self.method, self.adapter, encoding.modality)
        self.record_groups(output, groups)
        return output
