# SPDX-License-Identifier: Apache-2.0
"""An image or video in the prompt of a request, and its plan under a setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.multimodal.parse import VideoProcessorItems
from vllm.multimodal.processing import BaseProcessingInfo
from vllm.multimodal.processing.processor import PromptUpdateDetails

from tokenprune.integrations.vllm.frontend.pixels import Shrinker, SmallerImages, select_units
from tokenprune.integrations.vllm.settings import towers
from tokenprune.integrations.vllm.settings.configuration import family_of
from tokenprune.integrations.vllm.settings.items import count_kept, get_method
from tokenprune.integrations.vllm.settings.plan import Plan, Run, find_runs
from tokenprune.integrations.vllm.settings.tower_items import check_tiles, crops
from tokenprune.models.families import Family
from tokenprune.selection.sites.encoder import TowerMethod
from tokenprune.settings import Setting


@dataclass
class CountedDetails(PromptUpdateDetails):
    """Prompt text of an item with its token counts and metrics labels.

    vLLM caches this object with the item, so cache hits have the counts too.

    Attributes:
        before: Visual tokens before pruning.
        after: Visual tokens after pruning.
        left: Tokens dropped between the vision tower and the prompt.
        label: Metrics labels of the setting.
        segments: Number of budgets of the item.
        more: Additional record of the request (`ServedRequest.get_shadow`).
    """

    before: int = 0
    after: int = 0
    left: int = 0
    label: tuple[str, str] = ("off", "1")
    segments: int = 1
    more: Any = None


@dataclass(frozen=True)
class ModelItems:
    """Facts shared by all items of a served model. info: vLLM's `ProcessingInfo`."""

    info: BaseProcessingInfo
    family: Family
    config: Any

    @classmethod
    def from_info(cls, info: BaseProcessingInfo) -> ModelItems:
        model_config = info.ctx.model_config
        return cls(info, family_of(model_config), model_config.hf_config)


@dataclass(frozen=True)
class PromptItem:
    """An item after the model's processor. A setting determines its plan.

    Args:
        content: Text of the item in the prompt.
        data: Processed fields of the item.
        items: All items of the request before processing.
        kwargs: The request's `mm_processor_kwargs` without `KEY`.
    """

    model: ModelItems
    modality: str
    index: int
    content: PromptUpdateDetails
    data: Any
    items: Any
    kwargs: Mapping[str, object]

    @cached_property
    def text(self) -> tuple[Run, ...]:
        text, is_embed = self.content.full, self.content.is_embed
        return find_runs(text, None if is_embed is None else is_embed(text))

    @cached_property
    def frames(self) -> int:
        """Number of frames of a video in the language model, 0 if unknown. 1 for an image."""
        if self.modality == "image":
            return 1
        grid = self.data.get("video_grid_thw")
        if grid is not None:
            return int(grid.data[0])
        videos = self.items["video"]
        return videos.get_num_frames(self.index) if isinstance(videos, VideoProcessorItems) else 0

    def make_plan(self, setting: Setting) -> Plan:
        """Return the plan of the item under a setting; raise a TokenPruneError if the setting does not support it."""
        kind, family = _find_kind(setting), self.model.family
        plan = Plan.build(setting, self.text, family.vllm.per_run, kind.count_budgets(self), family.after_video)
        return kind.check_plan(plan, self)

    def count_original(self, plan: Plan) -> int:
        """Return the number of visual tokens of the item as received."""
        items = self.items[self.modality]
        return items.full[self.index] if isinstance(items, SmallerImages) else sum(plan.counts)

    def count_kept_under(self, setting: Setting) -> int:
        """Return the number of visual tokens that a setting would keep; raises like `make_plan`."""
        if setting.pixel_method is not None:
            shrinker = Shrinker(setting, self.model.info, self.kwargs)
            if self.modality != "video":
                return count_kept(setting, shrinker.count_tokens(self.items["image"], self.index))
            shrinker.check_videos(self.items)
        return sum(self.make_plan(setting).keep)


# -- settings by the stage of their method


@dataclass(frozen=True)
class _AfterTower:
    """Rules for the plan of an item, for a setting without a method or with a method after the tower.

    Subclasses have the rules for methods at other stages.
    """

    setting: Setting

    def count_budgets(self, item: PromptItem) -> int:
        """Return the number of frames or tiles of an item that may have their own budgets."""
        return item.frames

    def check_plan(self, plan: Plan, item: PromptItem) -> Plan:
        """Return the plan of an item after checks; raise a TokenPruneError if it cannot be carried out."""
        return plan


class _Dropping(_AfterTower):
    """Rules for a method that drops units inside the tower. Each tile may have its own budget."""

    def count_budgets(self, item: PromptItem) -> int:
        count = sum(length for _, embed, length in item.text if embed)
        method = get_method(self.setting)
        assert isinstance(method, TowerMethod)
        return towers.tiles_of(method, item.model.config, count)


class _Merging(_Dropping):
    """Rules for a method that merges tokens inside the tower. Each tile or frame may have its own budget."""

    def count_budgets(self, item: PromptItem) -> int:
        return item.frames if item.modality == "video" else super().count_budgets(item)

    def check_plan(self, plan: Plan, item: PromptItem) -> Plan:
        towers.check_reachable(self.setting, item.model.config, plan.counts, item.modality == "video")
        if crops(item.model.config):
            check_tiles(self.setting, item.model.info, item.data, sum(plan.keep))
        return plan


class _DroppingByPixels(_Dropping):
    """Rules for a method that drops units in the tower. The front end selects these units from pixels."""

    def check_plan(self, plan: Plan, item: PromptItem) -> Plan:
        info, count = item.model.info, sum(plan.counts)
        kept = select_units(self.setting, item.data, item.modality, info, item.kwargs, count)
        return dataclasses.replace(plan, kept=kept)


def _find_kind(setting: Setting) -> _AfterTower:
    if setting.keeps_all_tokens:
        return _AfterTower(setting)
    kinds = {
        _Merging: towers.merges_in_tower,
        _DroppingByPixels: towers.drops_by_pixels,
        _Dropping: towers.acts_in_tower,
    }
    return next((kind for kind, matches in kinds.items() if matches(setting.method)), _AfterTower)(setting)
