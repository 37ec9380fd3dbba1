# SPDX-License-Identifier: Apache-2.0
"""Rules of methods that do not select visual tokens."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError
from tokenprune.kernels.host_random import normal, uniform
from tokenprune.selection.frames import Visual
from tokenprune.selection.observable_registry import get_observable
from tokenprune.selection.segments import Sizes
from tokenprune.selection.sites.attention import AttentionPattern
from tokenprune.selection.sites.decode import DecodeMethod
from tokenprune.selection.sites.encoder import EncoderMethod, Tower
from tokenprune.selection.sites.frames import FrameMerger
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.selection.sites.units import UnitDropper
from tokenprune.testing.rules import require

_KEEPS = (0.5, 0.75, 1.0)
_QUESTIONS = ("What is in the image?", "Is there a dog in image 2?", "")


def check_merges(method: EncoderMethod, tower: Tower | None) -> None:
    """Raise ConformanceError if the merges of a method in the vision tower break a rule.

    A plan has one matcher or None per block. Merges are equal when planned again, and for a single row or in a batch.
    Leading `protected` tokens are kept, and `keep=1.0` merges no tokens.
    """
    tower = tower or Tower(
        tokens=33, protected=1, blocks=4, blocks_read=3, module=nn.Linear(2, 2, device="cpu", dtype=torch.float32)
    )
    with suppress(OptionError):  # keep=1.0 may contradict the options
        full_budget = Budget.from_keep(1.0)
        is_identity = method.is_identity(full_budget) or not any(method.plan(full_budget, tower))
        require(is_identity, "with keep=1.0 it merges tokens")
    for keep in _KEEPS[:-1]:
        if method.reads:
            _check_drops(method, Budget.from_keep(keep), tower)
            continue
        plan = method.plan(Budget.from_keep(keep), tower)
        require(len(plan) == tower.blocks, f"plan() must return a matcher or None for each of {tower.blocks} blocks")
        require(
            not any(plan[tower.blocks_read :]),
            f"blocks from {tower.blocks_read} on have no keys, so their plan must be None",
        )
        keys = normal(3, tower.tokens, 16, generator=torch.Generator("cpu").manual_seed(0))
        left = [tower.tokens] * len(keys)
        for block, match in enumerate(plan):
            if match is None or (merge := match(keys, left if method.ragged else None)) is None:
                continue
            again = match(keys, left if method.ragged else None)
            same = again is not None and torch.equal(merge.keep, again.keep)
            require(same, f"block {block} merges other tokens when called again")
            rows = [merge.keep.shape[1]] * len(keys) if merge.num_kept is None else merge.num_kept
            require(method.ragged or len(set(rows)) == 1, "rows merge different numbers of tokens. Set ragged = True.")
            for row, (now, before) in enumerate(zip(rows, left, strict=True)):
                stay = merge.keep[row, :now].tolist()
                require(
                    len(set(stay)) == now and max(stay) < before, f"block {block}: keep must name {now} real tokens"
                )
                require(set(range(tower.protected)) <= set(stay), f"block {block}: a class token must not be merged")
                alone = match(keys[row : row + 1, :before], [before] if method.ragged else None)
                single_keep = stay if alone is None else alone.keep[0].tolist()
                require(
                    single_keep == stay, f"block {block}: row {row} of a batch keeps other tokens than a single row"
                )
            keys, left = merge.mean(keys, torch.ones(keys.shape[:2], dtype=torch.float32, device="cpu")), rows


def _check_drops(method: EncoderMethod, budget: Budget, tower: Tower) -> None:
    """Raise ConformanceError if the patches that a method with `reads` drops break a rule of `check_merges`.

    Also checks the number of kept patches.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    sizes, tower_observable = Sizes((tower.patches,) * 3), get_observable(method.reads)
    observed = [tower_observable.example(sizes, generator) for _ in range(tower.blocks)]

    def left(rows: list[int]) -> list[list[int]]:
        plan, stay = method.plan(budget, tower), [list(range(tower.patches)) for _ in rows]
        require(len(plan) == tower.blocks, f"plan() must return a matcher or None for each of {tower.blocks} blocks")
        for block, match in enumerate(plan):
            counts = [len(patches) + tower.protected for patches in stay]
            longest = max(map(len, stay))
            padded = torch.tensor([patches + [0] * (longest - len(patches)) for patches in stay], device="cpu")
            flow = torch.stack(
                [observed[block][row][:, kept_patches] for row, kept_patches in zip(rows, padded, strict=True)]
            )
            merge = None if match is None else match(flow, counts if len(set(counts)) > 1 else None)
            if merge is None:
                continue
            require(merge.is_drop and merge.num_kept is not None, f"block {block}: return a Merge.from_kept")
            for index, (now, before) in enumerate(zip(merge.num_kept or (), counts, strict=True)):
                kept = merge.keep[index, :now].tolist()
                is_valid = len(set(kept)) == now and max(kept) < before
                require(is_valid, f"block {block}: keep must name {now} real tokens")
                require(kept[: tower.protected] == list(range(tower.protected)), f"block {block} drops a class token")
                stay[index] = [stay[index][patch - tower.protected] for patch in kept[tower.protected :]]
        return stay

    batched = left([0, 1, 2])
    require(batched == left([0, 1, 2]), "it drops other patches when called again")
    for row, kept_patches in enumerate(batched):
        require(left([row]) == [kept_patches], f"row {row} of a batch keeps other patches than a single row")
        exact = method.inexact is not None or len(kept_patches) == tower.count_kept(budget)
        require(exact, f"it keeps {len(kept_patches)} patches, not {tower.count_kept(budget)}")


