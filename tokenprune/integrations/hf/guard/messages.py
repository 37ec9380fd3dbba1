# SPDX-License-Identifier: Apache-2.0
"""Messages of the guard: the risk it found, the measured loss, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenprune.integrations.hf.guard.floors import Floors
from tokenprune.integrations.hf.guard.settings import Guard, is_tokens

_SEEN = {
    ("image", "text"): "an image looks like text",
    ("prompt", "text"): "a prompt asks to read, or for fine detail",
    ("prompt", "grounding"): "a prompt asks where something is, or for something by its place",
    ("prompt", "counting"): "a prompt asks to count",
}


def statement(settings: Guard, watched: Sequence[tuple[str, Mapping[str, float]]], reads_text: bool) -> str:
    """Return the line that says what the guard of a patch does. watched: the methods that it watches, each with the
    kinds of questions that may be left too few tokens, and what is enough for each."""
    seen = "prompts and images" if reads_text else "images (prompts need processor=)"
    does = "keeps more tokens" if settings.mode == "auto" else "logs one warning for each reason"
    at_risk = [
        f"{name} ({', '.join(f'{kind} below {floor:g}' for kind, floor in floors.items())})" for name, floors in watched
    ]
    return f'guard="{settings.mode}" looks at {seen}, and {does} where {" + ".join(at_risk)} may keep too few tokens'


def warning(source: str, kind: str, name: str, share: float, floor: float, raisable: bool, table: Floors) -> str:
    """Return the warning for a kind of question. source: "image" or "prompt", where it was seen. name: of the method,
    which keeps `share` where `floor` would be enough, a share or a number of tokens. raisable: whether guard="auto" is
    possible."""
    loss = table.loss(name, kind, share)
    measured = "it was not measured on such questions"
    if loss is not None:
        measured = (
            f"at keep={loss.keep:g} it lost {loss.points:.0f} points of such questions with {loss.model} "
            f"({100 * loss.unpatched:.0f} to {100 * loss.share:.0f} % right)"
        )
    enough = f"keep={floor}" if is_tokens(floor) else f"keep={floor:g}"
    ways = ["no pruning (no keep that was measured is enough)" if floor == 1 else enough]
    if raisable:
        ways.append('guard="auto", which keeps that much for such prompts alone')
    if safe := [other for other in table.safe(kind, share) if other != name][:3]:
        ways.append(f"at this keep one of {', '.join(safe)}")
    return (
        f"tokenprune's guard: {_SEEN[source, kind]}, and {name} keeps {share:.0%} of the visual tokens; {measured}. "
        f'What helps: {"; ".join(ways)}. This is said once; guard="off" turns it off'
    )
