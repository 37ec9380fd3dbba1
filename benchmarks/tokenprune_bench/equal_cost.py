# SPDX-License-Identifier: Apache-2.0
"""Equal cost: settings that spend a given share of the visual tokens, averaged over the decoder's layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenprune.errors import BudgetError
from tokenprune.selection.method import Method, Site
from tokenprune.selection.options import get_option_types
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.settings import Setting
from tokenprune_bench.profiling.patched import is_escalation

_INSIDE = (Site.IN_LLM, Site.DECODE)
# A resized image has an integral grid of patches, so its tokens may differ from the target by this share.
_GRID = 1 / 8
_NEAR = 1 / 200  # tolerance as a share of all tokens: each tile of an image rounds its budget


def solve_setting(setting: Setting, share: float) -> Setting:
    """Return the setting of a method that spends `share` of the visual tokens, averaged over the decoder's layers.

    Before the decoder, and for methods that spread a budget over several cuts, `keep` is this average already. Inside
    the decoder it is solved for the layer of the cut (`Budget.average_share`). Methods with an `exact` option get
    exact=True. A share that is out of reach of the site raises an error later, when the method runs.

    Raises:
        BudgetError: If no setting of the method guarantees an average.
    """
    name, (options_of_setting,) = setting.to_text(), setting.options
    why = "the first answer decides whether it runs a second pass" if is_escalation(setting) else None
    method = None if why else setting.methods[0]
    options: dict[str, Any] = {}
    if isinstance(method, EncoderMethod) and method.inexact and "exact" in get_option_types(type(method)):
        options = {"exact": True}
        method = dataclasses.replace(method, **options)
    why = why or _explain_inexact_count(method)
    if why:
        raise BudgetError(f"{name} has no setting for a layer average of {share:g}: {why}.")
    keep = {"average_share": share} if method.site in _INSIDE else share
    return dataclasses.replace(setting, options=(options_of_setting | options,), keep=keep)


def _explain_inexact_count(method: Method) -> str | None:
    """Return why no setting of a method guarantees its number of tokens, or None."""
    if not method.removes:
        return "it removes no tokens"
    if isinstance(method, ImageChooser):
        return "it keeps or drops whole images"
    if isinstance(method, ResizeMethod) and method.depends_on_content:
        return "the number of tokens depends on the image's content"
    return method.inexact if isinstance(method, EncoderMethod) else None


def explain_miss(setting: Setting, share: float, spent: float, images: float, tokens: float) -> str | None:
    """Return why a run did not spend `share`, or None.

    A run may differ by one token per image, or by half a percent of all tokens. Methods that resize images may differ
    by an eighth of the target, because the resized grid is integral.

    Args:
        setting: The setting.
        share: Target share.
        spent: Visual tokens of the run, averaged over the decoder's layers.
        images: Number of images of the unpatched model.
        tokens: Visual tokens of the unpatched model.
    """
    allowed = _GRID * share * tokens if isinstance(setting.methods[0], ResizeMethod) else max(images, _NEAR * tokens)
    if abs(spent - share * tokens) <= allowed + 1e-6:
        return None
    return (
        f"{setting.to_text()} has no setting for a layer average of {share:g}: it spent {spent / tokens:.3f} of the "
        "visual tokens."
    )


def describe_setting(setting: dict[str, Any], per_layer: list[float], unpatched_tokens: float) -> str:
    """Describe a setting and its tokens per layer: "average_share=0.5: 100 %, 25 % from layer 2".

    Args:
        setting: The setting as JSON.
        per_layer: Visual tokens of each layer.
        unpatched_tokens: Visual tokens of the unpatched model.
    """
    keep = setting["keep"]
    options = dict(keep) if isinstance(keep, dict) else {"keep": keep}
    options |= {name: value for name, value in setting.items() if name not in ("method", "keep")}
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    shares = [f"{100 * tokens / unpatched_tokens:.3g} %" for tokens in per_layer]
    steps = [
        share if layer == 0 else f"{share} from layer {layer}"
        for layer, share in enumerate(shares)
        if layer == 0 or share != shares[layer - 1]
    ]
    return text if len(steps) == 1 else f"{text}: {', '.join(steps)}"
