# SPDX-License-Identifier: Apache-2.0
"""The runs of the papers' table: each method at each budget, as arguments of lmms-eval, with its token counts."""

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
# Kinds of methods without a run in the table, a test for each kind, and the reason.
UNFIT: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("methods for videos", compares_frames, "compares the frames of videos, and the benchmarks have images"),
    ("patterns of attention", lambda method: method.site is Site.ATTENTION, "removes no tokens"),
    (
        "choices between images",
        lambda method: isinstance(method, ImageChooser),
        "chooses between the images of a prompt, and every prompt has one image",
    ),
    (
        "sizes by content",
        lambda method: isinstance(method, ResizeMethod) and method.depends_on_content,
        "resizes each image by its content, so its average of 192 is not known before the run",
    ),
    (
        "units of patches dropped ahead of the tower",
        lambda method: isinstance(method, UnitDropper),
        "acts on towers that pack patches of any grid, and LLaVA-1.5 has a fixed grid",
    ),
    (
        "methods that need a fitted file",
        lambda method: method.default_equals is not None,
        "needs a file that is fitted to the model",
    ),
    (
        "images withdrawn",
        lambda method: method.min_tokens == 0,
        "may drop all tokens at a layer, so its setting for 192 is not known before the run, or drops at a fixed layer",
    ),
)
OUR_OWN = "tokenprune.methods."
LEFT_OUT = {
    "ivc_prune": "counts the tokens kept at its cut; earlier layers keep all, and only its authors' code evicts them",
    "erase": "reads the pixels of towers that pack patches, and selects the layer of its cut from them",
}
LEFT_OUT |= {
    name: reasons[0]
    for name in tokenprune.available_methods()
    if (reasons := [why for _, is_so, why in UNFIT if is_so(tokenprune.method(name))])
}
# As in its paper: merged in the tower, unmerged in the decoder's attention.
_OPTIONS = {"dymu": {"vtu": "expanded"}}


@dataclass(frozen=True)
class Setting:
    """A run: a method at a budget. Its name is the name of its results folder.

    Attributes:
        method: Name of the method.
        budget: The paper's budget.
        means: Meaning of the budget, as in the published rows.
        keep: `keep` of the method.
        options: Options of the method.
        average: Tokens averaged over the decoder's layers.
        tokens: Description of the tokens per layer.
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
    def model_args(self) -> dict[str, Any]:
        """The part of `--model_args` that identifies this run."""
        return (
            {"method": "none"}
            if self.method == UNPATCHED
            else {"method": self.method, "keep": self.keep, **self.options}
        )

    def arguments(self, pretrained: str, device: str, thresholds: str) -> str:
        """Return `--model_args`."""
        arguments = {
            "base": "llava_hf",
            "pretrained": pretrained,
            "device": device,
            "device_map": device,
            **self.model_args,
        }
        if self.method == "dymu":
            arguments["thresholds"] = thresholds
        for name, value in arguments.items():
            if "," in str(value):
                raise OptionError(
                    f"{name}={value!r} has a comma, which separates lmms-eval's arguments. Use a value without one."
                )
        return ",".join(f"{name}={value}" for name, value in arguments.items())


@cache
def settings() -> tuple[Setting, ...]:
    """Return all settings: unpatched, then our methods in the order of their sites."""
    ours = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
    ours = [info for info in ours if info.cls.__module__.startswith(OUR_OWN) and info.name not in LEFT_OUT]
    all_settings = [Setting(UNPATCHED)]
    for info in sorted(ours, key=lambda info: info.site.order):
        for budget in BUDGETS:
            if info.site is Site.PRE_ENCODER:
                all_settings.append(_smaller_image(info.name, budget))
            elif info.site is Site.IN_ENCODER:
                all_settings.append(_merged(info.name, budget))
            elif (reached := _reached(info.name, budget)) is not None:
                all_settings.append(reached)
    # The budget of DART's paper counts the tokens kept at its cut, which keeps 4 more.
    all_settings += [_setting("dart", budget, "cut", budget, {"exact": False}) for budget in BUDGETS]
    return tuple(all_settings)


def _reached(name: str, budget: int) -> Setting | None:
    """Return `_dropped`, or None if the layers before a method's first cut exceed the budget."""
    try:
        return _dropped(name, budget)
    except BudgetError:
        return None


