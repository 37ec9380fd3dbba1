# SPDX-License-Identifier: Apache-2.0
"""An image or video of a request at its place in the prompt, and what a setting makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.parse import VideoProcessorItems
from vllm.multimodal.processing import BaseProcessingInfo
from vllm.multimodal.processing.processor import PromptUpdateDetails

from tokenprune.integrations.vllm.front.pixels import Shrinker, SmallerImages, kept_units
from tokenprune.integrations.vllm.setting.configuration import family_of
from tokenprune.integrations.vllm.setting.plan import Plan
from tokenprune.integrations.vllm.setting.settings import ServedSetting
from tokenprune.integrations.vllm.setting.tower_items import check_tiles, crops
from tokenprune.integrations.vllm.setting.towers import check_reachable, drops_by_pixels, merges_in_tower, tiles_of
from tokenprune.sites.encoder import EncoderMethod
from tokenprune.view.registry import compares_frames


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
class PromptItem:
    """An item that the model's processor has processed.

    content:  its text in the prompt. items: of its request, before they were processed. fields: what was made of them,
    by modality. kwargs: the request's `mm_processor_kwargs`, without ours.
    """

    info: BaseProcessingInfo
    modality: str
    index: int
    content: PromptUpdateDetails
    items: Any
    fields: Any
    kwargs: Mapping[str, object]

    def own(self, setting: ServedSetting) -> ServedSetting:
        """Return what of a setting acts on this item: images stay as they are where frames are compared."""
        return setting.without_method() if compares_frames(setting.method) and self.modality == "image" else setting

    def plan(self, setting: ServedSetting) -> Plan:
        """Return the plan by which the model carries a setting out. Raises a TokenPruneError for an item that cannot
        be served under it."""
        own, config = self.own(setting), self.info.ctx.model_config.hf_config
        family = family_of(self.info.ctx.model_config)
        full, is_embed = self.content.full, self.content.is_embed
        embeds = None if is_embed is None else is_embed(full).tolist()
        merges = merges_in_tower(own.method) and not own.removes_nothing
        asked = self.modality == "video" and (compares_frames(own.method) or merges or own.per == "frame")
        frames = self._frames() if asked else 1
        if merges and not asked:
            assert isinstance(own.method, EncoderMethod)
            frames = tiles_of(own.method, config, len(full) if embeds is None else sum(embeds))
        plan = Plan.make(own, full, embeds, family.vllm.per_run, frames, family.after_video)
        if merges:
            check_reachable(own, config, plan.counts, self.modality == "video")
            if crops(config):
                check_tiles(own, self.info, self.fields[self.modality][self.index], sum(plan.keep))
        if drops_by_pixels(own.method) and not own.removes_nothing:
            item = self.fields[self.modality][self.index]
            kept = kept_units(own, item, self.modality, self.info, self.kwargs, sum(plan.counts))
            plan = dataclasses.replace(plan, kept=kept)
        return plan

    def before(self, plan: Plan) -> int:
        """Return how many visual tokens the item has as it came."""
        items = self.items[self.modality]
        return items.full[self.index] if isinstance(items, SmallerImages) else sum(plan.counts)

    def would_keep(self, setting: ServedSetting) -> int:
        """Return how many visual tokens a setting would leave of an item that is served in full. Raises as `plan`."""
        if setting.pixels is not None:
            shrinker = Shrinker(setting, self.info, self.kwargs)
            if self.modality != "video":
                return self.own(setting).count(shrinker.tokens(self.items["image"], self.index))
            shrinker.check_videos(self.items)
        return sum(self.plan(setting).keep)

    def _frames(self) -> int:
        """Return the number of frames of a video that reach the language model; 0 if it is not known."""
        grid = self.fields["video"][self.index].get("video_grid_thw")
        if grid is not None:
            return int(grid.data[0])
        videos = self.items["video"]
        return videos.get_num_frames(self.index) if isinstance(videos, VideoProcessorItems) else 0
