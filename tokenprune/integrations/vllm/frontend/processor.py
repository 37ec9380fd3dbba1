# SPDX-License-Identifier: Apache-2.0
"""Front end: writes the shorter prompt, and attaches to each item the plan that the model carries out."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.processor import (
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.frontend.items import CountedDetails, ModelItems, PromptItem
from tokenprune.integrations.vllm.frontend.pixels import Shrinker, find_missing_images
from tokenprune.integrations.vllm.frontend.request import RequestRun, get_policy
from tokenprune.integrations.vllm.frontend.served import RequestRecord, ServedRequest, wrap_method_errors
from tokenprune.integrations.vllm.settings.configuration import get_server_setting
from tokenprune.integrations.vllm.settings.items import OFF, get_label
from tokenprune.integrations.vllm.settings.keys import KEY, NO_SETTING
from tokenprune.integrations.vllm.settings.plan import MODALITIES, field_name
from tokenprune.integrations.vllm.settings.position_checks import count_positions, has_original_positions
from tokenprune.integrations.vllm.settings.server_config import get_profile_settings

# Kinds of prompt updates, and the field that holds the written text.
_CONTENT_FIELDS = {PromptReplacement: "replacement", PromptInsertion: "insertion"}


class ReducingProcessor(BaseMultiModalProcessor):
    """Mixin for vLLM's processor of a model.

    vLLM calls the steps of a processor one after the other and passes no values of ours. Each request therefore has a
    copy of the processor, which holds the resolved request.

    Attributes:
        _request: Request of a copy. None in the processor itself, and on a server without a setting.
        _kwargs: The request's `mm_processor_kwargs`, before a limit of tokens.
        _images: Images of a copy's request that are not in vLLM's cache. None if no method resizes images.
        prompt_texts: Prompt texts of the items of a copy's request.
    """

    _request: ServedRequest | None = None
    _kwargs: Mapping[str, object] = MappingProxyType({})
    _images: ImageProcessorItems | None = None
    prompt_texts: list[CountedDetails]

    def apply(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._request is not None:
            return super().apply(inputs, *args, **kwargs)
        kwargs_without_key = dict(inputs.hf_processor_mm_kwargs)
        requested = kwargs_without_key.pop(KEY, NO_SETTING)
        if get_server_setting(self.info.ctx.model_config) is None:
            if requested is not NO_SETTING:
                raise OptionError(
                    f"this server has no {KEY} setting, so requests cannot change it. Start it with "
                    f'--mm-processor-kwargs \'{{"{KEY}": {{"off": true}}}}\' to let requests choose'
                )
            return super().apply(inputs, *args, **kwargs)
        run = RequestRun(self, dataclasses.replace(inputs, hf_processor_mm_kwargs=kwargs_without_key), args, kwargs)
        policy = get_policy(self.info.ctx.model_config, requested)
        return policy.serve(policy.resolve(requested, run.counts), run)

    def for_request(self, request: ServedRequest, kwargs: Mapping[str, object] | None = None) -> ReducingProcessor:
        """Return a copy of the processor for one request. kwargs: its `mm_processor_kwargs` without `KEY`."""
        processor = copy.copy(self)
        processor._request, processor.prompt_texts, processor.model_items = request, [], self.model_items
        processor._kwargs = {} if kwargs is None else kwargs
        return processor

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], *args: Any, **kwargs: Any) -> Any:
        """Return the largest unpruned items, because a request may send {"off": true}."""
        processor = self
        if get_server_setting(self.info.ctx.model_config) is not None:
            processor = self.for_request(ServedRequest.build(OFF, mm_counts, RequestRecord()))
        return super(ReducingProcessor, processor).get_dummy_mm_inputs(mm_counts, *args, **kwargs)

    def check_pixels(self) -> None:
        """Raise OptionError if a setting resizes images and the model's token counts do not depend on their size."""
        model_config = self.info.ctx.model_config
        for setting in () if get_server_setting(model_config) is None else get_profile_settings(model_config).values():
            if setting.pixel_method is not None:
                Shrinker(setting, self.info, {}).check()

    # -- the steps of vLLM's `apply`

    def _get_mm_hashes(self, inputs: Any) -> Any:
        hashes, request = super()._get_mm_hashes(inputs), self._request
        if request is None:
            return hashes
        # Cached embeddings include positions.
        more = {"positions": "original"} if has_original_positions(self.info.ctx.model_config) else {}
        return {
            modality: [
                _hash_with(item_hash, request.cache_key(modality, index) | more)
                for index, item_hash in enumerate(of_items)
            ]
            for modality, of_items in hashes.items()
        }

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Mapping[str, object]:
        if self._request is not None:  # the following steps see only the other items
            if self._request.setting.pixel_method is not None:
                self._images = find_missing_images(inputs.mm_data_items, mm_is_cached)
            self._request = self._request.without_cached(mm_is_cached)
        return super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached)

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        if self._request is not None and self._request.setting.pixel_method is not None:
            if self._images is not None:
                mm_items["image"] = self._images
            with wrap_method_errors(self._request.setting):
                hf_kwargs = Shrinker(self._request.setting, self.info, hf_kwargs).shrink(mm_items, self._kwargs)
        return super()._apply_hf_processor_main(mm_items=mm_items, hf_kwargs=hf_kwargs)

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        updates = super()._get_prompt_updates(
            mm_items=mm_items, hf_processor_mm_kwargs=hf_processor_mm_kwargs, out_mm_kwargs=out_mm_kwargs
        )
        if self._request is None:
            return updates

        request = out_mm_kwargs, mm_items, hf_processor_mm_kwargs
        return [self._shorten(update, *request) if update.modality in MODALITIES else update for update in updates]

    def _shorten(self, update: PromptUpdate, data: Any, *request: Any) -> PromptUpdate:
        """Return the prompt update with fewer tokens. request: fields of `PromptItem` from `items` on."""
        name = next((name for kind, name in _CONTENT_FIELDS.items() if isinstance(update, kind)), None)
        if name is None:
            raise UnsupportedSetupError(f"{type(self).__name__} puts images into the prompt by {update.mode}")
        modality = update.modality

        def get_content(index: int) -> PromptUpdateDetails:
            content = update._resolve_content(index)
            item = PromptItem(self.model_items, modality, index, content, data[modality][index], *request)
            return self._prune(item)

        return dataclasses.replace(update, **{name: get_content})

    @cached_property
    def model_items(self) -> ModelItems:
        """Processing info, family and config of the model, which all items need."""
        return ModelItems.from_info(self.info)

    def _prune(self, item: PromptItem) -> CountedDetails:
        """Return the prompt text of an item, and attach the plan to the item's data."""
        request = self._request
        assert request is not None
        setting = request.items[item.modality][item.index]
        with wrap_method_errors(setting):
            plan = item.make_plan(setting)
        # vLLM reads the item at this point too. It is stored, cached and sent afterwards.
        element = MultiModalFieldElem(data=plan.encode(), field=MultiModalBatchedField(keep_on_cpu=True))
        item.data[field_name(item.modality)] = element
        content = item.content
        if plan.reduces:
            text = plan.reduced()
            # If all tokens are placeholders, vLLM need not compare each.
            select = PromptUpdateDetails.select_token_id
            content = PromptUpdateDetails(text) if plan.is_plain else select(text, plan.placeholder)
        counts = item.count_original(plan), sum(plan.keep), sum(plan.counts) - sum(plan.keep)
        label, segments, more = get_label(setting), len(plan.counts), request.get_shadow(item)
        return CountedDetails(content.full, content.is_embed, *counts, label, segments, more)

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> Any:
        applied = super()._maybe_apply_prompt_updates(mm_items, mm_res)
        if self._request is not None:
            details = [update[0].content for items in mm_res.prompt_updates.values() for update in items if update]
            self.prompt_texts += [content for content in details if isinstance(content, CountedDetails)]
            if has_original_positions(self.info.ctx.model_config):
                self._check_length(sum(text.left for text in self.prompt_texts))
        return applied

    def _check_length(self, num_dropped: int) -> None:
        """Raise OptionError if positions of the answer may exceed the rotary cache after dropping tokens."""
        model_config = self.info.ctx.model_config
        spare = count_positions(model_config) - model_config.max_model_len
        if num_dropped and num_dropped >= spare:
            raise OptionError(
                f"{num_dropped} visual tokens are dropped from this prompt, and their positions stay empty. This model "
                f"has positions for fewer than {spare}: send fewer or smaller images, or keep more tokens"
            )


def _hash_with(item_hash: str, key: Mapping[str, Any]) -> str:
    """Return the hash of an item under a setting.

    The setting is part of the hash as resolved, because caches may outlive servers or be shared.
    """
    return hashlib.sha256(json.dumps([item_hash, key], sort_keys=True).encode()).hexdigest()


@cache
def make_reducing_class(base: type[BaseMultiModalProcessor]) -> type[BaseMultiModalProcessor]:
    """Return `base` with `ReducingProcessor` mixed in, under the same name."""
    kind: Any = type(base)
    return kind(base.__name__, (ReducingProcessor, base), {"__module__": base.__module__})
