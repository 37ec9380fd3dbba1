# SPDX-License-Identifier: Apache-2.0
"""erase and `patch_entropy` against naive loops, on synthetic tokens and in models.

The numbers of invariants refer to the description.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import several_cuts
import tokenprune
from each import each
from families import FAMILIES as EVERY_FAMILY
from oracle import close
from several_cuts import Arrived, best, check_in_model, counts_of, rows
from tokenprune import Budget, BudgetError, OptionError, UnsupportedSetupError, VisualTokens
from tokenprune.selection.observable_registry import find_observable
from zoo import FAMILIES

MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
PROCESSOR = SimpleNamespace(image_processor=SimpleNamespace(image_mean=MEAN, image_std=STD))
THRESHOLDS, SHARES = (3.0, 2.0, 1.0), (0.9, 0.7, 0.5, 0.4)
SETTING: dict[str, Any] = {"entropy": THRESHOLDS, "retain": SHARES, "layers": (0, 2)}


def naive_entropy(pixels: list[tuple[int, int, int]]) -> float:
    """Return the entropy of the grey levels of a token's pixels (steps 2 and 3)."""
    r, g, b = torch.tensor(pixels, dtype=torch.float32).T
    greys = Counter(int(level) for level in (0.299 * r + 0.587 * g + 0.114 * b).tolist())
    shares = [greys[level] / len(pixels) + 1e-10 for level in range(256)]
    return -math.fsum(p * math.log(p) for p in shares)


