# SPDX-License-Identifier: Apache-2.0
"""The record that a patch leaves on an encoder's output follows the output through copies and device moves."""

from __future__ import annotations

import ast
import copy
import pickle
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from transformers.modeling_outputs import BaseModelOutputWithPooling

import tokenprune
from families import FAMILIES
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import KEY, EncoderRecord, get_record, open_record

# Methods with different fields, and the fields of the record for a Qwen image.
LEFT = {
    "tome": {"grids", "num_encoded", "owners", "block_tokens", "groups"},
    "vscan": {"grids", "num_encoded", "encoded"},
    "divprune": {"grids", "num_encoded"},
}


def encode_images(method: str, family: str = "qwen2_5_vl", **options: Any) -> Any:
    family = FAMILIES[family]
    model, inputs = family.build(), family.make_inputs(images=(2, 1))
    with torch.no_grad(), tokenprune.patched(model, method, keep=0.5, **options):
        return model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])


def list_written(record: EncoderRecord) -> set[str]:
    return {field.name for field in fields(record) if getattr(record, field.name) is not None}


@pytest.mark.parametrize("method", LEFT)
def test_patch_leaves_one_item(method: str) -> None:
    output = encode_images(method)
    assert [name for name in output if name.startswith("tokenprune")] == [KEY]
    assert not [name for name in vars(output) if name.startswith("tokenprune") and name != KEY]
    assert list_written(get_record(output)) - {"looks"} == LEFT[method]


def test_reading_does_not_change_an_output() -> None:
    output = BaseModelOutputWithPooling(pooler_output=torch.zeros(1))
    assert get_record(output) == EncoderRecord() and get_record(None) == EncoderRecord()
    assert KEY not in output and not hasattr(output, KEY)
    record = open_record(output)
    assert output[KEY] is record is get_record(output) is open_record(output)
    with pytest.raises(UnsupportedSetupError, match="return_dict"):
        open_record((torch.zeros(1),))


def test_index_tensors_move_with_the_output() -> None:
    output = encode_images("tome")
    moved = send_to_device({"mm_encoder_outputs": {"image": output}}, torch.device("meta"))
    moved_record, record = get_record(moved["mm_encoder_outputs"]["image"]), get_record(output)
    assert {tensor.device.type for tensor in [*moved_record.groups, *moved_record.owners]} == {"meta"}
    assert {tensor.device.type for tensor in [*record.groups, *record.owners]} == {"cpu"}
    assert (moved_record.grids, moved_record.block_tokens) == (record.grids, record.block_tokens)


def test_scores_move_when_they_are_read() -> None:
    output = encode_images("vscan")
    moved = get_record(send_to_device(output, torch.device("meta")))
    assert moved.encoded is get_record(output).encoded and get_record(output).attention is None


@pytest.mark.parametrize("duplicated", [copy.deepcopy, lambda output: pickle.loads(pickle.dumps(output))])
@pytest.mark.parametrize("method", ["tome", "vscan"])
def test_copies_of_an_output_have_separate_records(method: str, duplicated: Any) -> None:
    output = encode_images(method)
    original, duplicate = get_record(output), get_record(duplicated(output))
    assert duplicate is not original and list_written(duplicate) == list_written(original)
    assert duplicate.grids == original.grids and duplicate.block_tokens == original.block_tokens
    for name in ("groups", "owners"):
        assert all(map(torch.equal, getattr(duplicate, name) or [], getattr(original, name) or []))
    for key, values in (original.encoded.values if original.encoded else {}).items():
        assert torch.equal(duplicate.encoded.values[key], values)


def test_each_field_has_one_writer() -> None:
    names, writers = {field.name for field in fields(EncoderRecord)}, Counter()
    for path in Path(tokenprune.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert 'output["tokenprune' not in text and "output.tokenprune" not in text, path
        if "open_record" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                for element in target.elts if isinstance(target, ast.Tuple) else [target]:
                    owner = ast.unparse(element.value) if isinstance(element, ast.Attribute) else ""
                    if owner == "record" or owner.startswith("open_record("):
                        writers[element.attr] += 1
    assert writers == dict.fromkeys(names, 1)
