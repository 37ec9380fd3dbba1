# SPDX-License-Identifier: Apache-2.0
"""What a forward knows, what its features keep, and that asking for something changes nothing."""

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
class Mine:
    value: int = 0


def layout_of(*kept: list[int], length: int) -> Layout:
    gone = torch.ones(len(kept), length, dtype=torch.bool)
    for row, positions in enumerate(kept):
        gone[row, positions] = False
    return Layout.build_uncut(len(kept), length, gone.device).cut(gone, [len(positions) for positions in kept])[0]


def segments_of(counts: list[int], rows: list[int]) -> Segments:
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    position = torch.arange(max(counts)).expand(len(counts), -1)
    return Segments(rows, [0] * len(rows), counts, position, mask, [None] * len(rows), ["image"] * len(rows))


# -- the state of parts


def test_what_a_part_keeps_ends_with_the_call_and_is_not_copied():
    kept: PerCall[Mine] = PerCall()
    outer, inner = Call({}), Call({})
    kept[outer], kept[inner] = Mine(1), Mine(2)
    assert kept[outer] == Mine(1) and kept.pop(inner) == Mine(2) and kept.get(inner) is None
    assert not copy.deepcopy(kept) and not pickle.loads(pickle.dumps(kept))
    del outer
    gc.collect()
    assert not kept


# -- what the host knows


def test_padding_that_leaves_is_none_of_the_visual_tokens():
    visual = torch.tensor([[True, True, False, False], [False, False, True, True]])
    padding = torch.tensor([[True, False, False, True], [True, False, False, False]])
    prompt = PromptInfo({"image": visual, "video": torch.zeros_like(visual)}, padding)
    assert prompt.padding_to_drop.tolist() == [[False, False, False, True], [True, False, False, False]]
    assert prompt.tokens_per_row == [3, 3]
    assert prompt.visual_ends == [(1, 3)]
    assert PromptInfo({"image": visual}).padding_to_drop is None
    assert PromptInfo({"image": visual}).tokens_per_row == [4, 4]


def test_nothing_is_read_of_the_device_until_it_is_asked_for():
    ids = torch.tensor([[5, 1, 1, 6]])
    call = Call({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1]])})
    assert not call.prompt.placeholders and call.prompt.input_ids is None
    prompt = PromptInfo.from_arguments(call.arguments, {"image": ids == 1}, True, call.padding)
    assert prompt.input_ids.tolist() == ids.tolist()
    assert prompt.padding.tolist() == [[True, False, False, False]]
    assert PromptInfo.from_arguments(call.arguments, {"image": ids == 1}, False, call.padding).input_ids is None


# -- layers


def test_columns_are_those_of_the_past_and_then_those_that_remain():
    layout = layout_of([1, 3], [0, 1, 3], length=4)  # ragged: the first row has an empty slot
    device = torch.device("cpu")
    assert find_key_positions(2, layout, 0, None, device).tolist() == [[-1, 1, 3], [0, 1, 3]]
    assert find_key_positions(2, layout, 2, None, device).tolist() == [[0, 1, -1, 3, 5], [0, 1, 2, 3, 5]]
    slots = [(0, torch.tensor([[0, 1], [0, 1]])), (2, torch.tensor([[1], [-1]]))]
    reduction = Reduction(2, slots, ragged=True)
    assert find_key_positions(1, layout, 2, reduction, device).tolist() == [[0, 1, -1, 3, 5], [0, 1, 2, 3, 5]]
    assert find_key_positions(2, layout, 2, reduction, device).tolist() == [[1, -1, 3, 5], [-1, 2, 3, 5]]


@pytest.fixture
def new_objects() -> None:
    """Leave what is there before the test out where objects are collected and listed, which takes a second."""
    gc.freeze()


@torch.no_grad()
@pytest.mark.usefixtures("new_objects")
@pytest.mark.parametrize(
    ("method", "options"),
    [("divprune", {}), ("fastv", {"guard": "warn"}), ("pyramiddrop", {}), ("sparsevlm", {}), ("dyrate", {"layer": 2})],
)
@pytest.mark.parametrize("fails", [False, True])
def test_nobody_holds_a_call_that_is_over(method: str, options: dict[str, Any], fails: bool, build) -> None:
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
        kept = [one for part in parts for one in vars(part).values() if isinstance(one, PerCall)]
        # One of them is that of packed rows, which every patch has.
        assert (len(kept) > 1) == (method != "divprune") and not any(kept)
        assert not [one for one in gc.get_objects() if type(one) is Call]


@torch.no_grad()
@pytest.mark.parametrize(("method", "options"), [("fastv", {"layer": 2}), ("sparsevlm", {}), ("dyrate", {"layer": 2})])
def test_a_call_within_a_call_has_states_of_its_own(method: str, options: dict[str, Any], build) -> None:
    """Between what a layer shows of one call and the cut that reads it another call may run."""
    family = FAMILIES["llava"]
    model, inputs, others = build(family), family.make_inputs(), family.make_inputs(images=(2, 1))
    found: list[Any] = []

    def run(*args: Any) -> None:
        if not found:
            found.append(None)
            found[0] = model(**others).logits

    with tokenprune.patched(model, method, keep=0.4, **options):
        wanted, within = (model(**given).logits for given in (inputs, others))
        for layer in model.model.language_model.layers:
            found.clear()
            with layer.register_forward_hook(run):
                assert torch.equal(model(**inputs).logits, wanted)
            assert torch.equal(found[0], within)