def naive_level(entropy: list[float], thresholds: Any = THRESHOLDS) -> int:
    middle = sorted(entropy)[(len(entropy) - 1) // 2]
    return next((level for level, threshold in enumerate(thresholds) if middle > threshold), len(thresholds))


def naive_first_cut(entropy: list[float], keep: int, shares: Any = SHARES) -> list[int]:
    return best(entropy, max(int(len(entropy) * shares[naive_level(entropy)]), keep))


def compute_entropies(pixels: list[list[tuple[int, int, int]]]) -> list[float]:
    colours = torch.tensor(pixels, dtype=torch.float32).transpose(1, 2)[:, None] / 255
    return find_observable("patch_entropy").compute_from_colors(colours).squeeze(1).tolist()


def test_entropies_equal_naive_loop() -> None:
    draw = random.Random(0)
    tokens = [[tuple(draw.randrange(0, top) for _ in range(3)) for _ in range(64)] for top in (2, 9, 64, 256) * 4]
    assert compute_entropies(tokens) == pytest.approx([naive_entropy(token) for token in tokens], abs=1e-5)
    same = [(5, 6, 7)] * 64
    assert compute_entropies([same, same]) == pytest.approx([0.0, 0.0], abs=1e-6)  # invariant 1
    halves = [(0, 0, 0)] * 32 + [(255, 255, 255)] * 32
    assert compute_entropies([halves]) == pytest.approx([math.log(2)], abs=1e-5)
    for token in tokens:  # invariant 2
        shuffled = draw.sample(token, len(token))
        swapped = [(x, x, x) for x in (draw.choice((10, 20, 30)) for _ in range(64))]
        other = [({10: 200, 20: 10, 30: 90}[x],) * 3 for x, _, _ in swapped]
        assert compute_entropies([shuffled]) == compute_entropies([token])
        assert compute_entropies([swapped]) == pytest.approx(compute_entropies([other]), abs=1e-6)


def select_first(entropy: list[list[float]], keep: list[int], **options: Any) -> tuple[list[list[int]], VisualTokens]:
    counts = [len(image) for image in entropy]
    padded = torch.tensor([image + [99.0] * (max(counts) - len(image)) for image in entropy])
    tokens = several_cuts.view(counts, keep, ["patch_entropy"], patch_entropy=padded, **options)
    return rows(tokenprune.method("erase", entropy=THRESHOLDS, retain=SHARES).select(tokens).keep), tokens


@each("ties", [False, True])
@each("share", [0.02, 0.25, 0.6, 1.0])
def test_first_stage_equals_naive_loop(share: float, ties: bool) -> None:
    draw, levels = random.Random(share), set()
    for _ in range(20):
        counts = [draw.randrange(1, 40) for _ in range(4)]
        entropy = [[draw.uniform(0, top) for _ in range(n)] for n, top in zip(counts, (1.5, 3, 5, 8), strict=True)]
        entropy = [[float(round(x)) if ties else x for x in image] for image in entropy]
        keep = [max(1, round(share * n)) for n in counts]
        got, _ = select_first(entropy, keep)
        assert got == [naive_first_cut(image, num_kept) for image, num_kept in zip(entropy, keep, strict=True)]
        levels |= {naive_level(image) for image in entropy}
    assert levels == {0, 1, 2, 3}
    assert select_first([[0.0] * 10], [2])[0] == [[0, 1, 2, 3]]  # invariant 1
    sizes = [len(select_first([[median] * 20], [2])[0][0]) for median in (0.5, 1.5, 2.5, 3.5)]
    assert sizes == sorted(sizes) == [8, 10, 14, 18]  # invariant 4
    assert len(select_first([[3.0] * 20], [2])[0][0]) == 14  # the threshold itself is not exceeded


@each(("prompts", "early"), [([0, 1, 2, 3], [3, 8, 2, 4]), ([0, 0, 1, 1], [4, 8, 4, 4]), ([0, 1, 2, 2], [3, 8, 4, 4])])
def test_most_complex_image_selects_the_cut_of_its_prompt(prompts: list[int], early: list[int]) -> None:
    counts, keep = [12, 12, 9, 5], [3, 3, 2, 2]
    entropy = torch.tensor([0.5, 2.5, 1.5, 4.0])[:, None].expand(4, 12)
    first, *later = [stage for stage, _ in tokenprune.method("erase", **SETTING).stages(Budget(keep=0.25), 4)]
    assert [stage.cut_layer for stage in later] == [1, 3]
    tokens = several_cuts.view(counts, keep, ["patch_entropy"], patch_entropy=entropy, rows=prompts)
    counts_left = [len(row) for row in rows(first.select(tokens).keep)]
    assert counts_left == [int(12 * 0.4), int(12 * 0.7), int(9 * 0.5), int(5 * 0.9)]
    for stage, num_kept in zip(later, (early, keep), strict=True):
        view = several_cuts.view(counts_left, keep, sorted(stage.needs), carry=dict(tokens.carry), rows=prompts)
        votes = (view.text_attention * view.text.mask[:, None, :, None]).sum(2).mean(1)
        segments = zip(votes.tolist(), counts_left, num_kept, strict=True)
        assert rows(stage.select(view).keep) == [best(vote[:count], k) for vote, count, k in segments]
        counts_left = num_kept


def test_layers_and_budgets() -> None:
    method = tokenprune.method("erase")
    layers = {n: [stage.cut_layer - 1 for stage, _ in method.stages(Budget(keep=0.5), n)][1:] for n in (28, 36, 4, 3)}
    assert layers == {28: [1, 16], 36: [2, 21], 4: [0, 1], 3: [0, 1]}
    assert counts_of(method, 28, 100, 0.25)[0] == (0, 25)
    for budget in (Budget(average_share=0.5), Budget(keep=0.5, per="prompt")):
        with pytest.raises(BudgetError, match=r"erase does not support Budget.* Pass keep"):
            method.stages(budget, 28)
    with pytest.raises(OptionError, match=r"layers=\(1, 27\) is out of range: the last of 28 layers is 27"):
        tokenprune.method("erase", layers=(1, 27)).stages(Budget(keep=0.5), 28)


def replace_images(inputs: Any, seed: int = 0) -> Tensor:
    """Replace packed images by noise of 2, 256, 30 or 9 levels. Return colours (tokens, patches, 3, pixels)."""
    g, units = torch.Generator().manual_seed(seed), len(inputs["pixel_values"]) // 4
    pixels = inputs["pixel_values"].shape[1] // 3
    max_levels = [
        top
        for index, (t, h, w) in enumerate(inputs["image_grid_thw"].tolist())
        for top in [(2, 256, 30, 9)[index % 4]] * (t * h * w // 4)
    ]
    spread = torch.tensor(max_levels)[:, None, None, None] * torch.rand(units, 1, 1, 1, generator=g).sqrt()
    colours = (torch.rand(units, 4, 3, pixels, generator=g) * spread).floor()
    normalised = (colours / 255 - torch.tensor(MEAN)[:, None]) / torch.tensor(STD)[:, None]
    inputs["pixel_values"] = normalised.flatten(2).flatten(0, 1).to(inputs["pixel_values"].dtype)
    return colours


def naive_entropies(colours: Tensor) -> list[float]:
    return [naive_entropy([tuple(p) for p in unit.transpose(1, 2).flatten(0, 1).tolist()]) for unit in colours]


@torch.no_grad()
@each("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_patch_entropy_in_models(name: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family, calls = EVERY_FAMILY[name], []
    model, inputs = build(family), family.make_inputs(images=(1, 2))
    want = iter(naive_entropies(replace_images(inputs)))
    select = type(tokenprune.method("erase")).select

    def look(method: Any, tokens: VisualTokens) -> Any:
        calls.append((tokens.counts, tokens.patch_entropy))
        return select(method, tokens)

    monkeypatch.setattr(type(tokenprune.method("erase")), "select", look)
    monkeypatch.setattr("tokenprune.integrations.hf.towers.attention_scores._CHUNK_TOKENS", 5)
    with tokenprune.patched(model, "erase", keep=0.25, processor=PROCESSOR, guard=None):
        model(**inputs)
    ((counts, entropy),) = calls
    assert entropy.dtype == torch.float32
    for count, row in zip(counts, entropy, strict=True):
        close(row[:count], torch.tensor([next(want) for _ in range(count)]))
        assert not row[count:].any()
    assert next(want, None) is None


def make_setting(colours: Tensor, inputs: Any) -> dict[str, Any]:
    """Return options whose second threshold is between the medians of the two most complex images."""
    sizes = [count for counts in inputs.counts for count in counts]
    parts = torch.tensor(naive_entropies(colours)).split(sizes)
    first, second = sorted((float(part.median()) for part in parts), reverse=True)[:2]
    return {**SETTING, "entropy": (9.0, (first + second) / 2, 0.01)}


@torch.no_grad()
@each("images", [(1, 1), (2, 1)])
@each("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_every_cut_equals_naive_loop_in_models(
    name: str, images: tuple[int, int], build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    inputs = family.make_inputs(images=images)
    colours = replace_images(inputs)
    monkeypatch.setattr(type(family), "make_inputs", lambda self, **_: inputs)

    def naive(arrived: Arrived) -> list[int]:
        if arrived.number == 0:
            return arrived.stays
        votes = {p: sum(float(arrived.before[:, r, p].mean()) for r in arrived.text) for p in arrived.places}
        return sorted(arrived.places, key=lambda p: (-votes[p], p))[: arrived.keep]

    setting = make_setting(colours, inputs)
    cuts = check_in_model("erase", naive, build, keep=0.3, name=name, processor=PROCESSOR, guard=None, **setting)
    assert [cut.layer for cut in cuts] == [0, 1, 3]
    values, offset = naive_entropies(colours), 0
    visual = family.visual_mask(build(family, "eager"), inputs)
    for row, counts in enumerate(inputs.counts):
        positions, expected = visual[row].nonzero().flatten().tolist(), []
        for count in counts:
            image_positions, image_values = positions[:count], values[offset : offset + count]
            positions, offset = positions[count:], offset + count
            keep, level = max(1, round(0.3 * count)), naive_level(image_values, setting["entropy"])
            expected += [image_positions[i] for i in best(image_values, max(int(count * SHARES[level]), keep))]
        assert [position for position in cuts[0].kept[row] if visual[row, position]] == expected
    counts_per_cut = [[int(visual[row, kept].sum()) for row, kept in enumerate(cut.kept)] for cut in cuts]
    first, early, late = counts_per_cut
    assert sorted([a > b for a, b in zip(first, early, strict=True)]) == [False, True]
    assert [a > b for a, b in zip(early, late, strict=True)] == [a == b for a, b in zip(first, early, strict=True)]


@torch.no_grad()
def test_batch_matches_single_rows(build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(1, 1))
    colours = replace_images(inputs)
    setting = dict(processor=PROCESSOR, guard=None, **make_setting(colours, inputs))
    plain = model(**inputs).logits
    with tokenprune.patched(model, "erase", keep=1.0, **setting):
        assert torch.equal(model(**inputs).logits, plain)
    with tokenprune.patched(model, "erase", keep=0.3, record=True, **setting):
        both = model(**inputs).logits
        kept = [cut.kept for cut in tokenprune.stats(model).cuts]
        start = 0
        for row, (count,) in enumerate(inputs.counts):
            single = family.make_inputs(images=(1, 1), only=row)
            single["pixel_values"] = inputs["pixel_values"][start * 4 : (start + count) * 4]
            start += count
            close(model(**single).logits[0, -1], both[row, -1])
            shift = len(inputs["input_ids"][0]) - len(single["input_ids"][0])
            single_cuts = [[index + shift for index in cut.kept[0]] for cut in tokenprune.stats(model).cuts]
            batch_cuts = [[index for index in tokens[row] if index >= shift] for tokens in kept]
            assert len(single_cuts) == 2 and single_cuts == [
                tokens for index, tokens in enumerate(batch_cuts) if tokens not in batch_cuts[:index]
            ]
    with tokenprune.patched(model, "erase", keep=2, **setting):
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_out == 4


def test_invalid_setups_are_refused(build: Any) -> None:
    with pytest.raises(OptionError, match=r"erase reads colours.*Pass processor="):
        tokenprune.patch(build(FAMILIES["qwen2_5_vl"]), "erase")
    with pytest.raises(UnsupportedSetupError, match=r"erase needs pixels that are packed token by token"):
        tokenprune.patch(build(FAMILIES["llava"]), "erase", processor=PROCESSOR)
