# SPDX-License-Identifier: Apache-2.0
"""Counters beside vLLM's own at /metrics, in the process that has the processor and answers there.

The number of labels is bounded, whatever clients send: names of methods and profiles, and shares in hundredths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge

from tokenprune.integrations.vllm.front.of_workers import of_workers
from tokenprune.integrations.vllm.front.served import BY_KEY, CALLER, KEPT, LOAD, NAME, SHADOWS, Served
from tokenprune.integrations.vllm.log import tell
from tokenprune.integrations.vllm.setting.callers import CallerError
from tokenprune.integrations.vllm.setting.configuration import offered
from tokenprune.integrations.vllm.setting.offer import DEFAULT, REQUEST, ProfileError
from tokenprune.integrations.vllm.setting.rules import LimitError, is_of_input
from tokenprune.integrations.vllm.setting.settings import ServedSetting

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
_REASONS: dict[type[Exception], str] = {ProfileError: "profile", CallerError: "caller", LimitError: "limit"}
REASONS = (*_REASONS.values(), "setting", "input", "failure")
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


_informed: dict[str, tuple[str, ...]] = {}


def inform(model_config: Any, facts: Mapping[str, str]) -> None:
    """Show what the plugin does for a model. facts: values of the labels of `tokenprune:info` but `model_name`."""
    name = model_config.served_model_name
    if name in _informed:
        _gauge("tokenprune:info").labels(*_informed[name]).set(0)
    _informed[name] = (name, *(facts[label] for label in GAUGES["tokenprune:info"][1][1:]))
    _gauge("tokenprune:info").labels(*_informed[name]).set(1)


def step(model_config: Any, number: Callable[[], int] | int) -> None:
    """Show the step of the overload policy in force. number: a function is called each time metrics are read, which
    Prometheus' client does not do where several processes answer at /metrics together."""
    gauge = _gauge("tokenprune:overload_step").labels(model_config.served_model_name)
    if callable(number):
        gauge.set_function(number)
    else:
        gauge.set(number)


def start_at_zero(model_config: Any) -> None:
    """Make the counters of a server with a setting, so that the first request is a rise that an alert can see."""
    offer, name = offered(model_config), model_config.served_model_name
    under_load = () if offer.overload is None else offer.overload.profiles
    for profile, whole in offer.profiles.items():
        setting = ServedSetting.of(whole)
        counters = ["tokenprune:visual_tokens"]
        if offer.rollout(profile) < 1 and not setting.is_off:
            counters += ["tokenprune:shadow_tokens"]
            for outcome in SHADOWS:
                _counter("tokenprune:shadow_requests").labels(name, profile, outcome)
        for outcome in () if setting.is_off else FAILURES:
            _counter("tokenprune:failures").labels(name, profile, outcome)
        for label in {tier.label() for tier in setting.tiers}:
            _aim(name, *label)
            for stage in ("in", "out"):
                for counter in counters:
                    _counter(counter).labels(name, stage, *label)
        by = {NAME: True, BY_KEY: True, LOAD: profile in under_load, DEFAULT: profile == DEFAULT}
        by[CALLER] = profile != DEFAULT and offer.callers is not None and profile in offer.callers.own
        for one in (one for one, may in by.items() if may):
            _counter("tokenprune:requests").labels(name, profile, one)
        if setting.method is not None and not setting.in_llm:
            of_workers().zeros.add((name, setting.method.name))
    _counter("tokenprune:requests").labels(name, REQUEST, BY_KEY)
    for outcome in FAILURES:
        _counter("tokenprune:failures").labels(name, REQUEST, outcome)
    for result in RESULTS:
        _counter("tokenprune:reloads").labels(name, result)
    for reason in REASONS:
        _counter("tokenprune:refusals").labels(name, reason)


def count(model_config: Any, stage: str, method: str, keep: str, tokens: int) -> None:
    """Add visual tokens of a request. stage: "in" or "out". method, keep: see `Setting.label`."""
    name = model_config.served_model_name
    _aim(name, method, keep)
    _counter("tokenprune:visual_tokens").labels(name, stage, method, keep).inc(tokens)


def _aim(name: str, method: str, keep: str) -> None:
    """Show the share that a setting asks for; none for a whole number of tokens."""
    if keep != "tokens":
        _gauge("tokenprune:keep_target").labels(name, method, keep).set(float(keep))


def chose(model_config: Any, served: Served) -> None:
    """Add a request that is served under a profile."""
    _counter("tokenprune:requests").labels(model_config.served_model_name, served.profile, served.by).inc()


def shadowed(
    model_config: Any, served: Served, outcome: str, items: Iterable[tuple[tuple[str, str], int, int]]
) -> None:
    """Add a request that a rollout has served in full. outcome: one of `SHADOWS`. items: of each, the label of the
    setting that would have served it, and its visual tokens without and with that."""
    name = model_config.served_model_name
    _counter("tokenprune:shadow_requests").labels(name, served.profile, outcome).inc()
    for label, before, after in items if outcome == KEPT else ():
        _counter("tokenprune:shadow_tokens").labels(name, "in", *label).inc(before)
        _counter("tokenprune:shadow_tokens").labels(name, "out", *label).inc(after)


def failed(model_config: Any, profile: str, error: Exception, in_full: bool) -> None:
    """Add a request that could not be served under its setting, for this error, and whether it is served in full."""
    outcome = "input" if is_of_input(error) else "full" if in_full else "refused"
    _counter("tokenprune:failures").labels(model_config.served_model_name, profile, outcome).inc()


def reloaded(model_config: Any, result: str) -> None:
    """Add a signal to read the setting again. result: one of `RESULTS`."""
    _counter("tokenprune:reloads").labels(model_config.served_model_name, result).inc()


def refused(model_config: Any, error: Exception, what: str, served: Served) -> None:
    """Add a request that was refused, and log it where the server does. what: "setting" or "input", what was read
    when the error came."""
    reason = _REASONS.get(type(error), "failure" if what == "input" and not is_of_input(error) else what)
    _counter("tokenprune:refusals").labels(model_config.served_model_name, reason).inc()
    if offered(model_config).log:
        tell("refusal", **request_id(served), reason=reason)


def request_id(served: Served) -> dict[str, str]:
    """Return the field of the log that tells requests apart; none for a request without an id."""
    return {} if served.request is None else {"request": served.request}
