# SPDX-License-Identifier: Apache-2.0
"""Packed rows, which hold several samples without padding, are split, refused or noted, but never cut as one sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, DynamicCache, Trainer, TrainingArguments

import families
import tokenprune
from each import each
from tokenprune import UnsupportedSetupError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.sequence.packing import has_restart
from tokenprune.integrations.shared.checks import find_unsupported_reason
from zoo import FAMILIES, Family

ONE_AXIS = ("llava", "internvl", "smolvlm", "gemma3")
SEVERAL_AXES = ("qwen2_5_vl", "qwen3_vl")
# Their images are encoded before the base model, or have other argument names.
UNSPLIT = {"blip-2", "instructblip", "instructblipvideo", "fuyu"}


@pytest.fixture(params=families.FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return families.FAMILIES[request.param]


def pack_samples(family: Family, **options: bool) -> dict[str, Any]:
    """Return two samples with an image each in one row, from transformers' collator, with pixels and types."""
    samples = [family.make_inputs(only=row) for row in range(2)]
    inputs = DataCollatorWithFlattening(**options)([{"input_ids": sample["input_ids"][0]} for sample in samples])
    sizes, g = (family.sizes * 2)[:2], torch.Generator().manual_seed(7)
    pixels = family.collate([[family.image(size, g, 1) for size in sizes]])
    if family.types == "token_type_ids":
        inputs["token_type_ids"] = torch.cat([sample["token_type_ids"] for sample in samples], 1)
    return {name: value for name, value in inputs.items() if name != "labels"} | pixels


def number_samples(inputs: dict[str, Any]) -> torch.Tensor:
    """Return 1 at the tokens of the first sample, 2 at the second."""
    return (inputs["position_ids"] == 0).long().cumsum(-1)


def make_pair_mask(inputs: dict[str, Any]) -> torch.Tensor:
    sample = number_samples(inputs)
    return ((sample[:, None] == sample[:, :, None]) & torch.ones(sample.shape[1:] * 2).tril().bool())[:, None]


# Per argument that marks the samples: options of the collator, and additional arguments.
FORMATS = {
    "position_ids": ({}, lambda inputs: {}),
    "cu_seq_lens": (dict(return_flash_attn_kwargs=True), lambda inputs: {}),
    "seq_idx": (dict(return_seq_idx=True), lambda inputs: {}),
    "a numbered mask": ({}, lambda inputs: {"attention_mask": number_samples(inputs)}),
    "a mask of pairs": ({}, lambda inputs: {"attention_mask": make_pair_mask(inputs)}),
}


def make_packed(family: Family, form: str) -> dict[str, Any]:
    options, change = FORMATS[form]
    inputs = pack_samples(family, **options)
    inputs |= change(inputs)
    if family.name in SEVERAL_AXES:  # the text axis before the three axes marks the borders
        inputs["position_ids"] = inputs["position_ids"].expand(4, 1, -1)
    return inputs


