# SPDX-License-Identifier: Apache-2.0
"""Worker: vLLM's model classes, which return the number of rows per image that the prompt has placeholders for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor

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
from tokenprune.integrations.vllm.worker.items import get_group_key, get_item_shapes, slice_argument
from tokenprune.integrations.vllm.worker.position_notes import PositionNotes
from tokenprune.integrations.vllm.worker.requests import get_batch_requests
from tokenprune.integrations.vllm.worker.rope import prepare_decoder
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

_Model: Any = object  # `create_reducing_class` adds vLLM's model class as the next base


class ReducingModel(_Model):
    """Mixin for vLLM's model classes that removes rows from the output of `embed_multimodal`.

    Without a tokenprune setting of the server, the output is unchanged.
    """

    tokenprune_family: Family
    tokenprune_axes = 0  # number of position axes in the columns of rows (see positions.py)

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
        plans = [Plan.decode(item) for item in data]
        if not plans and self.tokenprune_family.vllm.audio:
            return super().embed_multimodal(**kwargs)
        rows: list[Tensor] = []
        requests = get_batch_requests(len(plans))
        for start, end in split_plans(self.config, plans):
            is_single = end - start == len(plans)
            part = (
                kwargs
                if is_single
                else {n: slice_argument(value, kwargs, modality, start, end) for n, value in kwargs.items()}
            )
            rows += self._embed(super().embed_multimodal, plans[start:end], part, modality, requests[start:end])
        return tuple(rows)

    def _embed(
        self, embed: Any, plans: list[Plan], kwargs: dict[str, Any], modality: str, requests: list[dict[str, str]]
    ) -> list[Tensor]:
        """Return the rows for items that the tower treats in the same way.

        Args:
            embed: `embed_multimodal` of vLLM's model class.
            requests: Log fields of each item; see `get_batch_requests`.
        """
        tower = create_tower_treatment(self, plans, kwargs, modality)
        with tower.activate():
            features = embed(**kwargs)
        if len(features) and len(plans) != len(features):
            raise PlaceholderMismatchError(f"The encoder got {len(features)} items with {len(plans)} plans.")
        reduced = list[Tensor]()
        items = [get_item_shapes(kwargs, index) for index in range(len(features))]
        entries = zip(itertools.count(), plans, features, items, tower.get_results(features), requests, strict=False)
        for (_, shapes, _), group in itertools.groupby(entries, get_group_key):
            _, (plan, *_), group_features, (item, *_), (result, *_), group_requests = zip(*group, strict=True)
            rows = [item_features.reshape(-1, item_features.shape[-1]) for item_features in group_features]
            if any(len(item_rows) != sum(plan.counts) for item_rows in rows):
                raise PlaceholderMismatchError(
                    f"The encoder made {[len(item_rows) for item_rows in rows]} tokens of items, and the processor "
                    f"counted {sum(plan.counts)} each."
                )
            if not plan.reduces:
                reduced += map(self._pad_columns, rows)
                continue
            size = {"modality": modality, "tokens_in": sum(plan.counts), "tokens_out": sum(plan.keep)}
            logs = [{"keep": plan.setting.joint_keep} | request | size for request in group_requests]
            with self.tokenprune_clock.timing(get_method(plan.setting).name, rows[0].device, *logs):
                joined = rows[0] if len(rows) == 1 else torch.cat(rows)
                reduced += self._reduce(plan, joined, modality, item, shapes, result)
        return reduced

    def _reduce(
        self, plan: Plan, rows: Tensor, modality: str, item: Mapping[str, Any], shapes: str, result: TowerResult
    ) -> Tensor:
        """Return the rows of B equal items for their placeholders in the prompt, shape (B, kept rows, width).

        Args:
            rows: Features of the encoder, shape (B * tokens, width).
            result: Result of the tower, for a single item. Empty for several items.
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
        awaited = self._insert_text(plan, AwaitedRows.from_kept(plan, rows, kept))
        return self._add_positions(plan, awaited, modality, item, shapes)

    def _get_cached(self, make: Callable[..., Any], plan: Plan, *arguments: Hashable) -> Any:
        """Return `make(plan, *key)`, computed for the first of several equal items: they share one plan object."""
        key = (make.__name__, id(plan), *arguments)
        if (entry := self.tokenprune_cache.get(key)) is None:
            entry = self.tokenprune_cache[key] = plan, make(plan, *arguments)
        return entry[1]

    def _place_axes(self, axes: int, vllm_config: Any) -> None:
        self.tokenprune_axes, self.tokenprune_notes = axes, PositionNotes()
        # Set on the instance, not on the class. V2 then calls the method that we wrap; V1 would call the model.
        self.supports_multimodal_pruning = vllm_config.use_v2_model_runner

    @property
    def tokenprune_norm(self) -> Any:
        """The last norm of the language model, if it has one."""
        decoder = self.get_language_model()
        return getattr(getattr(decoder, "model", decoder), "norm", None)

    def _insert_text(self, plan: Plan, awaited: AwaitedRows) -> AwaitedRows:
        """Insert the embeddings of text within an item among its rows. Features for deeper layers are zero there."""
        rows, is_text = awaited.rows, awaited.is_text
        if is_text is None:
            return awaited
        # Ids of placeholders may be outside the vocabulary.
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

    def _pad_columns(self, rows: Tensor) -> Tensor:
        """Pad the rows of an unpruned item to the width of rows with position columns."""
        return (
            torch.nn.functional.pad(rows, (0, positions.DIGITS * self.tokenprune_axes))
            if self.tokenprune_axes
            else rows
        )

    def _add_positions(
        self, plan: Plan, awaited: AwaitedRows, modality: str, item: Mapping[str, Any], shapes: str
    ) -> Tensor:
        """Return the rows, with columns of their positions in the unpruned prompt if the runner sets positions."""
        raise NotImplementedError


class ReducingLineModel(ReducingModel):
    """For models with one axis of positions.

    vLLM counts these positions itself, unless the setting requests original positions. Then vLLM treats the model as a
    model with M-RoPE.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.tokenprune_original:
            self.supports_mrope = True  # on the instance, not on the class
            self._place_axes(1, vllm_config)
            prepare_decoder(self.get_language_model(), vllm_config.model_config)

    def _add_positions(
        self, plan: Plan, awaited: AwaitedRows, modality: str, item: Mapping[str, Any], shapes: str
    ) -> Tensor:
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
    """For models with three axes of positions (M-RoPE)."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.tokenprune_active:
            self._place_axes(3, vllm_config)
            # `supports_multimodal_pruning` also enables the model's own pruning of videos, which must stay off.
            self.is_multimodal_pruning_enabled = False

    def _rule(self, tokens: list[int], features: list[Any]) -> tuple[Tensor, int]:
        return super().get_mrope_input_positions(tokens, features)

    def _add_positions(
        self, plan: Plan, awaited: AwaitedRows, modality: str, item: Mapping[str, Any], shapes: str
    ) -> Tensor:
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
        raise TokenPruneError(
            f"An item spans {last} positions, and its embeddings can encode {256**2}. Use smaller inputs."
        )


@cache
def create_reducing_class(base: type, family: Family) -> type:
    """Return `base` with the mixin of its family, under the same name."""
    mixin = ReducingMropeModel if family.vllm.mrope else ReducingLineModel
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "tokenprune_family": family}
    if family.vllm.nested:
        names["hf_to_vllm_mapper"] = build_mapper(base)
    return type(base)(base.__name__, (mixin, base), names)
