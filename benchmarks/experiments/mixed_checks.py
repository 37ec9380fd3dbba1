# SPDX-License-Identifier: Apache-2.0
"""Checks of mixed_load.py: changing profiles, the settings that they allow, and the server's counters."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mixed_requests import Answer, Request

from tokenprune.integrations.vllm.settings.server_config import GRACE_SECONDS

BASE = {"method": "uniform", "keep": 0.25}
OVERLOAD = {"in_flight": [8, 24], "profiles": ["pooled", "fast"], "rise": 0.2, "dwell": 1}
# The successive contents of the profile file. The second lacks a profile that clients request. The third is invalid.
OFFERS: tuple[dict[str, Any], ...] = (
    {"profiles": {"fast": {"keep": 0.11}, "pooled": {"method": "pool", "keep": 0.25}, "ocr": {"off": True}}},
    {"profiles": {"fast": {"keep": 0.2}, "pooled": {"method": "pool", "keep": 0.25}}},
    {"profiles": {"fast": {"keep": 7}}},
    {"profiles": {"fast": {"keep": 0.11}, "pooled": {"keep": 0.5}, "ocr": {"off": True}}, "overload": OVERLOAD},
)
WRONG_OFFERS = {2}
LIMITS = {"min_keep": 0.1}


@dataclass
class Sent:
    """A sent request, with the clock's seconds at sending and at the answer."""

    request: Request
    begin: float
    end: float = math.inf
    answer: Answer = field(default_factory=lambda: Answer(0))


@dataclass
class InForce:
    """Index of an offer, and the interval of seconds when it may have been in force."""

    index: int
    begin: float
    end: float = math.inf


def list_allowed(request: Request, offer: Mapping[str, Any]) -> list[tuple[str, str] | None]:
    """Return each (method, keep) that may serve a request while an offer is in force. None means a refusal.

    The request must choose a profile by name, or use the default.
    """
    profiles = {"default": BASE} | offer["profiles"]
    if request.kind == "default":
        names = ["default", *offer.get("overload", {}).get("profiles", ())]
    else:
        names = [request.profile or request.asked["profile"]]
    allowed: list[tuple[str, str] | None] = []
    for name in names:
        config = BASE | profiles[name] if name in profiles else None
        allowed.append(config and (("off", "1.0") if config.get("off") else (config["method"], str(config["keep"]))))
    return allowed


def out_of_force(sent: Sent, times: Sequence[InForce]) -> str | None:
    """Describe the error if a request was served by a setting that was not in force during the request, else None."""
    if sent.request.kind not in ("name", "profile", "default"):
        return None
    allowed_settings = [setting for index, time in enumerate(times) if time.begin <= sent.end and sent.begin <= time.end
           for setting in _served(sent, times[: index + 1])]  # fmt: skip
    served = sent.answer.record
    was = (served["method"], served["keep"]) if served else None
    return None if was in allowed_settings else f"served by {was}, allowed were {allowed_settings}"


def _served(sent: Sent, times: Sequence[InForce]) -> list[tuple[str, str] | None]:
    """Return the settings that may serve a request under the last of the offers.

    A removed profile stays valid for a grace period, with its last offer.
    """
    allowed = list_allowed(sent.request, OFFERS[times[-1].index])
    if allowed != [None]:
        return allowed
    had = (index for index, time in enumerate(times) if list_allowed(sent.request, OFFERS[time.index]) != [None])
    if (last := max(had, default=None)) is None or sent.begin > times[last].end + GRACE_SECONDS:
        return allowed
    before = list_allowed(sent.request, OFFERS[times[last].index])
    return before if sent.end < times[last + 1].begin + GRACE_SECONDS else before + allowed


def counted(page: str, name: str, *labels: str) -> collections.Counter[tuple[str, ...]]:
    """Return the sum of a counter on a metrics page by some of its labels."""
    sums: collections.Counter[tuple[str, ...]] = collections.Counter()
    for text, value in re.findall(rf"^{re.escape(name)}\{{(.*?)\}} (\S+)$", page, re.MULTILINE):
        values = dict(re.findall(r'(\w+)="(.*?)"', text))
        sums[tuple(values[label] for label in labels)] += int(float(value))
    return sums


def metric_differences(page: str, sent: Sequence[Sent], reloads: Mapping[str, int]) -> list[str]:
    """Describe the differences between a server's counters and the observations of its clients.

    Requests of clients that left before an answer may be counted or not.

    Args:
        page: Text of the metrics page.
        sent: All requests.
        reloads: Number of signals sent, by expected result.
    """
    num_gone = sum(request.request.kind == "gone" for request in sent)
    records = [request.answer.record for request in sent if request.answer.served]
    observed = collections.Counter((record["profile"], record["by"]) for record in records)
    requests = counted(page, "tokenprune:requests_total", "profile", "by")
    problems = _between("requests", observed, requests, num_gone)
    for stage in ("in", "out"):
        tokens = collections.Counter[tuple[str, ...]]()
        for record in records:
            tokens[(stage,)] += int(record[stage])
        counts = counted(page, "tokenprune:visual_tokens_total", "stage")
        max_extra = num_gone * max((int(record["in"]) for record in records), default=0)
        problems += _between("visual tokens", tokens, {(stage,): counts[(stage,)]}, max_extra)
    refused = sum(request.answer.status == 400 and request.request.kind != "broken" for request in sent)
    counts = counted(page, "tokenprune:refusals_total")
    problems += _between("refusals", {(): refused}, counts, 0)
    due = {(result,): count for result, count in reloads.items()}
    return problems + _between("reloads", due, counted(page, "tokenprune:reloads_total", "result"), 0)


def _between(label: str, observed: Mapping[Any, int], counts: Mapping[Any, int], slack: int) -> list[str]:
    """Describe counters below the observed values, or above them by more than `slack` in total."""
    below = [
        f"{label} {key}: counted {counts.get(key, 0)}, observed {observed[key]}"
        for key in observed
        if counts.get(key, 0) < observed[key]
    ]
    above = sum(counts.values()) - sum(observed.values())
    return below + ([f"{label}: counted {above} more than observed, allowed are {slack}"] if above > slack else [])
