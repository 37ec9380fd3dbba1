# SPDX-License-Identifier: Apache-2.0
"""Attention references equal slices of full maps, and kernels equal the references.

Without a GPU, kernels run in Triton's interpreter, whose time grows with the number of blocks. Shapes are small and
odd, and blocks are smaller, so that every loop runs more than once and ends within a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from each import each
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.kernels.attention import attention_column_means, attention_rows, visible_keys

MASKS = ("causal", "full", "of_keys", "bool", "per_head", "bias")


def draw_inputs(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype = torch.float32, kind: str = "causal"
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Return query, key, mask and options for a shape (B, H, Hkv, Q, K, D).

    Masks hide all keys of some queries and some keys from all queries.
    """
    batch, heads, kv_heads, queries, keys, width = shape
    g = torch.Generator().manual_seed(sum(shape))
    # The memory layout of models: tokens before heads.
    query = 3 * torch.randn(batch, queries, heads, width, generator=g).to(dtype).transpose(1, 2)
    key = torch.randn(batch, keys, kv_heads, width, generator=g).to(dtype).transpose(1, 2)
    options = dict(scaling=width**-0.5, causal=kind in ("causal", "of_keys"))
    if kind in ("causal", "full"):
        return query, key, None, options
    if kind == "of_keys":
        mask = torch.rand(batch, keys + 3, generator=g) > 0.3
        mask[0, : 3 + min(keys - 1, keys - queries + 1)] = False  # the first query of the first row sees no key
        return query, key, mask.long() if batch > 1 else mask, options
    mask = torch.rand(batch, heads if kind == "per_head" else 1, queries, keys + 2, generator=g) > 0.4
    mask[0, :, 0] = False
    mask[:, :, :, keys // 2] = False
    if kind == "bias":
        lowest = torch.finfo(dtype).min
        bias = torch.randn(mask.shape, generator=g).to(dtype).masked_fill(~mask, lowest)
        bias[..., 0] = bias[..., 0].masked_fill(~mask[..., 0], -torch.inf)
        return query, key, bias, options
    return query, key, mask, options


def compute_map(query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return float64 attention `[B, H, Q, K]` and the visible keys, computed entry by entry."""
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    logits = torch.full((batch, heads, queries, keys), -torch.inf, dtype=torch.float64)
    for b, h, i, j in itertools.product(*map(range, logits.shape)):
        x = float(query[b, h, i].double() @ key[b, h * key.shape[1] // heads, j].double()) * options["scaling"]
        if options.get("softcap"):
            x = options["softcap"] * float(torch.tensor(x / options["softcap"], dtype=torch.float64).tanh())
        is_visible = not options["causal"] or j <= i + keys - queries
        if mask is not None and mask.ndim == 2:
            is_visible = is_visible and bool(mask[b, mask.shape[1] - keys + j])
        elif mask is not None:
            value = mask[b % mask.shape[0], h % mask.shape[1], i % mask.shape[2], j]
            is_visible = bool(value) if value.dtype == torch.bool else float(value) > torch.finfo(value.dtype).min / 2
            x += float(value) if value.dtype != torch.bool else 0
        if is_visible:
            logits[b, h, i, j] = x
    return logits.softmax(-1).nan_to_num(0), logits > -torch.inf


def move_to(device: torch.device, values: Any) -> Iterator[Any]:
    return (x.to(device) if isinstance(x, Tensor) else x for x in values)


def check_close(got: Tensor, want: Tensor, atol: float = 2e-6) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), want.float().cpu(), atol=atol, rtol=2e-5)


# -- the references


@each("kind", MASKS)
@each("softcap", [None, 2.0])
def test_references_are_parts_of_the_map(kind: str, softcap: float | None) -> None:
    query, key, mask, options = draw_inputs((2, 4, 2, 5, 7, 6), kind=kind)
    options["softcap"] = softcap
    want, visible = compute_map(query, key, mask, options)
    index = torch.tensor([[0, 4, 4], [2, 0, 1]])
    row_index = index[:, None, :, None].expand(2, 4, 3, 7)
    rows = attention_rows(query, key, index, mask, **options)
    check_close(rows, want.gather(2, row_index))
    assert torch.equal(
        visible_keys(query, key, index, mask, causal=options["causal"]).expand_as(rows), visible.gather(2, row_index)
    )
    for heads in ("mean", "sum"):
        check_close(
            attention_rows(query, key, index, mask, heads=heads, **options),
            getattr(want.gather(2, row_index), heads)(1),
        )
    check_close(attention_rows(query, key, index, mask, heads="max", **options), want.gather(2, row_index).amax(1))

    valid = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    weight = (valid[:, None, :, None] & visible).double()
    means = (want * weight).sum(2) / weight.sum(2).clamp(min=1)
    check_close(attention_column_means(query, key, valid, mask, **options), means[..., -5:])
    means = want.sum(2) / visible.sum(2).clamp(min=1)
    check_close(attention_column_means(query, key, None, mask, **options), means[..., -5:])


def test_column_means_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, mask, options = draw_inputs((1, 2, 2, 9, 9, 4), kind="bool")
    expected = attention_column_means(query, key, None, mask, **options)
    monkeypatch.setattr("tokenprune.kernels.attention._MAX_ELEMENTS", 40)
    check_close(attention_column_means(query, key, None, mask, **options), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_see_each_other(causal: bool) -> None:
    query, key, _, _ = draw_inputs((1, 2, 1, 11, 11, 4))
    starts = torch.tensor([0, 3, 4, 11], dtype=torch.int32)
    got = attention_column_means(query, key, None, None, starts, scaling=0.5, causal=causal)
    for start, end in itertools.pairwise(starts.tolist()):
        piece = slice(start, end)
        want, visible = compute_map(query[:, :, piece], key[:, :, piece], None, dict(scaling=0.5, causal=causal))
        check_close(got[..., piece], want.sum(2) / visible.sum(2))


def test_rows_have_gradients_in_the_reference() -> None:
    query, key, _, options = draw_inputs((1, 2, 1, 3, 3, 4))
    query.requires_grad_()
    attention_rows(query, key, torch.tensor([[2]]), **options)[..., 0].sum().backward()
    assert query.grad[:, :, 2].any() and not query.grad[:, :, :2].any()


def test_unsupported_arguments_raise() -> None:
    query, key, mask, options = draw_inputs((2, 2, 1, 3, 3, 4), kind="bool")
    index = torch.zeros(2, 1, dtype=torch.long)
    for op in (attention_rows, attention_rows.reference):
        with pytest.raises(OptionError, match="'mean', 'max' or 'sum'"):
            op(query, key, index, heads="median", **options)
    starts = torch.tensor([0, 3])
    for args in (
        (query, key, None, None),
        (query[:1], key[:1], None, mask[:1]),
        (query[:1], key[:1, :, :2], None, None),
    ):
        with pytest.raises(OptionError, match="starts="):
            attention_column_means(*args, starts, **options)


def test_unsupported_kernel_inputs_raise(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPRUNE_KERNELS", "triton")
    query, key, mask, options = draw_inputs((2, 2, 1, 3, 3, 4), kind="bool")
    query, key, index, mask = move_to(kernel_device, (query, key, torch.zeros(2, 1, dtype=torch.long), mask))
    with pytest.raises(UnsupportedSetupError, match="float64"):
        attention_rows(query.double(), key.double(), index, **options)
    with pytest.raises(UnsupportedSetupError, match="head dimension 300"):
        attention_column_means(query.new_zeros(1, 1, 2, 300), query.new_zeros(1, 1, 2, 300), **options)
    with pytest.raises(UnsupportedSetupError, match="masks of dtype"):
        attention_rows(query, key, index, mask.double(), **options)


# -- the kernels

SHAPES = [
    (1, 1, 1, 1, 1, 1),  # one element in every dimension
    (2, 2, 1, 5, 21, 7),  # queries with a past, two blocks of keys
    (1, 2, 1, 37, 37, 24),
    (1, 2, 2, 16, 32, 16),  # blocks divide the shape
]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_kernel(shape: tuple, kind: str, kernel_device: torch.device) -> None:
    query, key, mask, options = draw_inputs(shape, kind=kind)
    queries = shape[3]
    g = torch.Generator().manual_seed(1)
    index = torch.cat(
        [torch.zeros(shape[0], 1, dtype=torch.long), torch.randint(queries, (shape[0], 2), generator=g)], 1
    )
    for rows in (index[:, :1], index):
        arguments = [*move_to(kernel_device, (query, key, rows, mask))]
        want = attention_rows.reference(query, key, rows, mask, **options)
        check_close(attention_rows.triton(*arguments, block_keys=16, **options), want)
    assert (want == 0).all(-1).any() or kind in ("causal", "full") or shape[3] == shape[4] == 1


@pytest.mark.parametrize("heads", ["mean", "max", "sum"])
def test_rows_kernel_reduces_heads(heads: str, kernel_device: torch.device) -> None:
    query, key, mask, options = draw_inputs((1, 36, 3, 3, 19, 5), kind="per_head")  # more heads than a block
    index = torch.tensor([[0, 2]])
    arguments = [*move_to(kernel_device, (query, key, index, mask))]
    got = attention_rows.triton(*arguments, heads=heads, block_keys=16, **options)
    check_close(got, attention_rows.reference(query, key, index, mask, heads=heads, **options))


def test_rows_kernel_with_many_rows(kernel_device: torch.device) -> None:
    """More rows than a block, with the default block of keys."""
    query, key, _, options = draw_inputs((1, 2, 1, 40, 70, 8))
    index = torch.arange(40).flip(0)[None, :33]
    got = attention_rows.triton(*move_to(kernel_device, (query, key, index)), **options)
    check_close(got, attention_rows.reference(query, key, index, **options))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_column_means_kernel(shape: tuple, kind: str, kernel_device: torch.device) -> None:
    query, key, mask, options = draw_inputs(shape, kind=kind)
    valid = torch.rand(shape[0], shape[3], generator=torch.Generator().manual_seed(2)) > 0.3
    for valid_queries in (None, valid) if shape[3] < 30 else (valid,):
        got = attention_column_means.triton(
            *move_to(kernel_device, (query, key, valid_queries, mask)), block=(32, 16), **options
        )
        check_close(got, attention_column_means.reference(query, key, valid_queries, mask, **options))


@pytest.mark.parametrize("causal", [False, True])
def test_column_means_kernel_on_packed_sequences(causal: bool, kernel_device: torch.device) -> None:
    query, key, _, _ = draw_inputs((1, 2, 1, 50, 50, 8))
    starts = torch.tensor([0, 1, 20, 20, 33, 50], dtype=torch.int32)  # the third sequence is empty
    valid = torch.arange(50)[None] % 7 != 0
    options = dict(scaling=0.3, causal=causal)
    got = attention_column_means.triton(
        *move_to(kernel_device, (query, key, valid, None, starts)), block=(16, 32), **options
    )
    check_close(got, attention_column_means.reference(query, key, valid, None, starts, **options))


def check_kernels(
    device: torch.device, query: Tensor, key: Tensor, index: Tensor, mask: Tensor | None, options: dict[str, Any],
    valid: Tensor | None = None, block: tuple[int, int] | None = (16, 16), atol: float = 2e-6,
) -> None:  # fmt: skip
    """Compare rows and column means of kernel and reference; `block` is for column means."""
    rows = attention_rows.triton(*move_to(device, (query, key, index, mask)), block_keys=16, **options)
    check_close(rows, attention_rows.reference(query, key, index, mask, **options), atol)
    sizes = {} if block is None else {"block": block}
    means = attention_column_means.triton(*move_to(device, (query, key, valid, mask)), **sizes, **options)
    check_close(means, attention_column_means.reference(query, key, valid, mask, **options), atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "bias"])
def test_kernels_in_half_precision(dtype: torch.dtype, kind: str, kernel_device: torch.device) -> None:
    """Only the input is rounded: products are summed in float32."""
    query, key, mask, options = draw_inputs((1, 4, 2, 9, 21, 12), dtype, kind)
    check_kernels(kernel_device, query, key, torch.tensor([[8, 0]]), mask, options, block=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_on_heads_wider_than_a_block(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """The width is summed in parts, with an incomplete last part at 72, the width of SigLIP's heads."""
    query, key, mask, options = draw_inputs((1, 6, 2, 9, 21, 72), dtype, "bool")
    check_kernels(kernel_device, query, key, torch.tensor([[8, 4]]), mask, options, atol=5e-6)


def test_kernels_with_softcap(kernel_device: torch.device) -> None:
    query, key, mask, options = draw_inputs((1, 2, 1, 9, 21, 12), kind="bias")
    check_kernels(kernel_device, query, key, torch.tensor([[8, 3]]), mask, options | {"softcap": 1.5})


def test_kernels_with_memory_in_any_order(kernel_device: torch.device) -> None:
    """Keys inside a longer cache, strided queries and one mask for all rows and queries."""
    query, key, _, options = draw_inputs((2, 2, 1, 3, 21, 8))
    query = query.transpose(2, 3).contiguous().transpose(2, 3)
    key = torch.full((2, 1, 30, 8), torch.nan).index_copy(2, torch.arange(4, 25), key)[:, :, 4:25]
    index, mask = torch.tensor([[2]]).expand(2, 1), torch.rand(1, 1, 1, 30) > 0.5
    check_kernels(kernel_device, query, key, index, mask, options)


def test_padding_longer_than_a_block(kernel_device: torch.device) -> None:
    """Left padding hides the first block of keys completely."""
    query, key, _, options = draw_inputs((1, 1, 1, 37, 37, 8))
    valid = torch.arange(37)[None] >= 20
    check_kernels(kernel_device, query, key, torch.tensor([[36]]), valid, options, valid=valid)


@pytest.mark.parametrize("form", ["flat", "bool", "bias"])
def test_values_at_padding_are_ignored(form: str) -> None:
    query, key, _, options = draw_inputs((2, 2, 1, 9, 9, 8))
    valid = torch.arange(9) >= torch.tensor([[4], [0]])
    visible = (valid[:, None] & torch.ones(9, 9, dtype=torch.bool).tril())[:, None]
    bias = torch.zeros(2, 1, 9, 9).masked_fill(~visible, -torch.inf)
    mask, padding = {"flat": valid, "bool": visible, "bias": bias}[form], ~valid[:, None, :, None]
    with_nan = query.masked_fill(padding, torch.nan), key.masked_fill(padding, torch.nan)
    index = torch.tensor([[8, 2, 5], [8, 2, 5]])  # index 2 is padding in the first row
    got, want = (attention_rows.reference(*pair, index, mask, **options) for pair in (with_nan, (query, key)))
    assert torch.equal(got, want)
    got, want = (attention_column_means.reference(*pair, valid, mask, **options) for pair in (with_nan, (query, key)))
    assert torch.equal(got, want) and (got[0, :, :4] == 0).all()


def test_equal_keys_have_equal_shares(kernel_device: torch.device) -> None:
    query, key, _, options = draw_inputs((1, 2, 2, 1, 40, 8))
    key = key[:, :, :1].expand(-1, -1, 40, -1)
    got = attention_rows.triton(*move_to(kernel_device, (query, key, torch.tensor([[0]]))), block_keys=16, **options)
    assert (got == got[0, 0, 0, 0]).all()
    check_close(got, torch.full((1, 2, 1, 40), 1 / 40))


def test_large_logits_do_not_overflow(kernel_device: torch.device) -> None:
    query, key, _, options = draw_inputs((1, 1, 1, 20, 20, 8))
    check_kernels(kernel_device, 300 * query, key, torch.tensor([[19]]), None, options, atol=1e-4)


def test_empty_inputs(kernel_device: torch.device) -> None:
    query, key, _, options = draw_inputs((1, 2, 1, 3, 5, 4))
    arguments = [*move_to(kernel_device, (query, key, torch.zeros(1, 0, dtype=torch.long)))]
    assert attention_rows.triton(*arguments, **options).shape == (1, 2, 0, 5)
    assert attention_rows.triton(*arguments, heads="mean", **options).shape == (1, 0, 5)
    assert attention_column_means.triton(arguments[0][:, :, :0], arguments[1], **options).shape == (1, 2, 0)


def test_the_whole_model_runs_on_the_kernels(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenprune.kernels.observation import Observation

    query, key, mask, options = draw_inputs((2, 4, 2, 5, 7, 6), kind="of_keys")
    observation = Observation(*move_to(kernel_device, (query, key, mask)), options["scaling"])
    index, valid = torch.tensor([[4], [2]]).to(kernel_device), torch.ones(2, 5, dtype=torch.bool, device=kernel_device)
    monkeypatch.setenv("TOKENPRUNE_KERNELS", "reference")
    want = observation.rows(index), observation.column_means(valid)
    monkeypatch.setenv("TOKENPRUNE_KERNELS", "triton")
    check_close(observation.rows(index), want[0])
    check_close(observation.column_means(valid), want[1])


# -- real shapes

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: shapes of 7B models")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 32, 32, 640, 640, 128), (1, 32, 32, 2943, 2943, 128), (2, 28, 4, 4133, 4133, 128), (4, 16, 16, 729, 729, 72)],
    ids=str,
)
def test_kernels_on_real_shapes(shape: tuple, dtype: torch.dtype, kernel_device: torch.device) -> None:
    batch, heads, kv_heads, queries, keys, width = shape
    g = torch.Generator(kernel_device).manual_seed(0)
    query = torch.randn(batch, queries, heads, width, generator=g, device=kernel_device, dtype=dtype).transpose(1, 2)
    key = torch.randn(batch, keys, kv_heads, width, generator=g, device=kernel_device, dtype=dtype).transpose(1, 2)
    options = dict(scaling=width**-0.5, causal=width == 128)
    index = torch.full((batch, 1), queries - 1, device=kernel_device)
    for reduce in (None, "mean", "max", "sum"):
        got = attention_rows.triton(query, key, index, heads=reduce, **options)
        check_close(got, attention_rows.reference(query, key, index, heads=reduce, **options), atol=1e-5)
    valid = torch.ones(batch, queries, dtype=torch.bool, device=kernel_device)
    valid[0, :33] = False
    got = attention_column_means.triton(query, key, valid, **options)
    check_close(got, attention_column_means.reference(query, key, valid, **options), atol=1e-5)
    assert torch.equal(got, attention_column_means.triton(query, key, valid, **options))
