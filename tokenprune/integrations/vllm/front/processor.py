# SPDX-License-Identifier: Apache-2.0
"""Front end: write the shorter prompt, and attach to each item the plan by which the model makes it come true."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem
from vllm.multimodal.parse import VideoProcessorItems
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.processor import (
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from tokenprune.abilities import reads_tower
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.vllm.front import metrics
from tokenprune.integrations.vllm.front.pixels import Shrinker, SmallerImages
from tokenprune.integrations.vllm.front.served import Served, TrackedSetting, followed
from tokenprune.integrations.vllm.front.units import kept_units
from tokenprune.integrations.vllm.log import tell
from tokenprune.integrations.vllm.setting.configuration import check_model, configured, family_of, offered
from tokenprune.integrations.vllm.setting.offer import PROFILE
from tokenprune.integrations.vllm.setting.plan import MODALITIES, Plan, field_name
from tokenprune.integrations.vllm.setting.position_checks import longest, original_positions
from tokenprune.integrations.vllm.setting.settings import KEY, ServedSetting
from tokenprune.integrations.vllm.setting.tower_items import check_items
from tokenprune.integrations.vllm.setting.towers import check_reachable, drops_units, merges_in_tower, tiles_of
from tokenprune.sites.encoder import EncoderMethod
from tokenprune.view.registry import compares_frames

# How an item is put into the prompt, and the field that says what is written.
_WRITTEN = {PromptReplacement: "replacement", PromptInsertion: "insertion"}


@dataclasses.dataclass
class CountedDetails(PromptUpdateDetails):
    """The prompt text of an item, with its numbers of visual tokens and the names of its setting in metrics.

    before, after: visual tokens without and with the setting. left: tokens dropped between the vision tower and the
    prompt. vLLM caches this object with the item, so a cache hit has the numbers too.
    """

    before: int = 0
    after: int = 0
    left: int = 0
    label: tuple[str, str] = ("off", "1")


# Prompt texts of the items of the request that this thread processes.
_written: ContextVar[list[CountedDetails]] = ContextVar("written")


class ReducingProcessor(BaseMultiModalProcessor):
    """Mixed into vLLM's processor of a model, whatever its class is."""

    _dummy = False  # while vLLM measures the largest item, which a request may ask for with {"off": true}

    def _setting(self, kwargs: Mapping[str, object]) -> ServedSetting | None:
        """Return the setting in force for a request's `mm_processor_kwargs`; None on a server without one."""
        server = configured(self.info.ctx.model_config)
        if server is None:
            if KEY in kwargs:
                raise OptionError(
                    f"this server was not started with a {KEY} setting, so a request cannot change it: start it with "
                    f'--mm-processor-kwargs \'{{"{KEY}": {{"off": true}}}}\' to let requests choose'
                )
            return None
        asked: Any = kwargs.get(KEY, {})
        offer = asked.offer if isinstance(asked, TrackedSetting) else offered(self.info.ctx.model_config)
        setting = ServedSetting() if self._dummy else offer.setting(asked)
        try:
            check_model(setting, self.info.ctx.model_config)
        except UnsupportedSetupError as error:
            raise OptionError(str(error)) from error  # the server goes on, and the client reads why
        return setting

    def check_pixels(self) -> None:
        """Raise OptionError if the server's setting or a profile asks for smaller images where they save nothing."""
        model_config = self.info.ctx.model_config
        for name in () if configured(model_config) is None else offered(model_config).profiles:
            setting = self._setting({KEY: {PROFILE: name}})
            if setting is not None and setting.pixels is not None:
                Shrinker(setting, self.info, {}).check()

    def _get_mm_hashes(self, inputs: Any) -> Any:
        setting = self._setting(inputs.hf_processor_mm_kwargs)
        if setting is not None:
            # The setting in force, not only what the request says: caches may outlive or be shared by servers.
            key = setting.cache_key()
            if original_positions(self.info.ctx.model_config):
                key |= {"positions": "original"}  # which travel with an item's embeddings
            kwargs = {**inputs.hf_processor_mm_kwargs, KEY: key}
            inputs = dataclasses.replace(inputs, hf_processor_mm_kwargs=kwargs)
        return super()._get_mm_hashes(inputs)

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        setting = self._setting(hf_kwargs)  # raise before any work is done
        hf_kwargs = _without(hf_kwargs)
        if setting is not None and setting.pixels is not None:
            hf_kwargs = Shrinker(setting, self.info, hf_kwargs).shrink(mm_items)
        return super()._apply_hf_processor_main(mm_items=mm_items, hf_kwargs=hf_kwargs)

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        return super()._get_mm_fields_config(hf_inputs, _without(hf_processor_mm_kwargs))

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        setting = self._setting(hf_processor_mm_kwargs)
        updates = super()._get_prompt_updates(
            mm_items=mm_items, hf_processor_mm_kwargs=_without(hf_processor_mm_kwargs), out_mm_kwargs=out_mm_kwargs
        )
        if setting is None:
            return updates
        return [
            self._reduced(update, setting, mm_items, _without(hf_processor_mm_kwargs), out_mm_kwargs)
            if update.modality in MODALITIES
            else update
            for update in updates
        ]

    def _reduced(
        self,
        update: PromptUpdate,
        setting: ServedSetting,
        mm_items: Any,
        kwargs: Mapping[str, object],
        out_mm_kwargs: Any,
    ) -> PromptUpdate:
        name = next((name for kind, name in _WRITTEN.items() if isinstance(update, kind)), None)
        if name is None:
            raise UnsupportedSetupError(f"{type(self).__name__} puts images into the prompt by {update.mode}")

        def content_of(index: int) -> PromptUpdateDetails:
            content = update._resolve_content(index)
            embeds = None if content.is_embed is None else content.is_embed(content.full).tolist()
            family, compares = family_of(self.info.ctx.model_config), compares_frames(setting.method)
            # Images stay as they are where frames are compared.
            own = setting.without_method() if compares and update.modality == "image" else setting
            merges = merges_in_tower(own.method) and not own.removes_nothing
            asked = update.modality == "video" and (compares or merges or setting.per == "frame")
            frames = _frames(mm_items, out_mm_kwargs, index) if asked else 1
            config = self.info.ctx.model_config.hf_config
            if merges and not asked:
                frames = tiles_of(_merger(own), config, len(content.full) if embeds is None else sum(embeds))
            plan = Plan.make(own, content.full, embeds, family.vllm.per_run, frames, family.after_video)
            if merges:
                check_reachable(own, config, plan.counts, update.modality == "video")
            item = out_mm_kwargs[update.modality][index]
            if drops_units(own.method) and not own.removes_nothing:
                kept = kept_units(own, item, update.modality, self.info, kwargs, sum(plan.counts))
                plan = dataclasses.replace(plan, kept=kept)
            # The same moment at which vLLM itself reads the item: it is stored, cached and sent after this.
            element = MultiModalFieldElem(data=plan.encode(), field=MultiModalBatchedField(keep_on_cpu=True))
            item[field_name(update.modality)] = element
            if plan.reduces:
                content = PromptUpdateDetails.select_token_id(plan.reduced(), plan.placeholder)
            items = mm_items[update.modality]
            full = items.full[index] if isinstance(items, SmallerImages) else sum(plan.counts)
            counts = full, sum(plan.keep), sum(plan.counts) - sum(plan.keep)
            return CountedDetails(content.full, content.is_embed, *counts, own.label())

        return dataclasses.replace(update, **{name: content_of})

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> Any:
        applied = super()._maybe_apply_prompt_updates(mm_items, mm_res)
        details = [update[0].content for items in mm_res.prompt_updates.values() for update in items if update]
        counted = [one for one in details if isinstance(one, CountedDetails) and not self._dummy]
        if original_positions(self.info.ctx.model_config):
            self._check_length(sum(one.left for one in counted))
        for one in counted:
            metrics.count(self.info.ctx.model_config, "in", *one.label, one.before)
            metrics.count(self.info.ctx.model_config, "out", *one.label, one.after)
            _written.get([]).append(one)
        return applied

    def _check_length(self, left: int) -> None:
        """Raise OptionError if rope may have no angles for the answer to a prompt that lost `left` visual tokens."""
        model_config = self.info.ctx.model_config
        spare = longest(model_config) - model_config.max_model_len
        if left and left >= spare:
            raise OptionError(
                f"{left} visual tokens are left out of this prompt, and their positions stay empty: this model has "
                f"positions for less than {spare}. Send fewer or smaller images, or keep more of them"
            )

    def get_dummy_mm_inputs(self, *args: Any, **kwargs: Any) -> Any:
        self._dummy = configured(self.info.ctx.model_config) is not None
        try:
            return super().get_dummy_mm_inputs(*args, **kwargs)
        finally:
            self._dummy = False

    def apply(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model_config, what = self.info.ctx.model_config, "setting"
        if configured(model_config) is None or self._dummy:
            self._setting(inputs.hf_processor_mm_kwargs)
            return super().apply(inputs, *args, **kwargs)
        items: list[CountedDetails] = []
        _written.set(items)
        served = Served()
        try:
            asked = followed(inputs.hf_processor_mm_kwargs.get(KEY, {}), offered(model_config))
            whole = {**inputs.hf_processor_mm_kwargs, KEY: asked}
            inputs, served = dataclasses.replace(inputs, hf_processor_mm_kwargs=whole), asked.served
            setting, what = self._setting(inputs.hf_processor_mm_kwargs), "input"
            assert setting is not None  # the server has one
            # Before images are read.
            if family_of(model_config).vllm.mrope and not setting.is_off:
                counts, config = inputs.mm_data_items.get_all_counts(), self.info.get_hf_config()
                _check_placeholders(inputs.prompt, counts, config, not setting.removes_nothing)
            if reads_tower(setting.method) or merges_in_tower(setting.method):
                check_items(setting.acting, setting, inputs.mm_data_items, self.info)
            made = super().apply(inputs, *args, **kwargs)
        except TokenPruneError as error:
            metrics.refused(model_config, error, what, served)
            raise
        counts = inputs.mm_data_items.get_all_counts()
        served.profile = asked.offer.label(asked)
        served.method, served.keep = setting.label()[0], setting.whole_keep
        served.images, served.videos = counts.get("image", 0), counts.get("video", 0)
        served.tokens_in = sum(one.before for one in items)
        served.tokens_out = sum(one.after for one in items)
        metrics.chose(model_config, served)
        if asked.offer.log:
            tell("request", **metrics.request_id(served), **served.fields())
        return made


def _merger(setting: ServedSetting) -> EncoderMethod:
    assert isinstance(setting.method, EncoderMethod)
    return setting.method


def _frames(mm_items: Any, out_mm_kwargs: Any, index: int) -> int:
    """Return the number of frames of a video that reach the language model; 0 if it is not known."""
    grid = out_mm_kwargs["video"][index].get("video_grid_thw")
    if grid is not None:
        return int(grid.data[0])
    videos = mm_items["video"]
    return videos.get_num_frames(index) if isinstance(videos, VideoProcessorItems) else 0


def _without(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments of the model's own processor, without our key."""
    return {key: value for key, value in kwargs.items() if key != KEY}


def _check_placeholders(prompt: Sequence[int], items: Mapping[str, int], config: Any, reduces: bool) -> None:
    """Positions of kept tokens follow from the placeholders that a prompt holds, and counted from the text before them:
    there have to be no others, and there has to be some text. Those of the answer follow from the text behind."""
    tokens = {"image": config.image_token_id, "video": config.video_token_id}
    for modality, token in tokens.items():
        found, wanted = prompt.count(token), items.get(modality, 0)
        if found > wanted:
            raise OptionError(
                f"the prompt holds {found} {modality} placeholders for {wanted} {modality}s; leave the others out"
            )
    if any(one in tokens.values() and other in tokens.values() for one, other in itertools.pairwise(prompt)):
        raise OptionError(
            "two images stand side by side without a token between them; put the model's start and end tags around "
            "each, as its chat template does"
        )
    if reduces and prompt[-1:] and prompt[-1] in tokens.values():
        raise OptionError(
            "the prompt ends with an image, so that nothing tells where its answer stands; put the model's end tag "
            "behind it, as its chat template does"
        )


@cache
def reducing_class(base: type[BaseMultiModalProcessor]) -> type[BaseMultiModalProcessor]:
    """Return `base` with ReducingProcessor mixed in, under the same name."""
    kind: Any = type(base)
    return kind(base.__name__, (ReducingProcessor, base), {"__module__": base.__module__})