def _dropped(name: str, budget: int) -> Setting:
    """Return the setting with `budget` tokens on average over the layers."""
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
    """Return (layer, tokens from that layer on) for each cut of a method in LLaVA-1.5-7B."""
    count, cuts = PATCHES, []
    for stage, stage_budget in method.stages(budget, SHAPE.layers):
        about = dict(layer=stage.cut_layer, shape=SHAPE, text_tokens=0, original=[PATCHES])
        if count:
            kept = stage_budget.resolve([count], **about)[0]
            count = min(count, stage.resolve_count(count, kept))
        cuts.append((stage.cut_layer, count))
    return cuts


def average(cuts: Sequence[tuple[int, int]]) -> float:
    """Return the kept tokens averaged over the decoder's layers. Layers before the first cut have all tokens."""
    ends = [layer for layer, _ in cuts[1:]] + [SHAPE.layers]
    spent = cuts[0][0] * PATCHES + sum(kept * (end - layer) for (layer, kept), end in zip(cuts, ends, strict=True))
    return spent / SHAPE.layers


def describe_type(cuts: Sequence[tuple[int, int]]) -> str:
    """Describe the tokens after each cut. Cuts that remove nothing are left out."""
    fewer = [cut for index, cut in enumerate(cuts) if not index or cut[1] != cuts[index - 1][1]]
    return ", ".join(f"{kept} from layer {layer} on" if layer else f"{kept}" for layer, kept in fewer)


def _merged(name: str, budget: int) -> Setting:
    options = _OPTIONS.get(name, {})
    if name == "dymu":
        words = f"{budget} on average over images similar to the calibration set; the attention sees 576"
        return Setting(name, budget, "input", share(budget), options, budget, words)
    return Setting(name, budget, "input", budget, options, budget, str(budget))


def _smaller_image(name: str, budget: int) -> Setting:
    side = min(range(1, 25), key=lambda side: abs(side**2 - budget))
    words = f"{side**2}: an image of {side} x {side} patches, the square that is closest"
    return Setting(name, budget, "input", share(budget), {}, side**2, words)


def share(budget: int) -> float:
    """Return the budget as a share, rounded to six digits for the command line."""
    return round(budget / PATCHES, 6)


def picked(methods: str | None, budgets: str | None) -> list[Setting]:
    """Return the settings of comma-separated methods and budgets, all with None, and always unpatched.

    Percentages are relative to unpatched. Raises OptionError for unknown names.
    """
    known = list(dict.fromkeys(setting.method for setting in settings()))
    names = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    for name in names or ():
        if name in LEFT_OUT:
            raise OptionError(f"--methods: {name} is not in the table, because it {LEFT_OUT[name]}.")
        if name not in known:
            raise OptionError(f"--methods: {name!r} is unknown. Choose from: {', '.join(known)}.")
    sizes = BUDGETS if budgets is None else [part.strip() for part in budgets.split(",") if part.strip()]
    if not sizes or {str(size) for size in sizes} - set(map(str, BUDGETS)):
        raise OptionError(f"--budgets {budgets!r} is invalid. Choose from: {', '.join(map(str, BUDGETS))}.")
    sizes = {int(size) for size in sizes}
    return [
        setting
        for setting in settings()
        if setting.method == UNPATCHED or ((names is None or setting.method in names) and setting.budget in sizes)
    ]


def command(arguments: str, tasks: Sequence[str], output: Path, python: str = "python") -> list[str]:
    """Return the command that runs lmms-eval with `--model_args` on some tasks."""
    has_own_task = any((TASK_FOLDER / f"{task}.yaml").exists() for task in tasks)
    folder = ["--include_path", os.path.relpath(TASK_FOLDER)] if has_own_task else []
    return [
        python, "-m", "lmms_eval", "--model", "tokenprune", "--model_args", arguments,
        "--tasks", ",".join(tasks), *folder, "--batch_size", "1", "--output_path", str(output),
    ]  # fmt: skip


def calibration(pretrained: str, thresholds: str, images: str = "IMAGES") -> list[str]:
    """Return the command that fits the thresholds of dymu."""
    keeps = ",".join(f"{share(budget):g}" for budget in BUDGETS)
    return [
        "tokenprune", "fit", "dymu", "--model", pretrained, "--images", images, "--keep", keeps, "--out", thresholds,
    ]  # fmt: skip


def same(value: Any, other: Any) -> bool:
    """Return whether two command-line values are equal ("192" and 192, "False" and False)."""
    try:
        return math.isclose(float(value), float(other), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(value).lower() == str(other).lower()
