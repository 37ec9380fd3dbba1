# SPDX-License-Identifier: Apache-2.0
"""Observables of the vision tower, brought from its patches to the visual tokens that these become.

A hook reads queries and keys of the named blocks as they reach the attention function (after rotary embedding, once).
The observables are computed of them without an attention map (see kernels/attention.py), for any back end. They travel
with the tower's output, since `generate` encodes images before any forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part
from tokenprune.integrations.hf.sequence.alignment import placeholder_to_feature
from tokenprune.integrations.hf.sequence.record import open_record, record_of
from tokenprune.integrations.hf.sequence.segments import feature_total
from tokenprune.integrations.hf.towers.blocks import attention_of, find_blocks
from tokenprune.integrations.hf.towers.unit_dropping import coloured, colours_of
from tokenprune.integrations.shared.attachable import get_thread_states
from tokenprune.integrations.shared.checks import AFTER_THE_TOWER
from tokenprune.integrations.shared.towers.packed_features import PackRecorder, pop_packed_features
from tokenprune.integrations.shared.towers.patch_grid import image_sizes, trace_tokens
from tokenprune.integrations.shared.towers.tower_scores import (
    OUTPUT,
    BlockIndices,
    BlockScores,
    TowerValues,
    build_patches,
    create_block_scores,
    find_observed_blocks,
    find_options_without_tower,
    find_pixel_observables,
    get_tower_features,
    record_patches,
)
from tokenprune.kernels.observation import Observation
from tokenprune.kernels.transfer import to_device
from tokenprune.models.families import TOWERS
from tokenprune.selection.method import Pruner
from tokenprune.selection.observable import TowerInput, TowerOutput
from tokenprune.selection.observable_registry import find_observable
from tokenprune.selection.segments import Patches, Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call

_TOKENS = 1024  # whose pixels are read in one go
# The blocks that are known, and how many class tokens stand before the patches.
_CLASS_TOKENS = {tower.block: tower.class_tokens for tower in TOWERS.values()}


class BlockReader(Part):
    """Reads what `methods` need of the vision tower, in the blocks that they name in their `encoder_layers`.

    Raises UnsupportedSetupError for towers that are not known and families whose tokens cannot be traced to patches,
    OptionError for blocks that there are not, and where pixels are read and no processor tells their colours.
    """

    def __init__(self, adapter: Adapter, methods: Sequence[Pruner], processor: Any = None) -> None:
        super().__init__()
        self.adapter, self.name = adapter, ", ".join(method.name for method in methods)
        knows = f"{self.name} looks into the vision tower, and knows the towers CLIP, SigLIP (and its like in Idefics3 "
        knows += "and SmolVLM), InternVL, Pixtral, Qwen-VL and GLM-4V of transformers"
        self.tower, _, blocks = find_blocks(adapter, _CLASS_TOKENS, knows, _instead(methods))
        self.protected = _CLASS_TOKENS[type(blocks[0]).__name__]
        self.attentions = [attention_of(block) for block in blocks]
        self.blocks: BlockIndices = {}
        for method in methods:
            self.blocks |= find_observed_blocks(method, len(blocks), adapter.config)
        for index in set(self.blocks.values()) - {OUTPUT}:
            Observer(self.attentions[index], partial(self._record, index))  # raises what cannot be observed
        self.of_pixels = {one for method in methods for one in find_pixel_observables(method)}
        self.colours = colours_of(processor)
        if self.of_pixels and self.colours is None:
            raise OptionError(f"{self.name} reads colours, and the model gets normalised pixels. Pass processor=.")

    # -- inside the tower

    def _attach(self) -> None:
        for index in sorted(set(self.blocks.values()) - {OUTPUT}):
            self.attach_part(Observer(self.attentions[index], partial(self._record, index)))
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.tower.register_forward_hook, self._leave_tower)
        if hasattr(self.adapter.base, "pack_image_features"):
            self.wrap(self.adapter.base, "pack_image_features", PackRecorder)

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        pop_packed_features()  # what a call that failed may have left
        lengths = None
        if self.adapter.family.patches == "sized":
            given = dict(zip(("pixel_values", "image_sizes"), args, strict=False)) | kwargs
            patch = self.adapter.config.vision_config.patch_size
            lengths = [(height // patch) * (width // patch) for height, width in image_sizes(given)]
        get_thread_states()[self] = _Reading(create_block_scores(self.blocks), lengths)

    def _record(self, index: int, observation: Observation) -> None:
        state = get_thread_states().get(self)
        if state is not None:  # else gradient checkpointing runs the block again
            if observation.starts is None and state.lengths is not None:
                ends = [0, *accumulate(state.lengths)]
                observation = replace(observation, starts=torch.tensor(ends, device=observation.query.device))
            record_patches(state.seen, index, observation, self.protected)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> None:
        state = get_thread_states().pop(self, None)
        if state is None:
            return
        record = open_record(output)
        for name, index in state.seen:
            if index == OUTPUT:
                features = get_tower_features(output, self.adapter.config).detach().float()
                features = features if features.ndim == 3 else features[None]
                observable = cast(TowerOutput, find_observable(name))
                state.seen[name, index].append(observable.compute_from_features(features, self.protected))
        record.attention = state.seen

    # -- after the tower

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        output = encode(encoding)
        self._leave_observed(encoding, output)
        return output

    def _leave_observed(self, encoding: Encoding, output: Any) -> None:
        """Write the observables of the encoded visual tokens into the record on `output`."""
        state, packed = record_of(output).take_attention(), pop_packed_features()
        if state is None:
            return
        # Each (rows of the tower, patches, channels); a tower that lays images end to end has one row of all patches.
        if not all(state.values()):
            raise UnsupportedSetupError(
                f"{self.name}: some blocks of the vision tower did not call their attention function. {AFTER_THE_TOWER}"
            )
        on_one_axis = self.adapter.family.patches in ("runs", "sized")
        layers = [
            torch.cat([piece.flatten(0, 1) for piece in pieces])[None] if on_one_axis else torch.cat(pieces)
            for pieces in state.values()
        ]
        placed = trace_tokens(self.adapter, encoding.modality, encoding.on_host, feature_total(output), layers, packed)
        encoded = TowerValues.from_scores(placed, self.blocks, state, [x.shape[-1] for x in layers])
        if self.of_pixels:
            pixels = encoding.arguments["pixel_values_videos" if encoding.modality == "video" else "pixel_values"]
            units = pixels.float().unflatten(0, (len(placed.cells), -1)).split(_TOKENS)
            encoded.values.update(
                {(one.name,): torch.cat([self._read(one, x) for x in units]) for one in self.of_pixels}
            )
        open_record(output).encoded = encoded

    @torch.no_grad()
    def _read(self, observable: TowerInput, pixels: Tensor) -> Tensor:
        """Return what an observable makes of pixels, `[tokens, patches, channels * P]`."""
        assert self.colours is not None  # else refused
        shown = coloured(pixels.flatten(0, 1), self.colours)
        return observable.compute_from_colors(shown.view(*pixels.shape[:2], len(self.colours[0]), -1))


@dataclass(frozen=True)
class _Reading:
    """One forward of a tower. seen: see `empty`. lengths: of the images, if all are on one axis and only a mask tells
    them apart."""

    seen: BlockScores
    lengths: list[int] | None


class EncodedTokens:
    """Observables of the tower for a call's visual tokens."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self.device, self.parts = device, []
        self.masks: list[tuple[str, Tensor, int]] = []  # of each modality, with the number of its tokens
        for modality, output in call.outputs.items():
            encoded, mask = record_of(output).encoded, call.prompt.placeholders[modality]
            if encoded is None:
                raise UnsupportedSetupError(
                    f"These {modality} features were not encoded by the patched model, so values of its vision tower "
                    "are missing. Pass pixels."
                )
            self.masks.append((modality, mask, len(encoded.tokens.cells)))
            self.parts.append(encoded)

    def values(self, key: tuple, segments: Segments) -> Tensor:
        """Return float32 `[S, N, C]`; key: see `Encoded`."""
        if any(key not in part.values for part in self.parts):
            raise UnsupportedSetupError(
                f"The {' of block '.join(map(str, key))} of the vision tower was not recorded. List the block in the "
                "method's encoder_layers, and pass pixels if the features were encoded under another patch."
            )
        found = self._of([part.values[key] for part in self.parts], segments)
        return found.masked_fill(~segments.mask.unsqueeze(-1), 0) if segments.has_padding else found

    def patches(self, segments: Segments) -> Patches:
        def make() -> Patches:
            cells = self._of([part.tokens.cells for part in self.parts], segments)
            return build_patches(cells, segments.mask, sum(part.tokens.tiles for part in self.parts))

        keys = [part.tokens.key for part in self.parts]
        return make() if None in keys else segments.cache.get(("patches", *keys), make)

    def _of(self, parts: list[Tensor], segments: Segments) -> Tensor:
        """Return `[S, N, ...]` of the visual tokens of all modalities, one part each."""
        numbers = segments.cache.get(("numbers", *map(len, parts)), partial(self._numbers, segments))
        found = [part.to(self.device) for part in parts]
        return (found[0] if len(found) == 1 else torch.cat(found))[numbers]

    def _numbers(self, segments: Segments) -> Tensor:
        index, start = torch.zeros_like(self.masks[0][1], dtype=torch.long), 0
        for modality, mask, count in self.masks:
            index = torch.where(mask, placeholder_to_feature(modality, mask, count) + start, index)
            start += count
        return to_device(index, self.device)[segments.row_index, segments.position]


def _instead(methods: Sequence[Pruner]) -> str:
    """Return what to do where the tower cannot be read."""
    less = [
        f", or {method.name} with {options}" for method in methods if (options := find_options_without_tower(method))
    ]
    return "Use a method that acts after the tower" + "".join(less) + "."
