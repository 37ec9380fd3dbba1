# SPDX-License-Identifier: Apache-2.0
"""Merging inside the vision tower of a vision-language model, and what becomes of the merged tokens behind it.

The tower gives back what it always does, a feature for each patch: those of a merged token are all the same. Which
these are travels with the tower's output (`generate` encodes images before any forward). At the decoder's entry one
visual token of each group is kept, the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from tokenprune.base import Selection
from tokenprune.budget import Budget
from tokenprune.encoder import EncoderMethod, Tower
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.attention.observer import Observer
from tokenprune.integrations.hf.encoded.record import open_record, record_of
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.plan import Merged, Step
from tokenprune.integrations.hf.tower.merge_map import feature_groups, keep_one_per_group
from tokenprune.integrations.shared.attachable import with_output
from tokenprune.integrations.shared.block_merging import Block, Merger
from tokenprune.integrations.shared.observation import Observation
from tokenprune.integrations.shared.packed_features import PackRecorder, take_packed
from tokenprune.tokens import Segments

# The blocks that are known, and how many class tokens stand before the patches.
_CLASS_TOKENS = {"CLIPEncoderLayer": 1, "SiglipEncoderLayer": 0}


class TowerPatch(Merger, Part):
    """What all merging inside a tower has in common: its tokens' provenance reaches the decoder's entry.

    As the tower ends, a subclass says by `leave_tokens` what became of its tokens; behind it, `groups_of` says which
    features are one. Both are kept in the `EncoderRecord` of the output.
    """

    pads = True  # whether rows that merge more than others are padded

    def __init__(
        self, adapter: Adapter, method: EncoderMethod, budget: Budget, blocks: Sequence[Block], tower: Tower
    ) -> None:
        super().__init__(method, budget, blocks, tower)
        self.adapter = adapter
        self.step = Step(method, budget)  # what the engine reports the merged tokens' cut as

    def check_bias(self, config: Any) -> None:
        """Raise UnsupportedSetupError if the attention named by `config` takes no bias and the method needs one."""
        attention = config._attn_implementation or "eager"
        padding = self.pads and self.method.ragged
        if attention in ("eager", "sdpa") or not (self.method.proportional or padding):
            return
        why = "the padding of images that merge more than others" if padding else "proportional attention"
        way_out = "" if padding else ", or pass proportional=False"
        raise UnsupportedSetupError(
            f"{self.method.name}: attention {attention!r} of the vision tower takes no bias, which {why} needs; load "
            f'the model with attn_implementation={{"vision_config": "sdpa", ...}}{way_out}'
        )

    def leave_tokens(self, output: Any, owners: Tensor | list[Tensor], block_tokens: list[int]) -> None:
        """Write to the tower's output what became of its tokens; see `EncoderRecord`."""
        record = open_record(output)
        record.owners, record.block_tokens = owners, block_tokens

    def after_encode(self, modality: str, arguments: dict[str, Any], output: Any) -> None:
        groups = self.groups_of(modality, arguments, output)
        if groups is not None:
            open_record(output).groups = groups

    def groups_of(self, modality: str, arguments: dict[str, Any], output: Any) -> list[Tensor] | None:
        """Return the groups of an `EncoderRecord`, of what `after_encode` gets; None where the tower did not leave its
        tokens."""
        raise NotImplementedError

    def before_decoder(self, call: Call, kwargs: dict[str, Any]) -> None:
        if call.segments is None:
            return
        selection = self.select(call, call.segments.to(kwargs["inputs_embeds"].device))
        call.report.stats.encoder_tokens_per_layer = self.counts(call)
        if selection is not None:
            call.state.put(Merged(self.step, selection))

    def select(self, call: Call, segments: Segments) -> Selection | None:
        """Return which of a call's visual tokens stay, one of each group; None where nothing was merged."""
        for modality, output in call.outputs.items():
            if record_of(output).groups is None:
                raise UnsupportedSetupError(
                    f"{self.method.name}: these {modality} features were not encoded by the patched model: pass pixels"
                )
        groups = {modality: record_of(output).groups for modality, output in call.outputs.items()}
        return keep_one_per_group(segments, call.host.masks, groups)

    def counts(self, call: Call) -> list[int]:
        """Tokens that entered each of the tower's blocks, for all images of a call."""
        counts = [record_of(output).block_tokens for output in call.outputs.values()]
        return [sum(of_block) for of_block in zip(*counts, strict=True)]


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


def tower_patch(adapter: Adapter, method: EncoderMethod, budget: Budget) -> TowerPatch:
    """Return the patch for the kind of tower that `adapter`'s model has; see the classes for what they raise."""
    from tokenprune.integrations.hf.tower.packed_merging import BLOCKS, PackedTowerPatch

    blocks = getattr(getattr(adapter.base, "visual", None), "blocks", None)
    if adapter.unmergeable is None and blocks and type(blocks[0]).__name__ in BLOCKS:
        return PackedTowerPatch(adapter, method, budget)
    return EncoderPatch(adapter, method, budget)


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
