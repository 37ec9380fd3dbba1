# SPDX-License-Identifier: Apache-2.0
"""Rows that hold several samples, as training without padding lays them: taken apart, or refused or noted; never cut as
one sample."""

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
# Their images came in before the base model, or by arguments of another name.
UNSPLIT = {"blip-2", "instructblip", "instructblipvideo", "fuyu"}


@pytest.fixture(params=families.FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return families.FAMILIES[request.param]


def packed(family: Family, **returned: bool) -> dict[str, Any]:
    """Two samples with an image each in one row, as transformers' collator lays them; it drops pixels and types."""
    samples = [family.make_inputs(only=row) for row in range(2)]
    inputs = DataCollatorWithFlattening(**returned)([{"input_ids": one["input_ids"][0]} for one in samples])
    sizes, g = (family.sizes * 2)[:2], torch.Generator().manual_seed(7)
    pixels = family.collate([[family.image(size, g, 1) for size in sizes]])
    if family.types == "token_type_ids":
        inputs["token_type_ids"] = torch.cat([one["token_type_ids"] for one in samples], 1)
    return {name: value for name, value in inputs.items() if name != "labels"} | pixels


def numbered(inputs: dict[str, Any]) -> torch.Tensor:
    """1 at the first sample, 2 at the second."""
    return (inputs["position_ids"] == 0).long().cumsum(-1)


def of_pairs(inputs: dict[str, Any]) -> torch.Tensor:
    sample = numbered(inputs)
    return ((sample[:, None] == sample[:, :, None]) & torch.ones(sample.shape[1:] * 2).tril().bool())[:, None]


# By the argument that tells the samples: what the collator is asked for, and what is handed over beside.
TOLD = {
    "position_ids": ({}, lambda inputs: {}),
    "cu_seq_lens": (dict(return_flash_attn_kwargs=True), lambda inputs: {}),
    "seq_idx": (dict(return_seq_idx=True), lambda inputs: {}),
    "a numbered mask": ({}, lambda inputs: {"attention_mask": numbered(inputs)}),
    "a mask of pairs": ({}, lambda inputs: {"attention_mask": of_pairs(inputs)}),
}


def given(family: Family, by: str) -> dict[str, Any]:
    returned, change = TOLD[by]
    inputs = packed(family, **returned)
    inputs |= change(inputs)
    if family.name in SEVERAL_AXES:  # borders stand in a text axis before the three
        inputs["position_ids"] = inputs["position_ids"].expand(4, 1, -1)
    return inputs


def one_by_one(family: Family, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of `packed`, each a call of its own."""
    sample = (inputs["position_ids"].reshape(-1, inputs["input_ids"].shape[1])[0] == 0).long().cumsum(-1)
    sizes, g = (family.sizes * 2)[:2], torch.Generator().manual_seed(7)
    pixels = [family.collate([[family.image(size, g, 1)]]) for size in sizes]
    names = {"input_ids", "position_ids", "token_type_ids"} & inputs.keys()
    calls = []
    for number, image in enumerate(pixels, 1):
        of = {name: inputs[name][..., sample == number] for name in names}
        calls.append(of | {"attention_mask": torch.ones_like(of["input_ids"])} | image)
    return calls


@pytest.mark.pairwise
@pytest.mark.parametrize("by", TOLD)
@pytest.mark.parametrize("method", ["divprune", "fastv", "tome"])
@pytest.mark.parametrize("name", [*ONE_AXIS, *SEVERAL_AXES])
@torch.no_grad()
def test_a_sample_of_a_packed_row_is_as_it_is_alone(name: str, method: str, by: str, build) -> None:
    """Whatever tells where it ends; with keep=1.0 the call is left as it is, to the bit."""
    family = FAMILIES[name]
    if (name, by) == ("gemma3", "a mask of pairs"):
        pytest.skip("Gemma 3 makes its masks of token types")
    model, inputs = build(family), given(family, by)
    want = model(**inputs).logits
    with tokenprune.patched(model, method, keep=1.0):
        assert torch.equal(model(**inputs).logits, want)
    # Numbers in a mask are read in training alone: to read them takes a wait.
    model.train(by == "a numbered mask")
    with tokenprune.patched(model, method, keep=0.5):
        alone = torch.cat([model(**call).logits for call in one_by_one(family, inputs)], 1)
        got = model(**inputs)
        torch.testing.assert_close(got.logits, alone, rtol=1e-4, atol=1e-4)
        assert got.past_key_values is None
        assert tokenprune.stats(model).keep_ratio < 0.6
    model.eval()


@torch.no_grad()
def test_samples_of_every_family(family: Family, model) -> None:
    batch = family.make_inputs(images=(2, 1, 0))
    real = batch["attention_mask"].bool()
    row = {
        name: value[real][None] if value.shape[:2] == real.shape and not name.startswith("pixel") else value
        for name, value in batch.items()
        if name != "attention_mask"
    }
    ends = torch.cat([torch.zeros(1, dtype=torch.long), real.sum(1).cumsum(0)]).int()
    row |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    for method in ("divprune", "fastv"):
        if find_unsupported_reason(tokenprune.method(method), get_adapter(model).family) is not None:
            continue
        with tokenprune.patched(model, method, keep=0.5):
            want, before = model(**batch).logits[real], tokenprune.stats(model)
            if family.kind in UNSPLIT:
                with pytest.raises(UnsupportedSetupError, match="its own row"):
                    model(**row)
                continue
            got, after = model(**row).logits[0], tokenprune.stats(model)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert after.visual_tokens_in == before.visual_tokens_in and after.keep_ratio == before.keep_ratio < 1


def labelled(family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Four samples, of which one is text and one has two images, padded on the left, and end to end in a row. Labels
    are at text after the first token of a sample."""
    batch = family.make_inputs(images=(1, 0, 2, 1))
    real = batch["attention_mask"].bool()
    places = (real.cumsum(-1) - 1) * real
    labels = torch.where(real & (places > 0) & (batch["input_ids"] > 20), batch["input_ids"], -100)
    row = {name: value[real][None] for name, value in (("input_ids", batch["input_ids"]), ("position_ids", places))}
    pixels = {name: value for name, value in batch.items() if name.startswith(("pixel", "image"))}
    return dict(batch) | {"labels": labels}, row | pixels | {"labels": labels[real][None]}


# Within the decoder not every version can: tests/unit/engine/test_gradients.py.
@pytest.mark.parametrize(
    ("method", "checkpointing"), [("fastv", None), ("divprune", None), ("divprune", True), ("divprune", False)]
)
def test_loss_and_gradients_are_those_of_the_padded_batch(method: str, checkpointing: bool | None) -> None:
    """checkpointing: whether it is re-entrant; None: none."""
    family = FAMILIES["llava"]
    model = family.build().train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    batch, row = labelled(family)
    found = []
    with tokenprune.patched(model, method, keep=0.5):
        for inputs in (batch, row):
            model.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            found.append((loss.detach(), {name: one.grad for name, one in model.named_parameters()}))
    (want, gradients), (got, others) = found
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert any(one is not None and one.abs().max() > 0 for one in gradients.values())
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-5)


class Flattened:
    """transformers' collator, and the pixels that it leaves out."""

    def __init__(self) -> None:
        self.collate = DataCollatorWithFlattening()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [{name: one[name].tolist() for name in ("input_ids", "labels")} for one in samples]
        return self.collate(texts) | {"pixel_values": torch.cat([one["pixel_values"] for one in samples])}


def one_sample(samples: list[dict[str, Any]]) -> dict[str, Any]:
    (one,) = samples
    texts = {name: one[name][None] for name in ("input_ids", "labels")}
    return texts | {"attention_mask": torch.ones_like(texts["input_ids"]), "pixel_values": one["pixel_values"]}


def test_a_trainer_with_lora_takes_packed_rows(tmp_path) -> None:
    """Two steps of two samples each: packed as transformers lays them, and one by one, gathered by the trainer."""
    family = FAMILIES["llava"]
    batches = [family.make_inputs(only=row) for row in (0, 1, 1, 0)]
    samples = [
        {"input_ids": one["input_ids"][0], "labels": one["input_ids"][0].clone(), "pixel_values": one["pixel_values"]}
        for one in batches
    ]
    losses = []
    for together, collate in ((2, Flattened()), (1, one_sample)):
        torch.manual_seed(0)
        model = get_peft_model(family.build(), LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
        tokenprune.patch(model, "divprune", keep=0.5)
        settings = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=together,
            gradient_accumulation_steps=2 // together, learning_rate=1e-2, logging_steps=1, report_to=[], seed=0,
            save_strategy="no", use_cpu=True, remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, settings, collate, train_dataset=samples)
        trainer.train()
        losses.append([one["loss"] for one in trainer.state.log_history if "loss" in one])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@pytest.mark.parametrize("method", ["divprune", "fastv"])
def test_no_gradient_reaches_another_sample(name: str, method: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), given(family, "position_ids")
    pixels = inputs["pixel_values"] = inputs["pixel_values"].clone().requires_grad_()
    with tokenprune.patched(model, method, keep=0.5):
        model(**inputs).logits[0, -1].sum().backward()
    own = len(pixels) // 2 if name == "llava" else int(inputs["image_grid_thw"][0].prod())
    assert pixels.grad is not None
    assert not pixels.grad[:own].any() and pixels.grad[own:].any()


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


@pytest.mark.parametrize("how", WRONG)
@torch.no_grad()
def test_what_is_wrong_with_packed_rows_is_said(how: str, build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), given(family, "cu_seq_lens")
    message = dict.fromkeys(("differ", "end early", "fall"), "must be equal, and rise from 0")
    message["other samples"] = "define different samples"
    with tokenprune.patched(model, "divprune", keep=0.5):
        with pytest.raises(UnsupportedSetupError, match=message.get(how, how)):
            model(**inputs | WRONG[how](inputs))
        want = model(**inputs).logits  # the model is as it was
        ones = torch.ones_like(inputs["input_ids"])
        assert torch.equal(model(**inputs, attention_mask=ones).logits, want)


@torch.no_grad()
def test_lengths_filled_up_and_a_head_that_keeps_all_logits() -> None:
    """Collators of one size of batch repeat the last end; 0 logits to keep are all of them."""
    family = families.FAMILIES["llama4"]
    model, batch = family.build(), family.make_inputs(images=(1, 1))
    real = batch["attention_mask"].bool()
    ends = torch.tensor([0, int(real[0].sum()), int(real.sum())]).int()
    row = {"input_ids": batch["input_ids"][real][None], "pixel_values": batch["pixel_values"]}
    with tokenprune.patched(model, "divprune", keep=0.5):
        want = model(**batch).logits[real]
        for one in (ends, torch.cat([ends, ends[-1:], ends[-1:]])):
            got = model(**row, cu_seq_lens_q=one, cu_seq_lens_k=one, logits_to_keep=0).logits[0]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with pytest.raises(UnsupportedSetupError, match="logits_to_keep"):
            model(**row, cu_seq_lens_q=ends, cu_seq_lens_k=ends, logits_to_keep=1)


@torch.no_grad()
def test_masks_that_cross_a_border_and_numbers_unread_are_refused(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), given(family, "a mask of pairs")
    with tokenprune.patched(model, "divprune", keep=0.5):
        mask = inputs["attention_mask"].clone()
        mask[0, 0, -1, 0] = True
        with pytest.raises(UnsupportedSetupError, match="4-D attention_mask"):
            model(**inputs | {"attention_mask": mask})
        additive = torch.zeros(mask.shape).masked_fill(~inputs["attention_mask"], torch.finfo(torch.float32).min)
        want = model(**inputs).logits
        assert torch.equal(model(**inputs | {"attention_mask": additive}).logits, want)
        with pytest.raises(UnsupportedSetupError, match=r"values above 1.*its own row"):
            model(**given(family, "a numbered mask"))  # not in training


@torch.no_grad()
def test_rows_and_samples_of_one_token(build) -> None:
    """Two rows, of which one begins with a sample of one token and ends with text; then with padding, by numbers."""
    family = FAMILIES["llava"]
    model, batch = build(family), family.make_inputs(images=(2, 1))
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    length, end = real.shape[1], int(real[1].sum()) + 1
    row = torch.cat([torch.tensor([30]), ids[1, real[1]], torch.full((length - end,), 30)])
    positions = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(end - 1), torch.arange(length - end)])
    inputs = {name: value for name, value in batch.items() if name.startswith("pixel")}
    inputs["input_ids"] = torch.stack([ids[0], row])
    with tokenprune.patched(model, "divprune", keep=0.5):
        want = model(**batch).logits
        first, last = (model(input_ids=torch.full((1, number), 30)).logits for number in (1, length - end))
        wanted = torch.cat([first[0], want[1, real[1]], last[0]])
        got = model(**inputs, position_ids=torch.stack([torch.arange(length), positions])).logits
        torch.testing.assert_close(got, torch.stack([want[0], wanted]), rtol=1e-4, atol=1e-4)
        model.train()
        numbers = torch.full((2, length), 2)
        numbers[1, 0], numbers[1, end:] = 1, 0
        padded = model(**inputs, attention_mask=numbers).logits
        model.eval()
    torch.testing.assert_close(padded[1, :end], wanted[:end], rtol=1e-4, atol=1e-4)
    assert not padded[1, end:].isnan().any()


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@torch.no_grad()
def test_packed_text_is_left_alone(name: str, build) -> None:
    family = FAMILIES[name]
    model = build(family)
    inputs = packed(family, return_flash_attn_kwargs=True)
    text = {name: value for name, value in inputs.items() if not name.startswith(("pixel", "image"))}
    text["input_ids"] = text["input_ids"].clamp(min=20)
    want = model(**text).logits
    with tokenprune.patched(model, "divprune", keep=0.3):
        assert torch.equal(model(**text).logits, want) and not tokenprune.stats(model).notes


