# SPDX-License-Identifier: Apache-2.0
"""What is known of methods, task by task: published numbers and our own runs, as assets/evidence.json has them.

dev/evidence.py makes that file from benchmarks/papers and benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from tokenprune.base import ImageChooser, Site
from tokenprune.config import Config
from tokenprune.errors import TokenPruneError
from tokenprune.registry import MethodInfo, available_methods, method_info
from tokenprune.setting import file_options

ASSETS = Path(__file__).parent / "assets"
KEEPS = (0.5, 0.25, 0.11)
_PUBLISHED = {0.5: 192, 0.25: 128, 0.11: 64}  # of 576: the papers' budgets that are nearest
_COVERED = 10  # methods that a run must have for a rank in it to say something
# Points within which two methods are taken as alike, by published numbers and by our own runs: the sources differ by
# about as much in the same row, and a question is worth half a point or more in our runs.
_NEAR_PUBLISHED, _NEAR_OURS = 2.0, 5.0


@dataclass(frozen=True)
class Evidence:
    """What speaks for a setting. kind: "published", "measured by us" or "closed form". told: the number, in words.
    source: where it stands. short: the number in fewer words, for a table."""

    kind: str
    told: str
    source: str
    short: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.told} ({self.source})"


@dataclass(frozen=True)
class Candidate:
    """A method with what is known of it for a task at a keep.

    published, ours, fast: entries of the file: accuracy by papers, by our runs, and times. gap: points above the
    unpatched model (below: negative), mean over our runs; None where they lack it. beside: of each entry of ours, what
    the unpatched model and dropping at random scored there. served: the config of the model, where the plugin for vLLM
    knows its family; else None.
    """

    name: str
    site: Site
    setting: dict[str, Any]
    published: tuple[dict[str, Any], ...]
    ours: tuple[dict[str, Any], ...]
    fast: tuple[dict[str, Any], ...]
    gap: float | None
    beside: tuple[tuple[float, float], ...]
    served: Any

    @cached_property
    def why_not(self) -> str | None:
        """Why vLLM cannot serve it; None if it can."""
        return _why_not(self.setting, self.served)

    @property
    def percent(self) -> float | None:
        """Percent of the unpruned model, mean over the papers."""
        return fmean(one["percent"] for one in self.published) if self.published else None

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Those with a published number first, the best of them first; then by our own runs."""
        return self.percent is None, -(self.percent or 0.0), -(-100.0 if self.gap is None else self.gap)

    def among_equals(self, goal: str) -> tuple[bool, bool, float]:
        """What vLLM serves goes first, then what has a time measured, if that is the goal; then our own runs decide."""
        return self.why_not is not None, goal == "ttft" and not self.fast, -(-100.0 if self.gap is None else self.gap)

    def near(self, best: Candidate) -> bool:
        """Whether the evidence tells no difference from the best one."""
        if (self.percent is None) != (best.percent is None):
            return False
        if self.percent is None:
            return self.gap is not None and best.gap - self.gap <= _NEAR_OURS
        return best.percent - self.percent <= _NEAR_PUBLISHED

    def accuracy(self) -> Iterator[Evidence]:
        """Yield at most two published numbers, and ours."""
        for row in self.published[:2]:
            told = (
                f"{row['percent']:g} % of the unpruned {row['model']}, {row['what']}, with {row['tokens']} of "
                f"{row['of']} tokens ({row['tokens'] / row['of']:.0%})"
            )
            short = f"{row['percent']:g} % of the unpruned, {row['what']}, with {row['tokens']} of {row['of']} tokens"
            yield Evidence("published", told, row["source"], short)
        for row, (whole, chance) in zip(self.ours, self.beside, strict=True):
            share, low, high = row["right"]
            told = (
                f"{share:g} % right [{low:g}, {high:g}] of {row['questions']} drawn questions; unpatched {whole:g}, "
                f"random {chance:g}; {row['model']}"
            )
            short = f"{share:g} % of {row['questions']} right, unpatched {whole:g}, random {chance:g}"
            yield Evidence("measured by us", told, row["file"], short)

    def times(self) -> Iterator[Evidence]:
        """Yield a published time and one of ours, where there are any."""
        for kind, published in (("published", True), ("measured by us", False)):
            row = next((one for one in reversed(self.fast) if one["published"] is published), None)
            if row is not None:
                yield Evidence(kind, row["told"], row["source"])