def split_samples(family: Family, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a packed row as separate calls."""
    sample = (inputs["position_ids"].reshape(-1, inputs["input_ids"].shape[1])[0] == 0).long().cumsum(-1)
    sizes, g = (family.sizes * 2)[:2], torch.Generator().manual_seed(7)
    pixels = [family.collate([[family.image(size, g, 1)]]) for size in sizes]
    names = {"input_ids", "position_ids", "token_type_ids"} & inputs.keys()
    calls = []
    for index, image in enumerate(pixels, 1):
        arguments = {name: inputs[name][..., sample == index] for name in names}
        calls.append(arguments | {"attention_mask": torch.ones_like(arguments["input_ids"])} | image)
    return calls


@pytest.mark.pairwise
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("method", ["divprune", "fastv", "tome"])
@pytest.mark.parametrize("name", [*ONE_AXIS, *SEVERAL_AXES])
@torch.no_grad()
def test_packed_samples_equal_single_samples(name: str, method: str, form: str, build) -> None:
    """For each way to mark borders. With keep=1.0 the packed call is bit-equal to the unpatched model."""
    family = FAMILIES[name]
    if (name, form) == ("gemma3", "a mask of pairs"):
        pytest.skip("Gemma 3 makes its masks of token types")
    model, inputs = build(family), make_packed(family, form)
    want = model(**inputs).logits
    with tokenprune.patched(model, method, keep=1.0):
        assert torch.equal(model(**inputs).logits, want)
    # Numbers in a mask are read in training only, because reading them waits for the device.
    model.train(form == "a numbered mask")
    with tokenprune.patched(model, method, keep=0.5):
        single = torch.cat([model(**call).logits for call in split_samples(family, inputs)], 1)
        got = model(**inputs)
        torch.testing.assert_close(got.logits, single, rtol=1e-4, atol=1e-4)
        assert got.past_key_values is None
        assert tokenprune.stats(model).keep_ratio < 0.6
    model.eval()


@torch.no_grad()
def test_samples_of_every_family(family: Family, model) -> None:
    batch = family.make_inputs(images=(2, 1, 0))
    is_valid = batch["attention_mask"].bool()
    row = {
        name: value[is_valid][None] if value.shape[:2] == is_valid.shape and not name.startswith("pixel") else value
        for name, value in batch.items()
        if name != "attention_mask"
    }
    ends = torch.cat([torch.zeros(1, dtype=torch.long), is_valid.sum(1).cumsum(0)]).int()
    row |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    for method in ("divprune", "fastv"):
        if find_unsupported_reason(tokenprune.method(method), get_adapter(model).family) is not None:
            continue
        with tokenprune.patched(model, method, keep=0.5):
            want, before = model(**batch).logits[is_valid], tokenprune.stats(model)
            if family.kind in UNSPLIT:
                with pytest.raises(UnsupportedSetupError, match="its own row"):
                    model(**row)
                continue
            got, after = model(**row).logits[0], tokenprune.stats(model)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert after.visual_tokens_in == before.visual_tokens_in and after.keep_ratio == before.keep_ratio < 1


def make_labelled(family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return four samples, padded on the left and packed in a row.

    One sample is text and one has two images. Labels are at text after the first token of a sample.
    """
    batch = family.make_inputs(images=(1, 0, 2, 1))
    is_valid = batch["attention_mask"].bool()
    positions = (is_valid.cumsum(-1) - 1) * is_valid
    labels = torch.where(is_valid & (positions > 0) & (batch["input_ids"] > 20), batch["input_ids"], -100)
    row = {
        name: value[is_valid][None] for name, value in (("input_ids", batch["input_ids"]), ("position_ids", positions))
    }
    pixels = {name: value for name, value in batch.items() if name.startswith(("pixel", "image"))}
    return dict(batch) | {"labels": labels}, row | pixels | {"labels": labels[is_valid][None]}


# Checkpoints inside the decoder need some versions: see tests/unit/engine/test_gradients.py.
@pytest.mark.parametrize(
    ("method", "checkpointing"), [("fastv", None), ("divprune", None), ("divprune", True), ("divprune", False)]
)
def test_loss_and_gradients_are_those_of_the_padded_batch(method: str, checkpointing: bool | None) -> None:
    """`checkpointing` is None or the value of `use_reentrant`."""
    family = FAMILIES["llava"]
    model = family.build().train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    batch, row = make_labelled(family)
    results = []
    with tokenprune.patched(model, method, keep=0.5):
        for inputs in (batch, row):
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            results.append((loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    (want, gradients), (got, actual_gradients) = results
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert any(parameter is not None and parameter.abs().max() > 0 for parameter in gradients.values())
    torch.testing.assert_close(actual_gradients, gradients, rtol=1e-4, atol=1e-5)


class Flattened:
    """transformers' collator, plus the pixels that it omits."""

    def __init__(self) -> None:
        self.collate = DataCollatorWithFlattening()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [{name: sample[name].tolist() for name in ("input_ids", "labels")} for sample in samples]
        return self.collate(texts) | {"pixel_values": torch.cat([sample["pixel_values"] for sample in samples])}


def collate_sample(samples: list[dict[str, Any]]) -> dict[str, Any]:
    (sample,) = samples
    texts = {name: sample[name][None] for name in ("input_ids", "labels")}
    return texts | {"attention_mask": torch.ones_like(texts["input_ids"]), "pixel_values": sample["pixel_values"]}


def test_a_trainer_with_lora_takes_packed_rows(tmp_path) -> None:
    """Two steps of two packed samples equal two steps of single samples with gradient accumulation."""
    family = FAMILIES["llava"]
    batches = [family.make_inputs(only=row) for row in (0, 1, 1, 0)]
    samples = [
        {
            "input_ids": batch["input_ids"][0],
            "labels": batch["input_ids"][0].clone(),
            "pixel_values": batch["pixel_values"],
        }
        for batch in batches
    ]
    losses = []
    for batch_size, collate in ((2, Flattened()), (1, collate_sample)):
        torch.manual_seed(0)
        model = get_peft_model(family.build(), LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
        tokenprune.patch(model, "divprune", keep=0.5)
        settings = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=2 // batch_size, learning_rate=1e-2, logging_steps=1, report_to=[], seed=0,
            save_strategy="no", use_cpu=True, remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, settings, collate, train_dataset=samples)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@pytest.mark.parametrize("method", ["divprune", "fastv"])
def test_no_gradient_reaches_another_sample(name: str, method: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), make_packed(family, "position_ids")
    pixels = inputs["pixel_values"] = inputs["pixel_values"].clone().requires_grad_()
    with tokenprune.patched(model, method, keep=0.5):
        model(**inputs).logits[0, -1].sum().backward()
    num_first = len(pixels) // 2 if name == "llava" else int(inputs["image_grid_thw"][0].prod())
    assert pixels.grad is not None
    assert not pixels.grad[:num_first].any() and pixels.grad[num_first:].any()


WRONG = {
    "differ": lambda inputs: {"cu_seq_lens_k": inputs["cu_seq_lens_k"] + 1},
    "end early": lambda inputs: {name: inputs[name][:-1] for name in ("cu_seq_lens_q", "cu_seq_lens_k")},
    "fall": lambda inputs: {
        name: inputs[name].new_tensor([0, 1000, int(inputs[name][-1])]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")
    },
    "other samples": lambda inputs: {name: inputs[name][[0, -1]] for name in ("cu_seq_lens_q", "cu_seq_lens_k")},
    "past_key_values": lambda inputs: {"past_key_values": DynamicCache()},
    "output_attentions": lambda inputs: {"output_attentions": True},
}


@pytest.mark.parametrize("case", WRONG)
@torch.no_grad()
def test_invalid_packed_rows_are_refused(case: str, build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), make_packed(family, "cu_seq_lens")
    message = dict.fromkeys(("differ", "end early", "fall"), "must be equal, and rise from 0")
    message["other samples"] = "define different samples"
    with tokenprune.patched(model, "divprune", keep=0.5):
        with pytest.raises(UnsupportedSetupError, match=message.get(case, case)):
            model(**inputs | WRONG[case](inputs))
        want = model(**inputs).logits  # the failed call left the model unchanged
        ones = torch.ones_like(inputs["input_ids"])
        assert torch.equal(model(**inputs, attention_mask=ones).logits, want)


@torch.no_grad()
def test_repeated_lengths_and_logits_to_keep() -> None:
    """Some collators repeat the last end to fill a batch; `logits_to_keep=0` keeps all logits."""
    family = families.FAMILIES["llama4"]
    model, batch = family.build(), family.make_inputs(images=(1, 1))
    is_valid = batch["attention_mask"].bool()
    ends = torch.tensor([0, int(is_valid[0].sum()), int(is_valid.sum())]).int()
    row = {"input_ids": batch["input_ids"][is_valid][None], "pixel_values": batch["pixel_values"]}
    with tokenprune.patched(model, "divprune", keep=0.5):
        want = model(**batch).logits[is_valid]
        for lengths in (ends, torch.cat([ends, ends[-1:], ends[-1:]])):
            got = model(**row, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, logits_to_keep=0).logits[0]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with pytest.raises(UnsupportedSetupError, match="logits_to_keep"):
            model(**row, cu_seq_lens_q=ends, cu_seq_lens_k=ends, logits_to_keep=1)


@torch.no_grad()
def test_masks_across_borders_and_unread_numbers_are_refused(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), make_packed(family, "a mask of pairs")
    with tokenprune.patched(model, "divprune", keep=0.5):
        mask = inputs["attention_mask"].clone()
        mask[0, 0, -1, 0] = True
        with pytest.raises(UnsupportedSetupError, match="4-D attention_mask"):
            model(**inputs | {"attention_mask": mask})
        additive = torch.zeros(mask.shape).masked_fill(~inputs["attention_mask"], torch.finfo(torch.float32).min)
        want = model(**inputs).logits
        assert torch.equal(model(**inputs | {"attention_mask": additive}).logits, want)
        with pytest.raises(UnsupportedSetupError, match=r"values above 1.*its own row"):
            model(**make_packed(family, "a numbered mask"))  # refused outside of training


@torch.no_grad()
def test_rows_and_samples_of_one_token(build) -> None:
    """Two rows, one with a first sample of one token and a last sample of text; then padding with a numbered mask."""
    family = FAMILIES["llava"]
    model, batch = build(family), family.make_inputs(images=(2, 1))
    ids, is_valid = batch["input_ids"], batch["attention_mask"].bool()
    length, end = is_valid.shape[1], int(is_valid[1].sum()) + 1
    row = torch.cat([torch.tensor([30]), ids[1, is_valid[1]], torch.full((length - end,), 30)])
    positions = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(end - 1), torch.arange(length - end)])
    inputs = {name: value for name, value in batch.items() if name.startswith("pixel")}
    inputs["input_ids"] = torch.stack([ids[0], row])
    with tokenprune.patched(model, "divprune", keep=0.5):
        want = model(**batch).logits
        first, last = (model(input_ids=torch.full((1, num_tokens), 30)).logits for num_tokens in (1, length - end))
        expected = torch.cat([first[0], want[1, is_valid[1]], last[0]])
        got = model(**inputs, position_ids=torch.stack([torch.arange(length), positions])).logits
        torch.testing.assert_close(got, torch.stack([want[0], expected]), rtol=1e-4, atol=1e-4)
        model.train()
        sample_mask = torch.full((2, length), 2)
        sample_mask[1, 0], sample_mask[1, end:] = 1, 0
        padded = model(**inputs, attention_mask=sample_mask).logits
        model.eval()
    torch.testing.assert_close(padded[1, :end], expected[:end], rtol=1e-4, atol=1e-4)
    assert not padded[1, end:].isnan().any()


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@torch.no_grad()
def test_packed_text_is_unchanged(name: str, build) -> None:
    family = FAMILIES[name]
    model = build(family)
    inputs = pack_samples(family, return_flash_attn_kwargs=True)
    text = {name: value for name, value in inputs.items() if not name.startswith(("pixel", "image"))}
    text["input_ids"] = text["input_ids"].clamp(min=20)
    want = model(**text).logits
    with tokenprune.patched(model, "divprune", keep=0.3):
        assert torch.equal(model(**text).logits, want) and not tokenprune.stats(model).notes


@pytest.mark.parametrize("name", ["llava", "smolvlm", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("case", ["2-D positions", "three axes", "a mask of ones"])
@torch.no_grad()
def test_positions_without_borders_are_noted(name: str, case: str, build, caplog) -> None:
    """transformers also mixes these samples: it needs the text axis of M-RoPE, and no mask."""
    family = FAMILIES[name]
    if name not in SEVERAL_AXES and case != "a mask of ones":
        pytest.skip("positions of this model have one axis")
    model, inputs = build(family), pack_samples(family)
    if case == "three axes":
        inputs["position_ids"] = inputs["position_ids"].expand(3, 1, -1)
    if case == "a mask of ones":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with tokenprune.patched(model, "divprune", keep=0.3):
        for _ in range(2):
            model(**inputs)
            (note,) = tokenprune.stats(model).notes
            assert "counts as one sample" in note and ("text axis", "attention mask")[case[0] == "a"] in note
    assert [record.getMessage() for record in caplog.records] == [note]  # only once


def compute_positions(mask: torch.Tensor, fill: int) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, fill)


@each("name", ["llava", "smolvlm", "gemma3", "qwen2_5_vl"])
@each("padding", ["left", "right"])
@each("fill", [0, 1])
@torch.no_grad()
def test_padding_is_no_border(name: str, padding: str, fill: int, build, caplog) -> None:
    model, inputs = FAMILIES[name].prepare(build, images=(2, 1), padding=padding)
    positions = compute_positions(inputs["attention_mask"], fill)
    if name in SEVERAL_AXES:
        positions = positions.expand(4, *positions.shape)
    with tokenprune.patched(model, "divprune", keep=0.3):
        model(**inputs, position_ids=positions)
        assert not tokenprune.stats(model).notes
    assert not caplog.records


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_generate_makes_no_borders(name: str, cache: str | None, caplog) -> None:
    family = FAMILIES[name]
    model = family.build()
    with tokenprune.patched(model, "divprune", keep=0.3):
        for inputs in (family.make_inputs(images=(2, 1)), family.make_inputs(only=0)):
            model.generate(**inputs, max_new_tokens=2, cache_implementation=cache)
            assert not tokenprune.stats(model).notes
    assert not [record for record in caplog.records if record.name == "tokenprune"]


@torch.no_grad()
def test_a_video_is_no_border(build) -> None:
    """After a video, the time axis falls and the other axes do not."""
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, rows=1, images=(0,), video=20)
    positions, _ = model.model.get_rope_index(**{name: inputs[name] for name in inputs if "pixel" not in name})
    assert (positions[0].diff() < 0).any()
    with tokenprune.patched(model, "divprune", keep=0.3):
        model(**inputs, position_ids=positions)
        assert not tokenprune.stats(model).notes


@each(
    ("row", "expected"),
    [
        ([0, 1, 2, 0, 1, 2, 3], True),
        ([5, 6, 5, 6], True),  # another start
        ([0, 1, 2, 0, 0, 1], True),  # a sample of one token in the middle
        ([0, 1, 2, 3, 4, 5], False),
        ([0, 3, 9, 27], False),  # time stamps
        ([0, 1, 1, 1, 2, 3], False),  # an image at one position
        ([1, 1, 1, 0, 1, 2], False),  # padding on the left
        ([0, 1, 2, 1, 1], False),  # padding on the right
        ([0], False),
    ],
)
def test_has_restart(row: list[int], expected: bool) -> None:
    positions = torch.tensor(row)
    assert has_restart(positions[None]) is expected
    assert has_restart(positions.expand(4, 1, -1)) is expected
    assert has_restart(torch.stack([torch.arange(len(row)), positions])) is expected  # any row of a batch
    # Only one axis falls.
    assert not has_restart(torch.stack([torch.arange(len(row)), positions])[:, None])
    assert not has_restart(positions[None], torch.zeros(1, len(row), dtype=torch.bool))
