# SPDX-License-Identifier: Apache-2.0
"""Beams and samples are refused for models that repeat images instead of rows, and unchanged for other models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from each import each
from families import mrope, special
from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.hf.sequence.alignment import check_rows
from tokenprune.integrations.hf.sequence.record import EncoderRecord
from zoo import FAMILIES

REPEATING = {
    name: family
    for name, family in (mrope.FAMILIES | special.FAMILIES).items()
    if name in ("glm4v", "glm46v", "glm_ocr", "glm4v_moe", "granite4_vision")
}
EQUAL, DIFFERENT = 1, 2  # sizes of the images
BEAMS, SAMPLES = dict(num_beams=2), dict(num_return_sequences=2, do_sample=True)


def make_inputs(family: Any, sizes: int = DIFFERENT, images: tuple[int, ...] = (2, 1)) -> Any:
    return family.make_inputs(images=images, sizes=family.sizes[:sizes])


def generate(model: Any, inputs: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    output = model.generate(
        **inputs, max_new_tokens=2, output_logits=True, return_dict_in_generate=True, **{"num_beams": 1, **options}
    )
    return output.logits[0]


def test_all_models_under_test_exist() -> None:
    assert len(REPEATING) == 5


@pytest.mark.parametrize("options", [BEAMS, SAMPLES], ids=["beams", "samples"])
@pytest.mark.parametrize("sizes", [EQUAL, DIFFERENT])
@pytest.mark.parametrize("name", REPEATING)
@torch.no_grad()
def test_repeated_images_are_refused(name: str, sizes: int, options: dict[str, Any]) -> None:
    model, inputs = REPEATING[name].build(), make_inputs(REPEATING[name], sizes)
    for method in ("divprune", "fastv", ["divprune", "fastv"]):
        with tokenprune.patched(model, method, keep=0.5):
            before = generate(model, inputs)
            with pytest.raises(PlaceholderMismatchError, match="one image per row"):
                generate(model, inputs, **options)
            assert torch.equal(generate(model, inputs), before)


UNREPEATED = [(family, dict(images=(1, 1))) for family in REPEATING.values()] + [
    (FAMILIES[name], dict(sizes=sizes))
    for name in ("qwen2_vl", "qwen3_vl", "llava_next", "internvl")
    for sizes in (EQUAL, DIFFERENT)
]


@each(("family", "batch"), UNREPEATED)
@torch.no_grad()
def test_rows_and_single_images_are_pruned_as_without_beams(family: Any, batch: dict[str, Any]) -> None:
    model, inputs = family.build(), make_inputs(family, **batch)
    with tokenprune.patched(model, ["divprune", "fastv"], keep=0.5):
        plain, beams = generate(model, inputs), generate(model, inputs, **BEAMS)
    torch.testing.assert_close(beams, plain.repeat_interleave(2, 0), rtol=0, atol=1e-4)


@torch.no_grad()
def test_keep_of_all_tokens_equals_the_unpatched_model() -> None:
    model, inputs = REPEATING["glm4v"].build(), make_inputs(REPEATING["glm4v"])
    unpatched = generate(model, inputs, **BEAMS)
    with tokenprune.patched(model, "divprune", keep=1.0):
        assert torch.equal(generate(model, inputs, **BEAMS), unpatched)


# -- check_rows: row 0 has two images (a of two tokens, b of three), row 1 has one (c of one token) ------


class Output(dict):
    def __init__(self, *features: torch.Tensor, num_encoded: int) -> None:
        super().__init__()
        self.pooler_output = list(features)
        self.tokenprune_record = EncoderRecord(num_encoded=num_encoded)


def test_features_are_compared_with_rows() -> None:
    a, b, c, d = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(1, 4), torch.zeros(2, 4)
    repeated_rows = Output(a, b, a, b, c, c, num_encoded=3)
    check_rows({"image": [5, 5, 1, 1]}, {"image": repeated_rows})
    with pytest.raises(PlaceholderMismatchError, match="row 0 has 5 placeholders"):
        check_rows({"image": [5, 5, 1, 1]}, {"image": Output(a, a, b, b, c, c, num_encoded=3)})
    with pytest.raises(PlaceholderMismatchError, match="row 1 has 4 placeholders"):
        check_rows({"image": [4, 4, 1, 1]}, {"image": Output(a, a, d, d, c, c, num_encoded=3)})
    # Without repetition, any row may hold the same image, also as the same tensor from a cache.
    check_rows({"image": [4, 4]}, {"image": Output(a, a, d, d, num_encoded=4)})
    # Copies on another device are different tensors.
    moved = [feature.clone() for feature in (a, d, a, d, c, c)]
    check_rows({"image": [4, 4, 1, 1]}, {"image": Output(*moved, num_encoded=3)})
