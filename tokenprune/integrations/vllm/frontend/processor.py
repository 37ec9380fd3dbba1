# SPDX-License-Identifier: Apache-2.0
"""Front end: write the shorter prompt, and attach to each item the plan by which the model makes it come true."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.multimodal.processing.processor import (
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.frontend.items import CountedDetails, ModelItems, PromptItem
from tokenprune.integrations.vllm.frontend.pixels import Shrinker
from tokenprune.integrations.vllm.frontend.request import RequestRun, get_policy
from tokenprune.integrations.vllm.frontend.served import RequestRecord, ServedRequest, wrap_method_errors
from tokenprune.integrations.vllm.settings.configuration import get_server_setting
from tokenprune.integrations.vllm.settings.items import OFF, get_label
from tokenprune.integrations.vllm.settings.keys import KEY, NO_SETTING
from tokenprune.integrations.vllm.settings.plan import MODALITIES, field_name
from tokenprune.integrations.vllm.settings.position_checks import count_positions, has_original_positions
from tokenprune.integrations.vllm.settings.server_config import get_profile_settings

# How an item is put into the prompt, and the field that says what is written.
_WRITTEN = {PromptReplacement: "replacement", PromptInsertion: "insertion"}


class ReducingProcessor(BaseMultiModalProcessor):
    """Mixed into vLLM's processor of a model, whatever its class is.

    vLLM calls its steps one after the other, and hands none of them a value of ours. So each request has a copy of the
    processor, which knows what serves it.

    _request: what serves a copy's request; None in the processor itself, and on a server without a setting.
    prompt_texts:  the prompt texts of a copy's items.
    """

    _request: ServedRequest | None = None
    prompt_texts: list[CountedDetails]

    def apply(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._request is not None:
            return super().apply(inputs, *args, **kwargs)
        given = dict(inputs.hf_processor_mm_kwargs)
        asked = given.pop(KEY, NO_SETTING)
        if get_server_setting(self.info.ctx.model_config) is None:
            if asked is not NO_SETTING:
                raise OptionError(
                    f"this server was not started with a {KEY} setting, so a request cannot change it: start it with "
                    f'--mm-processor-kwargs \'{{"{KEY}": {{"off": true}}}}\' to let requests choose'
                )
            return super().apply(inputs, *args, **kwargs)
        run = RequestRun(self, dataclasses.replace(inputs, hf_processor_mm_kwargs=given), args, kwargs)
        policy = get_policy(self.info.ctx.model_config, asked)
        return policy.serve(policy.resolve(asked, run.counts), run)

    def for_request(self, request: ServedRequest) -> ReducingProcessor:
        """Return a copy for one request."""
        own = copy.copy(self)
        own._request, own.prompt_texts, own.model_items = request, [], self.model_items
        return own

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], *args: Any, **kwargs: Any) -> Any:
        """Measure the largest item, which a request may ask for with {"off": true}."""
        own = self
        if get_server_setting(self.info.ctx.model_config) is not None:
            own = self.for_request(ServedRequest.build(OFF, mm_counts, RequestRecord()))
        return super(ReducingProcessor, own).get_dummy_mm_inputs(mm_counts, *args, **kwargs)

    def check_pixels(self) -> None:
        """Raise OptionError if the server's setting or a profile asks for smaller images where they save nothing."""
        model_config = self.info.ctx.model_config
        for setting in () if get_server_setting(model_config) is None else get_profile_settings(model_config).values():
            if setting.pixel_method is not None:
                Shrinker(setting, self.info, {}).check()

    # -- the steps of vLLM's `apply`

    def _get_mm_hashes(self, inputs: Any) -> Any:
        found, request = super()._get_mm_hashes(inputs), self._request
        if request is None:
            return found
        # Positions travel with an item's embeddings.
        more = {"positions": "original"} if has_original_positions(self.info.ctx.model_config) else {}
        return {
            modality: [_under(one, request.cache_key(modality, index) | more) for index, one in enumerate(hashes)]
            for modality, hashes in found.items()
        }

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Any) -> Mapping[str, object]:
        if self._request is not None:  # the steps that follow see the other items alone
            self._request = self._request.without_cached(mm_is_cached)
        return super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached)

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        if self._request is not None and self._request.setting.pixel_method is not None:
            with wrap_method_errors(self._request.setting):
                hf_kwargs = Shrinker(self._request.setting, self.info, hf_kwargs).shrink(mm_items)
        return super()._apply_hf_processor_main(mm_items=mm_items, hf_kwargs=hf_kwargs)

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        updates = super()._get_prompt_updates(
            mm_items=mm_items, hf_processor_mm_kwargs=hf_processor_mm_kwargs, out_mm_kwargs=out_mm_kwargs
        )
        if self._request is None:
            return updates

        place = out_mm_kwargs, mm_items, hf_processor_mm_kwargs
        return [self._shorter(one, *place) if one.modality in MODALITIES else one for one in updates]

    def _shorter(self, update: PromptUpdate, made: Any, *request: Any) -> PromptUpdate:
        """Return what puts an item into the prompt with fewer tokens. made: of all items, by modality. request: see
        `PromptItem`, from its `items` on."""
        name = next((name for kind, name in _WRITTEN.items() if isinstance(update, kind)), None)
        if name is None:
            raise UnsupportedSetupError(f"{type(self).__name__} puts images into the prompt by {update.mode}")
        modality = update.modality

        def content_of(index: int) -> PromptUpdateDetails:
            content = update._resolve_content(index)
            return self._reduced(
                PromptItem(self.model_items, modality, index, content, made[modality][index], *request)
            )

        return dataclasses.replace(update, **{name: content_of})

    @cached_property
    def model_items(self) -> ModelItems:
        """Facts that the items of all its requests share."""
        return ModelItems.from_info(self.info)

    def _reduced(self, item: PromptItem) -> CountedDetails:
        """Return the prompt text of an item, and attach the plan to what the model gets of it."""
        request = self._request
        assert request is not None  # only then it is called
        setting = request.items[item.modality][item.index]
        with wrap_method_errors(setting):
            plan = item.make_plan(setting)
        # The same moment at which vLLM itself reads the item: it is stored, cached and sent after this.
        element = MultiModalFieldElem(data=plan.encode(), field=MultiModalBatchedField(keep_on_cpu=True))
        item.data[field_name(item.modality)] = element
        content = item.content
        if plan.reduces:
            text = plan.reduced()
            # Of placeholders alone vLLM need not look at each.
            select = PromptUpdateDetails.select_token_id
            content = PromptUpdateDetails(text) if plan.is_plain else select(text, plan.placeholder)
        counts = item.count_original(plan), sum(plan.keep), sum(plan.counts) - sum(plan.keep)
        label, segments, more = get_label(setting), len(plan.counts), request.get_shadow(item)
        return CountedDetails(content.full, content.is_embed, *counts, label, segments, more)

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> Any:
        applied = super()._maybe_apply_prompt_updates(mm_items, mm_res)
        if self._request is not None:
            details = [update[0].content for items in mm_res.prompt_updates.values() for update in items if update]
            self.prompt_texts += [one for one in details if isinstance(one, CountedDetails)]
            if has_original_positions(self.info.ctx.model_config):
                self._check_length(sum(one.left for one in self.prompt_texts))
        return applied

    def _check_length(self, left: int) -> None:
        """Raise OptionError if rope may have no angles for the answer to a prompt that lost `left` visual tokens."""
        model_config = self.info.ctx.model_config
        spare = count_positions(model_config) - model_config.max_model_len
        if left and left >= spare:
            raise OptionError(
                f"{left} visual tokens are left out of this prompt, and their positions stay empty: this model has "
                f"positions for less than {spare}. Send fewer or smaller images, or keep more of them"
            )


def _under(item_hash: str, key: Mapping[str, Any]) -> str:
    """Return the hash of an item under a setting, from its hash by vLLM. Not what the request says counts: caches may
    outlive servers, or be shared by them."""
    return hashlib.sha256(json.dumps([item_hash, key], sort_keys=True).encode()).hexdigest()


@cache
def make_reducing_class(base: type[BaseMultiModalProcessor]) -> type[BaseMultiModalProcessor]:
    """Return `base` with ReducingProcessor mixed in, under the same name."""
    kind: Any = type(base)
    return kind(base.__name__, (ReducingProcessor, base), {"__module__": base.__module__})
