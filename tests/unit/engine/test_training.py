# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients of a pruned model equal the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

import tokenprune
from basics import snapshot
from families import FAMILIES as ALL_FAMILIES
from oracle import close, reduced, survivors
from tests.unit.api.test_patch import forget_rope_deltas
from tokenprune import UnsupportedSetupError
from zoo import FAMILIES, Family

# Methods at the entry, merging at the entry, inside the decoder, and at both. Other methods cut the same way, and
# scores do not affect gradients.
METHODS = ["divprune", "pool", "dart", "vscan"]


def train(model: Any, inputs: Any, labels: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(**inputs, labels=labels)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out, grads


def start_checkpointing(model: Any, reentrant: bool) -> None:
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


def check_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    assert got.keys() == want.keys()
    for name, grad in got.items():
        assert grad.isfinite().all(), name
        close(grad, want[name], tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_training(method: str, family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    model.train()
    try:
        with tokenprune.patched(model, method, keep=0.3, record=True):
            model(**inputs)
            cuts = tokenprune.stats(model).cuts
            # A label counts if its token and the token before it are kept.
            is_kept = survivors(cuts[-1], inputs["input_ids"].shape[1])
            before = torch.nn.functional.pad(is_kept, (1, 0))[:, :-1]
            text = ~family.visual_mask(model, inputs)
            labels = inputs["input_ids"].masked_fill(~(is_kept & before & text), -100)
            got, grads = train(model, inputs, labels)
        with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
            want, want_grads = train(model, inputs, labels)
    finally:
        model.eval()
    assert got.loss.isfinite() and got.logits.shape[:2] == labels.shape
    close(got.loss, want.loss)
    check_gradients(grads, want_grads)
    # Gradients reach the vision tower through the kept tokens.
    assert any("vision" in name or "visual" in name for name, grad in grads.items() if grad.abs().max() > 0)


@pytest.mark.pairwise
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", ["divprune", "fastv", "pyramiddrop", "transprune", ["pool", "dart"]], ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_gradient_checkpointing(name: str, method: Any, reentrant: bool) -> None:
    """Gradients equal training without checkpointing; a cut inside the decoder refuses if hooks would run twice."""
    family = FAMILIES[name]
    model, inputs = family.prepare()
    labels = inputs["input_ids"].masked_fill(family.visual_mask(model, inputs), -100)
    model.train()
    with tokenprune.patched(model, method, keep=0.5):
        want, want_grads = train(model, inputs, labels)
    start_checkpointing(model, reentrant)
    if method != "divprune" and "__call__" in GradientCheckpointingLayer.__dict__:
        with tokenprune.patched(model, method, keep=0.5):
            with pytest.raises(UnsupportedSetupError, match="gradient_checkpointing_disable"):
                model(**inputs, labels=labels)
            model.eval()  # checkpointing is inactive outside of training
            model(**inputs)
        with tokenprune.patched(model.train(), "fastv", keep=1.0):
            train(model, inputs, labels)
        return
    others = family.make_inputs(images=(2, 1), seed=3)
    with tokenprune.patched(model, method, keep=0.5):
        for between in (False, True):
            model.zero_grad()
            got = model(**inputs, labels=labels, use_cache=between)
            if between:  # another call before the backward pass
                model(**others)
            got.loss.backward()
            close(got.loss, want.loss)
            check_gradients({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, want_grads)
    assert got.past_key_values is None or not got.past_key_values.get_seq_length()  # the cache is unused


@pytest.mark.parametrize("method", ["divprune", "pool"])
@pytest.mark.parametrize(
    ("name", "reentrant"),
    # Reentrant checkpointing of granite4_vision also changes gradients without a patch.
    [("qwen3_vl", True), ("qwen3_vl", False), ("granite4_vision", False)],
)
def test_gradient_checkpointing_adds_features_of_several_tower_layers(name: str, method: str, reentrant: bool) -> None:
    """Gradients are equal with and without checkpointing, although hooks of layers may run twice."""
    model, inputs = ALL_FAMILIES[name].prepare(images=(2, 1))
    model.train()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)  # for dropout
        model(**inputs, use_cache=False).logits[:, -1].logsumexp(-1).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with tokenprune.patched(model, method, keep=0.5):
        want = gradients()
    start_checkpointing(model, reentrant)
    with tokenprune.patched(model, method, keep=0.5):
        check_gradients(gradients(), want, 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_llama4_is_refused(reentrant: bool) -> None:
    """Its layers scale queries by the positions of the kept tokens, which the second run does not know."""
    model, inputs = ALL_FAMILIES["llama4"].prepare()
    start_checkpointing(model, reentrant)
    with (
        tokenprune.patched(model, "divprune", keep=0.5),
        pytest.raises(UnsupportedSetupError, match=r"llama4.*gradient_checkpointing_disable"),
    ):
        model(**inputs, use_cache=False)


def test_peft_like_training_of_a_part(build) -> None:
    model, inputs = FAMILIES["internvl"].prepare()
    model.requires_grad_(False)
    head = model.get_output_embeddings().weight.requires_grad_(True)
    with tokenprune.patched(model, ["divprune", "dart"], keep=0.5):
        model(**inputs).logits[:, -1].logsumexp(-1).sum().backward()
    assert head.grad.isfinite().all() and head.grad.abs().max() > 0


@pytest.mark.parametrize("method", ["divprune", "dart"])
@pytest.mark.parametrize(("name", "projector"), [("llava", "multi_modal_projector"), ("qwen2_5_vl", "merger")])
def test_projector_and_lora_learn_under_pruning(name: str, projector: str, method: str, tmp_path: Path) -> None:
    """Only adapters and the projector learn, also with checkpointing, and a saved adapter gives the same answers."""
    peft = pytest.importorskip("peft")
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    labels = inputs["input_ids"].masked_fill(family.visual_mask(model, inputs), -100)
    torch.manual_seed(0)
    layers = r".*language_model\..*\.(q_proj|v_proj|down_proj)"
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=layers, modules_to_save=[projector]))
    learned = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(learned, lr=0.05), []
    adapted.train()
    adapted(**inputs)  # transformers adds hooks in the first forward
    before = forget_rope_deltas(snapshot(adapted))
    with tokenprune.patched(model, method, keep=0.3):
        for _ in range(3):  # LoRA starts at zero: lora_A gets a gradient from the second step on
            optimizer.zero_grad()
            loss = adapted(**inputs, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    want = {
        parameter_name: parameter.grad.clone()
        for parameter_name, parameter in adapted.named_parameters()
        if parameter.grad is not None
    }
    assert len(want) == len(learned) and losses[0] > losses[1] > losses[2]
    assert {parameter_name.split(".")[-3] for parameter_name in want} >= {"lora_A", "lora_B"} and any(
        projector in parameter_name for parameter_name in want
    )
    for parameter_name, grad in want.items():
        assert grad.isfinite().all() and grad.abs().max() > 0, parameter_name
    tuned = compute_logits(adapted.eval(), inputs, method)
    adapted.train()
    assert forget_rope_deltas(snapshot(adapted)) == before

    if method == "divprune":
        with tokenprune.patched(model, method, keep=0.3):
            _, plain = train(adapted, inputs, labels)
            for reentrant in (True, False):
                start_checkpointing(model, reentrant)
                check_gradients(train(adapted, inputs, labels)[1], plain)
    adapted.save_pretrained(tmp_path)
    restored = peft.PeftModel.from_pretrained(family.build(), tmp_path).eval()
    assert torch.equal(compute_logits(restored, inputs, method), tuned)
    close(compute_logits(restored.merge_and_unload(), inputs, method), tuned)
    assert not torch.allclose(compute_logits(family.build(), inputs, method), tuned, atol=1e-3)


@torch.no_grad()
def compute_logits(model: Any, inputs: Any, method: str) -> torch.Tensor:
    """Return the logits of a pruned model at the ends of the prompts."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with tokenprune.patched(base, method, keep=0.3):
        return model(**inputs).logits[:, -1]
