# SPDX-License-Identifier: Apache-2.0
"""Methods of several stages: what they remember, how many tokens they leave, and that each computes what masks do.

The methods here stand outside the library, as a user's would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tokenprune
from families.special import FAMILIES as SPECIAL
from families.special import STATEFUL
from only_kept import only_kept
from oracle import close, generate_logits, reduced, survivors
from tests.engine.test_cache import longer, words
from tokenprune import Budget, Method, Selection, Site, VisualTokens
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.sequence.segments import Kept, keep_segments
from tokenprune.integrations.shared.selection import validate_selection
from tokenprune.tokens import Segments
from zoo import FAMILIES, Family

Choose = Callable[[VisualTokens], Tensor | Selection]

BATCHES: dict[str, dict[str, Any]] = {
    "one image": {"only": 0},
    "ragged": {"images": (2, 1)},
    "ragged right": {"images": (1, 3), "padding": "right"},
    "text beside": {"images": (0, 2)},
}
# One axis of positions, three, layers that add features to visual tokens, masks made by the model, a state in place of
# keys, sliding windows and inputs for each layer.
MANY = FAMILIES | SPECIAL
KINDS = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma3n", "llama4", "lfm2_vl"]


@dataclass(frozen=True)
class Stage(Method):
    """Keeps what `choose` makes of the tokens that reach `layer`."""

    name: ClassVar[str] = "staged"
    site: ClassVar[Site] = Site.IN_LLM
    layer: int = 1
    choose: Choose = field(default=lambda tokens: tokens.mask, compare=False)
    by_content_count: ClassVar[bool] = False

    def select(self, tokens: VisualTokens) -> Selection:
        chosen = self.choose(tokens)
        return chosen if isinstance(chosen, Selection) else Selection(chosen & tokens.mask)


@dataclass(frozen=True)
class ByContent(Stage):
    by_content_count: ClassVar[bool] = True


@dataclass(frozen=True)
class Withdraws(ByContent):
    least: ClassVar[int] = 0


@dataclass(frozen=True)
class Early(Withdraws):
    site: ClassVar[Site] = Site.PRE_LLM
    layer: int = 0


@dataclass(frozen=True)
class Staged(Method):
    """Consists of stages, which all get `budget`, or what `budgets` say."""

    name: ClassVar[str] = "staged"
    site: ClassVar[Site] = Site.IN_LLM
    parts: Sequence[Stage] = ()
    budgets: Sequence[Budget] | None = None

    @property
    def layer(self) -> int:
        return self.parts[0].layer

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        return list(zip(self.parts, self.budgets or [budget] * len(self.parts), strict=True))


def oracle(family: Family) -> Any:
    return only_kept if family.name in STATEFUL else reduced


@torch.no_grad()
def check(
    family: Family, model: Any, method: Any, inputs: Any, keep: Any = 0.5, steps: int = 3, **options: Any
) -> list:
    """A patched run computes what the unpatched model does with masks; returns its cuts."""
    length = inputs["input_ids"].shape[1]
    if family.name in STATEFUL and not inputs["attention_mask"][:, -1].all():
        pytest.skip("a state takes in padding behind a prompt before the answer, patched or not")
    with tokenprune.patched(model, method, keep=keep, record=True, **options):
        logits = model(**inputs).logits
        cuts = tokenprune.stats(model).cuts
        got, tokens, _ = generate_logits(model, inputs, steps)
        assert [cut.kept for cut in tokenprune.stats(model).cuts] == [cut.kept for cut in cuts]
    with oracle(family)(family, model, cuts, length):
        want = model(**inputs).logits
        wanted, _, _ = generate_logits(model, inputs, steps, tokens=tokens)
    alive = survivors(cuts[-1], length) if cuts else inputs["attention_mask"].bool()
    close(logits[alive], want[alive])
    read = inputs["attention_mask"][:, -1].bool()
    close(got[read], wanted[read])
    close(got[:, 1:], wanted[:, 1:])
    return cuts


def visual_left(family: Family, model: Any, inputs: Any, cut: Any) -> list[int]:
    """Visual tokens of each row that survive a cut."""
    visual = family.visual_mask(model, inputs)
    return (survivors(cut, visual.shape[1]) & visual).sum(1).tolist()


def every(number: int, offset: int = 0) -> Choose:
    return lambda tokens: (torch.arange(tokens.mask.shape[1]) % number == offset).expand_as(tokens.mask)


def images_of(*ordinals: int) -> Choose:
    """Keep these images of each row, and of the others nothing."""

    def choose(tokens: VisualTokens) -> Tensor:
        stays = torch.tensor([one in ordinals for one in tokens.segments.ordinal])
        return tokens.mask & stays[:, None]

    return choose


kind = pytest.mark.parametrize("family", [MANY[name] for name in KINDS], ids=KINDS)
batch = pytest.mark.parametrize("batch", BATCHES)


# -- counts decided by content


@kind
@batch
def test_a_method_that_counts_by_content_is_asked_whatever_its_budget(family: Family, batch: str, build: Any) -> None:
    """An int that is more than any image has is no reason not to ask."""
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    cuts = check(family, model, ByContent(2, every(3)), inputs, keep=10_000)
    assert [cut.layer for cut in cuts] == [2]
    before = sum(map(sum, inputs.counts))
    assert 0 < sum(visual_left(family, model, inputs, cuts[0])) < before


def test_keeping_everything_asks_nobody(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()

    def never(tokens: VisualTokens) -> Tensor:
        raise AssertionError("asked with keep=1.0")

    with torch.no_grad():
        want = model(**inputs).logits
        for method in (ByContent(1, never), Staged((ByContent(1, never), Stage(2, never)))):
            with tokenprune.patched(model, method, keep=1.0):
                assert torch.equal(model(**inputs).logits, want)


def test_other_methods_are_not_asked_where_their_budget_is_all(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    asked = []
    with torch.no_grad(), tokenprune.patched(model, Stage(1, lambda tokens: asked.append(1)), keep=10_000):
        model(**inputs)
    assert not asked


@kind
def test_a_stage_is_told_what_a_stage_by_content_really_left(family: Family, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    reached: list[list[int]] = []

    def note(tokens: VisualTokens) -> Tensor:
        reached.append(list(tokens.counts))
        return torch.arange(tokens.mask.shape[1]) < tokens.budget[:, None]

    method = Staged((ByContent(1, every(2)), Stage(3, note)), (Budget(keep=10_000), Budget(keep=0.5)))
    cuts = check(family, model, method, inputs)
    counts = [count for row in inputs.counts for count in row]
    if len(reached[0]) == len(counts):  # else a piece is a tile
        assert reached[0] == [-(-count // 2) for count in counts]
    assert sum(visual_left(family, model, inputs, cuts[1])) == sum(max(1, round(n * 0.5)) for n in reached[0])


# -- what stages remember


@kind
@batch
def test_what_a_stage_remembers_follows_the_tokens(family: Family, batch: str, build: Any) -> None:
    """Three stages: the first remembers where each token stands, the second cuts, the third finds the positions of
    those that are left; numbers for each image, and for the whole call, stay as they are."""
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    seen = []

    def first(tokens: VisualTokens) -> Tensor:
        position = tokens.segments.position.masked_fill(~tokens.mask, 0)
        tokens.remember("position", position)
        tokens.remember("wide", position[..., None].expand(-1, -1, 3).float())
        tokens.remember("row", torch.tensor(tokens.segments.row))
        tokens.remember("number", 7)
        return tokens.mask

    def last(tokens: VisualTokens) -> Tensor:
        position = tokens.segments.position.masked_fill(~tokens.mask, 0)
        assert torch.equal(tokens.carry["position"], position)
        assert torch.equal(tokens.carry["wide"], position[..., None].expand(-1, -1, 3).float())
        assert tokens.carry["row"].tolist() == tokens.segments.row and tokens.carry["number"] == 7
        seen.append(tokens.counts)
        return every(2, 1)(tokens) | (torch.arange(tokens.mask.shape[1]) == 0)

    whole = Budget(keep=1.0)
    method = Staged((ByContent(1, first), Stage(2, every(3)), ByContent(3, last)), (whole, Budget(keep=0.4), whole))
    cuts = check(family, model, method, inputs)
    assert len(seen) == 2 and [cut.layer for cut in cuts] == [2, 3]  # a forward, and the prefill of generate


def test_what_has_the_shape_of_tokens_by_chance_can_stay(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()

    def first(tokens: VisualTokens) -> Tensor:
        tokens.remember("square", torch.ones(tokens.mask.shape), per_token=False)
        tokens.remember("same", torch.ones(tokens.mask.shape), per_token=False)
        tokens.remember("same", torch.ones(tokens.mask.shape))
        return every(2)(tokens)

    def last(tokens: VisualTokens) -> Tensor:
        assert tokens.carry["square"].shape[1] == 2 * tokens.carry["same"].shape[1]
        assert tokens.carry["same"].shape == tokens.mask.shape
        return tokens.mask

    method = Staged((ByContent(1, first), ByContent(2, last)), (Budget(keep=0.5),) * 2)
    check(family, model, method, inputs)


def test_composed_methods_do_not_see_what_the_other_remembers(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    found = []

    def remember(value: int) -> Choose:
        def choose(tokens: VisualTokens) -> Tensor:
            found.append(dict(tokens.carry))
            tokens.remember("mine", value)
            return tokens.mask

        return choose

    one = Staged((ByContent(1, remember(1)), ByContent(3, remember(2))))
    two = ByContent(2, remember(3))
    with torch.no_grad(), tokenprune.patched(model, [one, two], keep=[0.5, 0.5]):
        model(**inputs)
        model(**inputs)
    assert found == [{}, {}, {"mine": 1}] * 2  # and nothing is left from one call to the next


# -- stages that only look


@kind
@batch
def test_a_stage_that_only_looks_changes_nothing(family: Family, batch: str, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    asked = []
    method = Staged((ByContent(1, lambda tokens: asked.append(1) or tokens.mask),))
    with torch.no_grad():
        want = model(**inputs).logits
        with tokenprune.patched(model, method, keep=10_000, record=True):
            assert torch.equal(model(**inputs).logits, want)
            stats = tokenprune.stats(model)
    assert asked and not stats.cuts and not stats.removals and stats.keep_ratio == 1
    assert check(family, model, method, inputs, keep=10_000) == []


def test_nothing_is_compacted_where_nothing_leaves(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenprune.integrations.hf.sequence.layout import Layout

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    monkeypatch.setattr(Layout, "cut", lambda *args: pytest.fail("compacted"))
    with torch.no_grad(), tokenprune.patched(model, ByContent(1), keep=0.5):
        model(**inputs)


# -- withdrawal


@kind
@batch
@pytest.mark.parametrize("counted", [False, True], ids=["asked", "told"])
def test_all_visual_tokens_are_withdrawn(family: Family, batch: str, counted: bool, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])

    def nothing(tokens: VisualTokens) -> Selection:
        keep = torch.zeros_like(tokens.mask)
        return Selection(keep, counts=[0] * len(tokens.counts) if counted else None)

    cuts = check(family, model, Withdraws(2, nothing), inputs)
    (cut,) = cuts
    assert not any(visual_left(family, model, inputs, cut))
    with torch.no_grad(), tokenprune.patched(model, Withdraws(2, nothing), keep=0.5):
        model(**inputs)
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_out == 0 and stats.keep_ratio == 0
    assert stats.visual_tokens_per_layer[:2] == [stats.visual_tokens_in] * 2
    assert not any(stats.visual_tokens_per_layer[2:])
    assert stats.as_dict() and repr(stats)


@kind
@pytest.mark.parametrize("batch", ["ragged", "ragged right", "text beside"])
def test_one_image_of_several_is_withdrawn(family: Family, batch: str, build: Any) -> None:
    """Later stages see those that are left, and what was remembered of them."""
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    seen = []

    def first(tokens: VisualTokens) -> Tensor:
        tokens.remember("position", tokens.segments.position.masked_fill(~tokens.mask, 0))
        tokens.remember("ordinal", torch.tensor(tokens.segments.ordinal))
        tokens.remember("rows", list(tokens.segments.row))
        return images_of(0, 2)(tokens)

    def second(tokens: VisualTokens) -> Tensor:
        seen.append(tokens.segments)
        assert all(tokens.counts) and all(tokens.keep) and tokens.text.hidden.shape[0] == len(tokens.counts)
        position = tokens.segments.position.masked_fill(~tokens.mask, 0)
        assert torch.equal(tokens.carry["position"], position)
        assert tokens.carry["ordinal"].tolist() == tokens.segments.ordinal
        assert tokens.carry["rows"] == tokens.segments.row
        return torch.arange(tokens.mask.shape[1]) < tokens.budget[:, None]

    method = Staged((Withdraws(1, first), Stage(2, second)), (Budget(keep=10_000), Budget(keep=0.5)))
    cuts = check(family, model, method, inputs)
    assert [cut.layer for cut in cuts] == [1, 2]
    assert set(seen[0].ordinal) <= {0, 2}
    assert sum(visual_left(family, model, inputs, cuts[1])) == sum(max(1, round(n * 0.5)) for n in seen[0].counts)


@kind
def test_a_row_without_images_left_stands_beside_others(family: Family, build: Any) -> None:
    """A batch gives what its rows give alone."""
    model = build(family)
    kept = {}

    def fits(tokens: VisualTokens) -> Tensor:
        """Keeps the images of most tokens, which stand in one row where the zoo's differ in size."""
        counts = torch.tensor(tokens.counts)
        return tokens.mask & (counts == max(row_of[1] for row_of in rows))[:, None]

    whole = family.make_inputs(images=(2, 1))
    rows = [(row, count) for row, counts in enumerate(whole.counts) for count in counts]
    for only in (None, 0, 1):
        inputs = family.make_inputs(images=(2, 1), only=only)
        cuts = check(family, model, Staged((Withdraws(1, fits), Stage(3, every(2)))), inputs, keep=0.5)
        kept[only] = [cut.kept for cut in cuts]
    starts = whole["attention_mask"].argmax(1).tolist()
    for row, start in enumerate(starts):
        assert kept[None][-1][row] == [start + place for place in kept[row][-1][0]]


