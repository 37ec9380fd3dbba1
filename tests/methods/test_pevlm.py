# SPDX-License-Identifier: Apache-2.0
"""pevlm inside real models: against the unpatched model with a dense mask written from the rule, and its invariants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

import tests.engine.test_modes  # noqa: F401  (registers flash_stand_in)
import tokenprune
from dense_blocks import dense_mask
from oracle import close, generate_logits, reduced, seen_before
from tests.kernels.test_block_attention import naive_ids
from tokenprune import BudgetError, OptionError, UnsupportedSetupError
from tokenprune.frames import Visual
from tokenprune.integrations.hf.attention.observer import Observer, Tap
from tokenprune.kernels.block_attention import PADDING, SINK, TAIL
from zoo import FAMILIES, VIDEO, Family

VIDEO_FAMILIES = [family for family in FAMILIES.values() if family.video]
SINK_FRAMES, BLOCK_FRAMES = 2, 4
SMALL = dict(sink_frames=SINK_FRAMES, block_frames=BLOCK_FRAMES, min_frames=1)
WAYS = (nullcontext, dense_mask)  # as the library computes it, and its reference
# A prompt beside it without video, or with another number of frames where the family can batch these.
BATCHES: dict[str, dict[str, Any]] = {
    "one row": dict(video=13, images=(0,), rows=1),
    "left": dict(video=(13, 13), images=(0, 0)),
    "right": dict(video=(13, 13), images=(0, 0), padding="right"),
    "mixed": dict(video=13, images=(0, 1)),
    "image after": dict(video=13, images=(1, 0), padding="right"),
    "no padding": dict(video=(13, 13), images=(0, 0), padding=None),
}


@pytest.fixture(params=VIDEO_FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def visuals_of(inputs: Any, row: int, frames: int) -> list[Visual]:
    """The videos (of `frames` frames) and images of a row, read off the prompt's ids."""
    ids, visuals = inputs["input_ids"][row].tolist(), []
    places = [position for position, token in enumerate(ids) if token in (VIDEO, VIDEO - 1)]
    for count in inputs.counts[row]:
        mine, places = places[:count], places[count:]
        number = frames if ids[mine[0]] == VIDEO else 1
        size = count // number
        ends = [*(mine[(n + 1) * size - 1] + 1 for n in range(number - 1)), mine[-1] + 1]
        visuals.append(Visual("video" if number > 1 else "image", tuple(zip(mine[::size], ends, strict=False))))
    return visuals


def block_ids(inputs: Any, frames: int = 13, sink: int = SINK_FRAMES, block: int = BLOCK_FRAMES) -> Tensor:
    """long [B, L]: the block of each token, from the rule."""
    rows = []
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        visuals, end = visuals_of(inputs, row, frames), int(mask.nonzero()[-1]) + 1
        blocked = any(visual.modality == "video" for visual in visuals)
        ids = naive_ids(visuals, end, sink, block) if blocked else [SINK] * end
        ids = torch.tensor(ids + [SINK] * (len(mask) - end))
        rows.append(ids.masked_fill(~mask, PADDING))
    return torch.stack(rows)


@contextmanager
def blocked(family: Family, model: Any, ids: Tensor, dense: tuple[int, ...] = ()) -> Iterator[Any]:
    """Within, the unpatched model's layers mask, in prefill, what a token must not see."""
    query, key = ids[:, :, None], ids[:, None, :]
    allowed = ((key == SINK) | (key == query) | (query == TAIL)) & (key != PADDING)
    allowed = allowed.tril() | torch.eye(ids.shape[1], dtype=torch.bool)
    handles = []
    for index, layer in enumerate(model.get_submodule(family.decoder).layers):

        def enter(module: Any, args: tuple, kwargs: dict, index: int = index) -> tuple:
            if not seen_before(kwargs.get("past_key_values"), index):
                kwargs = kwargs | {"attention_mask": allowed[:, None]}
            return args, kwargs

        if index not in dense:
            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


def real_of(inputs: Any) -> Tensor:
    return inputs["attention_mask"].bool()


