# SPDX-License-Identifier: Apache-2.0
"""An image or video of a request at its place in the prompt, and what a setting makes of it."""

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
    """The prompt text of an item, with its numbers of visual tokens and the names of its setting in metrics.

    before, after: visual tokens without and with the setting. left: tokens dropped between the vision tower and the
    prompt. segments: how many budgets the item has. more: what the request counted. vLLM caches this object with the
    item, so a cache hit has the numbers too.
    """

    before: int = 0
    after: int = 0
    left: int = 0
    label: tuple[str, str] = ("off", "1")
    segments: int = 1
    more: Any = None


@dataclass(frozen=True)
class ModelItems:
    """Facts that all items of a served model share. info: vLLM's `ProcessingInfo` of the model."""

    info: BaseProcessingInfo
    family: Family
    config: Any

    @classmethod
    def from_info(cls, info: BaseProcessingInfo) -> ModelItems:
        model_config = info.ctx.model_config
        return cls(info, family_of(model_config), model_config.hf_config)


@dataclass(frozen=True)
class PromptItem:
    """An item that the model's processor has processed: a plan follows from it and a setting alone.

    content: its text in the prompt. data: what was made of it. items: of its request, before they were processed.
    kwargs:  the request's `mm_processor_kwargs`, without ours.
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
        full, is_embed = self.content.full, self.content.is_embed
        return find_runs(full, None if is_embed is None else is_embed(full))

    @cached_property
    def frames(self) -> int:
        """Number of frames of a video that reach the language model, 0 if it is not known; of an image 1."""
        if self.modality == "image":
            return 1
        grid = self.data.get("video_grid_thw")
        if grid is not None:
            return int(grid.data[0])
        videos = self.items["video"]
        return videos.get_num_frames(self.index) if isinstance(videos, VideoProcessorItems) else 0

    def make_plan(self, setting: Setting) -> Plan:
        """Return the plan by which the model carries a setting out. Raises a TokenPruneError for an item that cannot
        be served under it."""
        acts, family = _act_of(setting), self.model.family
        plan = Plan.build(setting, self.text, family.vllm.per_run, acts.count_budgets(self), family.after_video)
        return acts.check_plan(plan, self)

    def count_original(self, plan: Plan) -> int:
        """Return how many visual tokens the item has as it came."""
        items = self.items[self.modality]
        return items.full[self.index] if isinstance(items, SmallerImages) else sum(plan.counts)

    def count_kept_under(self, setting: Setting) -> int:
        """Return how many visual tokens a setting would keep of an unpruned item; raises like `make_plan`."""
        if setting.pixel_method is not None:
            shrinker = Shrinker(setting, self.model.info, self.kwargs)
            if self.modality != "video":
                return count_kept(setting, shrinker.count_tokens(self.items["image"], self.index))
            shrinker.check_videos(self.items)
        return sum(self.make_plan(setting).keep)


# -- what a setting does before the features: nothing, or merge tokens or drop units in the tower


@dataclass(frozen=True)
class _AfterTower:
    setting: Setting

    def count_budgets(self, item: PromptItem) -> int:
        """Return in how many frames, or tiles, an item comes that may have a budget each."""
        return item.frames

    def check_plan(self, plan: Plan, item: PromptItem) -> Plan:
        """Return an item's plan once it is checked. Raises a TokenPruneError for one that cannot be carried out."""
        return plan


class _Dropping(_AfterTower):
    def count_budgets(self, item: PromptItem) -> int:
        count = sum(number for _, embed, number in item.text if embed)
        method = get_method(self.setting)
        assert isinstance(method, TowerMethod)
        return towers.tiles_of(method, item.model.config, count)


class _Merging(_Dropping):
    def count_budgets(self, item: PromptItem) -> int:
        return item.frames if item.modality == "video" else super().count_budgets(item)

    def check_plan(self, plan: Plan, item: PromptItem) -> Plan:
        towers.check_reachable(self.setting, item.model.config, plan.counts, item.modality == "video")
        if crops(item.model.config):
            check_tiles(self.setting, item.model.info, item.data, sum(plan.keep))
        return plan


class _DroppingByPixels(_Dropping):
    def check_plan(self, plan: Plan, item: PromptItem) -> Plan:
        info, count = item.model.info, sum(plan.counts)
        kept = select_units(self.setting, item.data, item.modality, info, item.kwargs, count)
        return dataclasses.replace(plan, kept=kept)


def _act_of(setting: Setting) -> _AfterTower:
    if setting.keeps_all_tokens:
        return _AfterTower(setting)
    merges, pixels, any_of_them = towers.merges_in_tower, towers.drops_by_pixels, towers.acts_in_tower
    kinds = {_Merging: merges, _DroppingByPixels: pixels, _Dropping: any_of_them}
    return next((kind for kind, acts in kinds.items() if acts(setting.method)), _AfterTower)(setting)
