# SPDX-License-Identifier: Apache-2.0
"""Limits on the allocations and operations of a pruned prefill, without a clock.

No tensor has the size of all pairs of visual tokens, and only requested logits are computed.
"""

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

GRID = (1, 40, 40)  # patches of an image of Qwen-VL; four patches are one token
VISUAL, KEEP = 400, 48
TEXT = (20, 33)

# Reads many rows of attention together.
ALL_PAIRS = {"fitprune"}
# Methods that also read the tower.
OF_THE_TOWER = ("scope", "tops", "idselection", "agilepruner", "sinkpruner")


def list_methods() -> list[str]:
    """Return the methods that select in the decoder and read no tower outputs."""
    infos = {name: tokenprune.method_info(name) for name in tokenprune.available_methods()}
    return [
        name
        for name, info in infos.items()
        if name not in ALL_PAIRS
        and info.site in (Site.PRE_LLM, Site.IN_LLM, Site.DECODE)
        and not any(need.startswith(("encoder", "frame", "patch")) for need in info.observables)
    ]


class Allocations(TorchDispatchMode):
    """Records the largest storage and the number of logit rows, and counts new tensors of at least all pairs.

    The counter's keys are the operation and the shape.
    """

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
        # Methods with several cuts need more kept tokens on four layers.
        keep = keep or (KEEP if tokenprune.method_info(name).site is Site.PRE_LLM else 0.8)
        tokenprune.patch(model, name, keep=keep, guard="off")
    with torch.no_grad(), Allocations() as allocations:
        model(input_ids=ids, attention_mask=mask, mm_encoder_outputs={"image": images}, use_cache=True, **options)
    return allocations


@pytest.fixture
def blocked_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable tables of all pairs, which are allowed for so few tokens."""
    monkeypatch.setattr(farthest, "TABLE", 0)
    monkeypatch.setattr(farthest_blocks, "ROWS", 64)
    monkeypatch.setattr(farthest_blocks, "COLUMNS", 16)
    for module in (pairs, coverage):
        monkeypatch.setattr(module, "_MAX_ELEMENTS", VISUAL**2 // 8)


@pytest.mark.parametrize("name", list_methods())
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_no_tensor_has_the_size_of_all_pairs(family: str, name: str, blocked_tables: None) -> None:
    # With padding, the unpatched model writes a mask of all pairs, and so do its layers before a cut.
    for batch in (1, 2) if tokenprune.method_info(name).site is Site.PRE_LLM else (1,):
        allocations = prefill(family, name, batch, logits_to_keep=1)
        assert allocations.largest < VISUAL**2, allocations.what
        assert allocations.logits == batch


@pytest.mark.parametrize("name", ["uniform", "fastv", "pyramiddrop"])
@pytest.mark.parametrize(("family", "batch"), [("llava", 2), ("exaone4_5", 1), ("exaone4_5", 2)])
def test_masks_of_all_pairs_are_those_of_the_unpatched_model(family: str, batch: int, name: str) -> None:
    """transformers writes such masks for padding and windows; a patched model adds none after the cut."""
    keep = KEEP if name == "uniform" else 0.5
    allocations = prefill(family, name, batch, keep=keep, logits_to_keep=1)
    assert allocations.pairs <= prefill(family, None, batch, logits_to_keep=1).pairs
    assert bool(allocations.pairs) == (name != "uniform")


@each(
    ("name", "options"),
    [
        *((name, {}) for name in (*OF_THE_TOWER, "mmtok")),
        ("prunesid", {"form": "llava"}),
        ("divprune", {"center": True}),
    ],
)
def test_methods_that_read_the_tower_allocate_no_pairs(
    name: str, options: dict[str, Any], blocked_tables: None
) -> None:
    tokens, method = image_tokens([VISUAL], [KEEP]), tokenprune.method(name, **options)
    with torch.no_grad(), Allocations() as allocations:
        got = method.select(tokens).keep
    assert allocations.largest < VISUAL**2, allocations.what
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(farthest, "TABLE", VISUAL)
        assert torch.equal(method.select(tokens).keep, got)


def test_allocations_are_counted() -> None:
    """Allocations counts the mask of the unpatched model, and the logits of all positions without `logits_to_keep`."""
    allocations = prefill("llava", None, 2, logits_to_keep=1)
    assert allocations.largest >= 2 * VISUAL**2
    assert prefill("llava", "uniform", 1).logits == VISUAL + TEXT[0]


if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGES, MAX_RATIO = 50, 4  # images of 16 tokens; limit relative to the unpatched prefill
LLAVA = FAMILIES["llava"]
SMALL = {"vision_config": tower("clip_vision_model", 16, projection_dim=VISION), "image_seq_length": 16}
FAMILY = replace(LLAVA, config={**LLAVA.config, **SMALL}, sizes=(16,))
aten = torch.ops.aten
# Index of the argument whose last axis is summed over.
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


class Work(TorchDispatchMode):
    """Counts multiplications and elements in `total`."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if packet in _PRODUCTS:
            self.total += result.numel() * args[_PRODUCTS[packet]].shape[-1]
        elif not function.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.total += max((x.numel() for x in leaves if isinstance(x, torch.Tensor)), default=0)
        return result


@contextmanager
def count_selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Count the operations of the selection only."""
    work = Work()
    for module in (engine, cuts):

        def count_selected(*args: Any, original: Any = module.select_tokens) -> Any:
            with work:
                return original(*args)

        monkeypatch.setattr(module, "select_tokens", count_selected)
    yield work


@cache
def model() -> Any:
    return FAMILY.build("eager")


@cache
@torch.no_grad()
def count_unpatched() -> int:
    with Work() as work:
        model()(**FAMILY.make_inputs(images=(IMAGES,)))
    return work.total


@pytest.mark.parametrize("name", MODEL_METHODS)
@torch.no_grad()
def test_choosing_among_many_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = FAMILY.make_inputs(images=(IMAGES,))
    with tokenprune.patched(model(), name, keep=0.6), count_selection(monkeypatch) as work:
        model()(**inputs)
    assert work.total <= MAX_RATIO * count_unpatched(), (
        f"{work.total / count_unpatched():.1f} times the unpatched prefill"
    )
