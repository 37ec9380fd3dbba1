# SPDX-License-Identifier: Apache-2.0
"""A setting to start from, for a model and a situation: a row of the table of advice (advice.py), graded for
the model's size, with closed forms of the model's cost."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenprune.errors import OptionError, TokenPruneError, UnsupportedModelError
from tokenprune.integrations.shared import checks
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.models.families import REFUSED, SERVED, SUPPORTED, family_of
from tokenprune.models.families.tested import list_tested_sites
from tokenprune.models.model_config import SHIPPED, read_model_config
from tokenprune.selection.method import Site
from tokenprune.selection.observable import Backend
from tokenprune.settings.cost import CostModel, Load
from tokenprune_bench.recommend.advice import NONE, Advice, Evidence, advice

TASKS = tuple(advice())
_MUCH = 0.25  # share of a prefill's FLOPs from which on a note tells of the tower
_ELSEWHERE = 2  # pieces of evidence from elsewhere that are shown
_CANDIDATES = 3  # methods that the last line names for `tune`


@dataclass(frozen=True)
class Recommendation:
    """A setting to start from; `print` shows it on one screen.

    setting: as `patch(config=...)` takes it; guard: "auto" where the evidence needs it beside; served_keep: what a vLLM
    server, which has no guard, keeps in its place. evidence: what speaks for it at its keep and task, and against;
    elsewhere: what is known of the method at other keeps and tasks. notes: what is not known, and what the model's
    shape says. smaller: what a smaller image of as many tokens does instead. candidates: methods to give to `tune`.
    served: whether vLLM can serve it; why_not: the reason where it cannot.
    """

    model: str
    family: str
    task: str
    setting: dict[str, Any]
    reason: str
    evidence: tuple[Evidence, ...]
    elsewhere: tuple[Evidence, ...] = ()
    notes: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    guard: str = ""
    served_keep: float | None = None
    smaller: str = ""
    served: bool = False
    why_not: str = ""

    @property
    def method(self) -> str:
        return self.setting["method"]

    @property
    def more(self) -> str:
        """The rest of what `patch` takes, as Python."""
        return f'guard="{self.guard}", processor=processor' if self.guard else ""

    @property
    def python(self) -> str:
        """The call that patches a model."""
        more = self.more and f", {self.more}"
        return f'tokenprune.patch(model, "{self.method}", keep={self.setting["keep"]!r}{more})'

    @property
    def config(self) -> str:
        """The same as the content of a tokenprune.json."""
        return json.dumps(self.setting | ({"guard": self.guard} if self.guard else {}))

    @property
    def vllm(self) -> str | None:
        """The flag for `vllm serve`; None where vLLM cannot serve it."""
        if not self.served:
            return None
        setting = self.setting | ({} if self.served_keep is None else {"keep": self.served_keep})
        return f"--mm-processor-kwargs '{json.dumps({'tokenprune': setting})}'"

    def __str__(self) -> str:
        lines = [
            f"{self.model} ({self.family}), {self.task}: start from {self.method} at keep {self.setting['keep']:g}",
            f"  because: {self.reason}",
            "",
            f"  Python  {self.python}",
            f"  vLLM    {self.vllm or f'not served: {self.why_not}'}",
            f"  config  {self.config}",
            "",
            *(f"- {one}" for one in (*self.evidence, *filter(None, [self.smaller]), *self.notes)),
        ]
        if self.elsewhere:
            lines += ["", "Elsewhere (other keeps or other questions):"]
            lines += [f"- {one}" for one in self.elsewhere[:_ELSEWHERE]]
            if (rest := len(self.elsewhere) - _ELSEWHERE) > 0:
                lines.append(f"- {rest} more: tokenprune.recommend(...).elsewhere")
        names = ",".join(self.candidates)
        lines += ["", f"It is a start, not a promise: tokenprune tune --data YOUR_QUESTIONS --methods {names}"]
        return "\n".join(lines)


def recommend(model: Any, *, task: str = "general") -> Recommendation:
    """Return a setting to start from, with its evidence: the row of the table of advice for this task.

    model: a model, its config, or its path or name, on disk or in the hub's cache; no weights are read. task: a
    situation of the table in docs/start/choose.md: "general" (photographs), "signs" (text in photographs),
    "documents" (rendered pages), "grounding" (where things are), "counting", "video", "long-video", "long-prompts",
    "server" (vLLM), "follow-up" (questions), "no-attention" (weights) or "tower" (a slow vision tower).

    Evidence is graded for the size of the model's decoder. Where the method of a row cannot act in the model's family,
    the row that this one names instead is taken, and a note says so.

    Raises OptionError for a task that is none, TokenPruneError for a config that cannot be read, UnsupportedModelError
    for a family that is refused.
    """
    if task not in TASKS:
        raise OptionError(f"task {task!r} is none of {', '.join(TASKS)}")
    name, config = _config_of(model)
    family = config.model_type
    notes = _notes(family)
    row = advice()[task]
    while not _may_act(row, family):
        notes.append(f"{row.method} cannot act in {family!r}: this is the row {row.instead!r}.")
        row = advice()[row.instead]
    cost, load = _cost(config, row)
    near, elsewhere = row.evidence(cost.decoder.weights)
    if not any(one.about == "accuracy" for one in near):
        notes.insert(0, f"Accuracy at this keep and task: {NONE}.")
    acting = [one for one in (row, *advice().values()) if _may_act(one, family)]
    why_not = _why_not(row, config)
    return Recommendation(
        name,
        family,
        task,
        row.setting.to_json(),
        row.reason,
        (*near, _closed(row, cost, load, family)),
        tuple(elsewhere),
        (*notes, *filter(None, [row.note, _unguarded(row)]), *_about(cost, load, row)),
        tuple(dict.fromkeys(one.method for one in acting if one.keep < 1))[:_CANDIDATES],
        "auto" if row.guard else "",
        row.served_keep if row.guard else None,
        _smaller(row, cost, load, family),
        why_not is None,
        why_not or "",
    )


def _unguarded(row: Advice) -> str:
    """Return what a server does in place of the guard."""
    if not row.guard:
        return ""
    kept = "all its tokens" if row.served_keep == 1 else f"{row.served_keep:g} of its tokens"
    return (
        f"vLLM has no guard: in its place every image keeps {kept}, the floor of {row.guard} (docs/guides/guard.md); a "
        f"request that asks for nothing of the kind may say keep {row.keep:g}."
    )


def _smaller(row: Advice, cost: CostModel, load: Load, family: str) -> str:
    """Return what `downsample` does at the keep of a row: its speed beside the row's, and what was measured of it."""
    if row.keep >= 1:
        return ""
    other = replace(row, method="downsample")
    (method,), _ = other.setting.steps()
    if reason := checks.unsupported(method, family):
        return f"The same budget by a smaller image (`downsample`) is not supported: {reason}"
    any_size = cost.tower is not None and cost.tower.view is None
    how = f"`downsample` at keep {row.keep:g}{', or max_pixels of the processor' if any_size else ''}"
    lead = f"The same budget by a smaller image ({how})"
    whole, ours, theirs = (
        one.flops for one in (cost.cost(load), *(cost.predict(load, *each.setting.steps()) for each in (row, other)))
    )
    speed = f"prefill x{whole / theirs:.2f} as fast by FLOPs, tower included, and {row.method} x{whole / ours:.2f}"
    if cost.tower is None:
        speed = f"how much faster is not known, as the tower's shape is not; {row.method} x{whole / ours:.2f} by FLOPs"
    near, _ = other.evidence(cost.decoder.weights)
    found = {one.about: one for one in reversed(near)}
    pieces = [str(found[about]) for about in ("accuracy", "time") if about in found]
    unknown = [] if "accuracy" in found else ["what it answers right at this keep and task was not measured"]
    return "; ".join([f"{lead}: {speed}", *unknown, *pieces])