@pytest.mark.parametrize("name", ["llava", "smolvlm", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("how", ["2-D positions", "three axes", "a mask of ones"])
@torch.no_grad()
def test_positions_that_tell_no_borders_are_noted(name: str, how: str, build, caplog) -> None:
    """transformers mixes the samples there, too: it reads borders off a text axis of M-RoPE, and beside no mask."""
    family = FAMILIES[name]
    if name not in SEVERAL_AXES and how != "a mask of ones":
        pytest.skip("positions of this model have one axis")
    model, inputs = build(family), packed(family)
    if how == "three axes":
        inputs["position_ids"] = inputs["position_ids"].expand(3, 1, -1)
    if how == "a mask of ones":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with tokenprune.patched(model, "divprune", keep=0.3):
        for _ in range(2):
            model(**inputs)
            (note,) = tokenprune.stats(model).notes
            assert "counts as one sample" in note and ("text axis", "attention mask")[how[0] == "a"] in note
    assert [record.getMessage() for record in caplog.records] == [note]  # once


def places(mask: torch.Tensor, fill: int) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, fill)


@each("name", ["llava", "smolvlm", "gemma3", "qwen2_5_vl"])
@each("padding", ["left", "right"])
@each("fill", [0, 1])
@torch.no_grad()
def test_padding_is_no_border(name: str, padding: str, fill: int, build, caplog) -> None:
    model, inputs = FAMILIES[name].prepare(build, images=(2, 1), padding=padding)
    positions = places(inputs["attention_mask"], fill)
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
    assert not [one for one in caplog.records if one.name == "tokenprune"]


@torch.no_grad()
def test_a_video_is_no_border(build) -> None:
    """Behind a video the time axis falls back, and the others do not."""
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, rows=1, images=(0,), video=20)
    positions, _ = model.model.get_rope_index(**{name: inputs[name] for name in inputs if "pixel" not in name})
    assert (positions[0].diff() < 0).any()
    with tokenprune.patched(model, "divprune", keep=0.3):
        model(**inputs, position_ids=positions)
        assert not tokenprune.stats(model).notes


@each(
    ("row", "wanted"),
    [
        ([0, 1, 2, 0, 1, 2, 3], True),
        ([5, 6, 5, 6], True),  # from another start
        ([0, 1, 2, 0, 0, 1], True),  # a sample of one token between
        ([0, 1, 2, 3, 4, 5], False),
        ([0, 3, 9, 27], False),  # times
        ([0, 1, 1, 1, 2, 3], False),  # an image at one position
        ([1, 1, 1, 0, 1, 2], False),  # padding ahead,
        ([0, 1, 2, 1, 1], False),  # and behind
        ([0], False),
    ],
)
def test_where_positions_begin_anew(row: list[int], wanted: bool) -> None:
    positions = torch.tensor(row)
    assert has_restart(positions[None]) is wanted
    assert has_restart(positions.expand(4, 1, -1)) is wanted
    assert has_restart(torch.stack([torch.arange(len(row)), positions])) is wanted  # any row of a batch
    # One axis alone falls.
    assert not has_restart(torch.stack([torch.arange(len(row)), positions])[:, None])
    assert not has_restart(positions[None], torch.zeros(1, len(row), dtype=torch.bool))
