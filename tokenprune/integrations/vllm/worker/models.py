# SPDX-License-Identifier: Apache-2.0
"""Worker: vLLM's model classes, returning as many rows for an image as the prompt has room for."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from tokenprune.errors import PlaceholderMismatchError, TokenPruneError
from tokenprune.integrations.shared.towers.patch_grid import find_image_grid
from tokenprune.integrations.vllm.selection.before_llm import build_segments, choose
from tokenprune.integrations.vllm.settings.configuration import check_engine, get_server_setting, runs_in_llm
from tokenprune.integrations.vllm.settings.items import get_method
from tokenprune.integrations.vllm.settings.plan import MODALITIES, Plan, field_name
from tokenprune.integrations.vllm.settings.position_checks import has_original_positions
from tokenprune.integrations.vllm.settings.towers import is_known
from tokenprune.integrations.vllm.worker import positions
from tokenprune.integrations.vllm.worker.clock import Clock
from tokenprune.integrations.vllm.worker.position_notes import PositionNotes
from tokenprune.integrations.vllm.worker.requests import get_batch_requests
from tokenprune.integrations.vllm.worker.rows import AwaitedRows
from tokenprune.integrations.vllm.worker.runner import prepare_runner
from tokenprune.integrations.vllm.worker.tower import TowerReader
from tokenprune.integrations.vllm.worker.tower_rows import split_plans
from tokenprune.integrations.vllm.worker.tower_treatments import TowerResult, create_tower_treatment
from tokenprune.integrations.vllm.worker.weights import build_mapper
from tokenprune.kernels.transfer import to_device
from tokenprune.models.families import Family
from tokenprune.selection.method import Pruner
from tokenprune.selection.segments import Segments

# Fields of an item that the models' own rules of positions read.
_SHAPES = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
# Names under which a model gets how many tiles each image has.
_TILES = ("num_patches", "image_num_patches")


_Model: Any = object  # vLLM's class of the model follows it in `create_reducing_class`


class ReducingModel(_Model):
    """Mixed into a model class of vLLM. Without a tokenprune setting the model behaves as before."""

    tokenprune_family: Family
    tokenprune_axes = 0  # on which kept tokens are placed (see positions.py)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.tokenprune_active = get_server_setting(vllm_config.model_config) is not None
        self.tokenprune_original = self.tokenprune_active and has_original_positions(vllm_config.model_config)
        if self.tokenprune_active:
            check_engine(vllm_config, self.tokenprune_family, self.tokenprune_original)
            prepare_runner(vllm_config)
            self.tokenprune_tower = TowerReader(self) if is_known(self.config) else None
            self.tokenprune_clock = Clock.from_config(vllm_config)
        if runs_in_llm(vllm_config.model_config):
            from tokenprune.integrations.vllm.in_llm.attach import attach

            self.tokenprune_in_llm = attach(self, vllm_config)
        self.tokenprune_width = vllm_config.model_config.hf_text_config.hidden_size
        self.tokenprune_cache: LRUCache[Any, tuple[Plan, Any]] = LRUCache(64)  # see `_get_cached`

    def embed_multimodal(self, **kwargs: Any) -> Any:
        encoded = {modality: kwargs.pop(field_name(modality), None) for modality in MODALITIES}
        if not self.tokenprune_active:
            return super().embed_multimodal(**kwargs)
        modality, data = next(((name, data) for name, data in encoded.items() if data is not None), ("image", ()))
        plans = [Plan.decode(one) for one in data]
        if not plans and self.tokenprune_family.vllm.audio:
            return super().embed_multimodal(**kwargs)
        rows: list[Tensor] = []
        asked = get_batch_requests(len(plans))
        for start, end in split_plans(self.config, plans):
            whole = end - start == len(plans)
            part = kwargs if whole else {n: _part(value, kwargs, modality, start, end) for n, value in kwargs.items()}
            rows += self._embed(super().embed_multimodal, plans[start:end], part, modality, asked[start:end])
        return tuple(rows)

    def _embed(
        self, embed: Any, plans: list[Plan], kwargs: dict[str, Any], modality: str, asked: list[dict[str, str]]
    ) -> list[Tensor]:
        """Return the rows for the prompt's places of items that the tower treats alike.

        embed: the model's own `embed_multimodal`. asked: see `of_batch`.
        """
        tower = create_tower_treatment(self, plans, kwargs, modality)
        with tower.activate():
            features = embed(**kwargs)
        if len(features) and len(plans) != len(features):
            raise PlaceholderMismatchError(f"{len(features)} items came with {len(plans)} plans")
        reduced = list[Tensor]()
        items = [_item(kwargs, index) for index in range(len(features))]
        found = zip(itertools.count(), plans, features, items, tower.get_results(features), asked, strict=False)
        for (_, shapes, _), group in itertools.groupby(found, _alike):
            _, (plan, *_), every, (item, *_), (result, *_), requests = zip(*group, strict=True)
            rows = [one.reshape(-1, one.shape[-1]) for one in every]
            if any(len(one) != sum(plan.counts) for one in rows):
                raise PlaceholderMismatchError(
                    f"the encoder made {[len(one) for one in rows]} tokens of items where the processor counted "
                    f"{sum(plan.counts)} each"
                )
            if not plan.reduces:
                reduced += map(self._whole, rows)
                continue
            size = {"modality": modality, "tokens_in": sum(plan.counts), "tokens_out": sum(plan.keep)}
            logs = [{"keep": plan.setting.joint_keep} | request | size for request in requests]
            with self.tokenprune_clock.timing(get_method(plan.setting).name, rows[0].device, *logs):
                together = rows[0] if len(rows) == 1 else torch.cat(rows)
                reduced += self._reduce(plan, together, modality, item, shapes, result)
        return reduced

    def _reduce(
        self, plan: Plan, rows: Tensor, modality: str, item: Mapping[str, Any], shapes: str, result: TowerResult
    ) -> Tensor:
        """Return the rows `[B, R, W]` for the places in the prompt of B items that are alike.

        rows: `[B * n, W]`, the encoder's features. item: of any of them. shapes: its content, as a key. result: the
        vision tower's, of one item; empty for several.
        """
        kept = result.kept
        if kept is None:
            method, count = plan.setting.method, len(rows) // sum(plan.counts)
            assert isinstance(method, Pruner)

            def segments_of_items(plan: Plan, *_: Any) -> Segments:
                frames, grid = plan.frame_sizes(self.tokenprune_family.after_frames), self._grid(item, modality)
                return build_segments(plan.counts, grid, modality, rows.device, self._image_grid, frames, count)

            segments = self._get_cached(segments_of_items, plan, shapes, modality, rows.device, count)
            norm, width = self.tokenprune_norm, self.tokenprune_width
            kept, rows = choose(method, rows, width, segments, plan.keep * count, norm, result.encoded)
        return self._placed(
            plan, self._with_text(plan, AwaitedRows.from_kept(plan, rows, kept)), modality, item, shapes
        )

    def _get_cached(self, make: Callable[..., Any], plan: Plan, *of: Hashable) -> Any:
        """Return `make(plan, *of)`, made for the first of the items that are alike: their plans are one object."""
        key = (make.__name__, id(plan), *of)
        if (found := self.tokenprune_cache.get(key)) is None:
            found = self.tokenprune_cache[key] = plan, make(plan, *of)
        return found[1]

    def _place_axes(self, axes: int, vllm_config: Any) -> None:
        self.tokenprune_axes, self.tokenprune_notes = axes, PositionNotes()
        # Of this object, not of the class. V2 then calls what we follow there, V1 would call the model.
        self.supports_multimodal_pruning = vllm_config.use_v2_model_runner

    @property
    def tokenprune_norm(self) -> Any:
        """The last norm of the language model, if it has one."""
        decoder = self.get_language_model()
        return getattr(getattr(decoder, "model", decoder), "norm", None)

    def _with_text(self, plan: Plan, awaited: AwaitedRows) -> AwaitedRows:
        """Put the embeddings of text that stands within an item among its rows; deeper layers get zeros there."""
        rows, is_text = awaited.rows, awaited.is_text
        if is_text is None:
            return awaited
        # Placeholders may lie beyond.
        ids = torch.where(is_text, to_device(plan.tokens, rows.device)[awaited.indices], 0).flatten()
        text = self.get_language_model().embed_input_ids(ids).to(rows.dtype).unflatten(0, is_text.shape)
        text = torch.nn.functional.pad(text, (0, rows.shape[-1] - text.shape[-1]))
        return dataclasses.replace(awaited, rows=torch.where(is_text[..., None], text, rows))

    def _grid(self, item: Mapping[str, Any], modality: str) -> tuple[int, int, int] | None:
        shape = item.get(f"{modality}_grid_thw")
        if shape is None:
            return None
        merge = self.config.vision_config.spatial_merge_size
        frames, height, width = shape.data.tolist()
        return frames, height // merge, width // merge

    def _image_grid(self, count: int) -> tuple[int, int, int] | None:
        family = self.tokenprune_family
        return find_image_grid(family, count, self.config, whole_image=not family.vllm.per_run)

    def _whole(self, rows: Tensor) -> Tensor:
        """Return the rows of an item that loses nothing, with columns that nobody reads where others have some."""
        return (
            torch.nn.functional.pad(rows, (0, positions.DIGITS * self.tokenprune_axes))
            if self.tokenprune_axes
            else rows
        )

    def _placed(self, plan: Plan, awaited: AwaitedRows, modality: str, item: Mapping[str, Any], shapes: str) -> Tensor:
        """Return the rows, with columns of their positions in the full prompt if the runner sets positions."""
        raise NotImplementedError

    def get_encoder_cudagraph_config(self) -> Any:
        config = super().get_encoder_cudagraph_config()
        # A captured encoder would go past embed_multimodal.
        return dataclasses.replace(config, modalities=[]) if self.tokenprune_active else config


class ReducingLineModel(ReducingModel):
    """For models with one axis of positions. vLLM counts these itself, unless the setting asks for original ones: then
    it treats the model as one with M-RoPE."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.tokenprune_original:
            self.supports_mrope = True  # of this object, not of the class
            self._place_axes(1, vllm_config)
            positions.prepare_decoder(self.get_language_model(), vllm_config.model_config)

    def _placed(self, plan: Plan, awaited: AwaitedRows, modality: str, item: Mapping[str, Any], shapes: str) -> Tensor:
        rows = awaited.rows
        if not self.tokenprune_original:
            return rows
        _check_span(plan.length - 1)
        columns = positions.encode_columns(awaited.indices.flatten()[None], rows.dtype)
        return torch.cat([rows, columns.unflatten(0, rows.shape[:2])], dim=-1)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        placed, delta, notes = positions.compute_line_positions(input_tokens, mm_features)
        self.tokenprune_notes.record(notes)
        return placed, delta


