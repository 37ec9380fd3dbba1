# SPDX-License-Identifier: Apache-2.0
"""Equal cost: the setting in which a method spends a given share of the unpatched model's visual tokens, averaged over
the decoder's layers, and whether a run really spent it."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenprune.errors import BudgetError
from tokenprune.selection.method import Method, Site
from tokenprune.selection.options import get_option_types
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.settings import Setting
from tokenprune_bench.profiling.patched import escalates

_INSIDE = (Site.IN_LLM, Site.DECODE)
# An image shrinks to a whole grid of patches, and this share of the target may be as near as one comes.
_GRID = 1 / 8
_NEAR = 1 / 200  # of the unpatched model's tokens, which tiles of an image, each with a budget of its own, round to


def setting_for(setting: Setting, share: float) -> Setting:
    """Return the setting of one method with the keep at which it spends `share` of the visual tokens, averaged over the
    decoder's layers.

    Ahead of the decoder, and in methods that spread a budget over several cuts, `keep` counts that already; inside the
    decoder it is solved for the layer of the cut (`Budget.average_share`). A method that keeps an exact number only on
    request is asked to. Raises BudgetError, with the reason, for a method of which no setting promises an average. A
    share that its place cannot reach is refused where it is solved, when the method runs.
    """
    name, (own,) = setting.to_text(), setting.options
    why = "it may ask twice, and the first answer decides" if escalates(setting) else None
    method = None if why else setting.methods[0]
    options: dict[str, Any] = {}
    if isinstance(method, EncoderMethod) and method.inexact and "exact" in get_option_types(type(method)):
        options = {"exact": True}
        method = dataclasses.replace(method, **options)
    why = why or _no_promise(method)
    if why:
        raise BudgetError(f"{name} has no setting for a layer average of {share:g}: {why}")
    keep = {"average_share": share} if method.site in _INSIDE else share
    return dataclasses.replace(setting, options=(own | options,), keep=keep)


def _no_promise(method: Method) -> str | None:
    """Why no setting of a method promises how many tokens it spends; None if one does."""
    if not method.removes:
        return "it removes no tokens"
    if isinstance(method, ImageChooser):
        return "it takes or leaves whole images"
    if isinstance(method, ResizeMethod) and method.depends_on_content:
        return "content decides how many tokens an image gets"
    return method.inexact if isinstance(method, EncoderMethod) else None


def missed(setting: Setting, share: float, spent: float, images: float, tokens: float) -> str | None:
    """Return why a run does not count as one at `share`; None if it does: within a token of each image, or half a
    percent of all, and for methods that resize images within an eighth of the target, since their grids are whole.

    spent: visual tokens, averaged over the decoder's layers. images, tokens: how many of them the unpatched model saw.
    """
    allowed = _GRID * share * tokens if isinstance(setting.methods[0], ResizeMethod) else max(images, _NEAR * tokens)
    if abs(spent - share * tokens) <= allowed + 1e-6:
        return None
    return (
        f"{setting.to_text()} has no setting for a layer average of {share:g}: set to it, it spent "
        f"{spent / tokens:.3f} of the visual tokens"
    )


def describe_type(setting: dict[str, Any], per_layer: list[float], whole: float) -> str:
    """Return a setting, and what it left to the decoder's layers: "average_share=0.5: 100 %, 25 % from layer 2".

    per_layer, whole: visual tokens that each layer saw, and those of the unpatched model.
    """
    keep = setting["keep"]
    given = dict(keep) if isinstance(keep, dict) else {"keep": keep}
    given |= {name: value for name, value in setting.items() if name not in ("method", "keep")}
    said = ", ".join(f"{name}={value}" for name, value in given.items())
    shares = [f"{100 * tokens / whole:.3g} %" for tokens in per_layer]
    steps = [
        one if layer == 0 else f"{one} from layer {layer}"
        for layer, one in enumerate(shares)
        if layer == 0 or one != shares[layer - 1]
    ]
    return said if len(steps) == 1 else f"{said}: {', '.join(steps)}"
