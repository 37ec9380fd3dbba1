# SPDX-License-Identifier: Apache-2.0
"""What is run: each method at each budget, as arguments of lmms-eval, and how many tokens that comes to."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from papers.published import BUDGETS, UNPATCHED
from papers.sets import TASK_FOLDER

import tokenprune
from tokenprune import Budget, Site
from tokenprune.errors import BudgetError, OptionError
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection import ImageChooser, ResizeMethod, UnitDropper
from tokenprune.selection.observable_registry import compares_frames

PRETRAINED = "llava-hf/llava-1.5-7b-hf"
PATCHES = 576
SHAPE = DecoderShape(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128)
# What a method may be of which no run stands in the table, by what it says of itself, and why.
UNFIT: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("methods for videos", compares_frames, "compares the frames of videos; here are images"),
    ("patterns of attention", lambda one: one.site is Site.ATTENTION, "removes no tokens"),
    (
        "choices between images",
        lambda one: isinstance(one, ImageChooser),
        "chooses between the images of a prompt; here every prompt has one",
    ),
    (
        "sizes by content",
        lambda one: isinstance(one, ResizeMethod) and one.depends_on_content,
        "gives each image a number by its content: what 192 on average takes is not known before the run",
    ),
    (
        "units of patches dropped ahead of the tower",
        lambda one: isinstance(one, UnitDropper),
        "acts on towers that pack patches of any grid, and LLaVA-1.5 has a fixed one",
    ),
    (
        "images withdrawn",
        lambda one: one.min_tokens == 0,
        "may withdraw all tokens at a layer: what 192 takes is not known before the run, or is met by whole layers",
    ),
)
OUR_OWN = "tokenprune.methods."
LEFT_OUT = {
    "ivc_prune": "counts what stays at its cut; the layers before it keep all, and only its authors' code evicts them",
    "erase": "reads the pixels of towers that pack patches, and decides by them at which layer it cuts",
}
LEFT_OUT |= {
    name: reasons[0]
    for name in tokenprune.available_methods()
    if (reasons := [why for _, is_so, why in UNFIT if is_so(tokenprune.method(name))])
}
# As its paper has it: merged in the tower, unmerged in the decoder's attention.
_OPTIONS = {"dymu": {"vtu": "expanded"}}


@dataclass(frozen=True)
class Setting:
    """One run: a method at a budget. Its name is that of its folder of results.

    means: what the budget counts, as in the published rows. keep, options: what the method is given. average: tokens
    averaged over the decoder's layers. tokens: the same in words.
    """

    method: str
    budget: int = PATCHES
    means: str = "all"
    keep: int | float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    average: float = PATCHES
    tokens: str = "all 576"

    @property
    def name(self) -> str:
        if self.method == UNPATCHED:
            return UNPATCHED
        return f"{self.method}-{self.budget}{'-cut' if self.means == 'cut' else ''}"

    @property
    def given(self) -> dict[str, Any]:
        """What tells this run from others, in `--model_args`."""
        return (
            {"method": "none"}
            if self.method == UNPATCHED
            else {"method": self.method, "keep": self.keep, **self.options}
        )

    def arguments(self, pretrained: str, device: str, thresholds: str) -> str:
        """Return `--model_args`."""
        given = {"base": "llava_hf", "pretrained": pretrained, "device": device, "device_map": device, **self.given}
        if self.method == "dymu":
            given["thresholds"] = thresholds
        for name, value in given.items():
            if "," in str(value):
                raise OptionError(f"{name}={value!r}: a comma ends an argument of lmms-eval; use a value without one")
        return ",".join(f"{name}={value}" for name, value in given.items())


@cache
def settings() -> tuple[Setting, ...]:
    """Return all settings: unpatched, then our methods in the order in which data meets them."""
    ours = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
    ours = [info for info in ours if info.cls.__module__.startswith(OUR_OWN) and info.name not in LEFT_OUT]
    found = [Setting(UNPATCHED)]
    for info in sorted(ours, key=lambda info: info.site.order):
        for budget in BUDGETS:
            if info.site is Site.PRE_ENCODER:
                found.append(_smaller_image(info.name, budget))
            elif info.site is Site.IN_ENCODER:
                found.append(_merged(info.name, budget))
            elif (reached := _reached(info.name, budget)) is not None:
                found.append(reached)
    # DART's paper counts what its cut keeps, and keeps 4 more than it counts.
    found += [_setting("dart", budget, "cut", budget, {"exact": False}) for budget in BUDGETS]
    return tuple(found)


def _reached(name: str, budget: int) -> Setting | None:
    """Return `_dropped`, or None where the layers before a method's first cut spend more than the budget."""
    try:
        return _dropped(name, budget)
    except BudgetError:
        return None


def _dropped(name: str, budget: int) -> Setting:
    """The tokens averaged over the layers are `budget`."""
    stages = tokenprune.method(name).stages(Budget(keep=budget), SHAPE.layers)
    if len(stages) > 1:
        return _setting(name, budget, "average", budget)
    layer = stages[0][0].cut_layer
    if layer == 0:
        return _setting(name, budget, "input", budget)
    target = Budget(average_tokens=budget)
    keep = target.resolve([PATCHES], layer=layer, shape=SHAPE, text_tokens=0)[0]
    return _setting(name, budget, "average", keep)


