# SPDX-License-Identifier: Apache-2.0
"""`reduce` keeps and merges what `patch` does, from plain tensors."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import tokenprune
from each import each
from tokenprune.errors import BudgetError, OptionError, TokenPruneError
from tokenprune.integrations.hf.engine import cuts, engine
from tokenprune.selection.observable import Input
from tokenprune.selection.observable_registry import find_observable, select_observables
from tokenprune.selection.segments import Patches
from zoo import FAMILIES

INFOS = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
PRE_LLM = [info for info in INFOS if info.site is tokenprune.Site.PRE_LLM]
# Options without which a method also acts inside the decoder or the tower.
OPTIONS: dict[str, dict[str, Any]] = {"flowcut": {"inside": False}} | {
    info.name: dict(info.cls.query_free) for info in PRE_LLM if "decoder" in info.needs and info.cls.query_free
}
# Each of these needs the decoder.
REFUSED = {"erase", "hawk", "vitcop"}


@dataclasses.dataclass
class Cut:
    """What a method received at the entry of the decoder, and what the engine made of its selection."""

    tokens: Any = None
    observed: dict[str, Any] = dataclasses.field(default_factory=dict)
    text: list[Any] | None = None
    keep: Any = None
    features: Any = None


assert engine.select_tokens is cuts.select_tokens  # imported here, so that it does not bind the functions below


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    record, build, apply = Cut(), cuts.VisualTokens, cuts.apply_selection

    def build_tokens(*arguments: Any) -> Any:
        record.tokens = build(*arguments)
        return record.tokens

    def apply_selection(call: Any, step: Any, selection: Any, hidden: Any, adapter: Any) -> Any:
        tokens = record.tokens
        for observable in select_observables(step.method.needs):
            value = getattr(tokens, observable.name)
            layers = step.method.encoder_layers if observable.by_layer else ()
            record.observed[observable.name] = {layer: value(layer) for layer in layers} or value
        if select_observables(step.method.needs, "TOWER", "TOWER_BLOCK"):
            record.observed["patches"] = tokens.patches
        try:
            record.text = [rows[mask] for rows, mask in zip(tokens.text.hidden, tokens.text.mask, strict=True)]
        except TokenPruneError:
            record.text = None
        out = apply(call, step, selection, hidden, adapter)
        record.keep, segments = selection.keep & tokens.mask, call.state.segments
        after = cuts.DecoderSource(call, call.state, out, adapter)
        record.features = after.gather(out, segments.position, segments)
        return out

    monkeypatch.setattr(cuts, "VisualTokens", build_tokens)
    monkeypatch.setattr(cuts, "apply_selection", apply_selection)
    return record


def take(value: Any, members: list[int], axis: int, width: int) -> Any:
    """Return the entries of some images, without the padding of others."""
    if isinstance(value, Patches):
        parts = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
        return Patches(**{k: v if isinstance(v, int) else take(v, members, 1, width) for k, v in parts.items()})
    if isinstance(value, dict):
        return {key: take(part, members, axis, width) for key, part in value.items()}
    return value[members].narrow(axis, 0, width)


def reduce_row(cut: Cut, members: list[int], name: str, keep: Any) -> list[Any]:
    """Call `reduce` with what the engine knew of the images of one prompt."""
    segments = cut.tokens.segments
    counts = [segments.counts[index] for index in members]
    arguments: dict[str, Any] = {"observables": {}}
    for observed, value in cut.observed.items():
        observable = find_observable(observed)
        if observable.input is Input.FRAMES or observed == "tiling":
            continue
        part = take(value, members, observable.axes.find("N"), max(counts))
        if observable.input is Input.TOWER_ATTENTION:
            part = {
                layer: [rows[:, :count] for rows, count in zip(x, counts, strict=True)] for layer, x in part.items()
            }
            arguments["tower_attention"] = next(iter(part.values())) if len(part) == 1 else part
        elif observed == "encoder_features":
            arguments["tower_features"] = [rows[:count] for rows, count in zip(part, counts, strict=True)]
        else:
            arguments["observables"][observed] = part
    if cut.text is not None:
        arguments["question"] = [cut.text[index] for index in members]
    return tokenprune.reduce(
        [cut.tokens.hidden[index, :count] for index, count in zip(members, counts, strict=True)],
        name, keep,
        grid=[segments.grids[index] for index in members],
        frames=[segments.frames[index] if segments.modality[index] == "video" else None for index in members],
        **arguments, **OPTIONS.get(name, {}),
    )  # fmt: skip


def compare(cut: Cut, model: Any, inputs: dict[str, Any], info: Any, keep: Any) -> str:
    """Compare `reduce` with `patch` for one method. Return "equal", or "unsupported" by the family."""
    name = info.name
    try:
        tokenprune.patch(model, name, keep=keep, **OPTIONS.get(name, {}))
    except TokenPruneError:
        return "unsupported"
    cut.__init__()
    try:
        with torch.no_grad():
            model(**inputs, use_cache=False)
    except TokenPruneError:
        return "unsupported"
    finally:
        tokenprune.unpatch(model)
    if cut.keep is None:
        return "no cut"
    rows = cut.tokens.segments.row
    for row in sorted(set(rows)):
        members = [index for index, other in enumerate(rows) if other == row]
        if info.for_videos and "video" not in [cut.tokens.segments.modality[index] for index in members]:
            continue  # `patch` keeps images, and `reduce` asks for the frames of a video
        for index, image in zip(members, reduce_row(cut, members, name, keep), strict=True):
            assert image.kept.tolist() == cut.keep[index].nonzero()[:, 0].tolist(), name
            # The state after the cut has only images with tokens, all of them here.
            torch.testing.assert_close(image.features, cut.features[index, : len(image.kept)], rtol=1e-5, atol=1e-6)
    return "equal"


@pytest.mark.parametrize("family", FAMILIES)
def test_reduce_equals_patch_on_every_method(family: str, cut: Cut) -> None:
    model = FAMILIES[family].build()
    images = FAMILIES[family].make_inputs(images=[1, 2])
    video = None if FAMILIES[family].video is None else FAMILIES[family].make_inputs(images=[0, 1], video=4)
    outcomes = Counter(
        compare(cut, model, inputs, info, keep)
        for info in PRE_LLM if info.name not in REFUSED
        for inputs, keep in ((images, 0.4), (images, 3), (video, 0.3))
        if inputs is not None and info.for_videos <= (inputs is video)
    )  # fmt: skip
    print(family, dict(outcomes))
    assert outcomes["equal"] >= 20


MISSING = {
    "fastervlm": "fastervlm needs the attention of the vision tower. Pass tower_attention=",
    "hiprune": "hiprune needs the attention of the vision tower. Pass tower_attention=",
    "mmtok": "mmtok needs the question. Pass question=",
    "visionzip": "visionzip needs the attention of the vision tower. Pass tower_attention=",
    "globalcom2": "globalcom2 needs 'encoder_logits'. Pass observables=",
    "evs": "evs needs the frames of a video. Pass frames=",
    "vscan": "vscan also cuts inside the decoder. Use tokenprune.patch, or pass stage2=False.",
    "vitcop": 'vitcop also cuts inside the decoder. Use tokenprune.patch, or another method, such as "divprune".',
    "hawk": "hawk needs the question",
    "fastv": "fastv acts in the language model and needs a model.",
    "tome": "tome acts in the vision tower and needs a model.",
    "downsample": "downsample acts on pixels and needs a model.",
}


@each("name", MISSING)
def test_a_missing_input_is_named_in_one_sentence(name: str) -> None:
    with pytest.raises(OptionError) as raised:
        tokenprune.reduce(torch.randn(16, 8), name)
    assert str(raised.value).startswith(MISSING[name])


def test_needs_say_ahead_what_reduce_requires() -> None:
    """A method runs on the features if and only if it needs nothing else."""
    for info in INFOS:
        if info.needs == {"features"}:
            assert len(tokenprune.reduce(torch.randn(16, 8), info.name, 4).kept) == 4
        else:
            with pytest.raises(OptionError):
                tokenprune.reduce(torch.randn(16, 8), info.name, 4)
    needs = {info.name: info.needs for info in INFOS}
    assert needs["cdpruner"] == {"features", "question"} and needs["mmtok"] >= {"tower_features", "question"}
    assert needs["scope"] == {"features", "tower_attention"} and needs["evs"] == {"features", "frames"}
    assert "decoder" in needs["vscan"] and needs["fastv"] == {"decoder", "question"} and needs["tome"] == {"tower"}


def test_numpy_arrays_and_lists_of_images() -> None:
    images = [np.random.default_rng(0).normal(size=(count, 8)).astype("float32") for count in (16, 9)]
    one, other = tokenprune.reduce(images, "pool", 0.25, grid=[(4, 4), (3, 3)])
    assert isinstance(one.features, np.ndarray) and isinstance(one.kept, np.ndarray) and len(other.kept) == 2
    for image, rows in ((one, images[0]), (other, images[1])):
        means = np.stack([rows[list(group)].mean(0) for group in image.sources])
        np.testing.assert_allclose(image.features, means, rtol=1e-5)
        np.testing.assert_allclose(image.apply(rows), image.features)
        assert sorted(row for group in image.sources for row in group) == list(range(len(rows)))
    alone = tokenprune.reduce(torch.tensor(images[0]), "pool", 0.25, grid=(4, 4))
    assert torch.equal(alone.features, torch.tensor(one.features)) and alone.sources == one.sources
    batch = tokenprune.reduce(torch.stack([alone.features] * 2), keep=2)
    assert [len(image.kept) for image in batch] == [2, 2]


def test_arrays_that_torch_does_not_read() -> None:
    rows = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    expected = tokenprune.reduce(rows, keep=4)
    frozen = rows.copy()
    frozen.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same in (frozen, rows.astype(">f4"), np.asfortranarray(rows), rows[:, ::-1].copy()[:, ::-1]):
            np.testing.assert_array_equal(tokenprune.reduce(same, keep=4).features, expected.features)
    assert tokenprune.reduce(rows[::-1], keep=4).features.shape == (4, 8)
    half = tokenprune.reduce([rows.astype("float16"), rows[:9].astype("float16")], "pool", keep=20)
    assert [(image.features.dtype, len(image.kept)) for image in half] == [("float16", 16), ("float16", 9)]


def test_keep_of_one_returns_the_rows() -> None:
    rows = torch.randn(16, 8)
    for info in PRE_LLM:
        if info.needs == {"features"}:
            image = tokenprune.reduce(rows, info.name, keep=1.0)
            assert torch.equal(image.features, rows) and image.sources == tuple((row,) for row in range(16))


def test_positions_of_kept_rows() -> None:
    image = tokenprune.reduce(torch.randn(24, 8), "uniform", keep=6, grid=(2, 3, 4))
    kept = image.kept.tolist()
    assert image.positions(start=7).tolist() == [7 + row for row in kept]
    assert image.positions((6, 4)).T.tolist() == [[row // 4, row % 4] for row in kept]
    assert image.positions((2, 3, 4), 5).T.tolist() == [[5 + r // 12, 5 + r // 4 % 3, 5 + r % 4] for r in kept]
    with pytest.raises(OptionError, match="does not have 24 cells"):
        image.positions((5, 5))


def test_the_seed_changes_random_methods_only() -> None:
    rows = torch.randn(64, 8)
    draws = [tokenprune.reduce(rows, "random", 8, seed=seed).kept.tolist() for seed in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]
    assert draws[0] == tokenprune.reduce(rows, tokenprune.method("random"), 8).kept.tolist()
    assert torch.equal(tokenprune.reduce(rows, keep=8, seed=1).kept, tokenprune.reduce(rows, keep=8).kept)


DAMAGED = torch.eye(4)
DAMAGED[1, 2] = float("nan")
REFUSALS = {
    "integers": (lambda: tokenprune.reduce(torch.ones(4, 2, dtype=torch.long)), OptionError, "features must be float"),
    "no rows": (lambda: tokenprune.reduce(torch.ones(0, 2)), OptionError, "features must be float"),
    "widths": (lambda: tokenprune.reduce([torch.ones(4, 2), torch.ones(4, 3)]), OptionError, "same width"),
    "no width": (lambda: tokenprune.reduce(torch.ones(4, 0)), OptionError, "features must be float"),
    "sparse": (lambda: tokenprune.reduce(torch.eye(4).to_sparse()), OptionError, "features must be float"),
    "NaN": (lambda: tokenprune.reduce(DAMAGED), OptionError, "1 rows of features have NaN or infinite values"),
    "an empty image in a list": (
        lambda: tokenprune.reduce([torch.ones(4, 2), torch.ones(0, 2)]), OptionError, "features must be float",
    ),
    "grid": (lambda: tokenprune.reduce(torch.ones(6, 2), grid=(2, 2)), OptionError, "does not have 6 cells"),
    "a number as grid": (lambda: tokenprune.reduce(torch.ones(4, 2), grid=2), OptionError, "grid=2 is invalid"),
    "a negative grid": (lambda: tokenprune.reduce(torch.ones(4, 2), grid=(-2, -2)), OptionError, "is invalid"),
    "four sides": (lambda: tokenprune.reduce(torch.ones(4, 2), grid=(1, 1, 2, 2)), OptionError, "is invalid"),
    "negative frames": (
        lambda: tokenprune.reduce(torch.ones(4, 2), "evs", frames=[-2, 6]), OptionError, "does not fit 4 rows",
    ),
    "text as frames": (lambda: tokenprune.reduce(torch.ones(4, 2), "evs", frames="2"), OptionError, "frames='2'"),
    "frames": (lambda: tokenprune.reduce(torch.ones(7, 2), "evs", frames=2), OptionError, "frames=2 does not fit 7"),
    "question": (lambda: tokenprune.reduce(torch.ones(4, 2), question=torch.ones(3, 5)), OptionError, r"\[M, 2\]"),
    "text as question": (
        lambda: tokenprune.reduce(torch.ones(4, 2), "cdpruner", question="what color?"), OptionError,
        "question must be a tensor or a numpy array, not str",
    ),
    "token ids": (
        lambda: tokenprune.reduce(torch.ones(4, 2), "cdpruner", question=torch.ones(3, 2, dtype=torch.long)),
        OptionError, "question must be float",
    ),
    "attention of queries": (
        lambda: tokenprune.reduce(torch.ones(4, 2), "scope", tower_attention=torch.ones(2, 4, 4)), OptionError,
        r"N = 4, not \[2, 4, 4\]",
    ),
    "attention of other heads": (
        lambda: tokenprune.reduce([torch.ones(4, 2)] * 2, "scope", tower_attention=[torch.ones(2, 4), torch.ones(4)]),
        OptionError, "same number of heads",
    ),
    "attention of the second image": (
        lambda: tokenprune.reduce([torch.ones(4, 2), torch.ones(3, 2)], "scope", tower_attention=[torch.ones(4)] * 2),
        OptionError, "N = 3",
    ),
    "attention of three images": (
        lambda: tokenprune.reduce([torch.ones(4, 2)] * 2, "scope", tower_attention=torch.ones(3, 2, 4)), OptionError,
        "3 entries for 2 images",
    ),
    "a number as attention": (
        lambda: tokenprune.reduce(torch.ones(4, 2), "scope", tower_attention=1.0), OptionError, "tower_attention",
    ),
    "tower features": (
        lambda: tokenprune.reduce(
            torch.ones(4, 2), "mmtok", question=torch.ones(3, 2), tower_features=torch.ones(5, 2)
        ),
        OptionError, "tower_features must be .* N = 4",
    ),
    "two methods": (
        lambda: tokenprune.reduce(torch.ones(4, 2), ["divprune", "pool"]), OptionError,
        "2 methods need tokenprune.patch",
    ),
    "rows": (lambda: tokenprune.reduce(torch.ones(4, 2), keep=2).apply(torch.ones(5, 2)), OptionError, r"\[4, C\]"),
    "attention": (
        lambda: tokenprune.reduce(torch.ones(4, 2), "scope", tower_attention=torch.ones(2, 5)), OptionError, "N = 4",
    ),
    "blocks": (
        lambda: tokenprune.reduce(torch.ones(4, 2), "hiprune", tower_attention=torch.ones(4)), OptionError, "blocks",
    ),
    "patches": (
        lambda: tokenprune.reduce(torch.ones(4, 2), "scope", tower_attention=torch.ones(4), features="tower"),
        OptionError, "tower_features=",
    ),
    "images": (lambda: tokenprune.reduce([torch.ones(4, 2)], grid=[(2, 2)] * 2), OptionError, "2 entries for 1"),
    "budget": (
        lambda: tokenprune.reduce(torch.ones(4, 2), keep=tokenprune.Budget.from_flops_share(0.5)), BudgetError,
        "tokens per image",
    ),
    "prompt": (
        lambda: tokenprune.reduce(torch.ones(4, 2), keep=tokenprune.Budget(keep=0.5, per="prompt")), BudgetError,
        "tokens per image",
    ),
    "text": (lambda: tokenprune.reduce("photo.jpg"), OptionError, "must be a tensor or a numpy array, not str"),
    "observables": (
        lambda: tokenprune.reduce(torch.ones(4, 2), observables=5), OptionError, "must be a dict of values by name",
    ),
    "a number as observable": (
        lambda: tokenprune.reduce(torch.ones(4, 2), observables={5: 1}), OptionError, "must be a dict of values",
    ),
    **{
        f"{start!r} as start": (
            lambda start=start, grid=grid: tokenprune.reduce(torch.ones(4, 2), keep=2).positions(grid, start=start),
            OptionError, "must be an int, the position of the first row",
        )
        for start, grid in (("a", None), ("b", (2, 2)), (None, None), (1.5, (2, 2)), (True, None), (2**70, None))
    },
    "option": (lambda: tokenprune.reduce(torch.ones(4, 2), centre=True), OptionError, "did you mean 'center'"),
}  # fmt: skip


@each("case", REFUSALS)
def test_invalid_arguments_are_refused(case: str) -> None:
    call, error, message = REFUSALS[case]
    with pytest.raises(error, match=message):
        call()
