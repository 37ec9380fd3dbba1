# SPDX-License-Identifier: Apache-2.0
"""Draw batches in a worker process, each from the seed (run seed, stage, batch index)."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
from collections.abc import Iterator

import numpy as np
import torch

from demo_model import GRID, ID, PATCH
from targets import letter_labels, patch_labels
from tokenprune_demo.scenes import KINDS, SIZE, Scene, SceneQuestion, draw_scene, load_photos

PREFIX = [ID["<bos>"], ID["user"], ID[":"]]
COUNT_WEIGHT = {"0": 1.0, "1": 1.0, "2": 1.3, "3": 3.5, "4": 3.5}
DEFAULT_MIX = {
    "colour": 1,
    "presence": 2,
    "count": 2,
    "position": 2,
    "small": 2,
    "digits": 1,
    "word": 1,
    "grounding": 2,
}


def words(text: str) -> list[int]:
    return [ID[word] for word in re.findall(r"\w+(?:-\w+)*|[^\w\s]", text)]


def straddles(scene: Scene, question: SceneQuestion) -> bool:
    """Return whether the two things of a grounding question are in different halves of the picture (easier)."""
    axis = 0 if "left" in question.text or "right" in question.text else 1
    target = next(item for item in scene.items if item.box == question.boxes[0])
    ends = [item.center[axis] for item in scene.items if item.what == target.what]
    return min(ends) < SIZE / 2 < max(ends)


def choose(rng: np.random.Generator, scene: Scene, mix: dict[str, int]) -> list[SceneQuestion]:
    """Choose up to ``mix[kind]`` questions of each kind, with balanced answers for presence and count."""
    chosen = []
    for kind in KINDS:
        pool = scene.of_kind(kind)
        n = min(mix.get(kind, 0), len(pool))
        if not n:
            continue
        weight = np.ones(len(pool))
        if kind == "presence":
            yes = np.array([q.answer == "yes" for q in pool])
            weight = np.where(yes, 0.5 / max(yes.sum(), 1), 0.5 / max((~yes).sum(), 1))
        elif kind == "count":
            weight = np.array([COUNT_WEIGHT[q.answer] for q in pool])
        elif kind == "grounding":
            weight = np.array([1.0 if straddles(scene, q) else 0.3 for q in pool])
        picks = rng.choice(len(pool), n, replace=kind == "presence", p=weight / weight.sum())
        chosen += [pool[i] for i in sorted(set(picks.tolist()))]
    return [chosen[i] for i in rng.permutation(len(chosen))]


def evidence(scene: Scene, question: SceneQuestion) -> np.ndarray | None:
    """Return a mask of the patches that show the answer of a "small" or "grounding" question, else None."""
    if question.kind not in ("small", "grounding"):
        return None
    owner_index = 1 + [item.box for item in scene.items].index(question.boxes[0])
    cover = scene.owner.reshape(GRID, PATCH, GRID, PATCH).transpose(0, 2, 1, 3).reshape(GRID * GRID, -1)
    return (cover == owner_index).mean(1) > 0.1


def draw_batch(seed: tuple[int, ...], stage: int, size: int, mix: dict[str, int], split: str = "train") -> tuple:
    """Draw pictures as bytes, with patch labels (stages 1 and 2) or with chosen questions (later stages)."""
    rng, photos = np.random.default_rng(seed), load_photos(split)
    scenes = [draw_scene(rng, photos, texts=int(rng.integers(2, 6)) if stage < 3 else 1) for _ in range(size)]
    pixels = np.stack([np.asarray(s.image) for s in scenes])
    if stage < 3:
        labels, present = zip(*(patch_labels(s) for s in scenes), strict=True)
        return pixels, np.stack(labels), np.stack(present), np.stack([letter_labels(s) for s in scenes])
    return pixels, [[(q.kind, q.text, q.answer, evidence(s, q)) for q in choose(rng, s, mix)] for s in scenes]


def _work(queue, seed: int, stage: int, start: int, size: int, mix: dict[str, int]) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 5)
    index = start
    while True:
        queue.put(draw_batch((seed, stage, index), stage, size, mix))
        index += 1


class Batches:
    """Iterator over batches that a background process draws in advance."""

    def __init__(self, seed: int, stage: int, start: int, size: int, mix: dict[str, int]) -> None:
        context = mp.get_context("spawn")
        self.queue = context.Queue(maxsize=8)
        self.process = context.Process(target=_work, args=(self.queue, seed, stage, start, size, mix), daemon=True)
        self.process.start()

    def __iter__(self) -> Iterator[tuple]:
        while True:
            yield self.queue.get()

    def close(self) -> None:
        self.process.terminate()


def to_pixels(pixels: np.ndarray) -> torch.Tensor:
    """Return the values that the image processor would return."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def pack(questions: list[list[tuple]], n_image: int) -> dict[str, torch.Tensor]:
    """Pack the questions about each picture into one sequence with a block mask.

    A question attends to the prompt's beginning, the picture and itself, and its positions continue after the picture.
    Each question therefore has the same result as in a separate prompt, at a fraction of the cost.
    """
    rows, asks, evidence = [], [], []
    for group in questions:
        ids = PREFIX + [ID["<image>"]] * n_image
        segment, position, label, kind = [0] * len(ids), list(range(len(ids))), [-100] * len(ids), [-1] * len(ids)
        begin = len(ids)
        for s, (name, text, answer, patches) in enumerate(group, 1):
            question_ids = [*words(text), ID["assistant"], ID[":"]]
            ids += [*question_ids, ID[answer]]
            label += [-100] * (len(question_ids) - 1) + [ID[answer], ID["<eos>"]]
            segment += [s] * (len(question_ids) + 1)
            position += range(begin, begin + len(question_ids) + 1)
            kind += [-1] * (len(question_ids) - 1) + [KINDS.index(name), -1]
            if patches is not None and patches.any():
                asks.append((len(rows), len(kind) - 2))
                evidence.append(patches)
        rows.append((ids, segment, position, label, kind))
    length = max(len(r[0]) for r in rows)
    fill = (ID["<pad>"], -1, 0, -100, -1)
    columns = [torch.tensor([r[i] + [fill[i]] * (length - len(r[i])) for r in rows]) for i in range(5)]
    ids, segment, position, label, kind = columns
    same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    mask = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
    packed = {"ids": ids, "mask": mask, "position": position, "label": label, "kind": kind}
    if asks:
        packed |= {"asks": torch.tensor(asks), "evidence": torch.from_numpy(np.stack(evidence)).float()}
    return packed
