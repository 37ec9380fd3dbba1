# SPDX-License-Identifier: Apache-2.0
"""hawk against a naive loop, on synthetic scores and in models."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenprune
from each import each
from several_cuts import COUNTS, SHARES, best, rows, view, wanted
from tokenprune import AlreadyPatchedError, OptionError, TokenPruneError
from tokenprune.api import is_patched
from tokenprune.methods.pre_llm.hawk import HeadWeights
from tokenprune_bench.calibration import fit_hawk
from zoo import FAMILIES

WEIGHTS = (0.5, 0.0, 2.0)


def naive(scores: Tensor, keep: int, weights: Any = None, norm: str = "l2") -> list[int]:
    """Return the kept tokens of one image. scores: shape (heads, tokens)."""
    total = [0.0] * scores.shape[1]
    for head, weight in zip(scores.double().tolist(), weights or [1.0] * len(scores), strict=True):
        values = [value if math.isfinite(value) else 0.0 for value in head]
        if norm == "l2":
            length = math.sqrt(sum(value * value for value in values))
            values = [value / length if length else 0.0 for value in values]
        elif norm == "softmax":
            values = [math.exp(value) / sum(map(math.exp, values)) for value in values]
        else:
            span = max(values) - min(values)
            values = [(value - min(values)) / span if span else 1.0 for value in values]
        total = [a + weight * b for a, b in zip(total, values, strict=True)]
    return best([round(value, 6) for value in total], keep)


@each("norm", ["l2", "softmax", "minmax"])
@each("weights", [None, WEIGHTS])
def test_equals_naive_loop(norm: Any, weights: Any) -> None:
    method = tokenprune.method("hawk", norm=norm, weights=weights)
    for seed, counts in enumerate(COUNTS):
        for share in SHARES:
            keep = wanted(counts, share)
            tokens = view(counts, keep, method.needs, seed=seed)
            segments = zip(tokens.first_layer_scores, counts, keep, strict=True)
            assert rows(method.select(tokens).keep) == [
                naive(heads[:, :n], k, weights, norm) for heads, n, k in segments
            ]


def select(scores: Tensor, **options: Any) -> list[int]:
    tokens = view([len(scores[0])], [5], ("first_layer_scores",), first_layer_scores=scores[None])
    return rows(tokenprune.method("hawk", **options).select(tokens).keep)[0]


def test_head_weights_and_invalid_heads() -> None:
    """A common factor and the norm of a head have no effect. Heads that are not finite or 0 are ignored."""
    scores = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    plain = select(scores, weights=WEIGHTS)
    assert select(scores, weights=[7 * weight for weight in WEIGHTS]) == plain != select(scores)
    assert select(scores, weights=[0, 1, 0]) == best(scores[1].tolist(), 5)
    assert select(scores * torch.tensor([[2.0], [1], [1]]), weights=WEIGHTS) == plain
    broken = scores.clone()
    broken[2] = torch.nan
    for norm in ("l2", "softmax", "minmax"):
        assert select(broken, weights=WEIGHTS, norm=norm) == best(scores[0].tolist(), 5)
        assert select(0 * scores, norm=norm) == [0, 1, 2, 3, 4]


@torch.no_grad()
def test_word_order_has_no_effect(family: Any, build: Any) -> None:
    """Queries of the first layer depend only on embeddings and are not rotated."""
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    reordered = {**inputs, "input_ids": inputs["input_ids"].clone()}
    reordered["input_ids"][:, -4:] = inputs["input_ids"][:, -4:].flip(1)
    assert not torch.equal(reordered["input_ids"], inputs["input_ids"])
    kept = []
    for prompt in (inputs, reordered):
        with tokenprune.patched(model, "hawk", keep=0.3, record=True):
            model(**prompt)
            kept.append(tokenprune.stats(model).cuts[0].kept)
    assert kept[0] == kept[1]


def test_unsupported_decoder_raises(build: Any) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(OptionError, match="hawk: weights has 3 heads"):
        tokenprune.patch(model, "hawk", keep=0.5, weights=WEIGHTS)
    decoder = nn.Module()
    decoder.layers = nn.ModuleList([nn.Identity()])
    with pytest.raises(OptionError, match="hawk reads the queries and keys"):
        tokenprune.method("hawk").check_model(decoder)
    assert not is_patched(model)


@torch.no_grad()
def compute_likelihood(model: nn.Module, sample: dict[str, Tensor], answer: Tensor) -> Tensor:
    """Return the log-likelihood of each row's answer."""
    ids = torch.cat([sample["input_ids"], answer], 1)
    mask = torch.cat([sample["attention_mask"], torch.ones_like(answer)], 1)
    inputs = {**sample, "input_ids": ids, "attention_mask": mask}
    logits = model(**inputs).logits[:, -answer.shape[1] - 1 : -1].log_softmax(-1)
    return logits.gather(2, answer.unsqueeze(2)).sum((1, 2))


@torch.no_grad()
def test_fitted_weights_equal_ablation_losses(build: Any, tmp_path: Path) -> None:
    """A weight is the loss of an answer without the head, minus the smallest loss, normalized."""
    family = FAMILIES["llava"]
    model, path = build(family), tmp_path / "heads.safetensors"
    samples, progress = [family.make_inputs(images=(1,), seed=seed) for seed in (0, 1)], []
    fitted = fit_hawk(model, samples, path, max_new_tokens=4, progress=progress.append)
    attention = model.get_submodule(family.decoder).layers[0].self_attn
    heads, size = attention.q_proj.out_features // attention.head_dim, attention.head_dim
    drop = torch.zeros(heads)
    for sample in samples:
        answer = model.generate(**sample, max_new_tokens=4, do_sample=False)[:, sample["input_ids"].shape[1] :]
        for head in range(heads):
            other = copy.deepcopy(model)
            for layer in other.get_submodule(family.decoder).layers:
                layer.self_attn.o_proj.weight[:, head * size : (head + 1) * size] = 0
            drop[head] += (
                float(compute_likelihood(model, sample, answer) - compute_likelihood(other, sample, answer)) / 2
            )
    want = drop - drop.min()
    torch.testing.assert_close(fitted.table, want / want.sum(), atol=1e-4, rtol=1e-3)
    assert progress == [1, 2] and not is_patched(model) and fitted.table.min() == 0
    with tokenprune.patched(model, "hawk", keep=0.4, heads=path, record=True):
        model(**samples[0])
        kept = tokenprune.stats(model).cuts[0].kept
    with tokenprune.patched(model, "hawk", keep=0.4, weights=HeadWeights.load(path).table.tolist(), record=True):
        model(**samples[0])
        assert tokenprune.stats(model).cuts[0].kept == kept
    with pytest.raises(OptionError, match="another model"):
        tokenprune.patch(build(FAMILIES["llava_next"]), "hawk", heads=path)


def test_fit_errors(build: Any, tmp_path: Path) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(TokenPruneError, match="without samples"):
        fit_hawk(model, [])
    with pytest.raises(OptionError, match="max_new_tokens=0"):
        fit_hawk(model, [], max_new_tokens=0)
    with tokenprune.patched(model, "fastv"), pytest.raises(AlreadyPatchedError):
        fit_hawk(model, [])
    with pytest.raises(OptionError, match="cannot read"):
        tokenprune.method("hawk", heads=tmp_path / "none.safetensors")
