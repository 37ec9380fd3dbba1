# SPDX-License-Identifier: Apache-2.0
"""Rules for methods that do not choose among visual tokens."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError
from tokenprune.kernels.drawn import normal, uniform
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
    """Raise ConformanceError if the merges that a method plans break a rule: a plan for each block; rows of tokens that
    fit together; what every row merges is the same in a batch and alone; the first `protected` tokens stay; nothing
    merges where everything is to be kept; and the same twice."""
    tower = tower or Tower(
        tokens=33, protected=1, blocks=4, blocks_read=3, module=nn.Linear(2, 2, device="cpu", dtype=torch.float32)
    )
    with suppress(OptionError):  # that keep=1.0 contradicts its options
        whole = Budget.from_keep(1.0)
        require(method.is_identity(whole) or not any(method.plan(whole, tower)), "with keep=1.0 it still merges tokens")
    for keep in _KEEPS[:-1]:
        if method.reads:
            _check_drops(method, Budget.from_keep(keep), tower)
            continue
        plan = method.plan(Budget.from_keep(keep), tower)
        require(len(plan) == tower.blocks, f"plan() must return a matcher or None for each of {tower.blocks} blocks")
        require(
            not any(plan[tower.blocks_read :]), f"blocks from {tower.blocks_read} on show no keys: theirs must be None"
        )
        keys = normal(3, tower.tokens, 16, generator=torch.Generator("cpu").manual_seed(0))
        left = [tower.tokens] * len(keys)
        for block, match in enumerate(plan):
            if match is None or (merge := match(keys, left if method.ragged else None)) is None:
                continue
            again = match(keys, left if method.ragged else None)
            same = again is not None and torch.equal(merge.keep, again.keep)
            require(same, f"block {block} merges other tokens the second time")
            rows = [merge.keep.shape[1]] * len(keys) if merge.num_kept is None else merge.num_kept
            require(method.ragged or len(set(rows)) == 1, "rows merge different numbers of tokens: set ragged = True")
            for row, (now, before) in enumerate(zip(rows, left, strict=True)):
                stay = merge.keep[row, :now].tolist()
                require(
                    len(set(stay)) == now and max(stay) < before, f"block {block}: keep must name {now} real tokens"
                )
                require(set(range(tower.protected)) <= set(stay), f"block {block}: a class token must not be merged")
                alone = match(keys[row : row + 1, :before], [before] if method.ragged else None)
                own = stay if alone is None else alone.keep[0].tolist()
                require(own == stay, f"block {block}: row {row} of a batch keeps other tokens than alone")
            keys, left = merge.mean(keys, torch.ones(keys.shape[:2], dtype=torch.float32, device="cpu")), rows


def _check_drops(method: EncoderMethod, budget: Budget, tower: Tower) -> None:
    """Raise ConformanceError if what a method drops by `EncoderMethod.reads` breaks a rule of `check_merges`, or if it
    leaves another number of patches than it says."""
    generator = torch.Generator("cpu").manual_seed(0)
    about, seen = Sizes((tower.patches,) * 3), get_observable(method.reads)
    shown = [seen.example(about, generator) for _ in range(tower.blocks)]

    def left(rows: list[int]) -> list[list[int]]:
        plan, stay = method.plan(budget, tower), [list(range(tower.patches)) for _ in rows]
        require(len(plan) == tower.blocks, f"plan() must return a matcher or None for each of {tower.blocks} blocks")
        for block, match in enumerate(plan):
            counts = [len(one) + tower.protected for one in stay]
            longest = max(map(len, stay))
            padded = torch.tensor([one + [0] * (longest - len(one)) for one in stay], device="cpu")
            flow = torch.stack([shown[block][row][:, own] for row, own in zip(rows, padded, strict=True)])
            merge = None if match is None else match(flow, counts if len(set(counts)) > 1 else None)
            if merge is None:
                continue
            require(merge.is_drop and merge.num_kept is not None, f"block {block}: return a Merge.from_kept")
            for place, (now, before) in enumerate(zip(merge.num_kept or (), counts, strict=True)):
                kept = merge.keep[place, :now].tolist()
                real = len(set(kept)) == now and max(kept) < before
                require(real, f"block {block}: keep must name {now} real tokens")
                require(kept[: tower.protected] == list(range(tower.protected)), f"block {block} drops a class token")
                stay[place] = [stay[place][one - tower.protected] for one in kept[tower.protected :]]
        return stay

    found = left([0, 1, 2])
    require(found == left([0, 1, 2]), "it drops other patches the second time")
    for row, own in enumerate(found):
        require(left([row]) == [own], f"row {row} of a batch keeps other patches than alone")
        exact = method.inexact is not None or len(own) == tower.count_kept(budget)
        require(exact, f"it leaves {len(own)} patches, not {tower.count_kept(budget)}")


def check_units(method: UnitDropper) -> None:
    """Raise ConformanceError if the units that a method keeps break a rule: a bool for each of a grid, at least one
    unit and at most `most`, the same twice, nothing changed of what it reads, and nothing dropped where
    everything is to be kept."""
    with suppress(OptionError):  # that keep=1.0 contradicts its options
        require(method.is_identity(Budget.from_keep(1.0)), "with keep=1.0 it still drops units")
    generator = torch.Generator("cpu").manual_seed(0)
    for grid in ((1, 1, 1), (1, 5, 7), (3, 4, 4)):
        levels = torch.randint(3, (*grid, 1), generator=generator, device="cpu").expand(*grid, 12)
        for pixels in (levels / 2, uniform(*grid, 12, generator=generator)):
            units, given = levels[..., 0].numel(), pixels.clone()
            for most, least in ((n, 1 if method.chooses_count else n) for n in {1, max(1, units // 2), units}):
                keep = method.keep_units(pixels, most)
                fine = isinstance(keep, torch.Tensor) and keep.dtype == torch.bool and keep.shape == grid
                require(fine, f"keep_units() must return a bool tensor {list(grid)}, not {keep}")
                require(least <= (n := int(keep.sum())) <= most, f"it keeps {n} of {units}, not {least} to {most}")
                require(torch.equal(keep, method.keep_units(pixels, most)), "it keeps other units the second time")
                require(torch.equal(pixels, given), "it changes the pixels that it reads")


def check_frames(method: FrameMerger) -> None:
    """Raise ConformanceError if what a method makes of frames breaks a rule: blocks that rise, of those there are;
    frames that stand in order, of those there are, from the first; groups of all that are left; at least one token and
    at most `keep`; the same twice, and nothing changed of what it reads."""
    with suppress(OptionError):  # that keep=1.0 contradicts its options
        require(method.is_identity(Budget.from_keep(1.0)), "with keep=1.0 it still merges frames")
    for depth in (1, 12, 26):
        blocks = method.blocks(depth)
        rise = all(a < b for a, b in pairwise(blocks)) and blocks and blocks[0] >= 0 and blocks[-1] < depth
        require(rise, f"blocks({depth}) must return rising indices below it, at least one, not {blocks}")
    generator = torch.Generator("cpu").manual_seed(0)
    for frames in (1, 2, 5, 16):
        steps = normal(frames, 9, 8, generator=generator) * uniform(frames, 1, 1, generator=generator)
        hidden = normal(9, 8, generator=generator) + 0.5 * steps.cumsum(0)
        given, mix = hidden.clone(), method.mix(hidden)
        require(mix == method.mix(hidden) and torch.equal(hidden, given), "it mixes other frames the second time")
        rise = mix.first[0] == 0 and all(a < b for a, b in pairwise(mix.first)) and max(mix.second) < frames
        require(rise, f"mix() of {frames} frames must start from 0 and rise: {mix}")
        require(all(0 <= weight <= 1 for weight in mix.weight), f"weights of a mix lie in [0, 1]: {mix.weight}")
        left = mix.apply(hidden)
        groups = method.groups(left)
        whole = sum(groups) == len(left) and min(groups) > 0
        require(whole, f"groups() of {len(left)} frames must add up to them, not {groups}")
        received = uniform(len(left), 9, generator=generator)
        for keep in (1, len(left), 9 * len(left)):
            stays = method.choose_tokens(received, groups, keep)
            fine = isinstance(stays, torch.Tensor) and stays.dtype == torch.bool and stays.shape == received.shape
            require(fine, f"choose_tokens() must return a bool tensor {list(received.shape)}, not {stays}")
            require(1 <= int(stays.sum()) <= keep, f"of {keep} tokens it keeps {int(stays.sum())}")
            again = method.choose_tokens(received, groups, keep)
            require(torch.equal(stays, again), "it keeps other tokens the second time")


def check_shares(method: ResizeMethod) -> None:
    """Raise ConformanceError if the shares that a method gives to images break a rule: one in (0, 1] for each, the same
    twice, an image's own in a batch as alone, and 1 where everything is to be kept."""
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
        fine = len(shares) == len(images) and all(0 < share <= 1 for share in shares)
        require(fine, f"shares() must return a number in (0, 1] for each of {len(images)} images, not {shares}")
        require(shares == method.compute_shares(images, keep, "image"), "it gives other shares the second time")
        alone = [method.compute_shares([image], keep, "image")[0] for image in images]
        require(alone == shares, f"images get {shares} together and {alone} alone")
        require(keep < 1 or shares == [1.0] * len(images), f"with keep=1.0 it gives {shares}")
        require(
            method.depends_on_content or len(set(shares)) == 1, "shares differ between images: say depends_on_content"
        )


