# SPDX-License-Identifier: Apache-2.0
"""Third-party methods: registration, entry points, use in models, and errors for bad selections and scores."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import pieces
from each import each
from oracle import close, generate_logits, reduced
from pruned import run_pruned
from tokenprune import Budget, Method, Pruner, Selection, Site, TokenPruneError, VisualTokens, register
from tokenprune.errors import RegistrationError
from tokenprune.methods import registry
from zoo import FAMILIES, Family

pytestmark = pytest.mark.usefixtures("restored_registries")


def register_norms() -> type[Method]:
    @register("norms", site=Site.PRE_LLM, paper="none (a test)")
    @dataclass(frozen=True)
    class Norms(Pruner):
        """Keep tokens with a large norm. Other tokens are dropped.

        Second paragraph.
        """

        power: float = 1.0

        def score(self, tokens: VisualTokens) -> Tensor:
            return tokens.hidden.norm(dim=-1) ** self.power

    return Norms


@torch.no_grad()
def test_third_party_method_works(family: Family, model) -> None:
    cls = register_norms()
    assert "norms" in tokenprune.available_methods()
    info = tokenprune.method_info("norms")
    assert (info.name, info.site, info.paper, info.cls) == ("norms", Site.PRE_LLM, "none (a test)", cls)
    assert info.summary.startswith("Keep tokens with a large norm.") and "Second" not in info.summary
    assert info.options == {"power": 1.0}
    assert (info.query_aware, info.prefix_cache_safe, info.merges) == (False, True, False)
    assert (info.observables, info.needs) == (frozenset(), {"features"})
    assert not info.capturable  # the host waits to check its scores for NaN
    inputs = family.make_inputs()
    hidden, _ = enter_decoder(family, model, inputs)
    kept = run_pruned(model, inputs, "norms", 5, power=-1.0)[1].cuts[0].kept
    for row, row_pieces in enumerate(pieces(family, inputs)):
        for piece in row_pieces:
            shortest = sorted(piece, key=lambda position: float(hidden[row, position].norm()))[:5]
            assert set(kept[row]) & set(piece) == set(shortest)


@torch.no_grad()
def test_the_next_cut_applies_to_the_actual_count(build) -> None:
    @register("three", site=Site.PRE_LLM, paper="none")
    @dataclass(frozen=True)
    class Three(Pruner):
        """Keep three tokens for any budget."""

        def select(self, tokens: VisualTokens) -> Selection:
            return Selection(tokens.mask & (torch.arange(tokens.mask.shape[1]) < 3))

    family = FAMILIES["llava_next"]
    model, inputs = build(family), family.make_inputs(images=(1, 2))
    output, stats = run_pruned(model, inputs, ["three", "fastv"], [0.5, 0.7])
    assert stats.visual_tokens_per_layer == [9, 9, 6, 6]
    with reduced(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        close(output.logits[:, -1], model(**inputs).logits[:, -1])


def enter_decoder(family: Family, model: Any, inputs: Any) -> tuple[Tensor, Any]:
    """Return the hidden states that enter the first decoder layer, and the statistics if the model is patched."""
    entered: list[Tensor] = []
    layer = model.get_submodule(family.decoder).layers[0]
    with layer.register_forward_pre_hook(lambda module, args: entered.append(args[0])):
        model(**inputs)
    return entered[0], tokenprune.stats(model) if tokenprune.is_patched(model) else None


def register_and_fail(name: str, cls: type, **options: Any) -> str:
    with pytest.raises(RegistrationError) as error:
        register(name, site=Site.PRE_LLM, paper="none", **options)(cls)
    return str(error.value)


def test_registration_errors() -> None:
    before = tokenprune.available_methods()

    @dataclass(frozen=True)
    class Good(Method):
        """Fine."""

    @dataclass
    class Thawed:
        """Is not frozen."""

    @dataclass(frozen=True)
    class Stranger:
        """Does not derive from Method."""

    @dataclass(frozen=True)
    class Silent(Method):
        pass

    class Plain(Method):
        """Inherits a dataclass but is not one."""

    @dataclass(frozen=True)
    class Rootless(Method):
        """Scores without the base class of a site."""

        def score(self, tokens: VisualTokens) -> Tensor:
            return tokens.hidden.norm(dim=-1)

    assert "taken" in register_and_fail("dart", Good) and "Dart" in register_and_fail("dart", Good)
    assert "Method" in register_and_fail("thawed", Thawed)
    assert "Method" in register_and_fail("stranger", Stranger)
    assert "docstring" in register_and_fail("silent", Silent)
    unknown = register_and_fail("good", Good, needs=("keyss",))
    assert "unknown needs ['keyss']" in unknown and "did you mean 'keys'" in unknown
    for name in ("Good", "my-method", "2d", ""):
        assert "name" in register_and_fail(name, Good)
    assert "dataclass" in register_and_fail("plain", Plain)
    assert "must derive from tokenprune.Pruner" in register_and_fail("rootless", Rootless)
    assert tokenprune.available_methods() == before
    # Registering the same class twice, as in a notebook cell, is allowed.
    for _ in range(2):
        register_norms()


def test_entry_points(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    entries = [
        EntryPoint("broken", "no_such_package.anywhere", registry.ENTRY_POINT_GROUP),
        EntryPoint("quits", "sys:exit", registry.ENTRY_POINT_GROUP),
        EntryPoint("norms", "test_registry:norms", registry.ENTRY_POINT_GROUP),
    ]

    def load(entry: EntryPoint) -> Any:
        if entry.name == "quits":
            sys.exit("this package\nneeds a license")
        return register_norms() if entry.name == "norms" else __import__(entry.module)

    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "tokenprune.methods" else [])
    # Loading a module registers its methods. Here a function call does.
    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(registry, "_loaded", False)
    with caplog.at_level(logging.WARNING):
        assert {"norms", "dart"} <= set(tokenprune.available_methods())
    broken, quits = caplog.records
    assert "'broken' (no_such_package.anywhere)" in broken.getMessage()
    assert "ModuleNotFoundError: No module named 'no_such_package'" in broken.getMessage()
    assert quits.getMessage().endswith("SystemExit: this package needs a license")
    # one line each, without a traceback
    assert all(record.levelname == "WARNING" and record.exc_info is None for record in caplog.records)
    assert all("\n" not in record.getMessage() for record in caplog.records)
    with pytest.raises(tokenprune.UnknownMethodError):
        tokenprune.method("broken")


def select_first(tokens: VisualTokens) -> Tensor:
    return tokens.mask & (torch.arange(tokens.mask.shape[1]) == 0)


@each(
    ("name", "suggestion"),
    [
        ("dartt", "'dart'"), ("FastV", "'fastv'"), ("fast_v", "'fastv'"), ("divprun", "'divprune'"), ("dimu", "'dymu'"),
        ("unifrom", "'uniform'"), ("squeezer", None), ("halves", None), ("compressor", None), ("x", None), ("", None),
    ],
)  # fmt: skip
def test_only_similar_names_are_suggested(name: str, suggestion: str | None) -> None:
    with pytest.raises(tokenprune.UnknownMethodError) as error:
        tokenprune.method(name)
    assert ("did you mean" in str(error.value)) == (suggestion is not None)
    assert suggestion is None or f"did you mean {suggestion}" in str(error.value)
    suggested = [
        known_name
        for known_name in tokenprune.available_methods()
        if f"'{known_name}'" in str(error.value).partition(": ")[2]
    ]
    assert len(suggested) == (3 if name else 0) and str(error.value).endswith("`tokenprune methods` lists them all")


@pytest.mark.pairwise
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_merging(layer: int, weighted: bool, family: Family, model) -> None:
    """Kept tokens become means of their sources, including features added later. Tokens with -1 are dropped."""

    @dataclass(frozen=True)
    class Merge(Pruner):
        """Keep every third token and merge the next token into it. Drop the rest."""

        layer: int = 0

        def select(self, tokens: VisualTokens) -> Selection:
            index = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)
            keep = tokens.mask & (index % 3 == 0)
            assign = torch.where(index % 3 == 2, -1, index - index % 3).masked_fill(~tokens.mask, -1)
            return Selection(keep, assign, torch.full(index.shape, 2.5) if weighted else None)

    register("merge", site=Site.IN_LLM if layer else Site.PRE_LLM, paper="none", merges=True)(Merge)
    inputs = family.make_inputs(images=(1, 2))
    with tokenprune.patched(model, "merge", keep=0.34, layer=layer, record=True):
        actual, tokens, _ = generate_logits(model, inputs, 3)
        (cut,) = tokenprune.stats(model).cuts
    for row, row_pieces in enumerate(pieces(family, inputs)):
        expected = {piece[i]: piece[i : i + 2] for piece in row_pieces for i in range(0, len(piece), 3)}
        assert cut.sources[row] == expected
        weights = {target: [1 / len(sources)] * len(sources) for target, sources in expected.items()}
        assert (cut.weights[row] == weights) if weighted else cut.weights is None
    with reduced(family, model, [cut], inputs["input_ids"].shape[1]):
        expected, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    close(actual, expected)
    cut.sources = None  # a cut that drops instead of merging differs
    with reduced(family, model, [cut], inputs["input_ids"].shape[1]):
        dropped, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    with pytest.raises(AssertionError):
        close(actual, dropped)


@torch.no_grad()
def test_weights_of_a_merge(build) -> None:
    @register("all_in_one", site=Site.PRE_LLM, paper="none", merges=True)
    @dataclass(frozen=True)
    class AllInOne(Pruner):
        """Merge all tokens into the first, with increasing weights."""

        def select(self, tokens: VisualTokens) -> Selection:
            weight = torch.arange(1.0, tokens.mask.shape[1] + 1).expand(tokens.mask.shape)
            return Selection(select_first(tokens), torch.zeros(tokens.mask.shape, dtype=torch.long), weight)

    family = FAMILIES["qwen3_vl"]
    model, inputs = build(family), family.make_inputs()
    unpruned, _ = enter_decoder(family, model, inputs)
    with tokenprune.patched(model, "all_in_one", keep=Budget(tokens=1), record=True):
        merged, stats = enter_decoder(family, model, inputs)
    kept = stats.cuts[0].kept
    for row, ((piece,), positions) in enumerate(zip(pieces(family, inputs), kept, strict=True)):
        weight = torch.arange(1.0, len(piece) + 1)
        expected = (unpruned[row, piece] * weight[:, None]).sum(0) / weight.sum()
        slot = positions.index(piece[0]) - len(positions)  # rows are right-aligned
        torch.testing.assert_close(merged[row, slot], expected)


WRONG = {
    "none": lambda tokens: None,
    "a tensor": lambda tokens: tokens.mask,
    "scores": lambda tokens: Selection(torch.rand(tokens.mask.shape)),
    "shape": lambda tokens: Selection(tokens.mask[:, :-1]),
    "nothing kept": lambda tokens: Selection(torch.zeros_like(tokens.mask)),
    "assign to a dropped token": lambda tokens: Selection(select_first(tokens), torch.full(tokens.mask.shape, 1)),
    "assign out of range": lambda tokens: Selection(select_first(tokens), torch.full(tokens.mask.shape, 10_000)),
    "assign below -1": lambda tokens: Selection(select_first(tokens), torch.full(tokens.mask.shape, -7)),
    "assign shape": lambda tokens: Selection(select_first(tokens), torch.full((2, 2), 0)),
    "assign type": lambda tokens: Selection(select_first(tokens), torch.zeros(tokens.mask.shape)),
    "weight shape": lambda tokens: Selection(select_first(tokens), torch.full(tokens.mask.shape, 0), torch.ones(2, 2)),
    "counts": lambda tokens: Selection(select_first(tokens), counts=[2] * len(tokens.keep)),
}


@each("case", WRONG)
@torch.no_grad()
def test_invalid_selection_is_rejected(case: str, build) -> None:
    @dataclass(frozen=True)
    class Wrong(Pruner):
        """Returns an invalid selection."""

        def select(self, tokens: VisualTokens) -> Any:
            return WRONG[case](tokens)

    register("wrong", site=Site.PRE_LLM, paper="none")(Wrong)
    model, inputs = FAMILIES["qwen2_vl"].prepare(build)
    before = model(**inputs).logits
    with tokenprune.patched(model, "wrong", keep=0.3), pytest.raises(TokenPruneError, match="wrong"):
        model(**inputs)
    assert torch.equal(model(**inputs).logits, before)


# (score function, expected error)
WRONG_SCORES = {
    "none": (lambda tokens: None, "not NoneType"),
    "a list": (lambda tokens: tokens.mask.tolist(), "not list"),
    "one for each image": (lambda tokens: tokens.hidden.mean(dim=(1, 2)), r"not float32 \[2\]"),
    "one for each head": (lambda tokens: tokens.hidden.unflatten(2, (4, -1)).mean(3), r"not float32 \[2, 35, 4\]"),
    "transposed": (lambda tokens: tokens.hidden.mean(2).T, r"not float32 \[35, 2\]"),
    "complex": (lambda tokens: tokens.hidden.mean(2) * 1j, "not complex64"),
    "yes or no": (lambda tokens: tokens.mask, "not bool"),
    "elsewhere": (lambda tokens: tokens.hidden.mean(2).to("meta"), "on meta"),
    "no number": (lambda tokens: tokens.hidden.mean(2) * torch.nan, "NaN"),
    "no number in one image": (lambda tokens: first_is_nan(tokens), "NaN"),
}


def first_is_nan(tokens: VisualTokens) -> Tensor:
    score = tokens.hidden.mean(2)
    score[0, : tokens.counts[0]] = torch.nan  # the rest of the row is padding
    return score


@each("case", WRONG_SCORES)
@torch.no_grad()
def test_invalid_score_is_rejected(case: str, build) -> None:
    score, message = WRONG_SCORES[case]

    @register("loud", site=Site.PRE_LLM, paper="none")
    @dataclass(frozen=True)
    class Loud(Pruner):
        """Returns an invalid score."""

        def score(self, tokens: VisualTokens) -> Any:
            return score(tokens)

    model, inputs = FAMILIES["llava_next"].prepare(build, sizes=[(16, 32), (8, 32)])
    shape = [2, max(max(row) for row in inputs.counts)]
    before = model(**inputs).logits
    with tokenprune.patched(model, "loud", keep=0.3), pytest.raises(TokenPruneError) as error:
        model(**inputs)
    assert f"loud.score() must return a float tensor [S, N] = {shape}" in str(error.value)
    assert re.search(message.replace("35", str(shape[1])), str(error.value))
    assert torch.equal(model(**inputs).logits, before)


@each("some_nan", [False, True])
def test_integers_and_some_nan_are_accepted_as_scores(some_nan: bool, build) -> None:
    """NaN counts as the lowest score, also in bfloat16. The method is not registered."""

    class Positions(Pruner):
        name = "positions"

        def score(self, tokens: VisualTokens) -> Tensor:
            index = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)
            return torch.where(index < 24, torch.nan, 1.0).bfloat16() if some_nan else index

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    (kept,) = run_pruned(model, inputs, Positions(), 12)[1].cuts[0].kept
    (piece,) = pieces(family, inputs)[0]
    assert set(kept) & set(piece) == set(piece[24:])