def _setting(name: str, budget: int, means: str, keep: int, options: Mapping[str, Any] | None = None) -> Setting:
    cuts = cuts_of(tokenprune.method(name, **(options or {})), Budget(keep=keep))
    return Setting(name, budget, means, keep, options or {}, average(cuts), describe_type(cuts))


def cuts_of(method: tokenprune.Method, budget: Budget) -> list[tuple[int, int]]:
    """(layer, tokens from there on) for each cut that a method makes in LLaVA-1.5-7B."""
    count, cuts = PATCHES, []
    for stage, own in method.stages(budget, SHAPE.layers):
        about = dict(layer=stage.cut_layer, shape=SHAPE, text_tokens=0, original=[PATCHES])
        if count:
            kept = own.resolve([count], **about)[0]
            count = min(count, stage.resolve_count(count, kept))
        cuts.append((stage.cut_layer, count))
    return cuts


def average(cuts: Sequence[tuple[int, int]]) -> float:
    """Return the tokens that cuts leave, averaged over the decoder's layers; those before the first see all."""
    ends = [layer for layer, _ in cuts[1:]] + [SHAPE.layers]
    spent = cuts[0][0] * PATCHES + sum(kept * (end - layer) for (layer, kept), end in zip(cuts, ends, strict=True))
    return spent / SHAPE.layers


def describe_type(cuts: Sequence[tuple[int, int]]) -> str:
    """Return what cuts leave, in words; a method may look at a layer and remove nothing."""
    fewer = [cut for place, cut in enumerate(cuts) if not place or cut[1] != cuts[place - 1][1]]
    return ", ".join(f"{kept} from layer {layer} on" if layer else f"{kept}" for layer, kept in fewer)


def _merged(name: str, budget: int) -> Setting:
    options = _OPTIONS.get(name, {})
    if name == "dymu":
        words = f"{budget} on average over images like those of the calibration; the attention sees 576"
        return Setting(name, budget, "input", share(budget), options, budget, words)
    return Setting(name, budget, "input", budget, options, budget, str(budget))


def _smaller_image(name: str, budget: int) -> Setting:
    side = min(range(1, 25), key=lambda side: abs(side**2 - budget))
    words = f"{side**2}: an image of {side} x {side} patches, the square that is closest"
    return Setting(name, budget, "input", share(budget), {}, side**2, words)


def share(budget: int) -> float:
    """The budget as a share, in digits that survive a command line."""
    return round(budget / PATCHES, 6)


def picked(methods: str | None, budgets: str | None) -> list[Setting]:
    """Return the settings of some methods and budgets, comma-separated; all for None. Unpatched always comes along: all
    percentages are of it. Raises OptionError for one that is not there."""
    known = list(dict.fromkeys(one.method for one in settings()))
    names = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    for name in names or ():
        if name in LEFT_OUT:
            raise OptionError(f"--methods: {name} is left out: it {LEFT_OUT[name]}")
        if name not in known:
            raise OptionError(f"--methods: {name!r} is not in the table; in it are {', '.join(known)}")
    sizes = BUDGETS if budgets is None else [part.strip() for part in budgets.split(",") if part.strip()]
    if not sizes or {str(size) for size in sizes} - set(map(str, BUDGETS)):
        raise OptionError(f"--budgets {budgets!r}: the papers' budgets are {', '.join(map(str, BUDGETS))}")
    sizes = {int(size) for size in sizes}
    return [
        one
        for one in settings()
        if one.method == UNPATCHED or ((names is None or one.method in names) and one.budget in sizes)
    ]


def command(arguments: str, tasks: Sequence[str], output: Path, python: str = "python") -> list[str]:
    """Return the command that runs lmms-eval with some `--model_args` on some tasks."""
    own = any((TASK_FOLDER / f"{task}.yaml").exists() for task in tasks)
    folder = ["--include_path", os.path.relpath(TASK_FOLDER)] if own else []
    return [
        python, "-m", "lmms_eval", "--model", "tokenprune", "--model_args", arguments,
        "--tasks", ",".join(tasks), *folder, "--batch_size", "1", "--output_path", str(output),
    ]  # fmt: skip


def calibration(pretrained: str, thresholds: str, images: str = "IMAGES") -> list[str]:
    """Return the command that makes the thresholds of dymu."""
    keeps = ",".join(f"{share(budget):g}" for budget in BUDGETS)
    return [
        "tokenprune", "fit", "dymu", "--model", pretrained, "--images", images, "--keep", keeps, "--out", thresholds,
    ]  # fmt: skip


def same(value: Any, other: Any) -> bool:
    """Whether two arguments of a command line say the same ("192" and 192, "False" and False)."""
    try:
        return math.isclose(float(value), float(other), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(value).lower() == str(other).lower()