def check_units(method: UnitDropper) -> None:
    """Raise ConformanceError if the units that a method keeps break a rule.

    `keep_units` returns a bool per unit, returns the same units when called again, and modifies no input. It keeps
    exactly `max_units` units, or between one and `max_units` if the method sets `chooses_count`. `keep=1.0` drops no
    units.
    """
    with suppress(OptionError):  # keep=1.0 may contradict the options
        require(method.is_identity(Budget.from_keep(1.0)), "with keep=1.0 it drops units")
    generator = torch.Generator("cpu").manual_seed(0)
    for grid in ((1, 1, 1), (1, 5, 7), (3, 4, 4)):
        levels = torch.randint(3, (*grid, 1), generator=generator, device="cpu").expand(*grid, 12)
        for pixels in (levels / 2, uniform(*grid, 12, generator=generator)):
            units, original = levels[..., 0].numel(), pixels.clone()
            for max_units, min_units in ((n, 1 if method.chooses_count else n) for n in {1, max(1, units // 2), units}):
                keep = method.keep_units(pixels, max_units)
                is_valid = isinstance(keep, torch.Tensor) and keep.dtype == torch.bool and keep.shape == grid
                require(is_valid, f"keep_units() must return a bool tensor {list(grid)}, not {keep}")
                require(
                    min_units <= (n := int(keep.sum())) <= max_units,
                    f"it keeps {n} of {units}, not {min_units} to {max_units}",
                )
                require(
                    torch.equal(keep, method.keep_units(pixels, max_units)), "it keeps other units when called again"
                )
                require(torch.equal(pixels, original), "it modifies its input pixels")


def check_frames(method: FrameMerger) -> None:
    """Raise ConformanceError if the frame merges of a method break a rule.

    Blocks are ascending and exist. Mixed frames are ascending and start with the first frame. Groups cover all
    remaining frames. Between one and `keep` tokens are kept. Results are equal when called again, and inputs are not
    modified.
    """
    with suppress(OptionError):  # keep=1.0 may contradict the options
        require(method.is_identity(Budget.from_keep(1.0)), "with keep=1.0 it merges frames")
    for depth in (1, 12, 26):
        blocks = method.blocks(depth)
        is_valid = all(a < b for a, b in pairwise(blocks)) and blocks and blocks[0] >= 0 and blocks[-1] < depth
        require(is_valid, f"blocks({depth}) must return ascending indices below {depth}, at least one, not {blocks}")
    generator = torch.Generator("cpu").manual_seed(0)
    for frames in (1, 2, 5, 16):
        steps = normal(frames, 9, 8, generator=generator) * uniform(frames, 1, 1, generator=generator)
        hidden = normal(9, 8, generator=generator) + 0.5 * steps.cumsum(0)
        original, mix = hidden.clone(), method.mix(hidden)
        require(
            mix == method.mix(hidden) and torch.equal(hidden, original),
            "it mixes other frames when called again, or modifies them",
        )
        is_valid = mix.first[0] == 0 and all(a < b for a, b in pairwise(mix.first)) and max(mix.second) < frames
        require(is_valid, f"mix() of {frames} frames must be ascending from 0, not {mix}")
        require(all(0 <= weight <= 1 for weight in mix.weight), f"weights of a mix must be in [0, 1], not {mix.weight}")
        left = mix.apply(hidden)
        groups = method.groups(left)
        is_complete = sum(groups) == len(left) and min(groups) > 0
        require(is_complete, f"groups() of {len(left)} frames must be positive and add up to this number, not {groups}")
        received = uniform(len(left), 9, generator=generator)
        for keep in (1, len(left), 9 * len(left)):
            stays = method.choose_tokens(received, groups, keep)
            is_valid = isinstance(stays, torch.Tensor) and stays.dtype == torch.bool and stays.shape == received.shape
            require(is_valid, f"choose_tokens() must return a bool tensor {list(received.shape)}, not {stays}")
            require(1 <= int(stays.sum()) <= keep, f"with keep={keep} it keeps {int(stays.sum())} tokens")
            again = method.choose_tokens(received, groups, keep)
            require(torch.equal(stays, again), "it keeps other tokens when called again")


def check_shares(method: ResizeMethod) -> None:
    """Raise ConformanceError if the resize shares of a method break a rule.

    Shares are in (0, 1], equal when called again, and equal for a single image or in a batch. They are 1 with
    `keep=1.0`.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    images: list[Any] = [
        SimpleNamespace(
            size=(side, 48),
            tokens=side,
            grey=uniform(side, 48, generator=generator),
            prompt=0,
            question=_QUESTIONS[0],
        )
        for side in (32, 64, 40)
    ]
    for keep in _KEEPS:
        method.check_keep(keep)
        shares = method.compute_shares(images, keep, "image")
        is_valid = len(shares) == len(images) and all(0 < share <= 1 for share in shares)
        require(
            is_valid, f"compute_shares() must return a number in (0, 1] for each of {len(images)} images, not {shares}"
        )
        require(shares == method.compute_shares(images, keep, "image"), "it returns other shares when called again")
        alone = [method.compute_shares([image], keep, "image")[0] for image in images]
        require(alone == shares, f"shares are {shares} in a batch, but {alone} for single images")
        require(keep < 1 or shares == [1.0] * len(images), f"with keep=1.0 shares must be 1, not {shares}")
        require(
            method.depends_on_content or len(set(shares)) == 1, "shares differ between images. Set depends_on_content."
        )


def check_chosen_images(method: ImageChooser) -> None:
    """Raise ConformanceError if the images that a method selects break a rule.

    Indices are sorted and unique, at least one image is selected, and results are equal when called again.
    """
    for question in _QUESTIONS:
        for count in (1, 2, 5):
            chosen = method.choose(question, count, count)
            is_valid = chosen == sorted(set(chosen)) and chosen and chosen[0] >= 0 and chosen[-1] < count
            require(is_valid, f"choose() must return sorted indices of {count} images, at least one, not {chosen}")
            require(chosen == method.choose(question, count, count), "it selects other images when called again")


def check_blocks(method: AttentionPattern) -> None:
    """Raise ConformanceError if the attention blocks of a method break a rule.

    Block starts are ascending prompt indices, or a string with the reason for full attention. Results are equal when
    called again.
    """
    for frames in (1, 4, 64, 200):
        spans = tuple((5 + 9 * frame, 14 + 9 * frame) for frame in range(frames))
        for end in (spans[-1][1], spans[-1][1] + 20):
            starts = method.block_starts([Visual("video", spans)], end)
            require(
                starts == method.block_starts([Visual("video", spans)], end),
                "it returns other blocks when called again",
            )
            if isinstance(starts, str):
                require(starts.strip(), "block_starts() must return the reason for full attention, not an empty string")
                continue
            rising = all(a < b for a, b in pairwise(starts)) and starts and starts[0] >= 0 and starts[-1] < end
            require(rising, f"block_starts() must return ascending indices below {end}, not {starts}")


def check_rates(method: DecodeMethod) -> None:
    """Raise ConformanceError if the decode rates of a method break a rule.

    Rates are in [0, 1], one per row, and equal for a single row or in a batch. At least one token is kept.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    share = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64, device="cpu")
    for steps in (1, 2, 9):
        masses = uniform(3, 1 + steps, 2, 4, generator=generator)
        require(isinstance(method.decides(steps), bool), "decides() must return True or False")
        rate = method.next_rate(masses, share)
        is_valid = rate.shape == share.shape and bool(((rate >= 0) & (rate <= 1)).all())
        require(is_valid, f"next_rate() must return a rate in [0, 1] for each of {len(share)} rows, not {rate}")
        for row in range(len(share)):
            alone = method.next_rate(masses[row : row + 1], share[row : row + 1])
            require(
                torch.equal(alone, rate[row : row + 1]), f"row {row} of a batch gets another rate than a single row"
            )
    require(
        all(1 <= method.count_min_kept(visual) <= visual for visual in (1, 7, 576)),
        "count_min_kept() must keep at least one token",
    )
