# SPDX-License-Identifier: Apache-2.0
"""Many questions about the same images or video in one sequence, each blind to the others.

A question sees the prompt's beginning, what is shown, and itself, and its positions go on from there; so each is
computed exactly as if it had been asked alone, for a fraction of the price.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qwen_vocabulary import ID

BEGIN = (ID["<bos>"], ID["user"], ID[":"])
ASK = (ID["assistant"], ID[":"])


def words(text: str) -> list[int]:
    return [ID[word] for word in re.findall(r"\w+(?:-\w+)*|[^\w\s]", text)]


@dataclass(frozen=True)
class Shown:
    """One image or video in a prompt: its grid in tokens, what is written before it, positions between its times."""

    grid: tuple[int, int, int]
    label: str = ""
    video: bool = False
    interval: int = 1


@dataclass
class Head:
    """The common beginning of all questions of a row."""

    ids: list[int]
    position: torch.Tensor  # [3, n]
    after: int  # position of the next word

    @classmethod
    def of(cls, shown: Sequence[Shown]) -> Head:
        """Lay out a prompt's beginning as the processor and `get_rope_index` do."""
        ids, parts, at = list(BEGIN), [], 0

        def text(n: int) -> None:
            nonlocal at
            parts.append(torch.arange(at, at + n).expand(3, -1))
            at += n

        text(len(BEGIN))
        for one in shown:
            label = words(one.label)
            ids += [*label, ID["<|vision_start|>"]]
            text(len(label) + 1)
            t, h, w = one.grid
            ids += [ID["<|video_pad|>" if one.video else "<|image_pad|>"]] * (t * h * w)
            axes = (torch.arange(t) * one.interval, torch.arange(h), torch.arange(w))
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + at)
            at += max(h, w)
            ids.append(ID["<|vision_end|>"])
            text(1)
        return cls(ids, torch.cat(parts, 1), at)


@dataclass(frozen=True)
class Asked:
    """One question with its answer; weight: of each of the answer's words in the loss."""

    kind: str
    text: str
    answer: str
    weight: float = 1.0


def pack(head: Head, rows: Sequence[Sequence[Asked]], kinds: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return ids [B, L], mask [B, 1, L, L], position [3, B, L], label, weight and kind [B, L] of rows of one head.

    The label of a position is what comes next, -100 where nothing is learned.
    """
    n = len(head.ids)
    table = []
    for asked in rows:
        ids, segment, position = list(head.ids), [0] * n, []
        label, weight, kind = [-100] * n, [0.0] * n, [-1] * n
        for number, one in enumerate(asked, 1):
            before, answer = [*words(one.text), *ASK], words(one.answer)
            ids += [*before, *answer]
            length = len(before) + len(answer)
            segment += [number] * length
            position += range(head.after, head.after + length)
            label += [-100] * (len(before) - 1) + [*answer, ID["<eos>"]]
            last = one.weight if len(answer) > 1 else 0.1  # after one word, that is the end: easily learned
            weight += [0.0] * (len(before) - 1) + [one.weight] * len(answer) + [last]
            kind += [-1] * (len(before) - 1) + [kinds.index(one.kind)] * (len(answer) > 0) + [-1] * len(answer)
        table.append((ids, segment, position, label, weight, kind))
    length = max(len(row[0]) for row in table)

    def column(i: int, fill: float) -> torch.Tensor:
        return torch.tensor([row[i] + [fill] * (length - n * (i == 2) - len(row[i])) for row in table])

    ids, segment, text, label = column(0, ID["<pad>"]), column(1, -1), column(2, 0), column(3, -100)
    same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    mask = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
    position = torch.cat([head.position[:, None].expand(-1, len(rows), -1), text.expand(3, -1, -1)], 2)
    weight, kind = column(4, 0.0), column(5, -1)
    return {
        "ids": ids,
        "mask": mask,
        "position": position,
        "label": label,
        "weight": weight,
        "kind": kind,
    }
