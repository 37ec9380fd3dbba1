# SPDX-License-Identifier: Apache-2.0
"""The seam between vLLM's request and the plugin: what serves a request is resolved once, and then only read.

A processor asks the policy of its server for a `ServedRequest`, and has it served. The policy of a plain setting stands
here. Where a setting names a key of `tokenprune.integrations.vllm.gateway`, that package's policy stands in its place.
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
    """A request on its way through vLLM's processor. It can be processed again, under another setting.

    processor: a `ReducingProcessor`. inputs: vLLM's `ProcessorInputs`, without our key. args, kwargs: of its `apply`.
    """

    processor: Any
    inputs: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def counts(self) -> Mapping[str, int]:
        return self.inputs.mm_data_items.get_all_counts()

    def check(self, request: ServedRequest) -> None:
        """Raise a TokenPruneError for a prompt, or items, that do not go with a setting. No image is read."""
        model, setting = self.processor.model_items, request.setting
        with wrap_method_errors(setting):
            if model.family.vllm.mrope and not setting.off:
                reduces = not all(one.keeps_all_tokens for items in request.items.values() for one in items)
                check_placeholders(self.inputs.prompt, self.counts, model.config, reduces)
            if reads_tower(setting.method) or acts_in_tower(setting.method):
                check_items(get_method(setting), request.items, self.inputs.mm_data_items, model.info)

    def process(self, request: ServedRequest) -> tuple[Any, list[CountedDetails]]:
        """Return what vLLM makes of a request, and the numbers of each item. Raises a TokenPruneError for one that
        cannot be served so."""
        own = self.processor.for_request(request)
        # A copy, which a method that acts on pixels writes to.
        items = type(self.inputs.mm_data_items)(self.inputs.mm_data_items)
        made = own.apply(dataclasses.replace(self.inputs, mm_data_items=items), *self.args, **self.kwargs)
        if (promise := getattr(self.inputs.cache, "promise", None)) is not None:  # see SenderCache
            uncached = dataclasses.replace(self, inputs=dataclasses.replace(self.inputs, cache=None))
            promise(made["mm_kwargs"], lambda: uncached.process(request)[0]["mm_kwargs"])
        return made, own.prompt_texts


@dataclass(frozen=True)
class RequestPolicy:
    """The policy of a server with a plain setting: requests are served under it, or under what they write over it."""

    model_config: Any

    def resolve(self, asked: Any, counts: Mapping[str, int]) -> ServedRequest:
        """Return what serves a request with so many items of each modality. asked: its value of our key. Raises a
        TokenPruneError for a setting that is wrong, or that this server does not serve."""
        served = RequestRecord()
        with metrics.count_refusals(self.model_config, "setting", served):
            return self._resolve(asked, counts, served)

    def _resolve(self, asked: Any, counts: Mapping[str, int], served: RequestRecord) -> ServedRequest:
        setting = parse_request(get_server_setting(self.model_config) or {}, asked)
        served.by, served.profile = (BY_KEY, REQUEST) if asked else (DEFAULT, DEFAULT)
        return ServedRequest.build(check_request_setting(setting, self.model_config), counts, served)

    def serve(self, request: ServedRequest, run: RequestRun) -> Any:
        """Have a request processed, and return what vLLM makes of it. Raises a TokenPruneError for one that cannot be
        served; all is counted and logged."""
        with metrics.count_refusals(self.model_config, "input", request.served):
            request, made, items = self._processed(request, run)
        self.observe(request, run, items)
        return made

    def _processed(self, request: ServedRequest, run: RequestRun) -> tuple[ServedRequest, Any, list[CountedDetails]]:
        """Return what served a request, and what `RequestRun.process` returns."""
        try:
            return request, *self._process(request, run)
        except TokenPruneError as error:
            if (fallback := request.fallback) is not None:
                logger.debug("a request is served in full: %s", error)
                made = fallback, *self._process(fallback, run)
            outcome = "input" if is_input_error(error) else "refused" if fallback is None else "full"
            metrics.add(self.model_config, "failures", request.served.profile, outcome)
            if fallback is None:
                raise
            return made

    def _process(self, request: ServedRequest, run: RequestRun) -> tuple[Any, list[CountedDetails]]:
        run.check(request)
        return run.process(request)

    def observe(self, request: ServedRequest, run: RequestRun, items: list[CountedDetails]) -> None:
        """Write the record of a request that is served, for the answer, and count and log it."""
        served, setting, counts = request.served, request.setting, run.counts
        served.full, served.method, served.keep = request.full, get_label(setting)[0], setting.joint_keep
        served.images, served.videos = counts.get("image", 0), counts.get("video", 0)
        served.tokens_in, served.tokens_out = sum(one.before for one in items), sum(one.after for one in items)
        for one in items:
            metrics.add_visual_tokens(self.model_config, one.label, one.before, one.after)
        metrics.add(self.model_config, "requests", served.profile, served.by)
        if get_server_config(self.model_config).log:
            log_event("request", **served.request_id(), **served.fields())

    def check_parameters(self, params: Any) -> None:
        """Raise an error for sampling parameters, or a request that has some, which this server cannot answer."""
        if runs_in_llm(self.model_config):
            from tokenprune.integrations.vllm.in_llm.attach import check_request

            check_request(params)

    def collect_facts(self) -> dict[str, list[str]]:
        """Return what the line at the start says beside the setting (see `announce.collect_facts`)."""
        return {"profiles": [], "policy": [], "hooks": []}

    def start_at_zero(self) -> None:
        """Make the counters of a server, so that the first request is a rise that an alert can see."""
        metrics.start_at_zero(self.model_config)


_gateway_policy: Callable[[], type[RequestPolicy]]  # set by the plugin when it registers


def get_policy(model_config: Any, asked: Any = NO_SETTING) -> RequestPolicy:
    """Return the policy of a server for a request. asked: the request's value of our key."""
    if not needs_gateway(model_config, asked):
        return RequestPolicy(model_config)
    return _gateway_policy()(model_config)


def use_gateway(policy: Callable[[], type[RequestPolicy]]) -> None:
    """Set the function that imports and returns the policy class for keys of the gateway."""
    global _gateway_policy
    _gateway_policy = policy
