# SPDX-License-Identifier: Apache-2.0
"""Remove visual tokens while the answer is written: the site DECODE.

What is needed for that lives on the cache, beside its `Reduction`, and follows it when rows are repeated, reordered or
selected. It is made by the cut in prefill. A later call with one new token observes the layer before the cut, decides,
and applies the decision to the layers from there on: `evict` takes keys and values out of the cache, `mask` hides them.
Calls with several tokens (a user's next turn, drafts that are not accepted yet) decide nothing: what was kept before
stays.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.cache.layer_storage import slots_handed_out
from tokenprune.integrations.hf.engine.decode_state import DecodeState, gather_keys, right_align, sum_by_type
from tokenprune.integrations.hf.engine.method_inputs import DecoderSource
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Observations, Part, PerCall
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.shared.attachable import get_hidden_states
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.segments import Segments
from tokenprune.selection.sites.decode import DecodeMethod, TokenType
from tokenprune.selection.tokens import require

if TYPE_CHECKING:
    from tokenprune.integrations.hf.cache.reduced_cache import Reduction
    from tokenprune.integrations.hf.forward.call import Call
    from tokenprune.selection.method import Method


@dataclass(frozen=True)
class _Prefill:
    """State before a cut in the prefill. row: float32 `[B, H, length]`, attention of the last
    token. segments: the visual tokens that arrive."""

    row: Tensor
    segments: Segments


class DecodePruning(Part):
    """Begins a `DecodeState` at the cut of the prefill, and goes on with it in each step of decoding.

    method: the one that acts while decoding. record: True to note every cut in the statistics.
    """

    def __init__(self, adapter: Adapter, method: DecodeMethod, record: bool) -> None:
        super().__init__()
        self.adapter, self.method, self.record = adapter, method, record
        self._prefill: PerCall[_Prefill] = PerCall()

    def before_cut(self, call: Call, step: Step, observed: Observations, args: tuple, kwargs: dict[str, Any]) -> None:
        if step.layer != self.method.layer:
            return
        if call.cuts_at(step.layer):
            hidden = self.adapter.flatten(get_hidden_states(args, kwargs))
            query = DecoderSource(call, call.state, hidden, self.adapter).get_last_slot()
            row = _row(call, observed, query, call.past + call.state.layout.length)
            self._prefill[call] = _Prefill(row, call.state.segments.to(hidden.device))
        elif (state := decides(call, self.method)) is not None:
            _decide(call, state, observed)

    def after_cut(self, call: Call, layer: int, hidden: Tensor) -> None:
        if layer and (prefill := self._prefill.pop(call, None)) is not None:
            call.cached.decode = _begin(call, self.method, prefill.row, prefill.segments, self.record)


# -- a call


def decides(call: Call, method: Method) -> DecodeState | None:
    """Return what `method` goes on with in a call that decides, a step of decoding; None in others."""
    decode = _state(call)
    # Another patch than the one that made the cache leaves it as it is.
    return decode if decode is not None and call.state.layout.length == 1 and method == decode.method else None


def _state(call: Call) -> DecodeState | None:
    """Return what the call's cache remembers, None without a cut of such a method."""
    decode = call.cached.decode
    assert decode is None or isinstance(decode, DecodeState)  # nothing else is ever put there
    return decode


def _decide(call: Call, state: DecodeState, observed: Observations) -> None:
    """Drop more visual tokens at the input of the cut's layer, before the layers from here on run."""
    start, cached = time.perf_counter(), call.cached
    row = _row(call, observed, torch.zeros_like(call.state.layout.index), call.past + 1)  # the one token of the call
    observed.pop(ObservedAt.LAYER_BEFORE, None)  # it holds the keys that may now leave
    changed = state.decide(row, call.past)
    if changed and state.method.mode == "evict" and cached.reduction is not None:
        _evict(cached.cache, cached.reduction, state)
    state.stats.overhead_ms = (state.stats.overhead_ms or 0.0) + 1000 * (time.perf_counter() - start)


def _row(call: Call, observed: Observations, query: Tensor, length: int) -> Tensor:
    """float32 `[B, H, length]`: attention of one token (slot `query`, `[B, 1]`) over logical positions, in the layer
    before the current one."""
    seen: Any = require(observed.get(ObservedAt.LAYER_BEFORE), "last_row_attention")
    with torch.no_grad():
        row = seen.rows(query.to(seen.query.device))[:, :, 0]
    columns = call.groups[-1].columns.to(row.device)[:, -row.shape[2] :]  # a sliding layer sees the last ones
    target = columns.masked_fill(columns < 0, length)[:, None].expand_as(row)
    return row.new_zeros(*row.shape[:2], length + 1).scatter_add_(2, target, row)[..., :length]


