# SPDX-License-Identifier: Apache-2.0
"""A setting to start from, for a model, a task and a goal, with the evidence for it: what papers print, what our own
runs measured, and closed forms of the model's cost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenprune.accounting import DecoderShape
from tokenprune.base import Site
from tokenprune.config import Config
from tokenprune.cost_model import CostModel, Load
from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.evidence import KEEPS, Candidate, Evidence, candidates, keeps_of
from tokenprune.model_config import SHIPPED_MODELS, read_model_config
from tokenprune.registry import method_class

TASKS = ("chat", "documents", "video", "grounding")
GOALS = ("ttft", "memory", "quality")
# A goal's place among the keeps; reading and finding places are lost first (docs/guard.md), so they keep a step more.
_PLACE = {"quality": 0, "ttft": 1, "memory": 2}
_LOST_FIRST = {"documents": "Reading", "grounding": "Finding places"}
_TOKENS = {"chat": 1024, "documents": 2048, "video": 8192, "grounding": 1024}  # of images that have their own size
_FRAMES = 16  # of a video, where every view has one size
_MOST, _MUCH = 0.5, 0.25  # shares of a prefill's FLOPs: from where on the tower decides, and from where a note says so
_EARLY = (Site.PRE_ENCODER, Site.IN_ENCODER)
_OTHERS = 3  # of those that the evidence tells no difference from, how many are named


@dataclass(frozen=True)
class Recommendation:
    """A setting to start from; `print` shows it on one screen.

    setting: as `patch(config=...)` takes it. evidence: what speaks for it, and against. notes: what is not known, and
    what the model's shape says. others: methods that the same evidence tells no difference from. served: whether vLLM
    can serve it; why_not: the reason where it cannot.
    """

    model: str
    family: str
    task: str
    goal: str
    setting: dict[str, Any]
    evidence: tuple[Evidence, ...]
    notes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    served: bool = False
    why_not: str = ""

    @property
    def method(self) -> str:
        return self.setting["method"]

    @property
    def python(self) -> str:
        """The call that patches a model."""
        keep = self.setting["keep"]
        budget = f"{keep!r}"
        if isinstance(keep, dict):
            budget = f"tokenprune.Budget({', '.join(f'{name}={value!r}' for name, value in keep.items())})"
        options = {name: value for name, value in self.setting.items() if name not in ("method", "keep")}
        more = "".join(f", {name}={value!r}" for name, value in options.items())
        pixels = ", processor=processor" if method_class(self.method).site is Site.PRE_ENCODER else ""
        return f'tokenprune.patch(model, "{self.method}", keep={budget}{more}{pixels})'

    @property
    def config(self) -> str:
        """The same as the content of a tokenprune.json."""
        return json.dumps(self.setting)

    @property
    def vllm(self) -> str | None:
        """The flag for `vllm serve`; None where vLLM cannot serve it."""
        return f"--mm-processor-kwargs '{json.dumps({'tokenprune': self.setting})}'" if self.served else None

    def __str__(self) -> str:
        lines = [
            f"{self.model} ({self.family}), {self.task}, {self.goal}: start from {self.method}",
            "",
            f"  Python  {self.python}",
            f"  vLLM    {self.vllm or f'not served: {self.why_not}'}",
            f"  config  {self.config}",
            "",
            *(f"- {one}" for one in self.evidence),
            *(f"- {one}" for one in self.notes),
        ]
        if self.others:
            lines.append(f"- By the same evidence no better and no worse: {', '.join(self.others)}.")
        names = ",".join([self.method, *self.others])
        lines += ["", f"It is a start, not a promise: tokenprune tune --data YOUR_QUESTIONS --methods {names}"]
        return "\n".join(lines)


def recommend(model: Any, *, task: str = "chat", goal: str = "ttft") -> Recommendation:
    """Return a setting to start from, with its evidence.

    model: a model, its config, or the path or name of one on disk or in the hub's cache; no weights are read. task:
    "chat" (questions about photographs), "documents", "video" or "grounding" (where things are). goal: "ttft" (time to
    the first token), "memory" (of the cache) or "quality" (as little loss as may be).

    Methods without any evidence for the task are left out, as are those that need a file fitted to the model, and those
    that our own runs show no better than dropping at random. The best published numbers go first, our own runs where
    papers print none. Among those that this tells no difference between goes what vLLM serves, for "ttft" what has a
    time measured, and then the best of our own runs. Where the vision tower is most of the work, "ttft" takes what
    shrinks the image or merges in the tower.

    Raises OptionError for a task or goal that is none, TokenPruneError for a config that cannot be read,
    UnsupportedModelError for a family that is refused, or in which nothing acts that there is evidence for.
    """
    for value, known, what in ((task, TASKS, "task"), (goal, GOALS, "goal")):
        if value not in known:
            raise OptionError(f"{what} {value!r} is none of {', '.join(known)}")
    name, config = _config_of(model)
    family = config.model_type
    sites, notes = _sites(family)
    cost, load = _cost(config, task)
    keep = _keep(task, goal)
    found = [one for one in candidates(task, keep, config if _is_served(config) else None) if one.site.name in sites]
    early = [one for one in found if one.site in _EARLY]
    if goal == "ttft" and cost.tower is not None and cost.cost(load).tower_share > _MOST:
        found = early or found
    if not found:
        raise UnsupportedModelError(
            f"there is no evidence for any method that acts on {family!r} at the task {task!r}: measure with "
            "`tokenprune bench`, or let `tokenprune tune` choose"
        )
    best = min(found, key=lambda one: one.rank)
    chosen, *others = sorted((one for one in found if one.near(best)), key=lambda one: one.among_equals(goal))
    return Recommendation(
        name,
        family,
        task,
        goal,
        chosen.setting,
        (*chosen.accuracy(), *(chosen.times() if goal == "ttft" else ()), _closed(chosen, cost, load, family)),
        (*_unknown(chosen, task, goal), *notes, *_about(cost, load, task)),
        tuple(one.name for one in others[:_OTHERS]),
        chosen.why_not is None,
        chosen.why_not or "",
    )


def _unknown(chosen: Candidate, task: str, goal: str) -> list[str]:
    """Say which evidence there is not."""
    notes = []
    if not chosen.published:
        notes.append(f"Published: none for {task} at this keep in the tables of benchmarks/papers.")
    if not chosen.ours:
        notes.append(f"Measured by us: none for {task} at this keep.")
    if goal == "ttft" and not chosen.fast:
        notes.append("Times: none published or measured; the closed form alone.")
    return notes


def _about(cost: CostModel, load: Load, task: str) -> list[str]:
    notes = []
    if cost.tower is not None and (share := cost.cost(load).tower_share) > _MUCH:
        notes.append(
            f"The vision tower is {share:.0%} of a prefill's FLOPs here: no cut behind it makes that more than "
            f"x{1 / share:.2f} as fast."
        )
    if task in _LOST_FIRST:
        notes.append(
            f'{_LOST_FIRST[task]} is lost first: guard="auto", processor=processor keeps more for such prompts '
            "(docs/guard.md)."
        )
    return notes


def _config_of(model: Any) -> tuple[str, Any]:
    if not isinstance(model, (str, Path)):
        config = getattr(model, "config", model)
        if getattr(config, "model_type", None) is None:
            raise OptionError(f"recommend takes a model, its config, or where it lies, not {type(model).__name__}")
        return getattr(config, "name_or_path", "") or type(model).__name__, config
    name = Path(model).name if Path(model).is_dir() else str(model)
    return f"{name} (shipped)" if str(model) in SHIPPED_MODELS else name, read_model_config(model)


def _sites(family: str) -> tuple[tuple[str, ...], list[str]]:
    """Return where methods may act in a family, and what to know of it; raises UnsupportedModelError."""
    from tokenprune.integrations.hf.families.table import REFUSED, SUPPORTED, Support

    if family in REFUSED:
        raise UnsupportedModelError(f"{family!r} cannot be patched: {REFUSED[family]}")
    if family in SUPPORTED:
        return SUPPORTED[family].sites, []
    return Support().sites, [f"{family!r} is not in the table of families: patch() tries the common contract."]


def _cost(config: Any, task: str) -> tuple[CostModel, Load]:
    tokens, views = _TOKENS[task], _FRAMES if task == "video" else 1
    try:
        cost = CostModel.from_config(config)
    except UnsupportedModelError:
        return CostModel(DecoderShape.from_config(config.get_text_config())), Load((), tokens)
    own = cost.tower.view is None
    return cost, Load.of_config(config, tokens=tokens if own else None, tiles=None if own else views)


def _keep(task: str, goal: str) -> float:
    """Return the keep of a goal, or the one nearest to it at which anything was measured."""
    place = max(0, _PLACE[goal] - (task in _LOST_FIRST))
    there = keeps_of(task)
    return min((keep for keep in KEEPS if keep in there), key=lambda keep: abs(KEEPS.index(keep) - place))


def _is_served(config: Any) -> bool:
    """Whether the plugin for vLLM serves models of this config."""
    from tokenprune.integrations.vllm.families import FAMILIES

    if any(one in FAMILIES for one in config.architectures or ()):
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return NAMES.get(config.model_type) in FAMILIES


def _closed(one: Candidate, cost: CostModel, load: Load, family: str) -> Evidence:
    before, after = cost.cost(load), cost.predict(load, *Config(one.setting).steps())
    parts = "tower and decoder" if cost.tower is not None else "the decoder"
    told = (
        f"prefill x{before.flops / after.flops:.2f} as fast by FLOPs of {parts}, KV cache "
        f"{after.cache / before.cache:.0%}, with {load.visual} visual tokens and {load.text} of text; choosing not "
        "counted"
    )
    return Evidence("closed form", told, f"the config of this {family}")


__all__ = ["GOALS", "TASKS", "Evidence", "Recommendation", "recommend"]
