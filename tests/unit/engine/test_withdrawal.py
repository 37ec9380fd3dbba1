# SPDX-License-Identifier: Apache-2.0
"""Images that lose all their tokens, and the effect on later stages and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tokenprune
from oracle import reduced
from pruned import run_pruned
from staged_methods import BATCHES, ByContent, Choose, Stage, Staged, batch, check, every, kind, visual_left
from tokenprune import Budget, Selection, Site, VisualTokens
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.sequence.segments import KeptTokens, drop_tokens
from tokenprune.selection.apply import validate_selection
from tokenprune.selection.segments import Segments
from turns import check_turns
from zoo import FAMILIES, Family


@dataclass(frozen=True)
class Withdraws(ByContent):
    min_tokens: ClassVar[int] = 0


@dataclass(frozen=True)
class Early(Withdraws):
    site: ClassVar[Site] = Site.PRE_LLM
    layer: int = 0


def keep_images(*ordinals: int) -> Choose:
    """Keep the images with these ordinals in each row and drop the others."""

    def choose(tokens: VisualTokens) -> Tensor:
        is_kept = torch.tensor([ordinal in ordinals for ordinal in tokens.segments.ordinal])
        return tokens.mask & is_kept[:, None]

    return choose


# -- withdrawal --------------------------------------------------------------------------------------------------------


@kind
@batch
@pytest.mark.parametrize("has_counts", [False, True], ids=["asked", "told"])
def test_all_visual_tokens_are_withdrawn(family: Family, batch: str, has_counts: bool, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])

    def drop_all(tokens: VisualTokens) -> Selection:
        keep = torch.zeros_like(tokens.mask)
        return Selection(keep, counts=[0] * len(tokens.counts) if has_counts else None)

    cuts = check(family, model, Withdraws(2, drop_all), inputs)
    (cut,) = cuts
    assert not any(visual_left(family, model, inputs, cut))
    stats = run_pruned(model, inputs, Withdraws(2, drop_all), 0.5)[1]
    assert stats.visual_tokens_out == 0 and stats.keep_ratio == 0
    assert stats.visual_tokens_per_layer[:2] == [stats.visual_tokens_in] * 2
    assert not any(stats.visual_tokens_per_layer[2:])
    assert stats.as_dict() and repr(stats)


@kind
@pytest.mark.parametrize("batch", ["ragged", "ragged right", "text beside"])
def test_one_image_of_several_is_withdrawn(family: Family, batch: str, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    segments = []

    def first(tokens: VisualTokens) -> Tensor:
        tokens.remember("position", tokens.segments.position.masked_fill(~tokens.mask, 0))
        tokens.remember("ordinal", torch.tensor(tokens.segments.ordinal))
        tokens.remember("rows", list(tokens.segments.row))
        return keep_images(0, 2)(tokens)

    def second(tokens: VisualTokens) -> Tensor:
        segments.append(tokens.segments)
        assert all(tokens.counts) and all(tokens.keep) and tokens.text.hidden.shape[0] == len(tokens.counts)
        position = tokens.segments.position.masked_fill(~tokens.mask, 0)
        assert torch.equal(tokens.carry["position"], position)
        assert tokens.carry["ordinal"].tolist() == tokens.segments.ordinal
        assert tokens.carry["rows"] == tokens.segments.row
        return torch.arange(tokens.mask.shape[1]) < tokens.budget[:, None]

    method = Staged((Withdraws(1, first), Stage(2, second)), (Budget(keep=10_000), Budget(keep=0.5)))
    cuts = check(family, model, method, inputs)
    assert [cut.layer for cut in cuts] == [1, 2]
    assert set(segments[0].ordinal) <= {0, 2}
    assert sum(visual_left(family, model, inputs, cuts[1])) == sum(max(1, round(n * 0.5)) for n in segments[0].counts)


@kind
def test_row_without_visual_tokens_in_a_batch(family: Family, build: Any) -> None:
    model = build(family)
    kept = {}

    def keep_largest(tokens: VisualTokens) -> Tensor:
        """Keep the images with the most tokens, all of them in one row if image sizes differ."""
        counts = torch.tensor(tokens.counts)
        return tokens.mask & (counts == max(row_count[1] for row_count in rows))[:, None]

    batch = family.make_inputs(images=(2, 1))
    rows = [(row, count) for row, counts in enumerate(batch.counts) for count in counts]
    for only in (None, 0, 1):
        inputs = family.make_inputs(images=(2, 1), only=only)
        cuts = check(family, model, Staged((Withdraws(1, keep_largest), Stage(3, every(2)))), inputs, keep=0.5)
        kept[only] = [cut.kept for cut in cuts]
    starts = batch["attention_mask"].argmax(1).tolist()
    for row, start in enumerate(starts):
        assert kept[None][-1][row] == [start + index for index in kept[row][-1][0]]


@kind
def test_images_are_withdrawn_at_the_entry(family: Family, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    (cut,) = check(family, model, Early(0, keep_images()), inputs)
    assert cut.layer == 0 and not any(visual_left(family, model, inputs, cut))


def test_budgets_are_solved_for_what_is_left(build: Any) -> None:
    """A method withdraws through `resolve_count`, so a later average budget applies to no tokens."""

    @dataclass(frozen=True)
    class DropAll(Withdraws):
        def resolve_count(self, count: int, keep: int) -> int:
            return 0

        def select(self, tokens: VisualTokens) -> Selection:
            return Selection(torch.zeros_like(tokens.mask), counts=list(tokens.keep))

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    later = Stage(3, lambda tokens: pytest.fail("called without tokens"))
    budgets = (Budget(keep=0.5), Budget(average_tokens=30))
    (cut,) = check(family, model, Staged((DropAll(2), later), budgets), inputs)
    assert not any(visual_left(family, model, inputs, cut))


def test_a_method_that_may_not_withdraw_is_refused(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, images=(2, 1))
    with (
        tokenprune.patched(model, ByContent(1, keep_images(0)), keep=0.5),
        pytest.raises(TokenPruneError, match="least"),
    ):
        model(**inputs)


# -- budgets of later stages -------------------------------------------------------------------------------------------


def test_later_budgets_get_the_original_counts(build: Any) -> None:
    resolved = []

    @dataclass(frozen=True, init=False, repr=False)
    class OfOriginal(Budget):
        def resolve(self, counts: Sequence[int], *, original: Sequence[int], **kwargs: Any) -> list[int]:
            resolved.append((list(counts), list(original)))
            return [max(1, count // 4) for count in original]

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    (count,) = inputs.counts[0]
    select_budget = lambda tokens: torch.arange(tokens.mask.shape[1]) < tokens.budget[:, None]  # noqa: E731
    method = Staged((Stage(1, select_budget), Stage(2, select_budget)), (Budget(keep=0.5), OfOriginal(keep=0.25)))
    cuts = check(family, model, method, inputs)
    assert set(map(str, resolved)) == {str(([count // 2], [count]))}
    assert visual_left(family, model, inputs, cuts[1]) == [count // 4]
    resolved.clear()
    check(family, model, ["uniform", method], inputs, keep=[0.5, 0.5], guard="off")
    assert set(map(str, resolved)) == {str(([count // 4], [count // 2]))}


# -- units -------------------------------------------------------------------------------------------------------------


def make_segments(counts: list[int], device: str = "cpu") -> Segments:
    """Return adjacent segments in a row, after three tokens of text."""
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    starts = 3 + torch.tensor([0, *counts]).cumsum(0)[:-1]
    position = torch.where(mask, starts[:, None] + torch.arange(max(counts)), starts[:, None])
    count = len(counts)
    segments = Segments([0] * count, list(range(count)), counts, position, mask, [None] * count, ["image"] * count)
    return segments.to(torch.device(device))


def test_padding_points_at_a_kept_token() -> None:
    keep = torch.tensor([[False, True, False, True], [False] * 4, [False, False, True, False]])
    kept = drop_tokens(make_segments([4, 4, 3]), KeptTokens(keep, [2, 0, 1]))
    assert kept.position.tolist() == [[4, 6], [13, 13]] and kept.mask.tolist() == [[True, True], [True, False]]
    assert kept.counts == [2, 1] and kept.ordinal == [0, 2] and kept.row == [0, 0]
    empty = drop_tokens(make_segments([3, 2]), KeptTokens(torch.zeros(2, 3, dtype=torch.bool), [0, 0]))
    assert len(empty) == 0 and empty.position.shape == (0, 0) and empty.grids == []


def test_counts_of_a_method_are_checked_on_the_host() -> None:
    """The host trusts the counts of a device, except for counts of 0."""
    segments = make_segments([3, 2], "meta")
    selection = Selection(segments.mask, counts=[0, 2])
    with pytest.raises(TokenPruneError, match="least"):
        validate_selection(selection, segments, ByContent())
    assert validate_selection(selection, segments, Withdraws())[1] == [0, 2]


# -- after a prefill ---------------------------------------------------------------------------------------------------


@kind
@pytest.mark.parametrize("images", [(), (0,)], ids=["all withdrawn", "one withdrawn"])
@torch.no_grad()
def test_a_second_turn_behind_a_withdrawal(family: Family, images: tuple[int, ...], build: Any) -> None:
    """The cache has tokens of the image only in layers before the cut."""
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    method = Staged((Withdraws(2, keep_images(*images)), ByContent(3, every(2))))
    cuts = check_turns(family, model, inputs, method, 0.5, steps=(3, 3)).cuts
    assert [cut.layer for cut in cuts] == ([2, 3] if images else [2])


@torch.no_grad()
def test_beams_behind_a_withdrawal(build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, Withdraws(2, keep_images(0)), keep=0.5, record=True):
        got = model.generate(**inputs, max_new_tokens=5, num_beams=3)
        cuts = tokenprune.stats(model).cuts
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want = model.generate(**inputs, max_new_tokens=5, num_beams=3)
    assert torch.equal(got, want)


def test_gradients_flow_to_kept_tokens(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(images=(2, 1))
    with tokenprune.patched(model, Staged((Withdraws(1, keep_images(0)), ByContent(2, every(2)))), keep=0.5):
        model.train()
        loss = model(**inputs).logits[:, -3:].float().logsumexp(-1).sum()
        loss.backward()
    grads = [p.grad for p in model.model.language_model.layers[-1].parameters()]
    assert all(grad is not None and bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads)
