# SPDX-License-Identifier: Apache-2.0
"""The resolution of requests: each request gets its settings once, which the later steps only read.

`RequestPolicy` handles servers with a plain setting. If the configuration has a key of
`tokenprune.integrations.vllm.gateway`, the policy of that package replaces it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared.checks import reads_tower
from tokenprune.integrations.vllm.frontend import metrics
from tokenprune.integrations.vllm.frontend.items import CountedDetails
from tokenprune.integrations.vllm.frontend.pixels import decode_for, make_shrinker
from tokenprune.integrations.vllm.frontend.served import (
    BY_KEY,
    RequestRecord,
    ServedRequest,
    is_input_error,
    wrap_method_errors,
)
from tokenprune.integrations.vllm.log import log_event
from tokenprune.integrations.vllm.settings.configuration import check_request_setting, get_server_setting, runs_in_llm
from tokenprune.integrations.vllm.settings.items import get_label, get_method
from tokenprune.integrations.vllm.settings.keys import DEFAULT, NO_SETTING, REQUEST
from tokenprune.integrations.vllm.settings.parse import parse_request
from tokenprune.integrations.vllm.settings.position_checks import check_placeholders
from tokenprune.integrations.vllm.settings.server_config import get_server_config, needs_gateway
from tokenprune.integrations.vllm.settings.tower_items import check_items
from tokenprune.integrations.vllm.settings.towers import acts_in_tower

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestRun:
    """A request in vLLM's processor. It can be processed again under another setting.

    Args:
        processor: A `ReducingProcessor`.
        inputs: vLLM's `ProcessorInputs` without `KEY`.
        args: Further positional arguments of `apply`.
        kwargs: Further keyword arguments of `apply`.
    """

    processor: Any
    inputs: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def counts(self) -> Mapping[str, int]:
        return self.inputs.mm_data_items.get_all_counts()

    def check(self, request: ServedRequest) -> None:
        """Raise a TokenPruneError if the prompt or an item does not support its setting. No image is read."""
        model, setting = self.processor.model_items, request.setting
        with wrap_method_errors(setting):
            if model.family.vllm.mrope and not setting.off:
                reduces = not all(item.keeps_all_tokens for items in request.items.values() for item in items)
                check_placeholders(self.inputs.prompt, self.counts, model.config, reduces)
            if reads_tower(setting.method) or acts_in_tower(setting.method):
                check_items(get_method(setting), request.items, self.inputs.mm_data_items, model.info)

    def process(self, request: ServedRequest) -> tuple[Any, list[CountedDetails]]:
        """Return vLLM's result for the request, and the details of each item; raise a TokenPruneError if it fails."""
        kwargs = self.inputs.hf_processor_mm_kwargs
        processor = self.processor.for_request(request, kwargs)
        # A copy, because a method that acts on pixels replaces items.
        items = type(self.inputs.mm_data_items)(self.inputs.mm_data_items)
        shrinker = make_shrinker(request.setting, processor.info, kwargs)
        if (images := items.get("image")) is not None:
            items["image"] = decode_for(images, shrinker)
        if shrinker is not None:
            with wrap_method_errors(request.setting):
                kwargs = shrinker.limit_kwargs(images)
        inputs = dataclasses.replace(self.inputs, mm_data_items=items, hf_processor_mm_kwargs=kwargs)
        result = processor.apply(inputs, *self.args, **self.kwargs)
        if (promise := getattr(self.inputs.cache, "promise", None)) is not None:  # see SenderCache
            uncached = dataclasses.replace(self, inputs=dataclasses.replace(self.inputs, cache=None))
            promise(result["mm_kwargs"], lambda: uncached.process(request)[0]["mm_kwargs"])
        return result, processor.prompt_texts


@dataclass(frozen=True)
class RequestPolicy:
    """The policy of a server with a plain setting, which requests may override."""

    model_config: Any

    def resolve(self, requested: Any, counts: Mapping[str, int]) -> ServedRequest:
        """Resolve the settings of a request with this value of `KEY` and these numbers of items by modality.

        Raises a TokenPruneError if the setting is invalid, or not allowed on this server.
        """
        served = RequestRecord()
        with metrics.count_refusals(self.model_config, "setting", served):
            return self._resolve(requested, counts, served)

    def _resolve(self, requested: Any, counts: Mapping[str, int], served: RequestRecord) -> ServedRequest:
        setting = parse_request(get_server_setting(self.model_config) or {}, requested)
        served.by, served.profile = (BY_KEY, REQUEST) if requested else (DEFAULT, DEFAULT)
        return ServedRequest.build(check_request_setting(setting, self.model_config), counts, served)

    def serve(self, request: ServedRequest, run: RequestRun) -> Any:
        """Process a request, count and log it, and return vLLM's result; raise a TokenPruneError if it fails."""
        with metrics.count_refusals(self.model_config, "input", request.served):
            request, result, items = self._process_or_fall_back(request, run)
        self.observe(request, run, items)
        return result

    def _process_or_fall_back(
        self, request: ServedRequest, run: RequestRun
    ) -> tuple[ServedRequest, Any, list[CountedDetails]]:
        """Return the request that was served (possibly the fallback), and the result of `RequestRun.process`."""
        try:
            return request, *self._process(request, run)
        except TokenPruneError as error:
            if (fallback := request.fallback) is not None:
                logger.debug("a request is served unpruned: %s", error)
                result = fallback, *self._process(fallback, run)
            outcome = "input" if is_input_error(error) else "refused" if fallback is None else "full"
            metrics.add(self.model_config, "failures", request.served.profile, outcome)
            if fallback is None:
                raise
            return result

    def _process(self, request: ServedRequest, run: RequestRun) -> tuple[Any, list[CountedDetails]]:
        run.check(request)
        return run.process(request)

    def observe(self, request: ServedRequest, run: RequestRun, items: list[CountedDetails]) -> None:
        """Complete the record of a served request, count and log it."""
        served, setting, counts = request.served, request.setting, run.counts
        served.full, served.method, served.keep = request.full, get_label(setting)[0], setting.joint_keep
        served.images, served.videos = counts.get("image", 0), counts.get("video", 0)
        served.tokens_in, served.tokens_out = sum(item.before for item in items), sum(item.after for item in items)
        for item in items:
            metrics.add_visual_tokens(self.model_config, item.label, item.before, item.after)
        metrics.add(self.model_config, "requests", served.profile, served.by)
        if get_server_config(self.model_config).log:
            log_event("request", **served.request_id(), **served.fields())

    def check_parameters(self, params: Any) -> None:
        """Raise an error for sampling parameters that this server does not support."""
        if runs_in_llm(self.model_config):
            from tokenprune.integrations.vllm.in_llm.attach import check_request

            check_request(params)

    def collect_facts(self) -> dict[str, list[str]]:
        """Return facts for the log line at the start (see `announce.collect_facts`)."""
        return {"profiles": [], "policy": [], "hooks": []}

    def start_at_zero(self) -> None:
        """Create the server's counters."""
        metrics.start_at_zero(self.model_config)


_gateway_policy: Callable[[], type[RequestPolicy]]  # set when the plugin is registered


def get_policy(model_config: Any, requested: Any = NO_SETTING) -> RequestPolicy:
    """Return the policy for a request with this value of `KEY`."""
    if not needs_gateway(model_config, requested):
        return RequestPolicy(model_config)
    return _gateway_policy()(model_config)


def use_gateway(policy: Callable[[], type[RequestPolicy]]) -> None:
    """Set the function that imports and returns the policy class of the gateway."""
    global _gateway_policy
    _gateway_policy = policy
