# SPDX-License-Identifier: Apache-2.0
"""Dropping units before a packed tower, against the unpatched tower with the columns of dropped units masked."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES
from oracle import close, generate_logits, reduced, survivors
from tests.unit.tower.test_encoder import with_features
from tests.unit.tower.test_packed_encoder import order_of_windows
from tokenprune import OptionError, Site
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.models.families import SUPPORTED
from tower_attention import attending_by

NAMES = sorted(name for name, family in FAMILIES.items() if SUPPORTED[family.kind].tower_rows == "all images")
# One tower of each kind: full attention, windows, deepstack, a convolution before the merger.
DIFFERENT = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
UNIT = 4
MODALITIES = {"image": "pixel_values", "video": "pixel_values_videos"}
BATCHES = {"left": {}, "ragged": {"images": (2, 1)}, "text beside": {"images": (0, 2)}, "video": {"video": True}}


def drawn(inputs: Any, seed: int = 0) -> Any:
    """Return the same inputs with repetitive images: areas of one colour, and some units of noise."""
    g, inputs = torch.Generator().manual_seed(seed), copy.copy(inputs)
    for modality, name in MODALITIES.items():
        if inputs.get(name) is None:
            continue
        images, width = [], inputs[name].shape[1]
        for t, h, w in inputs[f"{modality}_grid_thw"].tolist():
            frame = torch.full((h // 2, w // 2, UNIT * width), 0.5)
            frame[1:, 1:3] = -0.7
            detail = torch.rand(h // 2, w // 2, generator=g) < 0.3
            frame[detail] = torch.randn(int(detail.sum()), UNIT * width, generator=g)
            frames = frame.repeat(t, 1, 1, 1)
            moves = torch.rand(t, h // 2, w // 2, generator=g) < 0.2
            frames[moves] = torch.randn(int(moves.sum()), UNIT * width, generator=g)
            images.append(frames.reshape(-1, width))
        inputs[name] = torch.cat(images)
    return inputs


def base_of(model: Any) -> Any:
    return model.model if hasattr(model.model, "get_image_features") else model


def tower_of(model: Any) -> Any:
    return getattr(base_of(model), "visual", None) or base_of(model).vision_model


def encode(model: Any, inputs: Any) -> dict[str, Any]:
    """Return the features of the images and videos of a batch."""
    return {
        modality: getattr(base_of(model), f"get_{modality}_features")(inputs[name], inputs[f"{modality}_grid_thw"])
        for modality, name in MODALITIES.items()
        if inputs.get(name) is not None
    }


def kept_by(method: Any, inputs: Any, most: Any = lambda units: 10**6) -> dict[str, list[Tensor]]:
    """Return the mask of the units that the method keeps of each image, computed from the pixels."""
    found = {}
    for modality, name in MODALITIES.items():
        if inputs.get(name) is None:
            continue
        found[modality], start = [], 0
        for t, h, w in inputs[f"{modality}_grid_thw"].tolist():
            own = inputs[name][start : start + t * h * w]
            keep = method.keep_units(own.reshape(t, h // 2, w // 2, -1), most(t * h * w // UNIT))
            found[modality].append(keep.flatten())
            start += t * h * w
    return found


@contextmanager
def masked(tower: Any, grids: Tensor, keep: list[Tensor], first: int = 0) -> Iterator[None]:
    """Mask the patches of dropped units in `tower` within the context, from the block at `first` on.

    Dropped patches still attend to everything. The sequences of each block are in the order of its input.
    """
    side = tower.window_size // 2 // tower.patch_size if hasattr(tower, "window_size") else 10**6
    order = []
    for (t, h, w), units in zip(grids.tolist(), keep, strict=True):
        window = order_of_windows(h // 2, w // 2, side) if side < 10**6 else list(range(h * w // UNIT))
        for frame in units.view(t, -1):
            order.append(frame[window])
    seen = torch.cat(order).repeat_interleave(UNIT)
    done: dict[int, int] = {}
    before = {id(block.attn) for block in tower.blocks[:first]}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        start, width = done.get(id(module), 0), key.shape[2]
        done[id(module)] = (start + width) % len(seen)
        allowed = seen[start : start + width] | torch.eye(width, dtype=torch.bool) | (id(module) in before)
        logits = (query @ key.transpose(2, 3) * kwargs["scaling"]).masked_fill(~allowed, -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    configs = {id(block.attn.config): block.attn.config for block in tower.blocks}.values()
    with attending_by(attention, configs):
        yield
    assert not any(done.values()) and len(done) == len(tower.blocks)


def tensors_of(output: Any) -> list[Tensor]:
    """Return the features that a model uses, one row per unit: features of the last block and of deepstack layers."""
    pooled = output.pooler_output
    deep = list(getattr(output, "deepstack_features", None) or [])
    return [one if isinstance(one, Tensor) else torch.cat(list(one)) for one in (pooled, *deep)]


@pytest.mark.parametrize(("name", "keep"), [*((name, None) for name in NAMES), *((name, 0.4) for name in DIFFERENT)])
@torch.no_grad()
def test_tower_on_kept_units_matches_masked_tower(name: str, keep: float | None, build) -> None:
    family = FAMILIES[name]
    model, method = build(family), tokenprune.method("pixelprune")
    batches = [family.make_inputs(images=(2, 1))]
    batches += [family.make_inputs(images=(0, 0), video=True)] if family.video else []
    for inputs in map(drawn, batches):
        most = (lambda units: 10**6) if keep is None else lambda units: max(1, round(keep * units))
        wanted = kept_by(method, inputs, most)
        with tokenprune.patched(model, method, keep=keep):
            got = encode(model, inputs)
        for modality, images in wanted.items():
            kept = torch.cat(images)
            assert 1 < int(kept.sum()) < len(kept)
            assert all(map(torch.equal, get_record(got[modality]).kept, images))
            assert get_record(got[modality]).block_tokens == [UNIT * int(kept.sum())] * len(tower_of(model).blocks)
            with masked(tower_of(model), inputs[f"{modality}_grid_thw"], images):
                want = encode(model, inputs)[modality]
            for mine, theirs in zip(tensors_of(got[modality]), tensors_of(want), strict=True):
                close(mine[kept], theirs[kept])
                assert torch.equal(mine[~kept], mine[~kept][:1].expand_as(mine[~kept]))  # the output for zeros


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_blocks_and_merger_run_only_on_kept_units(name: str, attn: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family, attn), drawn(family.make_inputs(images=(2, 1)))
    tower, rows, pieces = tower_of(model), [], []
    handles = [m.register_forward_hook(lambda m, args, out: rows.append(len(args[0]))) for m in (tower.merger,)]
    for block in tower.blocks:
        handles += [
            block.mlp.register_forward_hook(lambda m, args, out: rows.append(len(args[0]))),
            block.attn.register_forward_pre_hook(
                lambda m, args, kwargs: pieces.append(kwargs["cu_seqlens"].tolist()), with_kwargs=True
            ),
        ]
    kept = kept_by(tokenprune.method("pixelprune"), inputs)["image"]
    with tokenprune.patched(model, "pixelprune"):
        model(**inputs)
        stats = tokenprune.stats(model)
    for handle in handles:
        handle.remove()
    counts = [UNIT * int(image.sum()) for image in kept]
    merged = sum(counts) // UNIT if name == "glm4v" else sum(counts)
    assert rows == [sum(counts)] * len(tower.blocks) + [merged]
    assert stats.encoder_tokens_per_layer == [sum(counts)] * len(tower.blocks)
    assert stats.visual_tokens_out == sum(counts) // UNIT
    whole = [0, *torch.tensor(counts).cumsum(0).tolist()]
    for index, piece in enumerate(pieces):
        assert piece[-1] == sum(counts) and all(a < b for a, b in pairwise(piece))
        assert piece == whole or (hasattr(tower, "window_size") and index not in tower.fullatt_block_indexes)


@torch.no_grad()
def test_empty_window_is_removed(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs, found = build(family), drawn(family.make_inputs(only=0)), []
    inputs["pixel_values"] = torch.full_like(inputs["pixel_values"], 0.5)
    inputs["pixel_values"][-1] = 1.0  # the first and the last unit are kept
    tower = tower_of(model)
    handle = tower.blocks[0].register_forward_hook(
        lambda m, args, kwargs, out: found.append(kwargs["cu_seqlens"].tolist()), with_kwargs=True
    )
    with tokenprune.patched(model, "pixelprune"):
        model(**inputs)
    handle.remove()
    assert found == [[0, UNIT, 2 * UNIT]]


@pytest.mark.parametrize(
    ("batch", "method"),
    [*((batch, "pixelprune") for batch in BATCHES), ("ragged", ["pixelprune", "pool", "dart"]),
     ("video", ["pixelprune", "fastv"])],
)  # fmt: skip
@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_decoder_matches_masked_decoder(name: str, batch: str, method: Any, build) -> None:
    """Compare with the unpatched model on the same features, with the columns of dropped tokens masked."""
    family = FAMILIES[name]
    if batch == "video" and not family.mixes:
        inputs = drawn(family.make_inputs(images=(0, 0), video=True))
    else:
        inputs = drawn(family.make_inputs(**BATCHES[batch]))
    model = build(family)
    with tokenprune.patched(model, method, keep=0.6, record=True):
        logits, stats = model(**inputs).logits, tokenprune.stats(model)
        got, tokens, _ = generate_logits(model, inputs, 3)
        cuts = tokenprune.stats(model).cuts
        outputs = encode(model, inputs)
    assert (cuts[0].site, cuts[0].layer, cuts[0].method, cuts[0].sources) == (Site.IN_ENCODER, 0, "pixelprune", None)
    length = inputs["input_ids"].shape[1]
    alive = survivors(stats.cuts[-1], length)
    with as_encoded(model, outputs):
        with reduced(family, model, stats.cuts, length):
            close(logits[alive], model(**inputs).logits[alive])
        with reduced(family, model, cuts, length):
            want, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    close(got, want)


@contextmanager
def as_encoded(model: Any, outputs: dict[str, Any]) -> Iterator[None]:
    """Return the unpatched model with the image and video features of a patched tower."""
    base = base_of(model)
    if "video" in outputs:
        base.get_video_features = lambda pixel_values_videos, video_grid_thw=None, **kwargs: copy.copy(outputs["video"])
    try:
        if "image" in outputs:
            with with_features(model, outputs["image"]):
                yield
        else:
            yield
    finally:
        base.__dict__.pop("get_video_features", None)


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_kept_tokens_keep_their_positions(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs, places = build(family), drawn(family.make_inputs(images=(2, 1))), []

    def note(module: Any, args: tuple, kwargs: dict) -> None:
        places.append(kwargs["position_ids"])

    model(**inputs)  # rope_deltas are stored on the model
    decoder = model.get_submodule(family.decoder)
    with tokenprune.patched(model, "pixelprune", record=True):
        handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
        model(**inputs)
        kept = tokenprune.stats(model).cuts[-1].kept
        handle.remove()
    handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
    model(**inputs)
    handle.remove()
    for row, positions in enumerate(kept):
        assert torch.equal(places[0][:, row, -len(positions) :], places[1][:, row, positions])


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_selection_does_not_depend_on_other_images(name: str, build) -> None:
    family, start = FAMILIES[name], 0
    model, inputs = build(family), drawn(family.make_inputs(images=(2, 2), sizes=((8, 12), (8, 12), (6, 10))))
    first = inputs["image_grid_thw"][0].prod()
    inputs["pixel_values"][first : 2 * first] = inputs["pixel_values"][:first]
    with tokenprune.patched(model, "pixelprune", keep=0.4):
        batch = encode(model, inputs)["image"]
        kept = get_record(batch).kept
        assert torch.equal(kept[0], kept[1])
        for image, grid in enumerate(inputs["image_grid_thw"]):
            pixels = inputs["pixel_values"][start : start + grid.prod()]
            alone = encode(model, {"pixel_values": pixels, "image_grid_thw": grid[None]})["image"]
            assert torch.equal(kept[image], get_record(alone).kept[0])
            close(tensors_of(batch)[0].split([len(one) for one in kept])[image], tensors_of(alone)[0], 1e-6)
            start += grid.prod()


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_images_without_repetition_are_unchanged(name: str, build) -> None:
    """Noise keeps all units: the output is bit-equal to the unpatched model, as with keep=1.0."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    want = model(**inputs).logits
    with tokenprune.patched(model, "pixelprune"):
        assert torch.equal(model(**inputs).logits, want)
        assert tokenprune.stats(model).visual_tokens_out == sum(map(sum, inputs.counts))
        assert tokenprune.stats(model).cuts == []
    inputs = drawn(inputs)
    want = model(**inputs).logits
    with tokenprune.patched(model, "pixelprune", keep=1.0):
        assert torch.equal(model(**inputs).logits, want)
    with tokenprune.patched(model, "pixelprune", keep=10**4):  # more than any image has, so no limit
        assert not torch.equal(model(**inputs).logits, want)


