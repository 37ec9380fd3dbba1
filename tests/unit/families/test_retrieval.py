# SPDX-License-Identifier: Apache-2.0
"""Models that return a vector per token: vectors of dropped tokens are zero and excluded."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, ColPaliProcessor

import tokenprune
from basics import snapshot
from each import each
from families import FAMILIES, REFUSED
from families.retrieval import RETRIEVERS, Retriever
from oracle import close, reduced, survivors
from pruned import run_pruned
from tokenprune import OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.models.families import SUPPORTED
from tokenprune.models.families.tested import list_tested_sites
from tokenprune.testing import check_model

# Methods that select, merge at the entry, cut inside the decoder (fastv by the last token, an end token), and cut
# repeatedly.
CUTTING = ("divprune", "pool", "dart", "fastv", "pyramiddrop")
IN_TOWER = ("tome",)
READING = ("visionzip",)
BATCHES: dict[str, dict[str, Any]] = {
    "left": {"images": (1, 1)}, "right": {"images": (1, 1), "padding": "right"}, "two": {"images": (2, 1)},
    "mixed": {"images": (0, 1)},
}  # fmt: skip

_built: dict[str, Any] = {}


@pytest.fixture(params=RETRIEVERS)
def retriever(request: pytest.FixtureRequest) -> Retriever:
    return RETRIEVERS[request.param]


@pytest.fixture
def model(retriever: Retriever) -> Any:
    if retriever.name not in _built:
        _built[retriever.name] = retriever.build()
        _built[retriever.name](**retriever.pages())  # transformers adds hooks for captured outputs in the first call
    model = _built[retriever.name]
    before = snapshot(model)
    yield model
    assert snapshot(model) == before, "a test changed the model"


def find_visual(inputs: dict[str, Any], retriever: Retriever, model: Any) -> Tensor:
    return retriever.inner.visual_mask(model, inputs)


@torch.no_grad()
@each("batch", BATCHES)
def test_keep_all_is_bit_equal(retriever: Retriever, model: Any, batch: str) -> None:
    inputs = retriever.pages(**BATCHES[batch])
    unpruned = model(**inputs).embeddings
    for method in (*CUTTING, *IN_TOWER, *READING):
        with tokenprune.patched(model, method, keep=1.0):
            output = model(**inputs)
        assert torch.equal(output.embeddings, unpruned) and torch.equal(output.kept, inputs["attention_mask"].bool())
    assert "kept" not in model(**inputs)


@torch.no_grad()
@each("method", CUTTING)
@each("batch", BATCHES)
def test_equals_masking(retriever: Retriever, model: Any, method: str, batch: str) -> None:
    """Kept rows equal the masked model and other rows are zero; `kept` marks the kept rows."""
    inputs = retriever.pages(**BATCHES[batch])
    output, stats = run_pruned(model, inputs, method, 0.3)
    length = inputs["input_ids"].shape[1]
    assert output.embeddings.shape[:2] == output.kept.shape == (len(inputs["input_ids"]), length)
    is_kept = torch.stack([survivors(cut, length) for cut in stats.cuts]).all(0)
    is_valid = inputs["attention_mask"].bool()
    assert torch.equal(output.kept, is_kept) and torch.equal(
        is_kept & ~find_visual(inputs, retriever, model), is_valid & ~find_visual(inputs, retriever, model)
    )
    assert stats.visual_tokens_out < stats.visual_tokens_in
    assert f"vectors: {int(is_kept.sum())} of {int(is_valid.sum())} kept, including text" in stats.notes
    assert not output.embeddings[~is_kept].any() and not output.embeddings.isnan().any()
    family = dataclasses.replace(retriever.inner, decoder=f"{retriever.inside(model)}.language_model")
    with reduced(family, model, stats.cuts, length):
        want = model(**inputs).embeddings
    close(output.embeddings[is_kept], want[is_kept])
    lengths = output.embeddings[is_kept].norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


@torch.no_grad()
@each("method", [*CUTTING, *IN_TOWER, *READING])
def test_batch_equals_single_pages(retriever: Retriever, model: Any, method: str) -> None:
    # dart compares keys, and these models rotate keys by positions that count left padding.
    for padding in ("right",) if method == "dart" else ("left", "right"):
        with tokenprune.patched(model, method, keep=0.3):
            batched = tokenprune.vectors(model(**retriever.pages(images=(1, 1), padding=padding)))
            singles = [
                tokenprune.vectors(model(**retriever.pages(images=(1, 1), only=row, sizes=retriever.inner.sizes)))
                for row in range(2)
            ]
        for row, (expected,) in zip(batched, singles, strict=True):
            close(row, expected)


@torch.no_grad()
def test_questions_are_unchanged(retriever: Retriever, model: Any) -> None:
    questions = retriever.questions()
    unpruned = model(**questions).embeddings
    with tokenprune.patched(model, "divprune", keep=0.3):
        output = model(**questions)
        assert tokenprune.stats(model).visual_tokens_in == 0 and not tokenprune.stats(model).notes
    assert torch.equal(output.embeddings, unpruned) and torch.equal(output.kept, questions["attention_mask"].bool())


@torch.no_grad()
def test_lists_of_vectors_are_the_kept_rows(retriever: Retriever, model: Any) -> None:
    """`vectors` excludes zero rows, which would win where all similarities are negative."""
    questions = tokenprune.vectors(model(**retriever.questions()))
    inputs = retriever.pages(images=(1, 1))
    unpruned = model(**inputs)
    unpruned_pages = tokenprune.vectors(unpruned)
    assert [len(page) for page in unpruned_pages] == inputs["attention_mask"].sum(1).tolist()
    with tokenprune.patched(model, "divprune", keep=0.3):
        output = model(**inputs)
    pages = tokenprune.vectors(output)
    assert [len(page) for page in pages] == output.kept.sum(1).tolist() < [len(page) for page in unpruned_pages]
    for row, page in enumerate(pages):
        similarities = [
            (question @ output.embeddings[row].T).masked_fill(~output.kept[row], -torch.inf) for question in questions
        ]
        want = torch.stack([similarity.amax(1).sum() for similarity in similarities])
        # One page per call, because the processor pads shorter pages with zeros.
        torch.testing.assert_close(ColPaliProcessor.score_retrieval(None, questions, [page])[:, 0], want)
    with pytest.raises(OptionError, match="dict has no embeddings"):
        tokenprune.vectors({})


@torch.no_grad()
def test_inside_and_outside_are_the_same_patch(retriever: Retriever, model: Any) -> None:
    inputs = retriever.pages(images=(1, 1))
    with tokenprune.patched(model, "divprune", keep=0.3):
        want = model(**inputs)
        assert tokenprune.is_patched(model) and tokenprune.is_patched(model.vlm)
    with pytest.raises(UnsupportedModelError):
        tokenprune.patch(model.get_submodule(f"{retriever.inside(model)}.language_model"), "divprune", keep=0.3)
    tokenprune.patch(model.get_submodule(retriever.inside(model)), "divprune", keep=0.3)
    got = model(**inputs)
    assert torch.equal(got.embeddings, want.embeddings) and torch.equal(got.kept, want.kept)
    with pytest.raises(tokenprune.AlreadyPatchedError):
        tokenprune.patch(model, "random", keep=0.3)
    assert tokenprune.stats(model).visual_tokens_out == tokenprune.stats(model.vlm).visual_tokens_out > 0
    tokenprune.unpatch(model)
    assert not tokenprune.is_patched(model.vlm)


@torch.no_grad()
def test_ways_to_call_it(retriever: Retriever, model: Any) -> None:
    """A tuple output, a page without a mask, a copy of the model, and the inner model."""
    inputs = retriever.pages(images=(1, 1), padding=None)
    with tokenprune.patched(model, "divprune", keep=0.3):
        want = model(**inputs)
        assert torch.equal(model(**inputs, return_dict=False)[0], want.embeddings)
        bare = {name: value for name, value in inputs.items() if name != "attention_mask"}
        close(model(**bare).embeddings, want.embeddings)
        assert torch.equal(copy.deepcopy(model)(**inputs).kept, want.kept)
        if retriever.name == "colpali":  # the other models store positions as attributes
            hidden = model.get_submodule(retriever.inside(model))(**retriever.questions()).last_hidden_state
            assert hidden.any(-1).all()


@torch.no_grad()
def test_a_row_of_several_pages_is_refused() -> None:
    """The inner model would split such a row, so vectors could not be assigned to pages."""
    retriever = RETRIEVERS["colpali"]
    model, pages = retriever.build(), retriever.pages(images=(1, 1))
    rows = [retriever.pages(images=(1, 1), only=row)["input_ids"] for row in range(2)]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with (
        tokenprune.patched(model, "divprune", keep=0.3),
        pytest.raises(UnsupportedSetupError, match="A row of the batch has several pages"),
    ):
        model(input_ids=torch.cat(rows, 1), position_ids=positions, pixel_values=pages["pixel_values"])


def test_gradients_reach_the_kept_vectors(retriever: Retriever, model: Any) -> None:
    with tokenprune.patched(model, "divprune", keep=0.3):
        torch.cat(tokenprune.vectors(model(**retriever.pages(images=(1, 1))))).sum().backward()
    gradient = model.embedding_proj_layer.weight.grad
    model.zero_grad(set_to_none=True)
    assert gradient is not None and gradient.isfinite().all() and gradient.any()


def test_it_passes_the_check_of_models(retriever: Retriever, model: Any) -> None:
    result = check_model(model, dict(retriever.pages(images=(2, 1))))
    assert 0 < result.kept < result.visual_tokens and result.oracle is not None and result.oracle < 1e-5
    assert result.step is None


def test_decoding_methods_and_unknown_inner_models_are_refused(retriever: Retriever, model: Any) -> None:
    with pytest.raises(OptionError, match=f"'{model.config.model_type}' writes no answer"):
        tokenprune.patch(model, "dyrate", keep=0.3)
    assert "DECODE" not in list_tested_sites(SUPPORTED[model.config.model_type])
    model_type = model.vlm.config.model_type
    try:
        model.vlm.config.model_type = "qwen3_vl"
        with pytest.raises(UnsupportedModelError, match="around a model of type 'qwen3_vl' is not supported"):
            tokenprune.patch(model, "divprune", keep=0.3)
    finally:
        model.vlm.config.model_type = model_type


def test_inner_model_is_refused_too() -> None:
    refused = REFUSED["colmodernvbert"]
    if refused.kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {refused.kind}")
    model: Any = refused.build()
    for target in (model, model.vlm):
        with pytest.raises(UnsupportedModelError, match="'colmodernvbert' is not supported: the encoder counts"):
            tokenprune.patch(target, "divprune", keep=0.5)
        assert not tokenprune.is_patched(model)


def test_models_of_colpali_engine_are_refused_by_name(build) -> None:
    """They subclass models of transformers and share their config."""
    model = build(FAMILIES["qwen2_vl"])
    for target in (model, model.model):
        target.custom_text_proj = nn.Linear(1, 1)
        with pytest.raises(
            UnsupportedModelError, match=f"{type(target).__name__} of colpali-engine is not supported.*colqwen2-v1.0-hf"
        ):
            tokenprune.patch(target, "divprune", keep=0.5)
        del target.custom_text_proj
    with tokenprune.patched(model, "divprune", keep=0.5):
        assert tokenprune.is_patched(model)


def test_owner_of_a_model_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search over all objects takes a quarter of a second, and a benchmark patches one model many times."""
    model, searches = FAMILIES["llava"].build(), []
    monkeypatch.setattr("gc.get_objects", lambda: searches.append(1) or [])
    for _ in range(3):
        with tokenprune.patched(model, "divprune", keep=0.5):
            pass
    assert len(searches) == 1