def keeps_of(task: str) -> set[float]:
    """Return the keeps at which our runs have methods for a task."""
    return {one["keep"] for one in _file()["accuracy"] if one["task"] == task}


def candidates(task: str, keep: float, served: Any) -> Iterator[Candidate]:
    """Yield the methods for which there is evidence, and which it does not speak against: no baselines, none that needs
    a file fitted to the model, none that our own runs show no better than dropping at random.

    served: the config of the model, where the plugin for vLLM knows its family; else None.
    """
    runs = list(_runs(task, keep))
    for name in available_methods():
        info = method_info(name)
        ours = [run[name] for run in runs if name in run]
        published = [
            one
            for one in _file()["published"]
            if (one["task"], one["method"], one["tokens"]) == (task, name, _PUBLISHED[keep])
        ]
        if _is_unfit(info) or not (published or (runs and len(ours) == len(runs))):
            continue
        beside = [(run["unpatched"]["right"][0], run["random"]["right"][0]) for run in runs if name in run]
        shares = [one["right"][0] for one in ours]
        if shares and fmean(shares) <= fmean(chance for _, chance in beside):
            continue
        gap = None
        if runs and len(ours) == len(runs):
            gap = fmean(share - whole for share, (whole, _) in zip(shares, beside, strict=True))
        setting = next((one["setting"] for one in ours if "setting" in one), {"method": name, "keep": keep})
        fast = tuple(one for one in _file()["speed"] if one["method"] == name)
        yield Candidate(
            name, info.site, setting, tuple(published), tuple(ours), fast, gap, tuple(beside), served
        )  # fmt: skip


def _runs(task: str, keep: float) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield what each of our runs says of the methods at a keep, where it has enough of them to rank one."""
    entries = [one for one in _file()["accuracy"] if one["task"] == task]
    for file in dict.fromkeys(one["file"] for one in entries):
        run = {one["method"]: one for one in entries if one["file"] == file and one["keep"] == keep}
        if len(run) >= _COVERED and "random" in run:
            (whole,) = (one for one in entries if (one["file"], one["method"]) == (file, "unpatched"))
            yield run | {"unpatched": whole}


def _is_unfit(info: MethodInfo) -> bool:
    baseline = info.paper.startswith("none")
    return baseline or info.reconstruction or bool(file_options(info.cls)) or issubclass(info.cls, ImageChooser)


def _why_not(setting: dict[str, Any], config: Any) -> str | None:
    """Return why vLLM cannot serve a setting; None if it can. config: of the model; None: a family it does not know."""
    if config is None:
        return "the plugin does not know this family"
    if why_not := _never_served(json.dumps(setting)):
        return why_not
    from tokenprune.integrations.vllm.setting import merge_checks, tower_checks

    (method,), _ = Config(setting).steps()
    at_start = SimpleNamespace(  # of vLLM's own config, what the checks at the start of a server read
        hf_config=config, dtype="bfloat16", multimodal_config=SimpleNamespace(mm_encoder_tp_mode="weights")
    )
    try:
        if merge_checks.merges_in_tower(method):
            plan = SimpleNamespace(method=method, keep=setting["keep"], removes_nothing=False)
            merge_checks.check_merging(plan, at_start)
        elif tower_checks.reads_tower(method):
            tower_checks.check_method(method, at_start)
    except TokenPruneError as error:
        return str(error)
    return None


@cache
def _never_served(setting: str) -> str | None:
    """Return why vLLM can serve a setting on no model at all, by what its method says of itself."""
    from tokenprune.integrations.vllm.setting.servable import declared_obstacle

    (method,), _ = Config(json.loads(setting)).steps()
    return declared_obstacle(method)


@cache
def _file() -> dict[str, Any]:
    return json.loads((ASSETS / "evidence.json").read_text(encoding="utf-8"))


__all__ = ["ASSETS", "KEEPS", "Candidate", "Evidence", "candidates", "keeps_of"]