@torch.no_grad()
def test_colours_match_the_processor(build) -> None:
    """A threshold refers to colours in 0..1, for any normalization of the processor."""
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), family.make_inputs(only=0)
    mean, std = [0.3, 0.4, 0.5], [0.1, 0.2, 0.4]
    _, h, w = inputs["image_grid_thw"][0].tolist()
    ramp = torch.arange(h * w // UNIT).repeat_interleave(UNIT)[:, None, None] * 0.01
    shape = (h * w, 3, inputs["pixel_values"].shape[1] // 3)
    normalised = (ramp.expand(shape) - torch.tensor(mean)[:, None]) / torch.tensor(std)[:, None]
    inputs["pixel_values"] = normalised.flatten(1)
    processor = SimpleNamespace(image_processor=SimpleNamespace(image_mean=mean, image_std=std))
    kept = []
    for threshold in (0.009, 0.011):
        method = tokenprune.method("pixelprune", threshold=threshold, anchored=False)
        with tokenprune.patched(model, method, processor=processor):
            kept.append(int(get_record(encode(model, inputs)["image"]).kept[0].sum()))
    # Neighbours in a row differ by one step, rows by a row's length: the first unit of each row is kept.
    assert kept == [h * w // UNIT, h // 2]
    with pytest.raises(OptionError, match=r"threshold=0.02 is a distance of color values.*Pass processor="):
        tokenprune.patch(model, "pixelprune", threshold=0.02)
