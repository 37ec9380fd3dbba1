# SPDX-License-Identifier: Apache-2.0
"""`tokenprune.testing`: synthetic tokens from plain tensors, and conformance checks of all methods."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenprune
from each import each
from pyramid import Pyramid
from tokenprune import OptionError, Selection, Site, TokenPruneError
from tokenprune import selection as extend
from tokenprune.errors import ConformanceError
from tokenprune.kernels.merging import bipartite_match
from tokenprune.methods.encoder.thresholds import Thresholds
from tokenprune.models.fingerprint import Fingerprint
from tokenprune.selection.sites.encoder import Tower
from tokenprune.testing import check_method, visual_tokens

pytestmark = pytest.mark.usefixtures("restored_registries")
TOWER = Tower(tokens=33, protected=1, blocks=4, blocks_read=3, module=nn.Linear(2, 2))
THRESHOLDS = Thresholds(
    {0.5: torch.tensor([0.2, 0.1, 0.1, 1.0]), 0.75: torch.tensor([0.3, 0.2, 0.2, 1.0])}, TOWER.fingerprint, images=9
)
# Options to check in addition to the default options.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "apet": [{"features": "tower", "own": 0.5}],
    "pact": [{"cutoff": 0.3}],
    "dart": [{"pivot_text": 0}, {"exact": False}, {"pivot_image": 1, "pivot_text": 9}],
    "fastv": [{"query": "all"}],
    "vscan": [{"stage2": False}, {"merge": False}, {"local": 0.0, "window": 2}],
    "visionzip": [{"context": 0.0}, {"centre": None}],
    "vispruner": [{"features": "projected"}, {"important": 0.0}],
    "prumerge": [{"merge": "clusters"}, {"exact": False}],
    "prumerge_plus": [{"merge": "none"}, {"exact": False, "merge": "clusters"}],
    "hiprune": [{"alpha": 1.0, "edges": "sequence"}],
    "holov": [{"rank": "holistic"}, {"crops": 1}],
    "divprune": [{"center": True}, {"center": "standardised"}, {"center": "tower"}],
    "cdpruner": [{"theta": 0}, {"theta": 1, "sign": -1}, {"center": True}, {"center": "tower"}],
    "scope": [{"alpha": 0}, {"features": "tower"}],
    "mmtok": [{"features": "projected"}, {"question": False}],
    "agilepruner": [{"limit": 2.0, "average_rank": 5.0}],
    "prunesid": [{"form": "llava"}],
    "eadp": [{"sign": 1, "alpha": 0.0, "share": 1.0}],
    "holitom": [{"inner": False, "threshold": 0.1}],
    "flashvid": [{"inner": False, "picks": 0.3}],
    "fastvid": [{"context": 1.0, "step": 1}],
    "kitoke": [{"sample": False}],
    "llava_scissor": [{"exact": False}],
    "prunevid": [{"inner": False}],
    "sttm": [{"exact": False}, {"temporal": 0.0}],
    "unipool": [{"inner": False, "clusters": 0.0, "threshold": 1.5}],
    "dymu": [{"thresholds": THRESHOLDS}, {"thresholds": THRESHOLDS, "exact": True}],
    "mustdrop": [{"protected": 0.0}, {"thresholds": (0.01, 0.1)}],
    "erase": [{"entropy": (), "retain": (0.4,)}],
    "pyramiddrop": [{"ratios": (0.9, 0.2)}],
    "sparsevlm": [{"version": "+", "heads": 1}, {"recycle": 1.0}, {"exact": False}],
    "v2drop": [{"last": "withdraw"}],
    "feather": [{"stride": None}, {"stride": 1}],
    "adaptinfer": [{"dynamic": 0.0}],
    "autoprune": [{"cuts": 1, "gamma": 0.0}, {"layers": (3, 9)}],
    "ivc_prune": [{"coordinates": 0.0}],
    "sinkpruner": [{"stage2": False, "sinks": 0.0}],
    "vitcop": [{"clusters": 1.0}],
    "transprune": [{"alpha": 1.0}],
    "d2pruner": [{"alpha": 0.5, "pivots": 0.2}, {"threshold": -1.0, "pivots": 0.1}],
    "saint": [{"threshold": 0.2, "partners": 1}],
    "tome": [{"r": 3}, {"r": (4, -1.0)}],
    "dynres": [{"text_guard": False}],
    "dyrate": [{"rate": "schedule", "schedule": (0.2, 0.5)}, {"mode": "mask", "monotone": False}],
    "pevlm": [{"sink_mode": "text"}, {"min_frames": 1, "block_frames": 4}],
}
CASES = [
    (name, options)
    for name in tokenprune.available_methods()
    for options in OPTIONS.get(name, []) + ([] if name == "dymu" else [{}])
]


@each(("name", "options"), CASES)
def test_our_methods_conform(name: str, options: dict[str, Any]) -> None:
    check_method(tokenprune.method(name, **options), tower=TOWER if name == "dymu" else None)


def test_names_and_classes_are_accepted() -> None:
    check_method("divprune")
    check_method(tokenprune.method_info("divprune").cls)
    with pytest.raises(ConformanceError, match="thresholds"):
        check_method("dymu")


def pruner(
    select: Any, site: str = "PRE_LLM", name: str = "broken", base: type = tokenprune.Pruner, **options: Any
) -> Any:
    @tokenprune.register(name, site=site, **options)
    @dataclass(frozen=True)
    class Broken(base):
        """Break a rule."""

    for member, value in (select if isinstance(select, dict) else {"select": select}).items():
        setattr(Broken, member, value)
    return Broken


def top(score: Any) -> Any:
    return lambda self, tokens: Selection.top(score(tokens), tokens)


def first(tokens: Any) -> Tensor:
    return tokens.mask & (torch.arange(tokens.mask.shape[1]) < tokens.budget[:, None])


def merging(assign: Any) -> Any:
    return lambda self, tokens: Selection(first(tokens), assign(tokens))


def scribbling(self: Any, tokens: Any) -> Selection:
    tokens.hidden.mul_(2)
    return Selection(first(tokens))


SIGNS = itertools.cycle((1, -1))
BROKEN = {
    "too few": (lambda self, tokens: Selection(first(tokens) & (tokens.mask.cumsum(1) < 2)), "its budget is"),
    "by content": (lambda self, tokens: Selection(tokens.mask & (tokens.hidden[..., 0] > 0)), "its budget is"),
    "padding": (lambda self, tokens: Selection(first(tokens) | ~tokens.mask), "keeps padding"),
    "by shape": (lambda self, tokens: Selection(tokens.mask[:, :1]), r"must be bool \[S, N\]"),
    "no selection": (lambda self, tokens: tokens.mask, "must return a Selection, not Tensor"),
    "counts": (lambda self, tokens: Selection(first(tokens), counts=[99] * len(tokens.keep)), "counts is"),
    "other each time": (top(lambda tokens: tokens.hidden[..., 0] * next(SIGNS)), "other tokens when called again"),
    "batch": (top(lambda tokens: tokens.hidden[..., 0] * (1 if len(tokens.keep) == 1 else -1)), "than as a single"),
    "row before": (top(lambda tokens: tokens.hidden.roll(1, 0)[..., 0]), "than as a single"),
    "padding seen": (
        top(lambda tokens: tokens.hidden[..., 0] * (1 if tokens.hidden.abs().max() < 100 else -1)),
        "values at padding change",
    ),
    "dtype": (top(lambda tokens: tokens.hidden @ torch.ones(40)), "raises RuntimeError"),
    "nan": (
        lambda self, tokens: Selection(first(tokens) & ~tokens.hidden.isnan().any(-1)),
        "with NaN at a token",
    ),
    "merges in secret": (merging(lambda tokens: first(tokens).cumsum(1).sub(1) * first(tokens)), "merges=True"),
    "undeclared": (top(lambda tokens: tokens.keys.sum(-1)), "reads 'keys' without declaring it"),
    "text": (top(lambda tokens: tokens.text.hidden.sum((1, 2))[:, None] * tokens.hidden[..., 0]), "text after"),
    "scribbles": (scribbling, "modifies its input hidden"),
}  # fmt: skip


@each("case", BROKEN)
def test_broken_rules_are_found(case: str) -> None:
    select, message = BROKEN[case]
    with pytest.raises(ConformanceError, match=message) as error:
        check_method(pruner(select))
    assert isinstance(error.value, AssertionError) and str(error.value).startswith("broken")


def test_invalid_merges_are_found() -> None:
    def to_dropped(tokens: Any) -> Tensor:
        return torch.full(tokens.mask.shape, tokens.mask.shape[1] - 1)

    def assign_to_first(tokens: Any) -> Tensor:
        return torch.where(first(tokens), 0, -1)

    for assign, message in ((to_dropped, "kept"), (assign_to_first, "assigned to itself")):
        with pytest.raises(ConformanceError, match=message):
            check_method(pruner(merging(assign), merges=True))


def test_undeclared_question_access_is_found() -> None:
    select = top(lambda tokens: tokens.last_row_attention.mean(1))
    with pytest.raises(ConformanceError, match="last_row_attention, which depend on the question"):
        check_method(pruner({"select": select, "layer": 2}, site="IN_LLM", needs=("last_row_attention",)))
    members = {"select": select, "layer": 2, "query_aware": property(lambda self: True)}
    check_method(pruner(members, "IN_LLM", "aware", needs=("last_row_attention",)))


def test_stages_are_checked_with_remembered_values() -> None:
    @dataclass(frozen=True)
    class Second(tokenprune.Pruner):
        """Keep the tokens with the largest norms, which the first stage remembers."""

        name, site = "second", Site.IN_LLM
        layer: int = 4

        def score(self, tokens: Any) -> Tensor:
            return tokens.carry["norms"]

    def note(self: Any, tokens: Any) -> Selection:
        tokens.remember("norms", tokens.hidden.norm(dim=-1))
        return Selection(tokens.mask)

    first = pruner({"select": note, "chooses_count": True, "layer": 2}, "IN_LLM", "first")()
    stages = {"stages": lambda self, budget, layers: [(first, budget), (Second(), budget)]}
    check_method(pruner(stages, "IN_LLM", "both"))
    with pytest.raises(ConformanceError, match="KeyError"):
        check_method(Second())
    check_method(Pyramid())


def test_min_tokens_is_checked() -> None:
    select_none = lambda self, tokens: Selection(torch.zeros_like(tokens.mask))  # noqa: E731
    with pytest.raises(ConformanceError, match="fewer than 1"):
        check_method(pruner({"select": select_none, "chooses_count": True}, name="none"))
    check_method(pruner({"select": select_none, "chooses_count": True, "min_tokens": 0}, name="withdraws"))


def test_class_without_method_base_is_rejected() -> None:
    class Bare(tokenprune.Pruner):
        """Is not a dataclass."""

    @dataclass(frozen=True)
    class Needy(tokenprune.Pruner):
        """Needs an option."""

        power: float

    @dataclass(frozen=True)
    class Nameless(tokenprune.Pruner):
        """Was never registered."""

    for method, message in ((Bare, "dataclass"), (Needy, "power"), (Nameless, "name is missing"), (3, "neither")):
        with pytest.raises(ConformanceError, match=message):
            check_method(method)


def test_broken_rules_of_other_sites_are_found() -> None:
    cases = [
        ("PRE_ENCODER", extend.ResizeMethod, {"compute_shares": lambda self, images, keep, per: [2.0] * 3}, "0, 1"),
        ("PRE_ENCODER", extend.ResizeMethod,
         {"compute_shares": lambda self, images, keep, per: [keep * image.tokens / 64 for image in images]},
         "depends_on_content|keep=1.0"),
        ("PRE_ENCODER", extend.ImageChooser, {"choose": lambda self, question, count, max_images: [0, 0]}, "sorted"),
        ("PRE_ENCODER", extend.ImageChooser, {"choose": lambda self, question, count, max_images: []}, "at least one"),
        ("ATTENTION", extend.AttentionPattern, {"block_starts": lambda self, visuals, end: [9, 9]}, "ascending"),
        ("IN_ENCODER", extend.EncoderMethod, {"plan": lambda self, budget, tower: []}, "for each of 4 blocks"),
        ("IN_ENCODER", extend.EncoderMethod, {
            "plan": lambda self, budget, tower: [lambda keys, counts: bipartite_match(keys, 3)] * 3 + [None]
        }, "class token"),
        ("IN_ENCODER", extend.UnitDropper,
         {"keep_units": lambda self, pixels, max_units: torch.ones(pixels.shape[:3], dtype=torch.bool)}, "not 1 to 1"),
        ("IN_ENCODER", extend.UnitDropper, {"keep_units": lambda self, pixels, max_units: pixels}, "a bool tensor"),
        ("DECODE", extend.DecodeMethod, {"next_rate": lambda self, masses, share: share + 1}, r"rate in \[0, 1\]"),
    ]  # fmt: skip
    for index, (site, base, members, message) in enumerate(cases):
        needs = {"needs": ("last_row_attention",)} if site == "DECODE" else {}
        with pytest.raises(ConformanceError, match=message):
            check_method(pruner(members, site, f"broken{index}", base, **needs))


def test_visual_tokens_return_their_arguments() -> None:
    hidden, keys = torch.randn(2, 9, 4), torch.randn(2, 9, 6)
    attention, scores = torch.rand(2, 3, 9), {1: torch.rand(2, 3, 9), -1: torch.rand(2, 3, 9)}
    text = {"hidden": torch.randn(2, 5, 4), "mask": torch.rand(2, 5) > 0.5}
    tokens = visual_tokens(
        hidden, [9, 5], keep=0.5, text=text, keys=keys, last_row_attention=attention, encoder_attention=scores,
        encoder_keys=keys, text_keys=text["hidden"] * 2, grids=[(1, 3, 3), None], carry={"curve": [1, 2]},
        place=torch.arange(9).expand(2, -1),
    )  # fmt: skip
    assert tokens.counts == [9, 5] and tokens.keep == [4, 2] and tokens.budget.tolist() == [4, 2]
    assert tokens.mask.sum(1).tolist() == [9, 5] and tokens.grids == [(1, 3, 3), None]
    for actual, expected in (
        (tokens.hidden, hidden), (tokens.normed, hidden), (tokens.keys, keys), (tokens.last_row_attention, attention),
        (tokens.encoder_attention(1), scores[1]), (tokens.encoder_attention(-1), scores[-1]),
        (tokens.encoder_keys(3), keys), (tokens.text.hidden, text["hidden"]), (tokens.text.mask, text["mask"]),
        (tokens.text.keys, text["hidden"] * 2), (tokens.place[0], torch.arange(9)),
    ):  # fmt: skip
        assert torch.equal(actual, expected)
    assert tokens.carry == {"curve": [1, 2]}
    tokens.remember("sum", 3)
    assert tokens.carry["sum"] == 3
    for read, message in (
        (lambda: tokens.received_attention, "reads 'received_attention' without declaring it"),
        (lambda: tokens.encoder_attention(2), "of block 2"),
        (lambda: tokens.encoder_queries(1), "reads 'encoder_queries' without declaring it"),
        (lambda: visual_tokens(hidden).text, "Pass text="),
        (lambda: tokens.patches, "not passed to visual_tokens"),
    ):
        with pytest.raises(TokenPruneError, match=message):
            read()
    with pytest.raises(AttributeError, match=r"no observable 'key'. Did you mean 'keys'"):
        _ = tokens.key


def test_invalid_tensors_are_rejected() -> None:
    hidden = torch.randn(2, 9, 4)
    for arguments, message in (
        ({"counts": [9]}, "do not fit"), ({"counts": [9, 0]}, "do not fit"), ({"keep": [9, 10]}, "keep="),
        ({"keyss": hidden}, "Did you mean 'keys'"), ({"keys": hidden[:1]}, "must be"),
        ({"keys": {1: hidden}}, "not read by layer"), ({"rows": [1, 0]}, "in order"),
        ({"keep": tokenprune.Budget(average_tokens=4)}, "whole decoder"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            visual_tokens(hidden, **{"counts": [9, 5], **arguments})


def test_frames_of_synthetic_videos() -> None:
    hidden = torch.randn(2, 6, 4)
    tokens = visual_tokens(hidden, [6, 4], grids=[(3, 1, 2), None], modality=["video", "image"])
    assert tokens.frames == [[2, 2, 2], [4]]
    assert tokens.frame.tolist() == [[0, 0, 1, 1, 2, 2], [0, 0, 0, 0, -1, -1]]
    assert tokens.place.tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, -1, -1]]
    with_frames = visual_tokens(hidden, [6, 4], modality="video", frames=[[1, 5], [4]])
    assert with_frames.frame.tolist()[0] == [0, 1, 1, 1, 1, 1]
    with pytest.raises(TokenPruneError, match="are unknown"):
        _ = visual_tokens(hidden, modality="video").frame


def test_several_images_of_one_prompt() -> None:
    tokens = visual_tokens(torch.randn(3, 4, 2), [4, 2, 3], rows=[0, 0, 1])
    assert tokens.segments.row == [0, 0, 1] and tokens.segments.ordinal == [0, 1, 0]
    positions = [tokens.segments.position[s, : tokens.counts[s]].tolist() for s in range(3)]
    assert not set(positions[0]) & set(positions[1])


def test_fingerprints_of_different_towers_differ() -> None:
    assert Fingerprint.from_module(TOWER.module, read=3, protected=1) == TOWER.fingerprint
    assert Site.IN_ENCODER is tokenprune.method_info("tome").site