def check_chosen_images(method: ImageChooser) -> None:
    """Raise ConformanceError if the images that a method chooses break a rule: sorted, each once, at least one, and the
    same twice."""
    for question in _QUESTIONS:
        for count in (1, 2, 5):
            chosen = method.choose(question, count, count)
            fine = chosen == sorted(set(chosen)) and chosen and chosen[0] >= 0 and chosen[-1] < count
            require(fine, f"choose() must return sorted numbers of {count} images, at least one, not {chosen}")
            require(chosen == method.choose(question, count, count), "it chooses other images the second time")


def check_blocks(method: AttentionPattern) -> None:
    """Raise ConformanceError if the blocks that a method makes break a rule: places in the prompt that rise, or words;
    and the same twice."""
    for frames in (1, 4, 64, 200):
        spans = tuple((5 + 9 * frame, 14 + 9 * frame) for frame in range(frames))
        for end in (spans[-1][1], spans[-1][1] + 20):
            starts = method.block_starts([Visual("video", spans)], end)
            require(
                starts == method.block_starts([Visual("video", spans)], end), "it makes other blocks the second time"
            )
            if isinstance(starts, str):
                require(starts.strip(), "block_starts() must say in words why a prompt keeps full attention")
                continue
            rising = all(a < b for a, b in pairwise(starts)) and starts and starts[0] >= 0 and starts[-1] < end
            require(rising, f"block_starts() must return rising places below {end}, not {starts}")


def check_rates(method: DecodeMethod) -> None:
    """Raise ConformanceError if the rates at which a method goes on removing tokens break a rule: one in 0..1 for each
    row, the same in a batch as alone, at least one token stays."""
    generator = torch.Generator("cpu").manual_seed(0)
    share = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64, device="cpu")
    for steps in (1, 2, 9):
        masses = uniform(3, 1 + steps, 2, 4, generator=generator)
        require(isinstance(method.decides(steps), bool), "decides() must return True or False")
        rate = method.next_rate(masses, share)
        fine = rate.shape == share.shape and bool(((rate >= 0) & (rate <= 1)).all())
        require(fine, f"next_rate() must return a rate in 0..1 for each of {len(share)} rows, not {rate}")
        for row in range(len(share)):
            alone = method.next_rate(masses[row : row + 1], share[row : row + 1])
            require(torch.equal(alone, rate[row : row + 1]), f"row {row} of a batch gets another rate than alone")
    require(
        all(1 <= method.count_min_kept(visual) <= visual for visual in (1, 7, 576)),
        "fewest() must leave at least one token",
    )
