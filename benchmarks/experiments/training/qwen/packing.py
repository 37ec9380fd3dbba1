# SPDX-License-Identifier: Apache-2.0
"""Pack many questions about the same images or video into one sequence with a block mask.

A question attends to the prompt's beginning, the visual parts and itself, and its positions continue after them. Each
question therefore has the same result as in a separate prompt, at a fraction of the cost.
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
    """An image or video in a prompt: grid in tokens, text before it, and positions between its time steps."""

    grid: tuple[int, int, int]
    label: str = ""
    video: bool = False
    interval: int = 1


@dataclass
class Head:
    """The common beginning of all questions of a row."""

    ids: list[int]
    position: torch.Tensor  # [3, n]
    after: int  # position of the next token

    @classmethod
    def from_shown(cls, visuals: Sequence[Shown]) -> Head:
        """Lay out a prompt's beginning as the processor and `get_rope_index` do."""
        ids, parts, next_position = list(BEGIN), [], 0

        def text(n: int) -> None:
            nonlocal next_position
            parts.append(torch.arange(next_position, next_position + n).expand(3, -1))
            next_position += n

        text(len(BEGIN))
        for part in visuals:
            label = words(part.label)
            ids += [*label, ID["<|vision_start|>"]]
            text(len(label) + 1)
            t, h, w = part.grid
            ids += [ID["<|video_pad|>" if part.video else "<|image_pad|>"]] * (t * h * w)
            axes = (torch.arange(t) * part.interval, torch.arange(h), torch.arange(w))
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + next_position)
            next_position += max(h, w)
            ids.append(ID["<|vision_end|>"])
            text(1)
        return cls(ids, torch.cat(parts, 1), next_position)


@dataclass(frozen=True)
class Asked:
    """A question with its answer, and the loss weight of each answer token."""

    kind: str
    text: str
    answer: str
    weight: float = 1.0


def pack(head: Head, rows: Sequence[Sequence[Asked]], kinds: Sequence[str]) -> dict[str, torch.Tensor]:
    """Pack rows with the same head.

    Returns:
        ids (B, L), mask (B, 1, L, L), position (3, B, L), and label, weight and kind (B, L). The label of a position is
        the next token, or -100 without loss.
    """
    n = len(head.ids)
    table = []
    for questions in rows:
        ids, segment, position = list(head.ids), [0] * n, []
        label, weight, kind = [-100] * n, [0.0] * n, [-1] * n
        for index, question in enumerate(questions, 1):
            before, answer = [*words(question.text), *ASK], words(question.answer)
            ids += [*before, *answer]
            length = len(before) + len(answer)
            segment += [index] * length
            position += range(head.after, head.after + length)
            label += [-100] * (len(before) - 1) + [*answer, ID["<eos>"]]
            last = question.weight if len(answer) > 1 else 0.1  # the end token after one word is easy
            weight += [0.0] * (len(before) - 1) + [question.weight] * len(answer) + [last]
            kind += [-1] * (len(before) - 1) + [kinds.index(question.kind)] * (len(answer) > 0) + [-1] * len(answer)
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
