# SPDX-License-Identifier: Apache-2.0
"""Log lines of the guard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenprune.integrations.hf.guard.floors import Floors
from tokenprune.integrations.hf.guard.settings import Guard, is_tokens

_REASONS = {
    ("image", "text"): "an image looks like text",
    ("prompt", "text"): "a prompt asks to read, or for fine detail",
    ("prompt", "grounding"): "a prompt asks where something is, or refers to its location",
    ("prompt", "counting"): "a prompt asks to count",
}


def describe_guard(settings: Guard, watched: Sequence[tuple[str, Mapping[str, float]]], reads_text: bool) -> str:
    """Return the line about the guard of a patch.

    Args:
        settings: The guard.
        watched: Name of each watched method, and the floors of its kinds of questions at risk.
        reads_text: Whether the guard reads prompts.
    """
    sources = "prompts and images" if reads_text else "images (prompts need processor=)"
    action = "keeps more tokens" if settings.mode == "auto" else "logs one warning for each reason"
    at_risk = [
        f"{name} ({', '.join(f'{kind} below {floor:g}' for kind, floor in floors.items())})" for name, floors in watched
    ]
    return f'guard="{settings.mode}" checks {sources}, and {action} if {" + ".join(at_risk)} may keep too few tokens'


def format_warning(source: str, kind: str, name: str, share: float, floor: float, raisable: bool, table: Floors) -> str:
    """Return the warning for a kind of question.

    Args:
        source: "image" or "prompt".
        kind: Kind of question.
        name: Name of the method.
        share: Share of the visual tokens that the method keeps.
        floor: Sufficient share, or number of tokens.
        raisable: Whether guard="auto" is possible.
        table: Measured losses.
    """
    loss = table.get_loss(name, kind, share)
    measured = "it was not measured on such questions"
    if loss is not None:
        measured = (
            f"at keep={loss.keep:g} it lost {loss.points:.0f} points of such questions with {loss.model} "
            f"({100 * loss.unpatched:.0f} to {100 * loss.share:.0f} % right)"
        )
    enough = f"keep={floor}" if is_tokens(floor) else f"keep={floor:g}"
    remedies = ["no pruning (no measured keep is enough)" if floor == 1 else enough]
    if raisable:
        remedies.append('guard="auto", which does this for such prompts only')
    if safe := [other for other in table.list_safe_methods(kind, share) if other != name][:3]:
        remedies.append(f"at this keep {' or '.join(safe)}")
    return (
        f"tokenprune guard: {_REASONS[source, kind]}, and {name} keeps {share:.0%} of the visual tokens; {measured}. "
        f'Use: {"; ".join(remedies)}. Logged once; guard="off" disables it.'
    )
