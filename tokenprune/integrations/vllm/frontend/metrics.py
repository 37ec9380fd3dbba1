# SPDX-License-Identifier: Apache-2.0
"""Counters beside vLLM's own at /metrics, in the process that has the processor and answers there.

The number of labels is bounded, whatever clients send: names of methods and profiles, and shares in hundredths.
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
        "Visual tokens of requests: what the model makes of their images and videos (in), and what is left (out).",
        ("model_name", "stage", "method", "keep"),
    ),
    "tokenprune:requests": (
        "Requests with images or videos, by the profile in force: the server's own setting is default, and one that "
        "the request wrote is request. by: who chose it, the model's name, the request's key, the rule of "
        "callers, the load, or nobody (default).",
        ("model_name", "profile", "by"),
    ),
    "tokenprune:shadow_requests": (
        "Requests of tokenprune:requests that a rollout had served in full. outcome: kept, counted in "
        "tokenprune:shadow_tokens; failed, if the method fails on them; or input, if their prompt or images do not go "
        "with their setting.",
        ("model_name", "profile", "outcome"),
    ),
    "tokenprune:shadow_tokens": (
        "Visual tokens of requests that a rollout had served in full: what they had (in), and what their setting would "
        "have left (out).",
        ("model_name", "stage", "method", "keep"),
    ),
    "tokenprune:failures": (
        "Requests that could not be served under their setting, which is right in itself. outcome: refused, or served "
        "in full, as on_error says, where the method failed; input where the prompt or the images do not go with it.",
        ("model_name", "profile", "outcome"),
    ),
    "tokenprune:refusals": (
        "Requests that were refused: for a profile that is not there, a caller that may not use it, a limit of the "
        "server's (min_keep, methods), any other fault of the setting, an input that cannot be served under it, or a "
        "failure of its method.",
        ("model_name", "reason"),
    ),
    "tokenprune:reloads": (
        "Signals (SIGHUP) to read the file of the setting again: the file was taken, or refused, and all stayed.",
        ("model_name", "result"),
    ),
}

RESULTS = ("taken", "refused")
REASONS = ("profile", "caller", "limit", "setting", "input", "failure")
FAILURES = ("refused", "full", "input")
GAUGES = {
    "tokenprune:info": (
        "The plugin that is loaded. 1: so it is now; 0: so it was before the setting was read again.",
        ("model_name", "version", "setting", "profiles", "policy", "vllm", "runner", "hooks"),
    ),
    "tokenprune:keep_target": (
        "The share that a setting of tokenprune:visual_tokens asks for: the label keep as a number.",
        ("model_name", "method", "keep"),
    ),
    "tokenprune:overload_step": (
        "Step of the overload policy at which a request without a choice of its own is served now; 0: the default.",
        ("model_name",),
    ),
}


@cache
def _counter(name: str) -> Counter:
    # Made when the engine has started: by then vLLM has decided whether several processes answer at /metrics together.
    return Counter(name, *COUNTERS[name])


@cache
def _gauge(name: str) -> Gauge:
    return Gauge(name, *GAUGES[name], multiprocess_mode="max")  # of several API servers, one series for all


def add(model_config: Any, name: str, *labels: str, count: int = 1) -> None:
    """Add to one of `COUNTERS`; 0 to show it. labels: all but the model's name."""
    _counter(f"tokenprune:{name}").labels(model_config.served_model_name, *labels).inc(count)


def add_tokens(model_config: Any, name: str, label: tuple[str, str], before: int = 0, after: int = 0) -> None:
    """Add visual tokens of an item, without and with a setting. label: see `get_label`."""
    for stage, tokens in (("in", before), ("out", after)):
        add(model_config, name, stage, *label, count=tokens)


def get_gauge(model_config: Any, name: str, *labels: str) -> Gauge:
    """Return a series of one of `GAUGES`."""
    return _gauge(f"tokenprune:{name}").labels(model_config.served_model_name, *labels)


_informed: dict[str, tuple[str, ...]] = {}


def set_info(model_config: Any, facts: Mapping[str, str]) -> None:
    """Show what the plugin does for a model. facts: values of the labels of `tokenprune:info` but `model_name`."""
    name = model_config.served_model_name
    if name in _informed:
        get_gauge(model_config, "info", *_informed[name]).set(0)
    _informed[name] = tuple(facts[label] for label in GAUGES["tokenprune:info"][1][1:])
    get_gauge(model_config, "info", *_informed[name]).set(1)


def start_at_zero(model_config: Any) -> None:
    """Make the counters of a server with a setting, so that the first request is a rise that an alert can see."""
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
    """Add an item that is served, and show the share that its setting asks for; none for a whole number of tokens."""
    add_tokens(model_config, "visual_tokens", label, before, after)
    if label[1] != "tokens":
        get_gauge(model_config, "keep_target", *label).set(float(label[1]))


@contextmanager
def count_refusals(model_config: Any, what: str, served: RequestRecord) -> Iterator[None]:
    """Count a request that is refused within, and log it where the server does. what: "setting" or "input", what is
    read within."""
    try:
        yield
    except TokenPruneError as error:
        reason = getattr(error, "reason", "failure" if what == "input" and not is_input_error(error) else what)
        add(model_config, "refusals", reason)
        if get_server_config(model_config).log:
            log_event("refusal", **served.request_id(), reason=reason)
        raise
