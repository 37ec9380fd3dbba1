# SPDX-License-Identifier: Apache-2.0
"""Front end: write the shorter prompt, and attach to each item the plan by which the model makes it come true."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.processor import (
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from tokenprune.abilities import reads_tower
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.vllm.front import by_age, metrics
from tokenprune.integrations.vllm.front.grace import by_key, offer_of
from tokenprune.integrations.vllm.front.items import CountedDetails, PromptItem, selecting
from tokenprune.integrations.vllm.front.pixels import Shrinker
from tokenprune.integrations.vllm.front.served import (
    FAILED,
    INPUT,
    KEPT,
    Served,
    TrackedSetting,
    followed,
    item_setting,
    shadow_of,
    shadow_outcome,
)
from tokenprune.integrations.vllm.log import tell
from tokenprune.integrations.vllm.setting.configuration import configured, family_of, in_force, offered
from tokenprune.integrations.vllm.setting.offer import PROFILE
from tokenprune.integrations.vllm.setting.plan import MODALITIES, field_name
from tokenprune.integrations.vllm.setting.position_checks import check_placeholders, longest, original_positions
from tokenprune.integrations.vllm.setting.settings import KEY, ServedSetting
from tokenprune.integrations.vllm.setting.tower_items import check_items
from tokenprune.integrations.vllm.setting.towers import merges_in_tower

logger = logging.getLogger(__name__)
# How an item is put into the prompt, and the field that says what is written.
_WRITTEN = {PromptReplacement: "replacement", PromptInsertion: "insertion"}


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
        setting = ServedSetting() if self._dummy else in_force(asked, offer, self.info.ctx.model_config)
        return ServedSetting() if isinstance(asked, TrackedSetting) and asked.served.full else setting

    def check_pixels(self) -> None:
        """Raise OptionError if the server's setting or a profile asks for smaller images where they save nothing."""
        model_config = self.info.ctx.model_config
        for name in () if configured(model_config) is None else offered(model_config).profiles:
            setting = self._setting({KEY: {PROFILE: name}})
            if setting is not None and setting.pixels is not None:
                Shrinker(setting, self.info, {}).check()

    def _get_mm_hashes(self, inputs: Any) -> Any:
        kwargs, hash_all = inputs.hf_processor_mm_kwargs, super()._get_mm_hashes
        setting, shadow = self._setting(kwargs), shadow_of(kwargs)
        if setting is None:
            return hash_all(inputs)

        def key_of(modality: str, index: int) -> by_age.Key:
            # The setting in force, not only what the request says: caches may outlive or be shared by servers.
            key = item_setting(kwargs, setting, modality, index).cache_key()
            if original_positions(self.info.ctx.model_config):
                key |= {"positions": "original"}  # which travel with an item's embeddings
            if shadow is not None:  # counted when the item is processed, and cached with it
                key |= {"shadow": item_setting(kwargs, shadow, modality, index).cache_key()}
            return key

        def under(part: Any, key: by_age.Key) -> Any:
            return hash_all(dataclasses.replace(part, hf_processor_mm_kwargs={**kwargs, KEY: key}))

        return by_age.hashes(inputs, key_of, under)

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Mapping[str, object]:
        kwargs, asked = super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached), inputs.hf_processor_mm_kwargs
        tracked = asked.get(KEY)
        return {**kwargs, KEY: tracked.without_cached(mm_is_cached)} if isinstance(tracked, TrackedSetting) else kwargs

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        setting = self._setting(hf_kwargs)  # raise before any work is done
        hf_kwargs = _without(hf_kwargs)
        if setting is not None and setting.pixels is not None:
            with selecting(setting):
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
            self._reduced(update, setting, mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
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
        of_request, rest = shadow_of(kwargs), _without(kwargs)

        def content_of(index: int) -> PromptUpdateDetails:
            content = update._resolve_content(index)
            item = PromptItem(self.info, update.modality, index, content, mm_items, out_mm_kwargs, rest)
            with selecting(setting):
                plan = item.plan(item_setting(kwargs, setting, update.modality, index))
            # The same moment at which vLLM itself reads the item: it is stored, cached and sent after this.
            element = MultiModalFieldElem(data=plan.encode(), field=MultiModalBatchedField(keep_on_cpu=True))
            out_mm_kwargs[update.modality][index][field_name(update.modality)] = element
            if plan.reduces:
                content = PromptUpdateDetails.select_token_id(plan.reduced(), plan.placeholder)
            counts = item.before(plan), sum(plan.keep), sum(plan.counts) - sum(plan.keep)
            made = CountedDetails(content.full, content.is_embed, *counts, plan.setting.label())
            made.segments = len(plan.counts)
            if of_request is not None:
                shadow = item_setting(kwargs, of_request, update.modality, index)
                made.would, made.outcome = item.would_keep_if_served(shadow)
                made.would_label = shadow.label()
            return made

        return dataclasses.replace(update, **{name: content_of})

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> Any:
        applied = super()._maybe_apply_prompt_updates(mm_items, mm_res)
        details = [update[0].content for items in mm_res.prompt_updates.values() for update in items if update]
        counted = [one for one in details if isinstance(one, CountedDetails) and not self._dummy]
        if original_positions(self.info.ctx.model_config):
            self._check_length(sum(one.left for one in counted))
        _written.get([]).extend(counted)
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
        served = Served()
        try:
            value = inputs.hf_processor_mm_kwargs.get(KEY, {})
            asked = followed(value, offer_of(model_config, lambda _: by_key(value)))
            asked = asked.with_items(inputs.mm_data_items.get_all_counts())
            whole = {**inputs.hf_processor_mm_kwargs, KEY: asked}
            inputs, served = dataclasses.replace(inputs, hf_processor_mm_kwargs=whole), asked.served
            self._setting(inputs.hf_processor_mm_kwargs)  # raises
            asked.draw()
            what = "input"
            try:
                made, items = self._apply(inputs, *args, **kwargs)
            except TokenPruneError as error:
                if in_full := asked.fall_back():
                    logger.debug("a request is served in full: %s", error)
                    made, items = self._apply(inputs, *args, **kwargs)
                metrics.failed(model_config, asked.offer.label(asked), error, in_full)
                if not in_full:
                    raise
        except TokenPruneError as error:
            metrics.refused(model_config, error, what, served)
            raise
        setting, counts = self._setting(inputs.hf_processor_mm_kwargs), inputs.mm_data_items.get_all_counts()
        assert setting is not None  # the server has one
        served.profile = asked.offer.label(asked)
        served.method, served.keep = setting.label()[0], setting.whole_keep
        served.images, served.videos = counts.get("image", 0), counts.get("video", 0)
        served.tokens_in = sum(one.before for one in items)
        served.tokens_out = sum(one.after for one in items)
        if setting.age is not None:
            own = [asked.of_item(setting, "image", index) for index in range(served.images)]
            served.aged = sum(one != setting.tiers[0] for one in own)
        for one in items:
            metrics.count(model_config, "in", *one.label, one.before)
            metrics.count(model_config, "out", *one.label, one.after)
        metrics.chose(model_config, served)
        if asked.shadow is not None:
            outcome = self._in_shadow(asked.shadow, inputs, items)
            served.shadow = sum(one.would or 0 for one in items) if outcome == KEPT else None
            kept = [(one.would_label, one.before, one.would or 0) for one in items]
            metrics.shadowed(model_config, served, outcome, kept)
        if asked.offer.log:
            tell("request", **metrics.request_id(served), **served.fields())
        return made

    def _apply(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[CountedDetails]]:
        """Process a request under the setting in force; return what vLLM makes of it, and the numbers of each item.
        Raises a TokenPruneError for one that cannot be served under it."""
        items: list[CountedDetails] = []
        _written.set(items)
        setting = self._setting(inputs.hf_processor_mm_kwargs)
        assert setting is not None  # the server has one
        self._check_input(setting, inputs)  # before images are read
        # A copy, which a method that acts on pixels writes to.
        own = dataclasses.replace(inputs, mm_data_items=type(inputs.mm_data_items)(inputs.mm_data_items))
        made = super().apply(own, *args, **kwargs)
        by_age.check_segments(setting, (one.segments for one in items))
        if (promise := getattr(inputs.cache, "promise", None)) is not None:  # see SenderCache
            uncached = dataclasses.replace(inputs, cache=None)
            promise(made["mm_kwargs"], lambda: self._apply(uncached, *args, **kwargs)[0]["mm_kwargs"])
        return made, items

    def _check_input(self, setting: ServedSetting, inputs: Any) -> None:
        counts = inputs.mm_data_items.get_all_counts()
        by_age.check_videos(setting, counts)

        def of_item(modality: str, index: int) -> ServedSetting:
            return item_setting(inputs.hf_processor_mm_kwargs, setting, modality, index)

        with selecting(setting):
            if family_of(self.info.ctx.model_config).vllm.mrope and not setting.is_off:
                own = [of_item(modality, index) for modality, count in counts.items() for index in range(count)]
                reduces = not all(one.removes_nothing for one in own)
                check_placeholders(inputs.prompt, counts, self.info.get_hf_config(), reduces)
            if reads_tower(setting.method) or merges_in_tower(setting.method):
                check_items(setting.acting, of_item, inputs.mm_data_items, self.info)

    def _in_shadow(self, shadow: ServedSetting, inputs: Any, items: list[CountedDetails]) -> str:
        """Return one of `SHADOWS` for a request that its setting would have served."""
        try:
            self._check_input(shadow, inputs)
            by_age.check_segments(shadow, (one.segments for one in items))
        except TokenPruneError as error:
            return shadow_outcome(error)
        outcomes = {one.outcome for one in items}
        return next((one for one in (FAILED, INPUT) if one in outcomes), KEPT)


def _without(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """Return the arguments of the model's own processor, without our key."""
    return {key: value for key, value in kwargs.items() if key != KEY}


@cache
def reducing_class(base: type[BaseMultiModalProcessor]) -> type[BaseMultiModalProcessor]:
    """Return `base` with ReducingProcessor mixed in, under the same name."""
    kind: Any = type(base)
    return kind(base.__name__, (ReducingProcessor, base), {"__module__": base.__module__})