def _about(cost: CostModel, load: Load, row: Advice) -> list[str]:
    """Warn that the vision tower dominates, if the method of the row acts after the tower."""
    (method,), _ = row.setting.steps()
    if cost.tower is None or method.site in (Site.PRE_ENCODER, Site.IN_ENCODER):
        return []
    if (whole := cost.cost(load)).tower_share <= _MUCH:
        return []
    return [
        f"The vision tower is {whole.tower_share:.0%} of a prefill's FLOPs here, and some {whole.tower_time:.0%} of "
        f"its time on a GPU: no cut after it makes that more than x{1 / whole.tower_time:.1f} as fast; task "
        '"tower" names what acts in it.'
    ]


def _config_of(model: Any) -> tuple[str, Any]:
    if not isinstance(model, (str, Path)):
        config = getattr(model, "config", model)
        if getattr(config, "model_type", None) is None:
            raise OptionError(f"recommend takes a model, its config, or where it lies, not {type(model).__name__}")
        return getattr(config, "name_or_path", "") or type(model).__name__, config
    name = Path(model).name if Path(model).is_dir() else str(model)
    return f"{name} (shipped)" if str(model) in SHIPPED else name, read_model_config(model)


def _notes(family: str) -> list[str]:
    """Return what to know of a family; raises UnsupportedModelError for one that is refused."""
    if family in REFUSED:
        raise UnsupportedModelError(f"{family!r} cannot be patched: {REFUSED[family]}")
    if family in SUPPORTED:
        return []
    return [f"{family!r} is not in the table of families: patch() tries the common contract."]


