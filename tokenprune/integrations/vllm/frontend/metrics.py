# SPDX-License-Identifier: Apache-2.0
"""Counters beside vLLM's own at /metrics, in the process of the processor.

Clients cannot add label values: the values are names of methods and profiles, and shares in hundredths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.frontend.served import BY_KEY, NAME, RequestRecord, is_input_error
from tokenprune.integrations.vllm.frontend.worker_metrics import get_worker_metrics
from tokenprune.integrations.vllm.log import log_event
from tokenprune.integrations.vllm.settings.items import get_label, settings_by_age
from tokenprune.integrations.vllm.settings.keys import DEFAULT, REQUEST
from tokenprune.integrations.vllm.settings.server_config import get_profile_settings, get_server_config

COUNTERS = {
    "tokenprune:visual_tokens": (
        "Visual tokens of requests before pruning (in) and after it (out).",
        ("model_name", "stage", "method", "keep"),
    ),
    "tokenprune:requests": (
        "Requests with images or videos by profile: default is the server's own setting, request is a setting in the "
        "request. by: selected by the model's name, the request's key, the caller, the load, or default.",
        ("model_name", "profile", "by"),
    ),
    "tokenprune:shadow_requests": (
        "Requests that a rollout served unpruned. outcome: kept (counted in tokenprune:shadow_tokens), failed (the "
        "method fails), or input (the prompt or images do not support the setting).",
        ("model_name", "profile", "outcome"),
    ),
    "tokenprune:shadow_tokens": (
        "Visual tokens of requests that a rollout served unpruned: all (in), and those their setting would keep (out).",
        ("model_name", "stage", "method", "keep"),
    ),
    "tokenprune:failures": (
        "Requests that failed under a valid setting. outcome: refused or full (served unpruned, see on_error) if the "
        "method failed; input if the prompt or images do not support the setting.",
        ("model_name", "profile", "outcome"),
    ),
    "tokenprune:refusals": (
        "Refused requests by reason: unknown profile, caller, limit (min_keep, methods), invalid setting, "
        "unsupported input, or failure of the method.",
        ("model_name", "reason"),
    ),
    "tokenprune:reloads": (
        "Reloads of the configuration file (SIGHUP), by result.",
        ("model_name", "result"),
    ),
}

RESULTS = ("taken", "refused")
REASONS = ("profile", "caller", "limit", "setting", "input", "failure")
FAILURES = ("refused", "full", "input")
GAUGES = {
    "tokenprune:info": (
        "State of the plugin. 1: current, 0: before a reload.",
        ("model_name", "version", "setting", "profiles", "policy", "vllm", "runner", "hooks"),
    ),
    "tokenprune:keep_target": (
        "Requested share of visual tokens, the label keep as a number.",
        ("model_name", "method", "keep"),
    ),
    "tokenprune:overload_step": (
        "Current step of the overload policy. 0: the default profile.",
        ("model_name",),
    ),
}


@cache
def _build_counter(name: str) -> Counter:
    # Created after the start of the engine, when vLLM has decided whether several processes share /metrics.
    return Counter(name, *COUNTERS[name])


@cache
def _build_gauge(name: str) -> Gauge:
    return Gauge(name, *GAUGES[name], multiprocess_mode="max")  # API servers share one series


def add(model_config: Any, name: str, *labels: str, count: int = 1) -> None:
    """Add to one of `COUNTERS`; `count=0` creates the series. labels: label values except the model's name."""
    _build_counter(f"tokenprune:{name}").labels(model_config.served_model_name, *labels).inc(count)


def add_tokens(model_config: Any, name: str, label: tuple[str, str], before: int = 0, after: int = 0) -> None:
    """Add the visual tokens of an item before and after pruning. label: see `get_label`."""
    for stage, tokens in (("in", before), ("out", after)):
        add(model_config, name, stage, *label, count=tokens)


def get_gauge(model_config: Any, name: str, *labels: str) -> Gauge:
    """Return a series of one of `GAUGES`."""
    return _build_gauge(f"tokenprune:{name}").labels(model_config.served_model_name, *labels)


_informed: dict[str, tuple[str, ...]] = {}


def set_info(model_config: Any, facts: Mapping[str, str]) -> None:
    """Set `tokenprune:info` of a model. facts: label values except `model_name`."""
    name = model_config.served_model_name
    if name in _informed:
        get_gauge(model_config, "info", *_informed[name]).set(0)
    _informed[name] = tuple(facts[label] for label in GAUGES["tokenprune:info"][1][1:])
    get_gauge(model_config, "info", *_informed[name]).set(1)


def start_at_zero(model_config: Any) -> None:
    """Create the counters of a server, so that alerts see the first request as an increase."""
    for profile, setting in get_profile_settings(model_config).items():
        for label in {get_label(tier) for _, tier in settings_by_age(setting)}:
            add_visual_tokens(model_config, label, 0, 0)
        for by in (NAME, BY_KEY, *((DEFAULT,) if profile == DEFAULT else ())):
            add(model_config, "requests", profile, by, count=0)
        for outcome in () if setting.off else FAILURES:
            add(model_config, "failures", profile, outcome, count=0)
        if setting.method is not None and not setting.in_llm:
            get_worker_metrics().zeros.add((model_config.served_model_name, setting.method.name))
    add(model_config, "requests", REQUEST, BY_KEY, count=0)
    for name, values in (("failures", FAILURES), ("reloads", RESULTS), ("refusals", REASONS)):
        for value in values:
            add(model_config, name, *((REQUEST,) if name == "failures" else ()), value, count=0)


def add_visual_tokens(model_config: Any, label: tuple[str, str], before: int, after: int) -> None:
    """Add the tokens of a served item, and set the gauge of its requested share unless keep is a number of tokens."""
    add_tokens(model_config, "visual_tokens", label, before, after)
    if label[1] != "tokens":
        get_gauge(model_config, "keep_target", *label).set(float(label[1]))


@contextmanager
def count_refusals(model_config: Any, stage: str, served: RequestRecord) -> Iterator[None]:
    """Count and log a request that is refused in this context, while its "setting" or "input" is read."""
    try:
        yield
    except TokenPruneError as error:
        reason = getattr(error, "reason", "failure" if stage == "input" and not is_input_error(error) else stage)
        add(model_config, "refusals", reason)
        if get_server_config(model_config).log:
            log_event("refusal", **served.request_id(), reason=reason)
        raise
