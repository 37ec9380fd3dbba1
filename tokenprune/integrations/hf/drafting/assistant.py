# SPDX-License-Identifier: Apache-2.0
"""assistant: a draft that sees fewer visual tokens writes ahead, and the target checks what it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenprune.api import attachment_of, is_patched, patch, unpatch
from tokenprune.errors import OptionError
from tokenprune.methods.registry import method_info
from tokenprune.selection.method import Method, Site
from tokenprune.settings.saved import read_config


def assistant(
    model: Any,
    method: str | Method | Sequence[str | Method] | None = None,
    *,
    draft: Any = None,
    keep: Any = None,
    guard: Any = "off",
    **options: Any,
) -> Any:
    """Return a draft for `model`, to be handed to its `generate`; the answer stays the one that `model` gives alone.

        assistant = tokenprune.assistant(model, "divprune", keep=0.1)
        model.generate(**inputs, assistant_model=assistant)

    model:  the target, whose `generate` is called, one prompt at a time. It may be patched itself: then its own pruned
            answer is what comes out.
    method, keep, options: what the draft sees, as `tokenprune.patch` takes them.
    draft:  a smaller model with the target's vocabulary and image processor; it is patched in place. None: a model that
            shares every weight with the target. That is exact and takes no memory for weights, but it is hardly ever
            faster: see `tokenprune.DraftCost`.
    guard:  as in `patch`; off, since the target checks every token.

    How many tokens are drafted at a time stands in `assistant.generation_config` (`num_assistant_tokens`), as for any
    assistant of transformers. `tokenprune.stats(assistant)` tells what the draft saw, `tokenprune.unpatch(assistant)`
    ends it. Until then the target notes what its images were encoded from, and reads a prompt before any draft, which
    costs one forward of one token; its hooks, config and generation config are not touched. Make the assistant when the
    target is as it will stay: weights that are moved or quantized later are not followed.

    Raises what `patch` raises; OptionError for a method on pixels and for a draft that reads other prompts than the
    target; UnsupportedModelError for models whose `generate` takes no assistant (layers with states, queries between
    tower and decoder); UnsupportedSetupError for offloaded weights. A batch of several prompts raises transformers' own
    ValueError.

    Source: SpecVLM (arXiv 2508.16201) drafts on pruned video tokens. Differs from the paper: any registered method
    chooses, and the draft keeps the positions of the full prompt (our decision).
    """
    from tokenprune.integrations.hf.drafting.checks import check_pair, check_target
    from tokenprune.integrations.hf.drafting.copying import share_weights
    from tokenprune.integrations.hf.drafting.images import DraftImages, Target, needs_tower
    from tokenprune.integrations.shared.attachable import unwrap

    # What torch.compile returns holds the model.
    model = getattr(model, "_orig_mod", model)
    check_target(model)
    for name, site in _sites(method, options).items():
        if site is Site.PRE_ENCODER:
            raise OptionError(
                f"{name} acts on pixels, and a draft reads the prompt of its target: the target would see less too. "
                "Use a method that acts in the model, such as divprune or fastv"
            )
    own_weights = draft is not None
    if own_weights:
        check_pair(model, draft)
    else:
        draft = share_weights(model)
        if is_patched(draft):
            unpatch(draft)
        unwrap(draft)
    patch(draft, method, keep=keep, guard=guard, **options)
    try:
        made = attachment_of(draft)
        shares = not own_weights and not any(map(needs_tower, made.engine.parts))
        made.add(DraftImages(draft, shares))
        made.add(Target(model, draft))
    except BaseException:
        unpatch(draft)
        raise
    return draft


def _sites(method: Any, options: dict[str, Any]) -> dict[str, Site]:
    """Return the site of each method that is asked for."""
    given: list[Any]
    if options.get("config") is not None:
        given = read_config(options["config"]).parsed.methods
    else:
        given = list(method) if isinstance(method, (list, tuple)) else [] if method is None else [method]
    return {one.name: one.site for one in (x if isinstance(x, Method) else method_info(x) for x in given)}
