# SPDX-License-Identifier: Apache-2.0
"""Prepare and connect a draft model for `tokenprune.assistant`."""

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
    """Return an unpatched draft for `model`.

    Args:
        model: The target model.
        draft: A smaller model, or None for a draft that shares all weights with `model`.
        method: Method of the draft, or a list of methods.
        options: Other arguments of `tokenprune.assistant`.

    Raises:
        OptionError: If a method acts on pixels, or the draft reads other prompts than the model.
    """
    check_target(model)
    for name, site in _get_sites(method, options).items():
        if site is Site.PRE_ENCODER:
            raise OptionError(
                f"{name} acts on pixels, which the draft shares with its target. Use a method that acts in the model, "
                "such as divprune or fastv."
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
    """Attach the parts that pass encoded images from `model` to a patched draft."""
    attachment = get_attachment(draft)
    shares = shares_weights and not any(map(needs_tower, attachment.engine.parts))
    attachment.add(DraftImages(draft, shares))
    attachment.add(Target(model, draft))


def _get_sites(method: Any, options: dict[str, Any]) -> dict[str, Site]:
    """Return the site of each requested method, by name."""
    methods: list[Any]
    if options.get("config") is not None:
        methods = read_config(options["config"]).methods
    else:
        methods = list(method) if isinstance(method, (list, tuple)) else [] if method is None else [method]
    infos = (entry if isinstance(entry, Method) else method_info(entry) for entry in methods)
    return {info.name: info.site for info in infos}
