# SPDX-License-Identifier: Apache-2.0
"""The state of a forward call, the plan of its cuts, and attachments to modules."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tokenprune
from tokenprune import Budget
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.cache.reduced_cache import Reduction, attach, get_reduction
from tokenprune.integrations.hf.cache.static_cache import KeySpan
from tokenprune.integrations.hf.forward.call import _NO_SEGMENTS, Call
from tokenprune.integrations.hf.forward.layer_inputs import LayerInputs, find_key_positions
from tokenprune.integrations.hf.forward.part import Part, PerCall
from tokenprune.integrations.hf.forward.plan import Plan, Step, plan_cuts
from tokenprune.integrations.hf.forward.prompt_info import PromptInfo
from tokenprune.integrations.hf.forward.token_state import Layout, TokenState
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.segments import Segments
from zoo import FAMILIES


@dataclass
class PartState:
    value: int = 0


def make_layout(*kept: list[int], length: int) -> Layout:
    dropped = torch.ones(len(kept), length, dtype=torch.bool)
    for row, positions in enumerate(kept):
        dropped[row, positions] = False
    return Layout.build_uncut(len(kept), length, dropped.device).cut(dropped, [len(positions) for positions in kept])[0]


def make_segments(counts: list[int], rows: list[int]) -> Segments:
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    position = torch.arange(max(counts)).expand(len(counts), -1)
    return Segments(rows, [0] * len(rows), counts, position, mask, [None] * len(rows), ["image"] * len(rows))


# -- the state of parts


def test_per_call_state_ends_with_the_call_and_is_not_copied():
    states: PerCall[PartState] = PerCall()
    outer, inner = Call({}), Call({})
    states[outer], states[inner] = PartState(1), PartState(2)
    assert states[outer] == PartState(1) and states.pop(inner) == PartState(2) and states.get(inner) is None
    assert not copy.deepcopy(states) and not pickle.loads(pickle.dumps(states))
    del outer
    gc.collect()
    assert not states


# -- the prompt on the host


def test_dropped_padding_excludes_visual_tokens():
    visual = torch.tensor([[True, True, False, False], [False, False, True, True]])
    padding = torch.tensor([[True, False, False, True], [True, False, False, False]])
    prompt = PromptInfo({"image": visual, "video": torch.zeros_like(visual)}, padding)
    assert prompt.padding_to_drop.tolist() == [[False, False, False, True], [True, False, False, False]]
    assert prompt.tokens_per_row == [3, 3]
    assert prompt.visual_ends == [(1, 3)]
    assert PromptInfo({"image": visual}).padding_to_drop is None
    assert PromptInfo({"image": visual}).tokens_per_row == [4, 4]


def test_prompt_is_read_from_the_device_on_request():
    ids = torch.tensor([[5, 1, 1, 6]])
    call = Call({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1]])})
    assert not call.prompt.placeholders and call.prompt.input_ids is None
    prompt = PromptInfo.from_arguments(call.arguments, {"image": ids == 1}, True, call.padding)
    assert prompt.input_ids.tolist() == ids.tolist()
    assert prompt.padding.tolist() == [[True, False, False, False]]
    assert PromptInfo.from_arguments(call.arguments, {"image": ids == 1}, False, call.padding).input_ids is None


# -- layers


def test_key_positions_are_the_past_and_the_kept_tokens():
    layout = make_layout([1, 3], [0, 1, 3], length=4)  # ragged: the first row has an empty slot
    device = torch.device("cpu")
    assert find_key_positions(2, layout, 0, None, device).tolist() == [[-1, 1, 3], [0, 1, 3]]
    assert find_key_positions(2, layout, 2, None, device).tolist() == [[0, 1, -1, 3, 5], [0, 1, 2, 3, 5]]
    slots = [(0, torch.tensor([[0, 1], [0, 1]])), (2, torch.tensor([[1], [-1]]))]
    reduction = Reduction(2, slots, ragged=True)
    assert find_key_positions(1, layout, 2, reduction, device).tolist() == [[0, 1, -1, 3, 5], [0, 1, 2, 3, 5]]
    assert find_key_positions(2, layout, 2, reduction, device).tolist() == [[1, -1, 3, 5], [-1, 2, 3, 5]]


@pytest.fixture
def new_objects() -> None:
    """Freeze existing objects, so that collecting and listing objects takes less than a second."""
    gc.freeze()


@torch.no_grad()
@pytest.mark.usefixtures("new_objects")
@pytest.mark.parametrize(
    ("method", "options"),
    [("divprune", {}), ("fastv", {"guard": "warn"}), ("pyramiddrop", {}), ("sparsevlm", {}), ("dyrate", {"layer": 2})],
)
@pytest.mark.parametrize("fails", [False, True])
def test_finished_calls_are_freed(method: str, options: dict[str, Any], fails: bool, build) -> None:
    family = FAMILIES["llava"]
    model = build(family)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    with tokenprune.patched(model, method, keep=0.4, **options):
        hook = model.model.language_model.layers[-1].register_forward_hook(fail)
        if not fails:
            hook.remove()
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            model(**family.make_inputs())
        hook.remove()
        gc.collect()
        parts = get_attachment(model).engine.parts
        kept = [value for part in parts for value in vars(part).values() if isinstance(value, PerCall)]
        # Every patch has the state of packed rows.
        assert (len(kept) > 1) == (method != "divprune") and not any(kept)
        assert not [value for value in gc.get_objects() if type(value) is Call]


@torch.no_grad()
@pytest.mark.parametrize(("method", "options"), [("fastv", {"layer": 2}), ("sparsevlm", {}), ("dyrate", {"layer": 2})])
def test_a_call_within_a_call_has_states_of_its_own(method: str, options: dict[str, Any], build) -> None:
    """Another call may run between a layer and the cut that reads the layer's inputs."""
    family = FAMILIES["llava"]
    model, inputs, nested_inputs = build(family), family.make_inputs(), family.make_inputs(images=(2, 1))
    nested: list[Any] = []

    def run(*args: Any) -> None:
        if not nested:
            nested.append(None)
            nested[0] = model(**nested_inputs).logits

    with tokenprune.patched(model, method, keep=0.4, **options):
        expected, expected_nested = (model(**arguments).logits for arguments in (inputs, nested_inputs))
        for layer in model.model.language_model.layers:
            nested.clear()
            with layer.register_forward_hook(run):
                assert torch.equal(model(**inputs).logits, expected)
            assert torch.equal(nested[0], expected_nested)