@pytest.mark.parametrize("batch", BATCHES)
@torch.no_grad()
def test_equals_a_dense_mask(batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    ids, real = block_ids(inputs), real_of(inputs)
    with blocked(family, model, ids):
        want = model(**inputs).logits[real]
    assert (model(**inputs).logits[real] - want).abs().max() > 0.1  # it is not full attention
    for way in WAYS:
        with tokenprune.patched(model, "pevlm", **SMALL), way():
            out = model(**inputs)
            stats = tokenprune.stats(model)
        close(out.logits[real], want)
    length = inputs["input_ids"].shape[1]
    assert all(layer.keys.shape[-2] == length for layer in out.past_key_values.layers)
    assert stats.visual_tokens_in == stats.visual_tokens_out and stats.kv_bytes == stats.kv_bytes_full
    assert stats.attention_blocks == sum(len(set(row) - {PADDING, SINK, TAIL}) for row in ids.tolist())
    without = sum(VIDEO not in row for row in inputs["input_ids"].tolist())
    assert stats.notes == ["pevlm: full attention for a prompt, because it holds no video"] * without


@pytest.mark.parametrize("batch", ["one row", "left", "mixed"])
def test_generate(batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    with tokenprune.patched(model, "pevlm", **SMALL):
        got, tokens, _ = generate_logits(model, inputs, 3)
    with blocked(family, model, block_ids(inputs)):
        close(got, generate_logits(model, inputs, 3, tokens=tokens)[0])


@pytest.mark.parametrize("families", ["qwen2_vl", "qwen3_vl"])
@torch.no_grad()
def test_rows_with_different_frames(families: str, build) -> None:
    """A batch gives what its rows give alone."""
    family = FAMILIES[families]
    model, inputs = build(family), family.make_inputs(video=(13, 7), images=(0, 0))
    with tokenprune.patched(model, "pevlm", **SMALL):
        together = model(**inputs).logits
        for row, mask in enumerate(real_of(inputs)):
            alone = family.make_inputs(video=(13, 7), images=(0, 0), only=row)
            close(together[row, mask], model(**alone).logits[0])


@torch.no_grad()
def test_rows_that_are_alike(build) -> None:
    """Rows of the same lengths are computed together, and come back in their places."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(**BATCHES["left"])
    twice = {key: value.repeat(2, *[1] * (value.ndim - 1)) for key, value in inputs.items()}
    with tokenprune.patched(model, "pevlm", **SMALL):
        close(model(**twice).logits, model(**inputs).logits.repeat(2, 1, 1))


@pytest.mark.parametrize("batch", ["left", "mixed"])
def test_beams(batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    beams = dict(max_new_tokens=3, num_beams=3, return_dict_in_generate=True, output_scores=True)
    with tokenprune.patched(model, "pevlm", **SMALL):
        got = model.generate(**inputs, **beams)
        assert tokenprune.stats(model).attention_blocks == 3 * 3 * (2 if batch == "left" else 1)
    with blocked(family, model, block_ids(inputs).repeat_interleave(3, 0)):
        want = model.generate(**inputs, **beams)
    assert torch.equal(got.sequences, want.sequences)
    close(got.sequences_scores, want.sequences_scores)


@torch.no_grad()
def test_one_block_and_a_large_sink_are_full_attention(family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    full = model(**inputs).logits
    with tokenprune.patched(model, "pevlm", sink_frames=2, block_frames=11, min_frames=1):
        got = model(**inputs).logits
        assert tokenprune.stats(model).attention_blocks == 1
        assert tokenprune.stats(model).prefill_flops_ratio == pytest.approx(1)
    close(got, full)
    with tokenprune.patched(model, "pevlm", sink_frames=13, min_frames=1):
        assert torch.equal(model(**inputs).logits, full)
        assert "sink holds all" in tokenprune.stats(model).notes[0]


@torch.no_grad()
def test_sink_and_first_block_are_those_of_full_attention(family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    ids = block_ids(inputs)[0]
    full = model(**inputs, output_hidden_states=True).hidden_states
    with tokenprune.patched(model, "pevlm", **SMALL):
        got = model(**inputs, output_hidden_states=True).hidden_states
    for layer, (one, other) in enumerate(zip(got, full, strict=True)):
        for part in (SINK, 1):
            close(one[0, ids == part], other[0, ids == part])
        # The tail's own row of the mask is that of full attention: it differs once the keys do.
        for part, from_layer in ((2, 1), (TAIL, 2)):
            differs = (one - other)[0, ids == part].abs().amax()
            assert (differs > 1e-3) == (layer >= from_layer)


def swapped(inputs: Any, ids: Tensor, a: int, b: int, frames: int) -> Any:
    """The prompt with blocks `a` and `b` of its one video in each other's place, text between frames too."""
    other = {key: value.clone() for key, value in inputs.items()}
    of_frame = [int(ids[first]) for first, _ in visuals_of(inputs, 0, frames)[0].frames]
    x, y = ([number for number, block in enumerate(of_frame) if block == which] for which in (a, b))
    order = list(range(frames))
    for i, j in zip(x, y, strict=True):
        order[i], order[j] = j, i
    pixels = other["pixel_values_videos"]
    if pixels.ndim == 5:
        other["pixel_values_videos"] = pixels[:, order]
    else:
        other["pixel_values_videos"] = pixels.unflatten(0, (frames, -1))[order].flatten(0, 1)
    other["input_ids"][0, ids == a], other["input_ids"][0, ids == b] = (
        inputs["input_ids"][0, ids == b],
        inputs["input_ids"][0, ids == a],
    )
    return other


@torch.no_grad()
def test_blocks_do_not_see_each_other(family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    ids = block_ids(inputs)[0]
    other = {key: value.clone() for key, value in inputs.items()}
    pixels = other["pixel_values_videos"]  # frames 6 to 9 are block 2
    frames = pixels[0] if pixels.ndim == 5 else pixels.unflatten(0, (13, -1))
    frames[6:10] = torch.randn_like(frames[6:10])
    with tokenprune.patched(model, "pevlm", **SMALL):
        one = model(**inputs, output_hidden_states=True).hidden_states
        two = model(**other, output_hidden_states=True).hidden_states
    for layer, (a, b) in enumerate(zip(one, two, strict=True)):
        for part in (SINK, 1, 3):
            assert torch.equal(a[0, ids == part], b[0, ids == part])
        assert not torch.equal(a[0, ids == 2], b[0, ids == 2])
        assert (not torch.equal(a[0, ids == TAIL], b[0, ids == TAIL])) == (layer > 0)


@torch.no_grad()
def test_order_of_blocks(family: Family, build) -> None:
    """With positions used again, equal blocks can change places; with those of full attention, order is felt."""
    model, inputs = build(family), family.make_inputs(video=14, images=(0,))
    ids = block_ids(inputs, 14)[0]
    assert (ids == 1).sum() == (ids == 2).sum()
    other = swapped(inputs, ids, 1, 2, 14)
    for mode in ("reuse", "sequential"):
        with tokenprune.patched(model, "pevlm", **SMALL, position_mode=mode):
            one, two = model(**inputs), model(**other)
        for a, b in zip(one.past_key_values.layers, two.past_key_values.layers, strict=True):
            if mode == "reuse":
                for kind in ("keys", "values"):
                    x, y = getattr(a, kind)[0], getattr(b, kind)[0]
                    close(x[:, ids == 1], y[:, ids == 2])
                    close(x[:, ids == 2], y[:, ids == 1])
                    close(x[:, ids == 3], y[:, ids == 3])
        differs = (one.logits - two.logits)[0, ids == TAIL].abs().max()
        assert differs < 1e-3 if mode == "reuse" else differs > 0.1


def positions_of(family: Family, model: Any, inputs: Any, steps: int) -> list[Tensor | None]:
    """What the rotary embedding is given in prefill and each decode step."""
    seen, decoder = [], model.get_submodule(family.decoder)
    handle = decoder.rotary_emb.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1]),
        with_kwargs=True,
    )
    try:
        model.generate(**inputs, max_new_tokens=steps)
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("batch", ["left", "mixed"])
def test_positions(batch: str, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    full = positions_of(family, model, inputs, 4)
    with tokenprune.patched(model, "pevlm", **SMALL):
        got = positions_of(family, model, inputs, 4)
    with tokenprune.patched(model, "pevlm", **SMALL, position_mode="reuse"):
        reuse = positions_of(family, model, inputs, 4)
    assert len(got) == 4 and all(torch.equal(a, b) for a, b in zip(got, full, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(reuse[1:], full[1:], strict=True))
    ids = block_ids(inputs)
    for row, of_row in enumerate(ids):
        fixed = (of_row <= 1) | (of_row == TAIL)
        assert torch.equal(reuse[0][..., row, fixed], full[0][..., row, fixed])
        for block in range(2, 1 + int(of_row[of_row < TAIL].max())):
            of_block, of_first = (reuse[0][..., row, of_row == which] for which in (block, 1))
            shared = min(of_block.shape[-1], of_first.shape[-1])
            assert torch.equal(of_block[..., :shared], of_first[..., :shared])


# -- composed ----------------------------------------------------------------------------------------------------------

COMPOSED = [
    ("random", "mixed"),
    ("divprune", "left"),
    ("pool", "mixed"),
    ("dart", "left"),
    ("fastv", "mixed"),
    ("uniform+fastv", "mixed"),
    ("random+dart", "left"),
]


@pytest.mark.parametrize(("names", "batch"), COMPOSED)
def test_composed(names: str, batch: str, family: Family, build) -> None:
    """Each token that is left is in the block of the frame that it came from."""
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    others = names.split("+")
    methods = [tokenprune.method("pevlm", **SMALL), *others]
    with tokenprune.patched(model, methods, keep=[1.0, *[0.5] * len(others)], record=True):
        got, tokens, _ = generate_logits(model, inputs, 2)
        cuts, blocks = tokenprune.stats(model).cuts, tokenprune.stats(model).attention_blocks
    assert len(cuts) == len(others) and blocks >= 3
    with blocked(family, model, block_ids(inputs)), reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want, _, _ = generate_logits(model, inputs, 2, tokens=tokens)
    close(got, want)


def test_last_row_attention_does_not_see_padding(family: Family, build) -> None:
    """FastV ranks as in each row alone, though no layer gets a mask."""
    model = build(family)
    inputs = family.make_inputs(video=(13, 13), images=(0, 0))
    methods, keep = [tokenprune.method("pevlm", **SMALL), "fastv"], [1.0, 0.3]

    def kept(inputs: Any) -> list[list[int]]:
        with torch.no_grad(), tokenprune.patched(model, methods, keep=keep, record=True):
            model(**inputs)
            return tokenprune.stats(model).cuts[0].kept

    for row, of_row in enumerate(kept(inputs)):
        (alone,) = kept(family.make_inputs(video=(13, 13), images=(0, 0), only=row))
        before = int((inputs["attention_mask"][row] == 0).sum())
        assert [position - before for position in of_row] == alone


@pytest.mark.parametrize("other", [None, "random", "fastv"])
@torch.no_grad()
def test_no_mask_of_all_pairs(other: str | None, build) -> None:
    """Padding, and rows that lose different numbers of tokens, make no layer get a dense mask."""
    family, masks, padding = FAMILIES["qwen2_5_vl"], [], []
    model, inputs = build(family), family.make_inputs(**BATCHES["mixed"])
    method = tokenprune.method("pevlm", **SMALL)
    with tokenprune.patched(model, [method, *([other] if other else [])], keep=[1.0, *([0.4] if other else [])]):
        handles = [
            layer.self_attn.register_forward_pre_hook(
                lambda m, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
            )
            for layer in model.get_submodule(family.decoder).layers
        ]
        handles.append(
            model.get_submodule(family.decoder).register_forward_pre_hook(
                lambda m, args, kwargs: padding.append(kwargs["attention_mask"]), with_kwargs=True
            )
        )
        model(**inputs)
        for handle in handles:
            handle.remove()
    assert masks == [None] * 4 and padding[0].all()


@pytest.mark.parametrize("first", ["observer", "computes"])
@pytest.mark.parametrize("leaves_first", ["observer", "computes"])
def test_two_at_one_module_in_any_order(first: str, leaves_first: str, build) -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs()
    module, seen = model.get_submodule(family.decoder).layers[1].self_attn, []
    full = model(**inputs).logits

    class Zero(Tap):
        def compute(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
            return torch.zeros_like(query.transpose(1, 2)), None

    taps = {"observer": Observer(module, seen.append), "computes": Zero(module)}
    order = sorted(taps, key=lambda name: name != first)
    for name in order:
        taps[name].attach()
    assert not torch.equal(model(**inputs).logits, full) and len(seen) == 1
    taps.pop(leaves_first).detach()
    assert torch.equal(model(**inputs).logits, full) == (leaves_first == "computes")
    for tap in taps.values():
        tap.detach()
    assert torch.equal(model(**inputs).logits, full)  # the fixture sees whether the module is as it was


# -- where it does nothing, and where it cannot ------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [dict(images=(2, 1)), dict(images=(0, 0))], ids=["images", "text"])
def test_no_video_is_bit_equal_and_said(batch: dict, family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**batch)
    before, tokens, _ = generate_logits(model, inputs, 3)
    with tokenprune.patched(model, "pevlm"):  # keep is 1.0 by itself
        got, got_tokens, _ = generate_logits(model, inputs, 3)
        stats = tokenprune.stats(model)
    assert torch.equal(got, before) and torch.equal(got_tokens, tokens)
    assert stats.notes == ["pevlm: full attention, because it holds no video"]
    assert stats.attention_blocks == 0 and stats.prefill_flops_ratio == 1


@torch.no_grad()
def test_what_keeps_full_attention(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(video=13, images=(1,))
    full = model(**inputs).logits

    def note(inputs: Any, want: Tensor | None = full, **options: Any) -> str:
        with tokenprune.patched(model, "pevlm", **{**SMALL, **options}):
            out = model(**inputs)
            assert want is None or torch.equal(out.logits, want)
            return "; ".join(tokenprune.stats(model).notes)

    assert "13 frames are fewer than min_frames=14" in note(inputs, min_frames=14)
    assert "more than one video or image" in note(inputs, only_single_video=True)
    length = inputs["input_ids"].shape[1]
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    own = {**inputs, "attention_mask": causal, "position_ids": torch.arange(length).expand(3, 1, -1)}
    assert "caller's own" in note(own, None)
    batch = family.make_inputs(video=13, images=(0, 1), padding=None)
    batch["attention_mask"][1, 2] = 0  # in the row without a video
    assert "has gaps" in note(batch, model(**batch).logits)
    ends = dict(family.make_inputs(video=13, images=(0,)))
    last = int((ends["input_ids"] == VIDEO).nonzero()[-1, 1]) + 1
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        ends[key] = ends[key][:, :last]
    assert "nothing follows" in note(ends, None)
    # Features of an unpatched model carry no grids.
    encoded = model.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True)
    images = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    bare = {key: value for key, value in inputs.items() if not key.startswith("pixel")}
    bare["mm_encoder_outputs"] = {"video": encoded, "image": images}
    assert "not known which tokens" in note(bare)


@torch.no_grad()
def test_later_turns(family: Family, build) -> None:
    """What follows a prefill in blocks attends to all of it; a video of a later turn is read with full attention."""
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    more = torch.arange(100, 104)[None]
    length = inputs["input_ids"].shape[1]
    turn = {"input_ids": more, "attention_mask": torch.ones(1, length + 4, dtype=torch.long)}
    if family.types:  # Qwen's positions: any will do that both are given
        turn["position_ids"] = torch.arange(length, length + 4).expand(3, 1, -1)
    with tokenprune.patched(model, "pevlm", **SMALL):
        cache = model(**inputs).past_key_values
        got = model(**turn, past_key_values=cache).logits
        again = {**inputs, "attention_mask": torch.ones(1, 2 * length + 4, dtype=torch.long)}
        if family.types:
            again["position_ids"] = torch.arange(length + 4, 2 * length + 4).expand(3, 1, -1)
        model(**again, past_key_values=cache)
        assert "earlier part of the conversation" in tokenprune.stats(model).notes[0]
    with blocked(family, model, block_ids(inputs)):
        cache = model(**inputs).past_key_values
        close(got, model(**turn, past_key_values=cache).logits)


@torch.no_grad()
def test_other_back_ends_and_caches(family: Family, build) -> None:
    inputs = family.make_inputs(**BATCHES["left"])
    with tokenprune.patched(build(family), "pevlm", **SMALL):
        want = build(family)(**inputs).logits[real_of(inputs)]
        close(build(family)(**inputs, use_cache=False).logits[real_of(inputs)], want)
    for way in WAYS:
        static = StaticCache(config=build(family).config.get_text_config(), max_cache_len=300)
        with tokenprune.patched(build(family), "pevlm", **SMALL), way():
            close(build(family)(**inputs, past_key_values=static).logits[real_of(inputs)], want)
            assert tokenprune.stats(build(family)).attention_blocks == 6
    for attention in ("eager", "flash_stand_in"):
        model = build(family, attention)
        with tokenprune.patched(model, "pevlm", **SMALL):
            close(model(**inputs).logits[real_of(inputs)], want)
        with tokenprune.patched(model, [tokenprune.method("pevlm", **SMALL), "divprune"], keep=[1.0, 0.5]):
            model(**inputs)


@torch.no_grad()
def test_dense_layers(family: Family, build) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES["left"])
    methods = [tokenprune.method("pevlm", **SMALL, dense_layers=[0, 3]), "fastv"]
    with tokenprune.patched(model, methods, keep=[1.0, 0.5], record=True):
        got, tokens, _ = generate_logits(model, inputs, 3)
        cuts = tokenprune.stats(model).cuts
    with (
        blocked(family, model, block_ids(inputs), dense=(0, 3)),
        reduced(family, model, cuts, inputs["input_ids"].shape[1]),
    ):
        close(got, generate_logits(model, inputs, 3, tokens=tokens)[0])


@torch.no_grad()
def test_flops_count_the_pairs(build) -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs(video=13, images=(0,))
    with tokenprune.patched(model, "pevlm", **SMALL, dense_layers=[1]):
        model(**inputs)
        ratio = tokenprune.stats(model).prefill_flops_ratio
    ids = block_ids(inputs)[0].tolist()
    length = len(ids)
    seen = sum(
        ids[j] in (SINK, ids[i]) or ids[i] == TAIL for i in range(length) for j in range(i + 1)
    )  # each pair that is computed, counted
    linear = 2 * length * 64 * (2 * 64 + 2 * 32 + 3 * 96)
    square = 4 * length**2 * 64
    part = linear + square * seen / (length * (length + 1) / 2)
    assert ratio == pytest.approx((3 * part + linear + square) / (4 * (linear + square)))


def test_gradients() -> None:
    family = FAMILIES["qwen3_vl"]
    model, inputs = family.build(), family.make_inputs(**BATCHES["mixed"])  # one of its own, to be trained
    weight = model.get_submodule(family.decoder).layers[1].self_attn.k_proj.weight
    grads = []
    for way in WAYS:
        with tokenprune.patched(model, "pevlm", **SMALL), way():
            model(**inputs).logits[real_of(inputs)].square().mean().backward()
        grads.append(weight.grad)
        model.zero_grad()
    close(*grads, tolerance=1e-4)
    model.gradient_checkpointing_enable()
    model.train()
    with (
        tokenprune.patched(model, "pevlm", **SMALL),
        pytest.raises(UnsupportedSetupError, match="gradient_checkpointing_disable"),
    ):
        model(**inputs)


def refused(model: Any, method: Any, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        tokenprune.patch(model, method, **options)
    assert not tokenprune.is_patched(model)


def test_what_is_refused(build) -> None:
    model = build(FAMILIES["qwen2_vl"])
    for keep in (0.5, 1, 64):
        refused(model, "pevlm", BudgetError, "removes no tokens", keep=keep)
    refused(model, ["divprune", "pevlm"], BudgetError, r"keep=\[0.25, 1.0\]", keep=0.5)
    everyone = [tokenprune.method("fastv", query="all"), "pevlm"]
    refused(model, everyone, OptionError, "never see", keep=[0.5, 1.0])
    refused(model, "pevlm", OptionError, r"dense_layers=\[4\]", dense_layers=[0, 4])
    refused(model, "pevlm", OptionError, "names all layers", dense_layers=[0, 1, 2, 3])
    refused(model, ["pevlm", "pevlm"], OptionError, "same place")
    for name, family in FAMILIES.items():
        if not family.video:
            refused(build(family), "pevlm", UnsupportedSetupError, f"{name}.*names no video token")


@torch.no_grad()
def test_sliding_windows() -> None:
    family = FAMILIES["qwen2_vl"]
    config = family.config["text_config"] | dict(use_sliding_window=True, sliding_window=16, max_window_layers=2)
    model = type(family)(**{**vars(family), "config": family.config | {"text_config": config}}).build()
    inputs = family.make_inputs(video=13, images=(0,))
    refused(model, "pevlm", UnsupportedSetupError, r"dense_layers=\[2, 3\]")
    with tokenprune.patched(model, "pevlm", **SMALL, dense_layers=[2, 3]):
        got = model(**inputs).logits
    with blocked(family, model, block_ids(inputs), dense=(2, 3)):
        close(got, model(**inputs).logits)


def test_the_benchmark_of_images_leaves_it_out() -> None:
    from tokenprune.bench.suite import patched

    with pytest.raises(UnsupportedSetupError, match="acts on videos"):
        patched(None, "pevlm", 1.0)
