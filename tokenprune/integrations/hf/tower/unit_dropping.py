# SPDX-License-Identifier: Apache-2.0
"""Drop units of patches ahead of the first block of towers that pack the patches of all images into one sequence.

Behind these towers the patches of a unit, which stand side by side in the sequence, become one visual token. The tower
embeds all patches and computes the places of the full grid; at its first block only the kept units go on, with their
own places, and what attends to itself (an image, a frame, a window) shrinks to those of it that are left. What reads
the blocks' output, the merger, sees the kept units too. Its result gets back the length that the model counts on, with
zeros at dropped units: their tokens are taken out at the decoder's entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune import abilities
from tokenprune.base import Selection
from tokenprune.budget import Budget
from tokenprune.errors import BudgetError, OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.hf.encoded.alignment import placeholder_to_feature
from tokenprune.integrations.hf.encoded.record import open_record, record_of
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.plan import Merged, Step
from tokenprune.integrations.hf.tower.base import InTower
from tokenprune.integrations.hf.tower.packed_merging import window_order
from tokenprune.integrations.shared.attachable import hidden_states, states, with_hidden_states
from tokenprune.integrations.shared.block_merging import check_checkpointing
from tokenprune.ops.transfer import to_device
from tokenprune.shapes.decoder import DecoderShape
from tokenprune.sites.units import UnitDropper


@dataclass
class Dropped:
    """One forward of a packed tower, of N units.

    kept: for each image bool `[units]`, on the host, in the order of its features. places: long `[n]`, where the kept
    units stand in the sequence of the tower; None if all are kept, so that nothing is to be done. memo: what blocks are
    handed, by the id of what they were handed before it was cut; both, so that no id is given out again.
    """

    kept: list[Tensor]
    places: Tensor | None
    units: int
    memo: dict[int, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Announced:
    """The images about to be encoded: (frames, height, width) in units of each image or video; None: not known."""

    grids: list[tuple[int, int, int]] | None


class UnitDrop(InTower):
    """Has `method` drop units ahead of the tower of `adapter`'s model, and takes their tokens out of the prompt.

    Raises UnsupportedSetupError for towers without packed patches, BudgetError for a budget that is not one of an image
    by itself, OptionError where colours are needed and no processor tells them.
    """

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget, processor: Any) -> None:
        super().__init__()
        self.adapter, self.method, self.budget = adapter, method, budget
        self.step = Step(method, budget)
        self.tower = _tower_of(adapter, method.name)
        self.unit = self.tower.spatial_merge_size**2  # patches that become one visual token
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.colours = _colours(processor)
        if self.colours is None and (why := method.reads_colours):
            raise OptionError(
                f"{method.name}: {why}, and the model gets normalised ones: pass processor=, or leave it out"
            )
        if budget.per != "image" or budget.flops_share is not None:
            raise BudgetError(
                f"{method.name} decides before the prompt is known, for each image or video by itself: of {budget}, "
                'say keep, average_tokens, average_share or kv_share, with per="image"'
            )

    def _attach(self) -> None:
        self.hook(self.tower.register_forward_pre_hook, self._enter_tower, with_kwargs=True)
        self.hook(self.tower.register_forward_hook, self._leave_tower)
        for block in self.tower.blocks:
            self.hook(block.register_forward_pre_hook, self._enter_block, with_kwargs=True)
        for merger in (self.tower.merger, *getattr(self.tower, "deepstack_merger_list", ())):
            self.hook(merger.register_forward_hook, self._leave_merger)

    # -- inside the tower

    def before_encode(self, modality: str, arguments: dict[str, Any]) -> None:
        # GLM's towers are handed each frame of a video as an image of its own.
        states()[self] = Announced(self.adapter.grids(modality, arguments))

    def _enter_tower(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        pixels = hidden_states(args, kwargs).detach()
        grids = self._grids(len(pixels), kwargs["grid_thw"] if "grid_thw" in kwargs else args[1])
        sizes = [math.prod(grid) for grid in grids]
        with torch.no_grad():
            images = pixels.split([units * self.unit for units in sizes])
            kept = torch.cat([self._keep(x, grid) for x, grid in zip(images, grids, strict=True)]).cpu()
        places = None
        if not bool(kept.all()):
            order = kept
            if hasattr(self.tower, "window_size"):  # its units stand in the order of windows
                order = kept[window_order(self.tower, args, kwargs).cpu()]
            places = order.nonzero()[:, 0]
        states()[self] = Dropped(list(kept.split(sizes)), places, len(kept))

    def _grids(self, patches: int, of_tower: Any) -> list[tuple[int, int, int]]:
        """Return (frames, height, width) in units of each image or video. of_tower: what the tower gets, in
        patches."""
        announced = states().pop(self, None)
        grids = announced.grids if isinstance(announced, Announced) else None
        if grids is not None and sum(map(math.prod, grids)) * self.unit == patches:
            return grids
        side = self.tower.spatial_merge_size
        return [(t, h // side, w // side) for t, h, w in torch.as_tensor(of_tower, device="cpu").tolist()]

    def _keep(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Return which units of an image or video stay, bool `[units]`. pixels: `[patches, P]`, unit by unit."""
        (most,) = self.budget.resolve([math.prod(grid)], layer=0, shape=self.shape, text_tokens=0)
        pixels = pixels.float()
        if self.colours is not None:
            mean, std = (to_device(one, pixels.device) for one in self.colours)
            channels = pixels.view(len(pixels), len(std), -1)
            pixels = torch.addcmul(mean[:, None], channels, std[:, None])
        keep = self.method.keep_units(pixels.reshape(*grid, -1), most)
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != grid:
            raise TokenPruneError(f"{self.method.name}.keep_units() must return a bool tensor {list(grid)}")
        return keep.flatten()

    def _enter_block(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        state = states().get(self)
        if not isinstance(state, Dropped) or (places := state.places) is None:
            return None  # a block that checkpointing runs again, or all units stay
        hidden = hidden_states(args, kwargs)
        check_checkpointing(module, hidden)
        if len(hidden) == state.units * self.unit:  # the first block
            args, kwargs = with_hidden_states(self._cut(places, hidden), args, kwargs)
        changed = dict(kwargs)
        for name in ("cu_seqlens", "position_embeddings"):
            value = kwargs[name]
            if id(value) not in state.memo:
                made = (
                    self._pieces(places, value) if name == "cu_seqlens" else tuple(self._cut(places, x) for x in value)
                )
                state.memo[id(value)] = value, made
            changed[name] = state.memo[id(value)][1]
        if (longest := kwargs.get("max_seqlen")) is not None:
            found = changed["cu_seqlens"].diff().max()
            changed["max_seqlen"] = found if isinstance(longest, Tensor) else int(found)
        return args, changed

    def _cut(self, places: Tensor, x: Tensor) -> Tensor:
        """`[N * unit, D]` -> `[n * unit, D]`"""
        return x.view(-1, self.unit, x.shape[-1])[to_device(places, x.device)].flatten(0, 1)

    def _pieces(self, places: Tensor, ends: Tensor) -> Tensor:
        """Return the borders of the pieces that attend to themselves, in patches of kept units; pieces of which all
        units went disappear. ends: those for all units."""
        left = torch.searchsorted(places, ends.cpu() // self.unit)  # kept units before each border
        return to_device((left * self.unit).unique_consecutive().to(ends.dtype), ends.device)

    def _leave_merger(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        state = states().get(self)
        if not isinstance(state, Dropped) or state.places is None:
            return None
        return self._full(state.units, state.places, output)

    def _full(self, units: int, places: Tensor, x: Tensor) -> Tensor:
        """`[n, D]` -> `[N, D]`, or `[n * unit, D]` -> `[N * unit, D]`, with zeros at dropped units."""
        size = {len(places): 1, len(places) * self.unit: self.unit}.get(len(x))
        if size is None:  # it is full, like what enters the first block
            return x
        full = x.new_zeros(units, size, x.shape[-1])
        return full.index_copy(0, to_device(places, x.device), x.view(-1, size, x.shape[-1])).flatten(0, 1)

    def _leave_tower(self, module: nn.Module, args: tuple, output: Any) -> Any:
        state = states().pop(self)
        if isinstance(output, tuple):
            raise UnsupportedSetupError(f"{self.method.name}: the tower must return an output object; use return_dict")
        if (places := state.places) is not None:
            output.last_hidden_state = self._full(state.units, places, output.last_hidden_state)
            if getattr(output, "hidden_states", None) is not None:
                output.hidden_states = tuple(self._full(state.units, places, x) for x in output.hidden_states)
        record, count = open_record(output), sum(int(kept.sum()) for kept in state.kept)
        record.kept, record.block_tokens = state.kept, [count * self.unit] * len(self.tower.blocks)
        return output

    # -- after the tower

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        if not call.has_images:
            return
        records = {modality: record_of(output) for modality, output in call.outputs.items()}
        kept: dict[str, list[Tensor]] = {}
        for modality, record in records.items():
            if record.kept is None:
                raise UnsupportedSetupError(
                    f"{self.method.name}: these {modality} features were not encoded by the patched model: pass pixels"
                )
            kept[modality] = record.kept
        counts = [record.block_tokens for record in records.values()]
        call.report.stats.encoder_tokens_per_layer = [sum(of_block) for of_block in zip(*counts, strict=True)]
        if all(bool(image.all()) for of_images in kept.values() for image in of_images):
            return
        stays = torch.ones_like(call.host.visual)
        for modality, of_images in kept.items():
            left, mask = torch.cat(of_images), call.host.masks[modality]
            numbers = placeholder_to_feature(modality, mask, len(left))
            stays[mask] = left[numbers[mask]]
        segments = call.held.segments.to(inputs.embeds.device)
        found = to_device(stays, segments.mask.device)[segments.row_index, segments.position] & segments.mask
        call.state.put(Merged(self.step, Selection(found, counts=found.sum(1).tolist())))


def _tower_of(adapter: Adapter, name: str) -> Any:
    """Return the tower of packed patches; raises UnsupportedSetupError where there is none."""
    family = adapter.config.model_type
    for attribute in ("visual", "vision_model"):
        tower = getattr(adapter.base, attribute, None)
        fits = all(hasattr(tower, part) for part in ("blocks", "merger", "spatial_merge_size"))
        if fits:
            return tower
    raise UnsupportedSetupError(
        f"{name} cannot act in the tower of this {family!r}: it has no blocks, merger and spatial_merge_size; "
        f"{abilities.AFTER_THE_TOWER}"
    )


def _colours(processor: Any) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation of each channel by which a processor normalises colours from 0 to 1; None
    where nothing tells."""
    for one in (processor, *(getattr(processor, name, None) for name in ("image_processor", "video_processor"))):
        mean, std = getattr(one, "image_mean", None), getattr(one, "image_std", None)
        if mean is not None and std is not None:
            colours = [mean, std] if getattr(one, "do_normalize", True) else [[0.0] * 3, [1.0] * 3]
            return tuple(torch.tensor(colours, dtype=torch.float32, device="cpu"))
    return None