def test_group_does_not_change_the_call():
    call = Call({}, state=TokenState(_NO_SEGMENTS, make_layout([0, 2], [1, 2], length=3)))
    call.groups.append(call.group(0))
    before = list(call.groups)
    first, second = call.group(1), call.group(1)
    assert call.groups == before and first is not second
    assert torch.equal(first.columns, second.columns)


def test_layers_of_a_group_share_values():
    start = LayerInputs(0, make_layout([0, 1, 2], length=3), torch.arange(3)[None], False, 0, None, None)
    group = LayerInputs(1, make_layout([0, 2], length=3), torch.tensor([[0, 2]]), False, 0, None, start)
    positions = torch.tensor([[7, 8, 9]])
    assert group.gather_for_group(positions, -1).tolist() == [[7, 9]]
    assert group.gather_for_group(positions, -1) is group.gather_for_group(positions, -1)
    assert start.gather_for_group(positions, -1) is positions
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    adapter = SimpleNamespace(attention="sdpa")
    group_mask = group.attention_mask(mask, KeySpan(-2, None, 2), adapter, torch.float32)
    assert group_mask.tolist() == [[[[True, False], [True, True]]]]
    assert group.attention_mask(mask, KeySpan(-2, None, 2), adapter, torch.float32) is group_mask
    assert start.attention_mask(mask, KeySpan(-3, None, 3), adapter, torch.float32) is mask


