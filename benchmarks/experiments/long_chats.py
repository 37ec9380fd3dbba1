# SPDX-License-Identifier: Apache-2.0
"""Count the tokens that an agent's chat computes if each turn adds a screenshot and older ones keep fewer tokens.

    python benchmarks/experiments/long_chats.py           # print the table
    python benchmarks/experiments/long_chats.py --page    # write it into docs/results/sessions.md

The script counts tokens and measures no times. Each turn sends the entire chat again, as most clients do. The common
prefix with the previous turn comes from a prefix cache; all tokens after the first change are computed. An image with
different kept tokens counts as a different image.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import calm_threads  # noqa: F401
from common import fill_page

from tokenprune.budgets.by_age import apply_ages

PAGE = Path(__file__).parents[2] / "docs/results/sessions.md"
BEGIN, END = "<!-- chats:begin (benchmarks/experiments/long_chats.py --page) -->", "<!-- chats:end -->"
TURNS, SYSTEM, VISUAL, TEXT = 50, 1000, 1024, 100  # tokens of the system prompt, of a screenshot, of a turn's text
TIERS = ((0, 1.0), (2, 0.5), (8, 0.1))

Item = tuple[str, int, int]  # kind, index, number of tokens


@dataclass(frozen=True)
class Way:
    """A way to shorten a chat.

    Attributes:
        name: Label in the table.
        last: Number of images to keep, 0 for all.
        chunk: Number of images that are removed at once.
        step: Step of the ages of `TIERS`, 0 if every image keeps all tokens.
    """

    name: str
    last: int = 0
    chunk: int = 1
    step: int = 0

    def prompt(self, turns: int) -> list[Item]:
        """Return the items of the chat after a number of turns."""
        num_removed = max(0, turns - self.last) // self.chunk * self.chunk if self.last else 0
        counts = [VISUAL] * (turns - num_removed)
        counts = apply_ages(counts, TIERS, self.step) if self.step else counts
        items: list[Item] = [("system", 0, SYSTEM)]
        for turn in range(turns):
            items += [("image", turn, counts[turn - num_removed])] if turn >= num_removed else []
            items.append(("text", turn, TEXT))
        return items


WAYS = (
    Way("everything stays"),
    Way("the last 3 images, one leaves a turn", last=3),
    Way("the last 3 to 12 images, ten leave at once", last=3, chunk=10),
    *(Way(f"`age={TIERS}`, `step={step}`", step=step) for step in (1, 5, 10)),
)


def tokens(items: list[Item]) -> int:
    return sum(count for *_, count in items)


def shared(before: list[Item], now: list[Item]) -> int:
    """Return the number of tokens in the common prefix of two prompts."""
    num_tokens = 0
    for item, other in zip(before, now, strict=False):
        if item != other:
            break
        num_tokens += item[2]
    return num_tokens


def table() -> str:
    lines = [
        "| way | tokens computed | computed again | longest prompt | images in the last turn |",
        "|---|---:|---:|---:|---:|",
    ]
    for way in WAYS:
        prompts = [way.prompt(turns) for turns in range(1, TURNS + 1)]
        computed = tokens(prompts[0]) + sum(tokens(now) - shared(before, now) for before, now in pairwise(prompts))
        first = SYSTEM + TURNS * (VISUAL + TEXT)
        num_images = sum(kind == "image" for kind, *_ in prompts[-1])
        longest = max(map(tokens, prompts))
        lines.append(f"| {way.name} | {computed:,} | {max(0, computed - first):,} | {longest:,} | {num_images} |")
    return "\n".join(lines) + (
        f"\n\n{TURNS} turns with a screenshot of {VISUAL} visual tokens and {TEXT} tokens of words each, after a "
        f"system prompt of {SYSTEM}; every turn finds the tokens of the turn before in a prefix cache. "
        "By `python benchmarks/experiments/long_chats.py`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table into docs/results/sessions.md")
    if not parser.parse_args().page:
        print(table())
        return
    fill_page(PAGE, BEGIN, END, table())


if __name__ == "__main__":
    main()
