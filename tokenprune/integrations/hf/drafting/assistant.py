# SPDX-License-Identifier: Apache-2.0
"""A draft model that sees fewer visual tokens, for assisted generation: the parts of `tokenprune.assistant`."""

from __future__ import annotations

from typing import Any

from tokenprune.errors import OptionError
from tokenprune.integrations.hf.drafting.checks import check_pair, check_target
from tokenprune.integrations.hf.drafting.copying import share_weights
from tokenprune.integrations.hf.drafting.images import DraftImages, Target, needs_tower
from tokenprune.integrations.shared.attachable import remove_wrappers
from tokenprune.integrations.shared.attachment import find_attachment, get_attachment
from tokenprune.methods.registry import method_info
from tokenprune.selection.method import Method, Site
from tokenprune.settings.saved import read_config


def prepare_draft(model: Any, draft: Any, method: Any, options: dict[str, Any]) -> Any:
    """Return an unpatched draft for `model`: `draft` itself, or a model that shares every weight with `model`.

    Raises OptionError for a method on pixels and for a draft that reads other prompts than the model.
    """
    check_target(model)
    for name, site in _sites(method, options).items():
        if site is Site.PRE_ENCODER:
            raise OptionError(
                f"{name} acts on pixels, and a draft reads the prompt of its target: the target would see less too. "
                "Use a method that acts in the model, such as divprune or fastv"
            )
    if draft is not None:
        check_pair(model, draft)
        return draft
    draft = share_weights(model)
    if (attachment := find_attachment(draft)) is not None:
        attachment.detach()
    remove_wrappers(draft)
    return draft


def connect_draft(model: Any, draft: Any, *, shares_weights: bool) -> None:
    """Attach the parts by which a patched draft takes encoded images from `model`."""
    attachment = get_attachment(draft)
    shares = shares_weights and not any(map(needs_tower, attachment.engine.parts))
    attachment.add(DraftImages(draft, shares))
    attachment.add(Target(model, draft))


def _sites(method: Any, options: dict[str, Any]) -> dict[str, Site]:
    """Return the site of each method that is asked for."""
    given: list[Any]
    if options.get("config") is not None:
        given = read_config(options["config"]).methods
    else:
        given = list(method) if isinstance(method, (list, tuple)) else [] if method is None else [method]
    return {one.name: one.site for one in (x if isinstance(x, Method) else method_info(x) for x in given)}
