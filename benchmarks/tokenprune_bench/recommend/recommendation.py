# SPDX-License-Identifier: Apache-2.0
"""Recommend a setting for a model and a task: a row of the table of advice (advice.py), graded for the model's size."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any

from tokenprune.errors import OptionError, TokenPruneError, UnsupportedModelError
from tokenprune.integrations.shared import checks
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.models.families import REFUSED, SERVED, SUPPORTED, get_family
from tokenprune.models.families.tested import list_tested_sites
from tokenprune.models.model_config import SHIPPED, read_model_config
from tokenprune.selection.method import Site
from tokenprune.selection.observable import Backend
from tokenprune.settings.cost import CostModel, Load
from tokenprune_bench.recommend.advice import (
    NONE,
    PROCESSOR_LIMIT,
    Advice,
    Evidence,
    describe_limit,
    describe_more,
    load_advice,
)

TASKS = tuple(load_advice())
_LARGE_TOWER = 0.25  # tower share of the prefill FLOPs that triggers a note
_ELSEWHERE = 2  # shown pieces of evidence from elsewhere
WIDTH = 80  # letters of a line of `summary`
_CANDIDATES = 3  # methods to suggest for `tune`


@dataclass(frozen=True)
class Recommendation:
    """A setting to start from. `print` shows all of its evidence.

    Attributes:
        model: Name of the model.
        family: Model type.
        task: The requested task.
        setting: Setting for `patch(config=...)`.
        reason: The main reason.
        evidence: Evidence at this keep and task.
        elsewhere: Evidence at other keeps and tasks.
        notes: Limits of the evidence, and notes on the shape of the model.
        candidates: Methods to pass to `tune`.
        guard: "auto" if the evidence requires the guard.
        served_keep: Keep for a vLLM server, which has no guard.
        smaller: Comparison with a smaller image of equal tokens.
        served: Whether vLLM can serve the setting.
        why_not: Reason if vLLM cannot serve it.
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
        """Remaining arguments of `patch`, as Python."""
        return describe_more(self.guard, self.setting.get("max_visual_tokens"))

    @property
    def python(self) -> str:
        """The call that patches a model."""
        more = self.more and f", {self.more}"
        return f'tokenprune.patch(model, "{self.method}", keep={self.setting["keep"]!r}{more})'

    @property
    def config(self) -> str:
        """The setting as content of a tokenprune.json."""
        return json.dumps(self.setting | ({"guard": self.guard} if self.guard else {}))

    @property
    def vllm(self) -> str | None:
        """Flag for `vllm serve`, or None if vLLM cannot serve the setting."""
        if not self.served:
            return None
        setting = self.setting | ({} if self.served_keep is None else {"keep": self.served_keep})
        return f"--mm-processor-kwargs '{json.dumps({'tokenprune': setting})}'"

    @property
    def summary(self) -> str:
        """The setting with its main reason and evidence, at most 12 lines of 80 letters. `str` has all evidence."""
        accuracy = next((str(item) for item in self.evidence if item.about == "accuracy"), NONE)
        lines = [
            f"{self.model} ({self.family}), {self.task}: start from {self.method} at keep {self.setting['keep']:g}",
            "  " + shorten(f"because: {self.reason}", 2 * WIDTH - 2),
            f"  Python  {self.python}",
            f"  vLLM    {self.vllm or shorten(f'not served: {self.why_not}', 2 * WIDTH - 20)}",
            shorten(f"Accuracy: {accuracy}", 2 * WIDTH),
            f"Test it on your questions: tokenprune tune --methods {','.join(self.candidates)} --data FILE",
            "--details prints all evidence and its limits.",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [
            f"{self.model} ({self.family}), {self.task}: start from {self.method} at keep {self.setting['keep']:g}",
            f"  because: {self.reason}",
            "",
            f"  Python  {self.python}",
            f"  vLLM    {self.vllm or f'not served: {self.why_not}'}",
            f"  config  {self.config}",
            "",
            *(f"- {line}" for line in (*self.evidence, *filter(None, [self.smaller]), *self.notes)),
        ]
        if self.elsewhere:
            lines += ["", "Elsewhere (other keeps or other questions):"]
            lines += [f"- {line}" for line in self.elsewhere[:_ELSEWHERE]]
            if (rest := len(self.elsewhere) - _ELSEWHERE) > 0:
                lines.append(f"- {rest} more: tokenprune.recommend(...).elsewhere")
        names = ",".join(self.candidates)
        lines += ["", f"This is a starting point. To test it: tokenprune tune --data YOUR_QUESTIONS --methods {names}"]
        return "\n".join(lines)


def recommend(model: Any, *, task: str = "general") -> Recommendation:
    """Return a setting to start from, with its evidence.

    The evidence is graded for the size of the model's decoder. If the family does not support the method of the task,
    the fallback row of the table is used, with a note.

    Args:
        model: A model, its config, or its path or name, on disk or in the hub's cache. No weights are read.
        task: "general" (photographs), "signs" (text in photographs), "documents" (rendered pages), "grounding"
            (positions of objects), "counting", "video", "long-video", "long-prompts", "server" (vLLM), "clients" (that
            send large photographs), "follow-up" (questions), "no-attention" (weights) or "tower" (a slow vision tower).
            See docs/start/choose.md.

    Raises:
        OptionError: If the task is not known.
        TokenPruneError: If the config cannot be read.
        UnsupportedModelError: If the family is refused.

    Examples:
        >>> advice = tokenprune.recommend(model, task="documents")
        >>> advice.family
        'llava'
    """
    if task not in TASKS:
        # A word of a row's title, such as "receipts", finds the row.
        rows = [row for row in load_advice().values() if task and task.lower() in row.title]
        hint = f"Use {rows[0].situation!r} ({rows[0].title})" if rows else f"Use one of {', '.join(TASKS)}"
        raise OptionError(f"task {task!r} is not known. {hint}.")
    name, config = _resolve_config(model)
    family = config.model_type
    notes = _list_family_notes(family)
    row = load_advice()[task]
    while not _may_act(row, family):
        notes.append(f"{_describe_refusal(row, family)} The row {row.instead!r} is used instead.")
        row = load_advice()[row.instead]
    cost, load = _build_cost_model(config, row)
    evidence, elsewhere = row.evidence(cost.decoder.num_weights)
    if not any(item.about == "accuracy" for item in evidence):
        notes.insert(0, f"Accuracy at this keep and task: {NONE}.")
    acting = [item for item in (row, *load_advice().values()) if _may_act(item, family)]
    why_not = _find_unserved_reason(row, config)
    return Recommendation(
        name,
        family,
        task,
        row.setting.to_json(),
        row.reason,
        (*evidence, _build_closed_form(row, cost, load, family)),
        tuple(elsewhere),
        (
            *notes,
            *filter(None, [row.note, _describe_missing_guard(row), _describe_processor_limit(row, cost, family)]),
            *_describe_tower_share(cost, load, row),
        ),
        tuple(dict.fromkeys(item.method for item in acting if item.keep < 1))[:_CANDIDATES],
        "auto" if row.guard else "",
        row.served_keep if row.guard else None,
        _compare_with_downsample(row, cost, load, family),
        why_not is None,
        why_not or "",
    )


def _describe_refusal(row: Advice, family: str) -> str:
    if row.max_visual_tokens is not None:
        return f"Whether max_visual_tokens limits {family!r} depends on its processor (docs/reference/processors.md)."
    return f"{row.method} does not support {family!r}."


def _describe_missing_guard(row: Advice) -> str:
    """Describe the server's replacement for the guard."""
    if not row.guard:
        return ""
    kept = "all its tokens" if row.served_keep == 1 else f"{row.served_keep:g} of its tokens"
    return (
        f"vLLM does not support the guard, so every image keeps {kept}, the floor of {row.guard} "
        f"(docs/guides/guard.md). Requests of other kinds can use keep {row.keep:g}."
    )


def _describe_processor_limit(row: Advice, cost: CostModel, family: str) -> str:
    """Describe when preprocessing is the bottleneck, and the setting to use then."""
    if row.max_visual_tokens is not None:
        return "Accuracy was measured without the limit. Read JPEG files with tokenprune.load_image, as vLLM does."
    any_size = cost.tower is not None and cost.tower.view is None
    if not any_size or Site.PRE_ENCODER in _list_sites(row) or not _may_act(load_advice()["clients"], family):
        return ""
    return (
        f"Preprocessing is the bottleneck if the processor takes over {PROCESSOR_LIMIT:.0%} of the time to the first "
        f"token (tokenprune profile --image FILE). {describe_limit()}"
    )


def _list_sites(row: Advice) -> list[Site]:
    return [method.site for method in row.setting.steps()[0]]


def _compare_with_downsample(row: Advice, cost: CostModel, load: Load, family: str) -> str:
    """Compare with `downsample` at the keep of a row: its speed, and its measured results."""
    if row.keep >= 1 or row.max_visual_tokens is not None:
        return ""
    other = replace(row, method="downsample")
    (method,), _ = other.setting.steps()
    if reason := checks.find_unsupported_reason(method, family):
        return f"The same budget by a smaller image (`downsample`) is not supported: {reason}"
    any_size = cost.tower is not None and cost.tower.view is None
    how = f"`downsample` at keep {row.keep:g}{', or max_pixels of the processor' if any_size else ''}"
    lead = f"The same budget by a smaller image ({how})"
    unpatched = cost.compute_cost(load).flops
    ours, theirs = (unpatched / cost.predict(load, *each.setting.steps()).flops for each in (row, other))
    speed = f"prefill x{theirs:.2f} as fast by FLOPs, tower included; {row.method} x{ours:.2f}"
    if cost.tower is None:
        speed = f"the speedup is not known, because the tower's shape is not; {row.method} x{ours:.2f} by FLOPs"
    evidence, _ = other.evidence(cost.decoder.num_weights)
    by_topic = {item.about: item for item in reversed(evidence)}
    pieces = [str(by_topic[about]) for about in ("accuracy", "time") if about in by_topic]
    unknown = [] if "accuracy" in by_topic else ["its accuracy at this keep and task was not measured"]
    return "; ".join([f"{lead}: {speed}", *unknown, *pieces])


def _describe_tower_share(cost: CostModel, load: Load, row: Advice) -> list[str]:
    """Warn if the vision tower dominates and the method of the row runs after the tower."""
    if cost.tower is None or not {Site.PRE_ENCODER, Site.IN_ENCODER}.isdisjoint(_list_sites(row)):
        return []
    if (unpatched := cost.compute_cost(load)).tower_share <= _LARGE_TOWER:
        return []
    return [
        f"The vision tower is {unpatched.tower_share:.0%} of a prefill's FLOPs here, and about "
        f"{unpatched.tower_time:.0%} of its time on a GPU. A cut after the tower makes a prefill at most "
        f"x{1 / unpatched.tower_time:.1f} as fast; task "
        '"tower" recommends methods inside the tower.'
    ]


def _resolve_config(model: Any) -> tuple[str, Any]:
    if not isinstance(model, (str, Path)):
        config = getattr(model, "config", model)
        if getattr(config, "model_type", None) is None:
            raise OptionError(f"recommend needs a model, its config, or its path or name, not {type(model).__name__}.")
        return getattr(config, "name_or_path", "") or type(model).__name__, config
    name = Path(model).name if Path(model).is_dir() else str(model)
    return f"{name} (shipped)" if str(model) in SHIPPED else name, read_model_config(model)


def _list_family_notes(family: str) -> list[str]:
    """Return notes on a family.

    Raises:
        UnsupportedModelError: If the family is refused.
    """
    if family in REFUSED:
        raise UnsupportedModelError(f"{family!r} cannot be patched: {REFUSED[family]}")
    if family in SUPPORTED:
        return []
    return [f"{family!r} is not in the table of families. patch() tries the generic adapter."]


def _may_act(row: Advice, family: str) -> bool:
    """Return True if the methods of a row are tested at their sites in a family and supported."""
    tested = list_tested_sites(get_family(family))
    return all(
        method.site.name in tested and checks.find_unsupported_reason(method, family) is None
        for method in row.setting.steps()[0]
    )


def _build_cost_model(config: Any, row: Advice) -> tuple[CostModel, Load]:
    try:
        cost = CostModel.from_config(config)
    except UnsupportedModelError:
        return CostModel(DecoderShape.from_config(config.get_text_config())), Load((), row.tokens)
    any_size = cost.tower.view is None
    size = {"tokens": row.tokens} if any_size else {"tiles": row.frames}
    return cost, Load.from_config(config, **size)


def _find_architecture(config: Any) -> str | None:
    """Return the architecture name that vLLM serves for this config, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    named = (*(config.architectures or ()), NAMES.get(config.model_type))
    return next((name for name in named if name in SERVED), None)


def _build_closed_form(row: Advice, cost: CostModel, load: Load, family: str) -> Evidence:
    before, after = cost.compute_cost(load), cost.predict(load, *row.setting.steps())
    parts = "tower and decoder" if cost.tower is not None else "the decoder"
    figure = (
        f"prefill x{before.flops / after.flops:.2f} as fast by FLOPs of {parts}, KV cache "
        f"{after.cache / before.cache:.0%}, with {load.visual} visual tokens and {load.text} text tokens; selection "
        "not counted"
    )
    return Evidence("closed form", figure, f"the config of this {family}")


def _find_unserved_reason(row: Advice, config: Any) -> str | None:
    """Return why vLLM cannot serve a row on this model, or None."""
    from tokenprune.integrations.vllm.settings.towers import check_tower, merges_in_tower

    if (architecture := _find_architecture(config)) is None:
        return "the plugin does not support this family"
    hint = "`recommend --task server` lists supported methods."
    methods, budgets = row.setting.steps()
    for method in methods:
        if reason := checks.find_unsupported_reason(method, architecture, Backend.VLLM, config=config):
            return f"{reason} {hint}"
    at_start = SimpleNamespace(  # the fields of vLLM's config that the startup checks read
        hf_config=config, dtype="bfloat16", multimodal_config=SimpleNamespace(mm_encoder_tp_mode="weights")
    )
    try:
        for method, budget in zip(methods, budgets, strict=True):
            if merges_in_tower(method) or checks.reads_tower(method):
                check_tower(SimpleNamespace(method=method, budget=budget, keeps_all_tokens=False), at_start)
    except TokenPruneError as error:
        return f"{error} {hint}"
    return None


__all__ = ["TASKS", "Evidence", "Recommendation", "recommend"]