def _begin(call: Call, method: DecodeMethod, row: Tensor, before: Segments, record: bool) -> DecodeState:
    """Return the state after the prefill's cut. before: the visual tokens that reached it."""
    visual = call.prompt.is_visual
    batch = len(visual)
    types = before.cache.get("types", partial(_types, visual, before.mask.device))
    position, kept = _places(before, call.state.segments, *visual.shape)
    available, previous = kept, _state(call)
    if call.past:
        # All that came before belongs to the prompt now; images of earlier turns compete with the new ones.
        earlier = types.new_full((len(types), call.past), int(TokenType.SYS))
        if previous is not None:
            earlier[:, previous.prompt :] = TokenType.INS
            earlier[:, : previous.prompt] = previous.types
            seen = (earlier == TokenType.IMG).any(1, keepdim=True)
            types = types.masked_fill(seen & (types == TokenType.SYS), int(TokenType.INS))
        types = torch.cat([earlier, types], dim=1)
        position = torch.where(position < 0, -1, position + call.past)
    if previous is not None:
        position = torch.cat([previous.position, position], dim=1)
        available = torch.cat([previous.available, kept], dim=1)
        kept = torch.cat([previous.kept, kept], dim=1)
    real = torch.ones_like(types, dtype=torch.bool)
    if (padding := call.padding(types.shape[1])) is not None:
        real[:, -padding.shape[1] :] = ~padding.to(real.device)
    # The host knows these: nothing has to be asked of the device.
    number, count = _per_row(before, batch), _per_row(call.state.segments, batch)
    start = count
    if previous is not None:
        number, count = number + previous.visual, count + previous.count
        start = start + (previous.count if previous.method.mode == "evict" else previous.start)
    return DecodeState(
        method=method,
        stats=call.trace.stats,
        record=record,
        types=types,
        real=real,
        position=position,
        available=available,
        kept=kept,
        visual=number,
        start=start,
        count=count,
        rate=torch.where(number > 0, 1 - count.double() / number.clamp(min=1), 0.0),
        masses=sum_by_type(row, types)[:, None],
        times=[],
    )


def _types(visual: Tensor, device: torch.device) -> Tensor:
    """Return long `[B, L]`, the type of each of the prompt's tokens. visual: bool `[B, L]`, on the host."""
    text = torch.where(visual.cumsum(1) > 0, int(TokenType.INS), int(TokenType.SYS))
    return to_device(torch.where(visual, int(TokenType.IMG), text), device)


def _positions(segments: Segments, batch: int) -> Tensor:
    """Return long `[B, N]`, the positions of each row's visual tokens, -1 = none."""
    rows: list[list[Tensor]] = [[segments.position.new_zeros(0)] for _ in range(batch)]
    for segment, row in enumerate(segments.row):
        rows[row].append(segments.position[segment, : segments.counts[segment]])
    return torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in rows], True, -1)


def _places(before: Segments, after: Segments, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the positions of each row's tokens before a cut (long `[B, N]`, -1 = none), and which of them are there
    after it, in rows of `length` tokens."""
    position = before.cache.get("positions", partial(_positions, before, batch))
    alive = torch.zeros(batch, length + 1, dtype=torch.bool, device=position.device)
    # Padding is written to a scratch entry at the end.
    alive.index_put_((after.row_index, torch.where(after.mask, after.position, length)), alive.new_ones(()))
    return position, alive.gather(1, position.clamp(min=0)) & (position >= 0)


def _per_row(segments: Segments, batch: int) -> Tensor:
    """long `[B]`, on the host: the visual tokens of each row."""
    counts = [0] * batch
    for row, count in zip(segments.row, segments.counts, strict=True):
        counts[row] += count
    return torch.tensor(counts, device="cpu")


def _evict(cache: Any, reduction: Reduction, state: DecodeState) -> None:
    """Take the keys and values of dropped tokens out of the layers from the cut on: memory is freed.

    Rows that hold fewer tokens than the widest are filled on the left with empty slots.
    """
    ends = [*(first for first, _ in reduction.slots[1:]), len(cache.layers)]
    groups = []  # (place in reduction.slots, which slots stay, layers)
    for place, (first, slots) in enumerate(reduction.slots):
        if first >= state.layer:
            # Layers that attend to the keys of others keep none.
            keeping = [layer for layer in cache.layers[first : ends[place]] if slots_handed_out(layer)]
            groups.append((place, (slots >= 0) & ~state.pruned_mask(slots), keeping))
    # A sliding layer holds the last slots only. Where it has lost a slot that the new slots of a short row reach back
    # to, it gets another one there: too old for the window, and masked by it.
    last = {
        (place, held): stays[:, stays.shape[1] - held :]
        for place, stays, layers in groups
        for held in {stays.shape[1], *(layer.keys.shape[-2] for layer in layers)}
    }
    counts = torch.stack([stays.sum(1) for stays in last.values()]).tolist()  # one question for all of them
    views = {key: right_align(last[key], max(left)) for key, left in zip(last, counts, strict=True)}
    for place, stays, layers in groups:
        for layer in layers:
            view = views[place, layer.keys.shape[-2]][0]
            layer.keys, layer.values = gather_keys(layer.keys, view), gather_keys(layer.values, view)
        first, slots = reduction.slots[place]
        view, valid = views[place, stays.shape[1]]
        reduction.slots[place] = (first, slots.gather(1, view).masked_fill(~valid, -1))
        reduction.ragged = reduction.ragged or len(set(counts[list(last).index((place, stays.shape[1]))])) > 1
    state.available = state.kept
