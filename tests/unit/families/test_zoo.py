# SPDX-License-Identifier: Apache-2.0
"""Properties of the tiny models that other tests rely on."""

from __future__ import annotations

import pytest
import torch

from zoo import FAMILIES, FIRST_TEXT_ID, PAD, Family

MODELS: dict[str, torch.nn.Module] = {}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def model(family: Family) -> torch.nn.Module:
    if family.name not in MODELS:
        MODELS[family.name] = family.build()
    return MODELS[family.name]


def list_batches(family: Family) -> list[dict]:
    """Return options of `make_inputs` for all shapes of a batch."""
    options = [{}, dict(images=(2, 1)), dict(images=(1, 0)), dict(images=0), dict(rows=3, images=2)]
    return options + ([dict(video=True), dict(video=True, images=(0, 1))] if family.video else [])


@torch.no_grad()
def compute_logits(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    return model(**inputs).logits


def test_build_is_deterministic_and_leaves_the_random_state_alone(family: Family) -> None:
    state = torch.get_rng_state()
    first = family.build()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    second = family.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not first.training
    assert {p.dtype for p in first.parameters()} == {torch.float32}
    decoder = first.get_submodule(family.decoder)
    assert len(decoder.layers) == 4
    assert decoder.config.num_key_value_heads < decoder.config.num_attention_heads
    assert decoder.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("padding", ["left", "right", None])
def test_forward(family: Family, model: torch.nn.Module, padding: str | None) -> None:
    for options in list_batches(family):
        inputs = family.make_inputs(padding=padding, **options)
        out = compute_logits(model, inputs)
        assert out.shape[:2] == inputs["input_ids"].shape
        assert out.isfinite().all()
        assert out.std() > 0.5
        mask = inputs["attention_mask"]
        assert (mask == 0).any() == (padding is not None)
        assert torch.equal(mask == 0, inputs["input_ids"] == PAD)
        if padding is not None:
            edge = -1 if padding == "left" else 0
            assert mask[:, edge].all()


def test_rows_do_not_depend_on_the_batch(family: Family, model: torch.nn.Module) -> None:
    for options in list_batches(family):
        inputs = family.make_inputs(padding="left", **options)
        batch = compute_logits(model, inputs)
        for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
            single = family.make_inputs(padding="left", only=row, **options)
            assert torch.equal(single["input_ids"][0], inputs["input_ids"][row, -length:])
            torch.testing.assert_close(batch[row, -length:], compute_logits(model, single)[0], atol=2e-4, rtol=0)


def test_generate(family: Family, model: torch.nn.Module) -> None:
    for options in list_batches(family):
        inputs = family.make_inputs(**options)
        length = inputs["input_ids"].shape[1]
        new = model.generate(**inputs, max_new_tokens=8)[:, length:]
        assert new.shape == (len(inputs["input_ids"]), 8)
        assert (new >= FIRST_TEXT_ID).all()  # excludes placeholders, padding and end tokens
        assert torch.equal(new, model.generate(**inputs, max_new_tokens=8)[:, length:])
        # The first new token is the argmax of a plain forward.
        assert torch.equal(new[:, 0], compute_logits(model, inputs)[:, -1].argmax(-1))


def test_images_change_the_logits(family: Family, model: torch.nn.Module) -> None:
    inputs = family.make_inputs()
    before = compute_logits(model, inputs)[:, -1]
    pixels = inputs["pixel_values"].clone()
    # Row 0 has the first image for all layouts of the first axis: images, tiles, rows or patches.
    pixels[0] += 1.0
    after = compute_logits(model, {**inputs, "pixel_values": pixels})[:, -1]
    assert (after - before)[0].abs().max() > 0.05
    torch.testing.assert_close(after[1], before[1], atol=2e-5, rtol=0)


def test_single_visual_tokens_change_the_logits(family: Family, model: torch.nn.Module) -> None:
    """Swapped features of two visual tokens change the last logits, so images are not just averaged."""
    inputs = family.make_inputs(rows=1)
    first, *_, last = family.visual_mask(model, inputs)[0].nonzero().flatten().tolist()

    def swap(module, args, kwargs):
        embeds = kwargs["inputs_embeds"].clone()
        embeds[:, [first, last]] = embeds[:, [last, first]]
        return args, {**kwargs, "inputs_embeds": embeds}

    before = compute_logits(model, inputs)
    with model.get_submodule(family.decoder).register_forward_pre_hook(swap, with_kwargs=True):
        after = compute_logits(model, inputs)
    assert (after - before)[0, -1].abs().max() > 0.02


def test_counts(family: Family, model: torch.nn.Module) -> None:
    for options in list_batches(family):
        inputs = family.make_inputs(**options)
        mask = family.visual_mask(model, inputs)
        counts = family.visual_counts(model, inputs)
        assert mask.dtype == torch.bool and mask.shape == inputs["input_ids"].shape
        assert mask.sum(1).tolist() == [sum(row) for row in counts]
        assert all(count > 8 for row in counts for count in row)
        images = options.get("images", 1)
        images = [images] * options.get("rows", 2) if isinstance(images, int) else list(images)
        images[0] += options.get("video", False)
        assert [len(row) for row in counts] == images
    if len(family.sizes) > 1:
        row = family.visual_counts(model, family.make_inputs())
        assert row[0] != row[1]


@pytest.mark.parametrize("video", [False, True])
def test_token_types(video: bool) -> None:
    """Types mark the placeholders and change the output through M-RoPE positions or bidirectional image attention."""
    for family in FAMILIES.values():
        if family.types is None or (video and family.video is None):
            continue
        model = family.build()
        inputs = family.make_inputs(video=video)
        types = inputs[family.types]
        assert torch.equal(types > 0, family.visual_mask(model, inputs))
        assert (types == 2).any() == video
        plain = {key: value for key, value in inputs.items() if "pixel" not in key}
        blank = {**plain, family.types: torch.zeros_like(types)}
        assert (compute_logits(model, plain) - compute_logits(model, blank)).abs().max() > 0.05


def test_text_only(family: Family, model: torch.nn.Module) -> None:
    inputs = family.make_inputs(images=(0, 0))
    assert not any("pixel" in key or "grid" in key or "sizes" in key for key in inputs)
    assert not family.visual_mask(model, inputs).any()
    # An earlier image must not change later text.
    compute_logits(model, family.make_inputs())
    torch.testing.assert_close(compute_logits(model, inputs), compute_logits(family.build(), inputs), atol=0, rtol=0)


def test_seed_and_sizes(family: Family) -> None:
    first, same, other = family.make_inputs(seed=1), family.make_inputs(seed=1), family.make_inputs(seed=2)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["input_ids"], other["input_ids"])
    assert not torch.equal(first["pixel_values"], other["pixel_values"])
    for size in family.sizes:
        counts = family.make_inputs(sizes=[size]).counts
        assert counts[0] == counts[1]
    with pytest.raises(ValueError, match="rows"):
        family.make_inputs(rows=3, images=(1, 1))
