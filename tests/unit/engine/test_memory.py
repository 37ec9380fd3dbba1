# SPDX-License-Identifier: Apache-2.0
"""What a pruned prefill allocates: nothing of the size of all pairs of visual tokens, no logits nobody asked for. And
the work of choosing among many small images, counted without a clock."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutputWithPooling

import tokenprune
from basics import MODEL_METHODS
from each import each
from families import FAMILIES
from greedy import image_tokens
from tokenprune import Site
from tokenprune.integrations.hf.engine import cuts, engine
from tokenprune.kernels import coverage, farthest, farthest_blocks, pairs
from zoo import FIRST_TEXT_ID, HIDDEN, VISION, VOCAB, tower

GRID = (1, 40, 40)  # patches of an image of Qwen-VL, four of which are a token
VISUAL, KEEP = 400, 48
TEXT = (20, 33)

# It reads many rows of attention at once.
ALL_PAIRS = {"fitprune"}
# Of the tower too.
OF_THE_TOWER = ("scope", "tops", "idselection", "agilepruner", "sinkpruner")


def methods() -> list[str]:
    """Those that choose among the tokens of an image in the decoder, and read nothing of the tower."""
    about = {name: tokenprune.method_info(name) for name in tokenprune.available_methods()}
    return [
        name
        for name, info in about.items()
        if name not in ALL_PAIRS
        and info.site in (Site.PRE_LLM, Site.IN_LLM, Site.DECODE)
        and not any(need.startswith(("encoder", "frame", "patch")) for need in info.observables)
    ]


class Allocations(TorchDispatchMode):
    """Notes the largest storage that an operation returned, in elements, and the most rows of logits; of those made
    anew that are as large as all pairs of visual tokens, what made each and its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.what, self.logits = 0, "", 0
        self.pairs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                if size > self.largest:
                    self.largest, self.what = size, f"{func} {tuple(tensor.shape)}"
                if size >= VISUAL**2 and not func.is_view:
                    self.pairs[f"{func} {tuple(tensor.shape)}"] += 1
                if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and tensor.shape[-1] == VOCAB:
                    self.logits = max(self.logits, tensor.numel() // VOCAB)
        return out


def prefill(family: str, name: str | None, batch: int, keep: Any = None, **options: Any) -> Allocations:
    model, g = FAMILIES[family].build("sdpa"), torch.Generator().manual_seed(0)
    width = VISUAL + TEXT[batch - 1]
    ids, mask = torch.zeros(2, batch, width, dtype=torch.long)
    for row, text in enumerate(TEXT[:batch]):
        start = width - VISUAL - text
        ids[row, start:] = torch.randint(FIRST_TEXT_ID, VOCAB, (VISUAL + text,), generator=g)
        ids[row, start + 4 : start + 4 + VISUAL] = model.config.image_token_id
        mask[row, start:] = 1
    if family == "qwen2_5_vl":
        options |= dict(
            image_grid_thw=torch.tensor([GRID] * batch), mm_token_type_ids=(ids == model.config.image_token_id).int()
        )
    images = BaseModelOutputWithPooling(pooler_output=[torch.randn(VISUAL, HIDDEN, generator=g) for _ in range(batch)])
    if name is not None:
        # Four layers are few for methods of several cuts.
        keep = keep or (KEEP if tokenprune.method_info(name).site is Site.PRE_LLM else 0.8)
        tokenprune.patch(model, name, keep=keep, guard="off")
    with torch.no_grad(), Allocations() as made:
        model(input_ids=ids, attention_mask=mask, mm_encoder_outputs={"image": images}, use_cache=True, **options)
    return made


@pytest.fixture
def as_with_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so few tokens a table of all pairs would be made."""
    monkeypatch.setattr(farthest, "TABLE", 0)
    monkeypatch.setattr(farthest_blocks, "ROWS", 64)
    monkeypatch.setattr(farthest_blocks, "COLUMNS", 16)
    for module in (pairs, coverage):
        monkeypatch.setattr(module, "_MAX_ELEMENTS", VISUAL**2 // 8)


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_nothing_has_the_size_of_all_pairs(family: str, name: str, as_with_many: None) -> None:
    # A batch with padding makes the unpatched model write a mask of all pairs; so do its layers before a cut inside.
    for batch in (1, 2) if tokenprune.method_info(name).site is Site.PRE_LLM else (1,):
        made = prefill(family, name, batch, logits_to_keep=1)
        assert made.largest < VISUAL**2, made.what
        assert made.logits == batch


@pytest.mark.parametrize("name", ["uniform", "fastv", "pyramiddrop"])
@pytest.mark.parametrize(("family", "batch"), [("llava", 2), ("exaone4_5", 1), ("exaone4_5", 2)])
def test_masks_of_all_pairs_are_those_of_the_unpatched_model(family: str, batch: int, name: str) -> None:
    """With padding, or layers that see a window, transformers writes masks of all pairs. Behind a cut none is written,
    nor is one there made into another."""
    keep = KEEP if name == "uniform" else 0.5
    made = prefill(family, name, batch, keep=keep, logits_to_keep=1)
    assert made.pairs <= prefill(family, None, batch, logits_to_keep=1).pairs
    assert bool(made.pairs) == (name != "uniform")


@each(
    ("name", "options"),
    [
        *((name, {}) for name in (*OF_THE_TOWER, "mmtok")),
        ("prunesid", {"form": "llava"}),
        ("divprune", {"center": True}),
    ],
)
def test_what_is_chosen_from_the_tower_too(name: str, options: dict[str, Any], as_with_many: None) -> None:
    tokens, method = image_tokens([VISUAL], [KEEP]), tokenprune.method(name, **options)
    with torch.no_grad(), Allocations() as made:
        got = method.select(tokens).keep
    assert made.largest < VISUAL**2, made.what
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(farthest, "TABLE", VISUAL)
        assert torch.equal(method.select(tokens).keep, got)


def test_what_the_watch_sees() -> None:
    """It finds the mask of the unpatched model, and logits of all places, where a call does not ask for the last."""
    made = prefill("llava", None, 2, logits_to_keep=1)
    assert made.largest >= 2 * VISUAL**2
    assert prefill("llava", "uniform", 1).logits == VISUAL + TEXT[0]


if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGES, MOST = 50, 4  # of 16 tokens; times the unpatched prefill
LLAVA = FAMILIES["llava"]
SMALL = {"vision_config": tower("clip_vision_model", 16, projection_dim=VISION), "image_seq_length": 16}
FAMILY = replace(LLAVA, config={**LLAVA.config, **SMALL}, sizes=(16,))
aten = torch.ops.aten
# The place of the argument whose last axis is summed over.
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


class Work(TorchDispatchMode):
    """Counts within: `done` is the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if packet in _PRODUCTS:
            self.done += made.numel() * args[_PRODUCTS[packet]].shape[-1]
        elif not function.is_view:
            leaves = tree_leaves((args, kwargs, made))
            self.done += max((x.numel() for x in leaves if isinstance(x, torch.Tensor)), default=0)
        return made


@contextmanager
def counted_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Count what is done to choose, and not what the model does."""
    work = Work()
    for module in (engine, cuts):

        def choose(*args: Any, original: Any = module.select_tokens) -> Any:
            with work:
                return original(*args)

        monkeypatch.setattr(module, "select_tokens", choose)
    yield work


@cache
def model() -> Any:
    return FAMILY.build("eager")


@cache
@torch.no_grad()
def unpatched() -> int:
    with Work() as work:
        model()(**FAMILY.make_inputs(images=(IMAGES,)))
    return work.done


@pytest.mark.parametrize("name", MODEL_METHODS)
@torch.no_grad()
def test_choosing_among_many_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = FAMILY.make_inputs(images=(IMAGES,))
    with tokenprune.patched(model(), name, keep=0.6), counted_choices(monkeypatch) as work:
        model()(**inputs)
    assert work.done <= MOST * unpatched(), f"{work.done / unpatched():.1f} times the unpatched prefill"