def test_asking_what_layers_are_handed_leaves_the_call_as_it_is():
    call = Call({}, state=TokenState(_NO_SEGMENTS, layout_of([0, 2], [1, 2], length=3)))
    call.groups.append(call.group(0))
    before = list(call.groups)
    one, other = call.group(1), call.group(1)
    assert call.groups == before and one is not other
    assert torch.equal(one.columns, other.columns)


def test_what_is_made_for_one_layer_serves_the_group():
    start = LayerInputs(0, layout_of([0, 1, 2], length=3), torch.arange(3)[None], False, 0, None, None)
    group = LayerInputs(1, layout_of([0, 2], length=3), torch.tensor([[0, 2]]), False, 0, None, start)
    positions = torch.tensor([[7, 8, 9]])
    assert group.gather_for_group(positions, -1).tolist() == [[7, 9]]
    assert group.gather_for_group(positions, -1) is group.gather_for_group(positions, -1)
    assert start.gather_for_group(positions, -1) is positions
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    adapter = SimpleNamespace(attention="sdpa")
    made = group.attention_mask(mask, KeySpan(-2, None, 2), adapter, torch.float32)
    assert made.tolist() == [[[[True, False], [True, True]]]]
    assert group.attention_mask(mask, KeySpan(-2, None, 2), adapter, torch.float32) is made
    assert start.attention_mask(mask, KeySpan(-3, None, 3), adapter, torch.float32) is mask


# -- plans


def plan_of(*steps: Step) -> Any:
    shape = SimpleNamespace(layers=4, kv_widths=[1] * 4)
    return plan_cuts(steps, shape, segments_of([8, 4, 8], [0, 0, 1]), [8, 4, 8], [20, 9])


def step(layer: int, keep: float | int) -> Step:
    return Step(tokenprune.method("fastv", layer=layer), Budget(keep=keep))


def test_a_plan_is_a_value():
    plan = plan_of(step(1, 0.5), step(2, 1.0), step(3, 0.5))
    assert plan.cuts == {1, 3} and plan.kept == [2, 1, 2] and plan.text == [8, 1]
    assert [stage.arrived for stage in plan.stages] == [[8, 4, 8], [4, 2, 4]]
    again = plan.plan_step(step(3, 0.5), [8, 4, 8])
    assert again.kept == [4, 2, 4] and plan.kept == [2, 1, 2]
    with pytest.raises(AttributeError):
        plan.text = []


def test_a_plan_is_raised_where_a_part_asks_for_more():
    plan = plan_of(step(1, 0.25), step(2, 0.5))
    assert plan.kept == [1, 1, 1]
    raised = plan.with_floor(lambda step, arrived, wanted: [max(3, one) for one in wanted])
    assert raised.stages[0].requested == [2, 1, 2] and raised.stages[1].arrived == [3, 3, 3] == raised.kept
    more = raised.with_floor(lambda step, arrived, wanted: [one + step.layer for one in wanted])
    assert [stage.kept for stage in more.stages] == [[4, 4, 4], [5, 5, 5]] and plan.kept == [1, 1, 1]
    assert plan_of(step(1, 16)).cuts == frozenset()


def test_planning_again_says_nothing(caplog):
    """A warning of the guard belongs to the call, not to the question how many tokens it would keep."""
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
    told = list(caplog.records)
    again = call.plan.with_floor(lambda step, arrived, wanted: list(wanted))
    assert again.kept == call.plan.kept and caplog.records == told


# -- attaching


def test_everything_that_is_put_on_a_model_is_attached_and_undone_alike():
    model = FAMILIES["llava"].build()
    module = model.model.language_model.layers[0].self_attn
    config, seen = module.config, []
    first, second = Observer(module, seen.append), Observer(module, seen.append)
    assert isinstance(first, Attachable)
    first.attach(), second.attach()
    first.detach()
    first.detach()  # a second time does nothing
    assert module.config is not config
    second.detach()
    assert module.config is config


def test_a_cache_gets_back_the_class_that_it_had():
    class Own(DynamicCache):
        pass

    cache = Own()
    attach(cache, Reduction(3, [(0, torch.arange(3)[None])], False))
    assert type(cache) is not Own and isinstance(cache, Own) and cache.get_seq_length() == 3
    copied = copy.deepcopy(cache)
    cache.reset()
    assert type(cache) is Own and get_reduction(cache) is None
    assert get_reduction(copied).length == 3 and type(copied) is not Own


def test_the_shape_of_a_decoder_is_enough_to_plan():
    shape = DecoderShape.from_config(FAMILIES["llava"].build().config.text_config)
    steps = [Step(tokenprune.method("fastv", layer=2), Budget.from_kv_share(0.75))]
    plan = plan_cuts(steps, shape, segments_of([8], [0]), [8], [12])
    assert plan.kept == [4]
