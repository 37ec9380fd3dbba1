# SPDX-License-Identifier: Apache-2.0
"""Compute observables inside the vision tower and map them from patches to visual tokens.

An observer reads the queries and keys of the requested blocks after the rotary embedding. The observables are computed
without an attention map (kernels/attention.py), so every attention implementation works. They are stored in the record
on the tower's output, because `generate` encodes images before the first forward.
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
from tokenprune.integrations.hf.sequence.alignment import index_placeholders
from tokenprune.integrations.hf.sequence.record import get_record, open_record
from tokenprune.integrations.hf.sequence.segments import count_features
from tokenprune.integrations.hf.towers.blocks import find_blocks, get_attention
from tokenprune.integrations.hf.towers.unit_dropping import denormalize, get_color_statistics
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
from tokenprune.selection.observable_bases import TowerInput, TowerOutput
from tokenprune.selection.observable_registry import find_observable
from tokenprune.selection.segments import Patches, Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call

_CHUNK_TOKENS = 1024  # visual tokens per chunk when observables read pixels
# Supported classes of blocks, and the number of class tokens before the patches.
_CLASS_TOKENS = {tower.block: tower.class_tokens for tower in TOWERS.values()}


class BlockReader(Part):
    """Computes the tower observables that `methods` need, in the blocks of their `encoder_layers` option.

    Raises:
        UnsupportedSetupError: If the tower is not supported, or its attention cannot be observed.
        OptionError: If a block does not exist, or a method reads pixels and `processor` has no image mean and std.
    """

    def __init__(self, adapter: Adapter, methods: Sequence[Pruner], processor: Any = None) -> None:
        super().__init__()
        self.adapter, self.name = adapter, ", ".join(method.name for method in methods)
        supported = f"{self.name} supports the vision towers CLIP, SigLIP, InternVL, Pixtral, Qwen-VL and GLM-4V"
        self.tower, _, blocks = find_blocks(adapter, _CLASS_TOKENS, supported, _suggest_alternative(methods))
        self.protected = _CLASS_TOKENS[type(blocks[0]).__name__]
        self.attentions = [get_attention(block) for block in blocks]
        self.blocks: BlockIndices = {}
        for method in methods:
            self.blocks |= find_observed_blocks(method, len(blocks), adapter.config)
        for index in set(self.blocks.values()) - {OUTPUT}:
            Observer(self.attentions[index], partial(self._record, index))  # raises if it cannot be observed
        self.pixel_observables = {observable for method in methods for observable in find_pixel_observables(method)}
        self.color_statistics = get_color_statistics(processor)
        if self.pixel_observables and self.color_statistics is None:
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
        pop_packed_features()  # discard the features of a failed call
        lengths = None
        if self.adapter.family.patches == "sized":
            arguments = dict(zip(("pixel_values", "image_sizes"), args, strict=False)) | kwargs
            patch = self.adapter.config.vision_config.patch_size
            lengths = [(height // patch) * (width // patch) for height, width in image_sizes(arguments)]
        get_thread_states()[self] = _TowerCall(create_block_scores(self.blocks), lengths)

    def _record(self, index: int, observation: Observation) -> None:
        state = get_thread_states().get(self)
        if state is not None:  # None if gradient checkpointing runs the block again
            if observation.starts is None and state.lengths is not None:
                ends = [0, *accumulate(state.lengths)]
                observation = replace(observation, starts=torch.tensor(ends, device=observation.query.device))
            record_patches(state.scores, index, observation, self.protected)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> None:
        state = get_thread_states().pop(self, None)
        if state is None:
            return
        record = open_record(output)
        for name, index in state.scores:
            if index == OUTPUT:
                features = get_tower_features(output, self.adapter.config).detach().float()
                features = features if features.ndim == 3 else features[None]
                observable = cast(TowerOutput, find_observable(name))
                state.scores[name, index].append(observable.compute_from_features(features, self.protected))
        record.attention = state.scores

    # -- after the tower

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        output = encode(encoding)
        self._record_tokens(encoding, output)
        return output

    def _record_tokens(self, encoding: Encoding, output: Any) -> None:
        """Write the observables of the encoded visual tokens into the record on `output`."""
        state, packed = get_record(output).take_attention(), pop_packed_features()
        if state is None:
            return
        # Scores have shape (rows of the tower, patches, channels). Packed towers have one row with all patches.
        if not all(state.values()):
            raise UnsupportedSetupError(
                f"{self.name}: some blocks of the vision tower did not call their attention function. {AFTER_THE_TOWER}"
            )
        on_one_axis = self.adapter.family.patches in ("runs", "sized")
        calls = [
            [piece.flatten(0, 1)[None] for piece in pieces] if on_one_axis else pieces for pieces in state.values()
        ]
        layers = [torch.cat(pieces, int(on_one_axis)) if len(pieces) > 1 else pieces[0] for pieces in calls]
        traced = trace_tokens(self.adapter, encoding.modality, encoding.on_host, count_features(output), layers, packed)
        encoded = TowerValues.from_scores(traced, self.blocks, state, [x.shape[-1] for x in layers])
        if self.pixel_observables:
            pixels = encoding.arguments["pixel_values_videos" if encoding.modality == "video" else "pixel_values"]
            chunks = pixels.float().unflatten(0, (len(traced.cells), -1)).split(_CHUNK_TOKENS)
            for observable in self.pixel_observables:
                encoded.values[(observable.name,)] = torch.cat([self._read(observable, x) for x in chunks])
        open_record(output).encoded = encoded

    @torch.no_grad()
    def _read(self, observable: TowerInput, pixels: Tensor) -> Tensor:
        """Compute an observable from normalised pixels, shape (tokens, patches, channels * pixels)."""
        assert self.color_statistics is not None  # checked in __init__
        colors = denormalize(pixels.flatten(0, 1), self.color_statistics)
        return observable.compute_from_colors(colors.view(*pixels.shape[:2], len(self.color_statistics[0]), -1))


@dataclass(frozen=True)
class _TowerCall:
    """One forward of a tower.

    Attributes:
        scores: Observables per block, see `create_block_scores`.
        lengths: Patches per image if all images share one row and only a mask separates them, else None.
    """

    scores: BlockScores
    lengths: list[int] | None


class EncodedTokens:
    """Tower observables of the visual tokens of a call."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self.device, self.parts = device, []
        self.masks: list[tuple[str, Tensor, int]] = []  # modality, placeholder mask, number of tokens
        for modality, output in call.outputs.items():
            encoded, mask = get_record(output).encoded, call.prompt.placeholders[modality]
            if encoded is None:
                raise UnsupportedSetupError(
                    f"These {modality} features were not encoded by the patched model, so values of its vision tower "
                    "are missing. Pass pixels."
                )
            self.masks.append((modality, mask, len(encoded.tokens.cells)))
            self.parts.append(encoded)

    def values(self, key: tuple, segments: Segments) -> Tensor:
        """Return an observable, float32 `[S, N, C]`. See `TowerValues` for the keys."""
        if any(key not in part.values for part in self.parts):
            raise UnsupportedSetupError(
                f"The {' of block '.join(map(str, key))} of the vision tower was not recorded. List the block in the "
                "method's encoder_layers, and pass pixels if the features were encoded under another patch."
            )
        values = self._gather([part.values[key] for part in self.parts], segments)
        return values.masked_fill(~segments.mask.unsqueeze(-1), 0) if segments.has_padding else values

    def patches(self, segments: Segments) -> Patches:
        """Return the patches of each visual token."""

        def build() -> Patches:
            cells = self._gather([part.tokens.cells for part in self.parts], segments)
            return build_patches(cells, segments.mask, sum(part.tokens.tiles for part in self.parts))

        keys = [part.tokens.key for part in self.parts]
        return build() if None in keys else segments.cache.get(("patches", *keys), build)

    def _gather(self, parts: list[Tensor], segments: Segments) -> Tensor:
        """Gather per-feature values, one tensor per modality, into `[S, N, ...]`."""
        indices = segments.cache.get(("numbers", *map(len, parts)), partial(self._compute_feature_indices, segments))
        values = [part.to(self.device) for part in parts]
        return (values[0] if len(values) == 1 else torch.cat(values))[indices]

    def _compute_feature_indices(self, segments: Segments) -> Tensor:
        """Return the index of each visual token among the features of all modalities, long `[S, N]`."""
        index, start = torch.zeros_like(self.masks[0][1], dtype=torch.long), 0
        for modality, mask, count in self.masks:
            index = torch.where(mask, index_placeholders(modality, mask, count) + start, index)
            start += count
        return to_device(index, self.device)[segments.row_index, segments.position]


def _suggest_alternative(methods: Sequence[Pruner]) -> str:
    """Return a sentence that suggests methods or options which do not read the tower."""
    options_of_methods = [
        f", or {method.name} with {options}" for method in methods if (options := find_options_without_tower(method))
    ]
    return "Use a method that acts after the tower" + "".join(options_of_methods) + "."