def _may_act(row: Advice, family: str) -> bool:
    """Return True where the method of a row is tested at its site in a family, and nothing keeps it from acting."""
    (method,), _ = row.setting.steps()
    return method.site.name in list_tested_sites(family_of(family)) and checks.unsupported(method, family) is None


def _cost(config: Any, row: Advice) -> tuple[CostModel, Load]:
    try:
        cost = CostModel.from_config(config)
    except UnsupportedModelError:
        return CostModel(DecoderShape.from_config(config.get_text_config())), Load((), row.tokens)
    own = cost.tower.view is None
    return cost, Load.of_config(config, tokens=row.tokens if own else None, tiles=None if own else row.frames)


def _architecture(config: Any) -> str | None:
    """Return the architecture by which the plugin for vLLM serves models of this config, None if it does not."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    named = (*(config.architectures or ()), NAMES.get(config.model_type))
    return next((one for one in named if one in SERVED), None)


def _closed(row: Advice, cost: CostModel, load: Load, family: str) -> Evidence:
    before, after = cost.cost(load), cost.predict(load, *row.setting.steps())
    parts = "tower and decoder" if cost.tower is not None else "the decoder"
    figure = (
        f"prefill x{before.flops / after.flops:.2f} as fast by FLOPs of {parts}, KV cache "
        f"{after.cache / before.cache:.0%}, with {load.visual} visual tokens and {load.text} of text; choosing not "
        "counted"
    )
    return Evidence("closed form", figure, f"the config of this {family}")


def _why_not(row: Advice, config: Any) -> str | None:
    """Return why vLLM cannot serve a row on the model of a config; None if it can."""
    from tokenprune.integrations.vllm.settings.towers import check_tower, merges_in_tower

    if (architecture := _architecture(config)) is None:
        return "the plugin does not know this family"
    (method,), _ = row.setting.steps()
    hint = "`recommend --task server` names the methods that it serves."
    if reason := checks.unsupported(method, architecture, Backend.VLLM, config=config):
        return f"{reason} {hint}"
    at_start = SimpleNamespace(  # of vLLM's own config, what the checks at the start of a server read
        hf_config=config, dtype="bfloat16", multimodal_config=SimpleNamespace(mm_encoder_tp_mode="weights")
    )
    try:
        if merges_in_tower(method) or checks.reads_tower(method):
            check_tower(SimpleNamespace(method=method, keep=row.keep, removes_nothing=False), at_start)
    except TokenPruneError as error:
        return f"{error} {hint}"
    return None


__all__ = ["TASKS", "Evidence", "Recommendation", "recommend"]