@kind
def test_images_are_withdrawn_at_the_entry(family: Family, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    (cut,) = check(family, model, Early(0, images_of()), inputs)
    assert cut.layer == 0 and not any(visual_left(family, model, inputs, cut))


def test_budgets_are_solved_for_what_is_left(build: Any) -> None:
    """A method that withdraws by its budget's own hook; an average is asked for behind it, of nothing."""

    @dataclass(frozen=True)
    class Gone(Withdraws):
        def budget(self, count: int, keep: int) -> int:
            return 0

        def select(self, tokens: VisualTokens) -> Selection:
            return Selection(torch.zeros_like(tokens.mask), counts=list(tokens.keep))

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    later = Stage(3, lambda tokens: pytest.fail("asked for no tokens"))
    budgets = (Budget(keep=0.5), Budget(average_tokens=30))
    (cut,) = check(family, model, Staged((Gone(2), later), budgets), inputs)
    assert not any(visual_left(family, model, inputs, cut))


def test_a_method_that_may_not_withdraw_is_refused(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, ByContent(1, images_of(0)), keep=0.5), pytest.raises(TokenPruneError, match="least"):
        model(**inputs)


# -- budgets of later stages


def test_later_stages_are_told_the_counts_at_the_first(build: Any) -> None:
    told = []

    @dataclass(frozen=True, repr=False)
    class OfOriginal(Budget):
        def resolve(self, counts: Sequence[int], *, original: Sequence[int], **about: Any) -> list[int]:
            told.append((list(counts), list(original)))
            return [max(1, count // 4) for count in original]

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    (count,) = inputs.counts[0]
    half = lambda tokens: torch.arange(tokens.mask.shape[1]) < tokens.budget[:, None]  # noqa: E731
    method = Staged((Stage(1, half), Stage(2, half)), (Budget(keep=0.5), OfOriginal(keep=0.25)))
    cuts = check(family, model, method, inputs)
    assert set(map(str, told)) == {str(([count // 2], [count]))}
    assert visual_left(family, model, inputs, cuts[1]) == [count // 4]
    told.clear()
    check(family, model, ["uniform", method], inputs, keep=[0.5, 0.5], guard="off")
    assert set(map(str, told)) == {str(([count // 4], [count // 2]))}


# -- the parts


def segments_of(counts: list[int], device: str = "cpu") -> Segments:
    """Segments side by side in one row, behind three tokens of text."""
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    starts = 3 + torch.tensor([0, *counts]).cumsum(0)[:-1]
    position = torch.where(mask, starts[:, None] + torch.arange(max(counts)), starts[:, None])
    number = len(counts)
    made = Segments([0] * number, list(range(number)), counts, position, mask, [None] * number, ["image"] * number)
    return made.to(torch.device(device))


def test_padding_points_at_a_token_that_is_left() -> None:
    keep = torch.tensor([[False, True, False, True], [False] * 4, [False, False, True, False]])
    left = keep_segments(segments_of([4, 4, 3]), Kept.of(keep, [2, 0, 1]), [2, 0, 1])
    assert left.position.tolist() == [[4, 6], [13, 13]] and left.mask.tolist() == [[True, True], [True, False]]
    assert left.counts == [2, 1] and left.ordinal == [0, 2] and left.row == [0, 0]


def test_nothing_is_left_of_anything() -> None:
    keep = torch.zeros(2, 3, dtype=torch.bool)
    left = keep_segments(segments_of([3, 2]), Kept.of(keep, [0, 0]), [0, 0])
    assert len(left) == 0 and left.position.shape == (0, 0) and left.grids == []


def test_counts_that_a_method_tells_are_checked_where_no_device_is_asked() -> None:
    """On another device the host believes what it is told, but not that an image is withdrawn."""
    segments = segments_of([3, 2], "meta")
    told = Selection(segments.mask, counts=[0, 2])
    with pytest.raises(TokenPruneError, match="least"):
        validate_selection(told, segments, ByContent())
    assert validate_selection(told, segments, Withdraws())[1] == [0, 2]


# -- what follows a prefill


@kind
@pytest.mark.parametrize("images", [(), (0,)], ids=["all withdrawn", "one withdrawn"])
@torch.no_grad()
def test_a_second_turn_behind_a_withdrawal(family: Family, images: tuple[int, ...], build: Any) -> None:
    """The cache holds the image in the layers before the cut, and nothing of it behind."""
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    method = Staged((Withdraws(2, images_of(*images)), ByContent(3, every(2))))
    more = words(len(inputs["input_ids"]), 4)

    def talk(forced: list) -> tuple[list[Tensor], list[Tensor]]:
        first, tokens, out = generate_logits(model, inputs, 3, tokens=forced[0])
        turn = longer(inputs, family, out.sequences, more)
        second, later, _ = generate_logits(model, turn, 3, tokens=forced[1], past_key_values=out.past_key_values)
        return [first, second], [tokens, later]

    with tokenprune.patched(model, method, keep=0.5, record=True):
        got, tokens = talk([None] * 2)
        cuts = tokenprune.stats(model).cuts
    assert [cut.layer for cut in cuts] == ([2, 3] if images else [2])
    with oracle(family)(family, model, cuts, inputs["input_ids"].shape[1]):
        want, _ = talk(tokens)
    for one, other in zip(got, want, strict=True):
        close(one, other)


@torch.no_grad()
def test_beams_behind_a_withdrawal(build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, Withdraws(2, images_of(0)), keep=0.5, record=True):
        got = model.generate(**inputs, max_new_tokens=5, num_beams=3)
        cuts = tokenprune.stats(model).cuts
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want = model.generate(**inputs, max_new_tokens=5, num_beams=3)
    assert torch.equal(got, want)


def test_gradients_flow_to_what_is_left(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    with tokenprune.patched(model, Staged((Withdraws(1, images_of(0)), ByContent(2, every(2)))), keep=0.5):
        model.train()
        loss = model(**inputs).logits[:, -3:].float().logsumexp(-1).sum()
        loss.backward()
    grads = [p.grad for p in model.model.language_model.layers[-1].parameters()]
    assert all(grad is not None and bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads)