class ReducingMropeModel(ReducingModel):
    """For models with three axes of positions."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.tokenprune_active:
            self._place_axes(3, vllm_config)
            # The runner's switch is ours now; the model's own pruning of videos hangs on the same one.
            self.is_multimodal_pruning_enabled = False

    def _rule(self, tokens: list[int], features: list[Any]) -> tuple[Tensor, int]:
        return super().get_mrope_input_positions(tokens, features)

    def _placed(self, plan: Plan, awaited: AwaitedRows, modality: str, item: Mapping[str, Any], shapes: str) -> Tensor:
        rows = awaited.rows

        def columns(plan: Plan, *_: Any) -> Tensor:
            within = positions.compute_item_positions(self._rule, plan, item, modality)
            _check_span(int(within.max()))
            return to_device(positions.encode_columns(within, rows.dtype), rows.device)

        known = self._get_cached(columns, plan, shapes, modality, rows.device, rows.dtype)
        return torch.cat([rows, known.index_select(0, awaited.indices.flatten()).unflatten(0, rows.shape[:2])], dim=-1)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        if not self.tokenprune_active:
            return super().get_mrope_input_positions(input_tokens, mm_features)
        placed, delta, notes = positions.compute_prompt_positions(self._rule, input_tokens, mm_features)
        self.tokenprune_notes.record(notes)
        return placed, delta


def _check_span(last: int) -> None:
    if last >= 256**2:
        raise TokenPruneError(f"an item spans {last} positions; at most {256**2} fit into its embeddings")


def _part(value: Any, kwargs: Mapping[str, Any], modality: str, start: int, end: int) -> Any:
    """Return the part of an argument of `embed_multimodal` for the items from `start` to `end` (exclusive)."""
    if isinstance(value, Tensor) and not value.ndim:
        return value  # it is the same for all
    sizes = next((kwargs[name] for name in (f"{modality}_grid_thw", *_TILES) if kwargs.get(name) is not None), None)
    if sizes is not None and len(value) != len(sizes):  # rows for patches or tiles, of all items end to end
        counts = (math.prod(torch.as_tensor(one, device="cpu").flatten().tolist()) for one in sizes)
        ends = [0, *itertools.accumulate(counts)]
        return value[ends[start] : ends[end]]
    return value[start:end]


def _item(kwargs: Mapping[str, Any], index: int) -> MultiModalKwargsItem:
    """Return the shapes of one item of a batch."""
    field = MultiModalBatchedField()
    present = [key for key in _SHAPES if kwargs.get(key) is not None]
    return MultiModalKwargsItem({key: MultiModalFieldElem(data=kwargs[key][index], field=field) for key in present})


def _alike(found: tuple[int, Plan, Tensor, Mapping[str, Any], TowerResult, Any]) -> tuple[int, str, int | None]:
    """Return what is equal for items among which a method chooses at once. found: number, plan, features, shapes,
    result of the tower, and request of an item."""
    number, plan, _, item, result, _ = found
    plain = result.kept is None and result.encoded is None
    return id(plan), repr([element.data.tolist() for element in item.values()]), None if plain else number


@cache
def create_reducing_class(base: type, family: Family) -> type:
    """Return `base` with the reduction mixed in, under the same name."""
    mixin = ReducingMropeModel if family.vllm.mrope else ReducingLineModel
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "tokenprune_family": family}
    if family.vllm.nested:
        names["hf_to_vllm_mapper"] = build_mapper(base)
    return type(base)(base.__name__, (mixin, base), names)