# -- plans


def make_plan(*steps: Step) -> Any:
    shape = SimpleNamespace(layers=4, kv_widths=[1] * 4)
    return plan_cuts(steps, shape, make_segments([8, 4, 8], [0, 0, 1]), [8, 4, 8], [20, 9])


def make_step(layer: int, keep: float | int) -> Step:
    return Step(tokenprune.method("fastv", layer=layer), Budget(keep=keep))


def test_a_plan_is_a_value():
    plan = make_plan(make_step(1, 0.5), make_step(2, 1.0), make_step(3, 0.5))
    assert plan.cuts == {1, 3} and plan.kept == [2, 1, 2] and plan.text == [8, 1]
    assert [stage.arrived for stage in plan.stages] == [[8, 4, 8], [4, 2, 4]]
    extended = plan.plan_step(make_step(3, 0.5), [8, 4, 8])
    assert extended.kept == [4, 2, 4] and plan.kept == [2, 1, 2]
    with pytest.raises(AttributeError):
        plan.text = []


def test_plan_with_floor():
    plan = make_plan(make_step(1, 0.25), make_step(2, 0.5))
    assert plan.kept == [1, 1, 1]
    raised = plan.with_floor(lambda step, arrived, requested: [max(3, count) for count in requested])
    assert raised.stages[0].requested == [2, 1, 2] and raised.stages[1].arrived == [3, 3, 3] == raised.kept
    more = raised.with_floor(lambda step, arrived, requested: [count + step.layer for count in requested])
    assert [stage.kept for stage in more.stages] == [[4, 4, 4], [5, 5, 5]] and plan.kept == [1, 1, 1]
    assert make_plan(make_step(1, 16)).cuts == frozenset()


def test_replanning_logs_no_warning(caplog):
    """Raising a plan logs no second warning of the guard."""
    calls = []

    class Watch(Part):
        def on_plan(self, call: Call, plan: Plan) -> Plan:
            calls.append(call)
            return plan

    family = FAMILIES["llava"]
    model = family.build()
    with tokenprune.patched(model, "fastv", keep=0.1, layer=1, guard="warn"), torch.no_grad():
        engine = get_attachment(model).engine
        engine._on_plan.append(Watch().on_plan)
        model(**family.make_inputs())
    (call,) = calls
    assert call.plan.cuts == {1}
    logged = list(caplog.records)
    replanned = call.plan.with_floor(lambda step, arrived, requested: list(requested))
    assert replanned.kept == call.plan.kept and caplog.records == logged


# -- attaching


def test_observers_attach_and_detach():
    model = FAMILIES["llava"].build()
    module = model.model.language_model.layers[0].self_attn
    config, observations = module.config, []
    first, second = Observer(module, observations.append), Observer(module, observations.append)
    assert isinstance(first, Attachable)
    first.attach(), second.attach()
    first.detach()
    first.detach()  # no effect
    assert module.config is not config
    second.detach()
    assert module.config is config


def test_a_cache_gets_back_the_class_that_it_had():
    class CustomCache(DynamicCache):
        pass

    cache = CustomCache()
    attach(cache, Reduction(3, [(0, torch.arange(3)[None])], False))
    assert type(cache) is not CustomCache and isinstance(cache, CustomCache) and cache.get_seq_length() == 3
    copied = copy.deepcopy(cache)
    cache.reset()
    assert type(cache) is CustomCache and get_reduction(cache) is None
    assert get_reduction(copied).length == 3 and type(copied) is not CustomCache


def test_the_shape_of_a_decoder_is_enough_to_plan():
    shape = DecoderShape.from_config(FAMILIES["llava"].build().config.text_config)
    steps = [Step(tokenprune.method("fastv", layer=2), Budget.from_kv_share(0.75))]
    plan = plan_cuts(steps, shape, make_segments([8], [0]), [8], [12])
    assert plan.kept == [4]
