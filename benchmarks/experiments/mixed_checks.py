# SPDX-License-Identifier: Apache-2.0
"""Offers of profiles that change, what they allow, and whether a server's counters are what its clients saw: the checks
of mixed_load.py."""

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
# What the file of profiles holds in turn. The second lacks a profile that clients ask for; the third is wrong.
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
    """A request that was sent: seconds of a clock at which it went and was answered."""

    request: Request
    begin: float
    end: float = math.inf
    answer: Answer = field(default_factory=lambda: Answer(0))


@dataclass
class InForce:
    """An offer, and the seconds between which it may have been in force."""

    number: int
    begin: float
    end: float = math.inf


def legal(request: Request, offer: Mapping[str, Any]) -> list[tuple[str, str] | None]:
    """Return method and keep that may serve a request while an offer is in force; None stands for a refusal. Of
    requests that choose by a profile's name, or not at all."""
    profiles = {"default": BASE} | offer["profiles"]
    if request.kind == "default":
        names = ["default", *offer.get("overload", {}).get("profiles", ())]
    else:
        names = [request.profile or request.asked["profile"]]
    made: list[tuple[str, str] | None] = []
    for name in names:
        given = BASE | profiles[name] if name in profiles else None
        made.append(given and (("off", "1.0") if given.get("off") else (given["method"], str(given["keep"]))))
    return made


def out_of_force(sent: Sent, times: Sequence[InForce]) -> str | None:
    """Return what is wrong with the setting that served a request, in words: it was not in force at any time at which
    the request was on its way. None if nothing is."""
    if sent.request.kind not in ("name", "profile", "default"):
        return None
    may = [one for place, time in enumerate(times) if time.begin <= sent.end and sent.begin <= time.end
           for one in _served(sent, times[: place + 1])]  # fmt: skip
    served = sent.answer.record
    was = (served["method"], served["keep"]) if served else None
    return None if was in may else f"served by {was}, and in force was {may}"


def _served(sent: Sent, times: Sequence[InForce]) -> list[tuple[str, str] | None]:
    """Return what may serve a request under the last of these offers: for a profile that has left, and for a while, the
    last offer that had it."""
    found = legal(sent.request, OFFERS[times[-1].number])
    if found != [None]:
        return found
    had = (place for place, time in enumerate(times) if legal(sent.request, OFFERS[time.number]) != [None])
    if (last := max(had, default=None)) is None or sent.begin > times[last].end + GRACE_SECONDS:
        return found
    before = legal(sent.request, OFFERS[times[last].number])
    return before if sent.end < times[last + 1].begin + GRACE_SECONDS else before + found


def counted(page: str, name: str, *labels: str) -> collections.Counter[tuple[str, ...]]:
    """Return the values of a counter on a page of metrics, by some of its labels."""
    sums: collections.Counter[tuple[str, ...]] = collections.Counter()
    for text, value in re.findall(rf"^{re.escape(name)}\{{(.*?)\}} (\S+)$", page, re.MULTILINE):
        found = dict(re.findall(r'(\w+)="(.*?)"', text))
        sums[tuple(found[label] for label in labels)] += int(float(value))
    return sums


def metric_differences(page: str, sent: Sequence[Sent], reloads: Mapping[str, int]) -> list[str]:
    """Return where a server's counters are not what its clients saw, in words. reloads: signals sent, by the result
    that is due. Of clients that went before an answer some may be counted, or none."""
    gone = sum(one.request.kind == "gone" for one in sent)
    records = [one.answer.record for one in sent if one.answer.served]
    seen = collections.Counter((one["profile"], one["by"]) for one in records)
    requests = counted(page, "tokenprune:requests_total", "profile", "by")
    said = _between("requests", seen, requests, gone)
    for stage in ("in", "out"):
        tokens = collections.Counter[tuple[str, ...]]()
        for one in records:
            tokens[(stage,)] += int(one[stage])
        found = counted(page, "tokenprune:visual_tokens_total", "stage")
        most = gone * max((int(one["in"]) for one in records), default=0)
        said += _between("visual tokens", tokens, {(stage,): found[(stage,)]}, most)
    refused = sum(one.answer.status == 400 and one.request.kind != "broken" for one in sent)
    found = counted(page, "tokenprune:refusals_total")
    said += _between("refusals", {(): refused}, found, 0)
    due = {(result,): count for result, count in reloads.items()}
    return said + _between("reloads", due, counted(page, "tokenprune:reloads_total", "result"), 0)


def _between(what: str, seen: Mapping[Any, int], found: Mapping[Any, int], slack: int) -> list[str]:
    """Return where counters are below what was seen, or above it by more than `slack` in all."""
    below = [
        f"{what} {key}: counted {found.get(key, 0)}, seen {seen[key]}" for key in seen if found.get(key, 0) < seen[key]
    ]
    above = sum(found.values()) - sum(seen.values())
    return below + ([f"{what}: {above} more counted than seen, and at most {slack} may be"] if above > slack else [])
