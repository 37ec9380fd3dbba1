# SPDX-License-Identifier: Apache-2.0
"""Drop visual tokens during decoding (the site DECODE).

The prefill's cut creates a `DecodeState` on the cache, which follows the rows of the cache. A later call with one new
token observes the layer before the cut, selects tokens, and applies the selection to all later layers: `evict` removes
keys and values from the cache, `mask` hides them. Calls with several tokens (the next turn, drafts) select nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenprune.integrations.hf.cache.layer_storage import count_slots
from tokenprune.integrations.hf.engine.cuts import DecoderSource
from tokenprune.integrations.hf.engine.decode_state import DecodeState, gather_keys, right_align, sum_by_type
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
    """State before the cut of a prefill.

    Attributes:
        row: Attention of the last token, shape (batch, heads, length), float32.
        segments: Visual tokens that reach the cut.
    """

    row: Tensor
    segments: Segments


class DecodePruning(Part):
    """Creates a `DecodeState` at the cut of the prefill, and updates it in each decoding step.

    Args:
        adapter: Adapter of the model.
        method: The method.
        record: Whether the statistics keep a record of each cut.
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
            row = _compute_attention_row(call, observed, query, call.past + call.state.layout.length)
            self._prefill[call] = _Prefill(row, call.state.segments.to(hidden.device))
        elif (state := get_step_state(call, self.method)) is not None:
            _decide(call, state, observed)

    def after_cut(self, call: Call, layer: int, hidden: Tensor) -> None:
        if layer and (prefill := self._prefill.pop(call, None)) is not None:
            call.cached.decode = _begin(call, self.method, prefill.row, prefill.segments, self.record)


# -- a call


def get_step_state(call: Call, method: Method) -> DecodeState | None:
    """Return the state of `method` if it selects tokens in this call (a decoding step), otherwise None."""
    decode = _get_state(call)
    # A cache that was filled under another patch is left unchanged.
    return decode if decode is not None and call.state.layout.length == 1 and method == decode.method else None


def _get_state(call: Call) -> DecodeState | None:
    decode = call.cached.decode
    assert decode is None or isinstance(decode, DecodeState)  # the only implementation of `DecodeMemory`
    return decode


def _decide(call: Call, state: DecodeState, observed: Observations) -> None:
    """Select visual tokens at the input of the cut's layer, before this layer and later layers run."""
    start, cached = time.perf_counter(), call.cached
    query = torch.zeros_like(call.state.layout.index)  # the call has a single token
    row = _compute_attention_row(call, observed, query, call.past + 1)
    observed.pop(ObservedAt.LAYER_BEFORE, None)  # frees the keys that may be evicted now
    changed = state.decide(row, call.past)
    if changed and state.method.mode == "evict" and cached.reduction is not None:
        _evict(cached.cache, cached.reduction, state)
    state.stats.overhead_ms = (state.stats.overhead_ms or 0.0) + 1000 * (time.perf_counter() - start)


def _compute_attention_row(call: Call, observed: Observations, query: Tensor, length: int) -> Tensor:
    """Return the attention of one token over logical positions, in the layer before the current layer.

    Args:
        query: Slot of the token in each row, shape (batch, 1).
        length: Number of logical positions.

    Returns:
        Attention weights, shape (batch, heads, length), float32.
    """
    attention: Any = require(observed.get(ObservedAt.LAYER_BEFORE), "last_row_attention")
    with torch.no_grad():
        row = attention.rows(query.to(attention.query.device))[:, :, 0]
    columns = call.groups[-1].columns.to(row.device)[:, -row.shape[2] :]  # a sliding layer sees the last ones
    target = columns.masked_fill(columns < 0, length)[:, None].expand_as(row)
    return row.new_zeros(*row.shape[:2], length + 1).scatter_add_(2, target, row)[..., :length]


def _begin(call: Call, method: DecodeMethod, row: Tensor, before: Segments, record: bool) -> DecodeState:
    """Return the state after the prefill's cut. before: Visual tokens that reached the cut."""
    visual = call.prompt.is_visual
    batch = len(visual)
    types = before.cache.get("types", partial(_compute_token_types, visual, before.mask.device))
    position, kept = _find_kept(before, call.state.segments, *visual.shape)
    available, previous = kept, _get_state(call)
    if call.past:
        # Earlier turns belong to the prompt now. Their images compete with the new images.
        earlier = types.new_full((len(types), call.past), int(TokenType.SYS))
        if previous is not None:
            earlier[:, previous.prompt :] = TokenType.INS
            earlier[:, : previous.prompt] = previous.types
            has_image = (earlier == TokenType.IMG).any(1, keepdim=True)
            types = types.masked_fill(has_image & (types == TokenType.SYS), int(TokenType.INS))
        types = torch.cat([earlier, types], dim=1)
        position = torch.where(position < 0, -1, position + call.past)
    if previous is not None:
        position = torch.cat([previous.position, position], dim=1)
        available = torch.cat([previous.available, kept], dim=1)
        kept = torch.cat([previous.kept, kept], dim=1)
    is_real = torch.ones_like(types, dtype=torch.bool)
    if (padding := call.padding(types.shape[1])) is not None:
        is_real[:, -padding.shape[1] :] = ~padding.to(is_real.device)
    # These counts are on the host, so the host does not wait for the device.
    num_visual, count = _count_per_row(before, batch), _count_per_row(call.state.segments, batch)
    start = count
    if previous is not None:
        num_visual, count = num_visual + previous.visual, count + previous.count
        start = start + (previous.count if previous.method.mode == "evict" else previous.start)
    return DecodeState(
        method=method,
        stats=call.trace.stats,
        record=record,
        types=types,
        is_real=is_real,
        position=position,
        available=available,
        kept=kept,
        visual=num_visual,
        start=start,
        count=count,
        rate=torch.where(num_visual > 0, 1 - count.double() / num_visual.clamp(min=1), 0.0),
        masses=sum_by_type(row, types)[:, None],
        times=[],
    )


def _compute_token_types(visual: Tensor, device: torch.device) -> Tensor:
    """Return the `TokenType` of each token of the prompt, int64, from its placeholder mask. Both (batch, length)."""
    text = torch.where(visual.cumsum(1) > 0, int(TokenType.INS), int(TokenType.SYS))
    return to_device(torch.where(visual, int(TokenType.IMG), text), device)


def _collect_positions(segments: Segments, batch: int) -> Tensor:
    """Return the positions of each row's visual tokens, shape (batch, tokens), int64, padded with -1."""
    rows: list[list[Tensor]] = [[segments.position.new_zeros(0)] for _ in range(batch)]
    for segment, row in enumerate(segments.row):
        rows[row].append(segments.position[segment, : segments.counts[segment]])
    return torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in rows], True, -1)


def _find_kept(before: Segments, after: Segments, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the positions of each row's visual tokens before a cut (see `_collect_positions`), and which are kept.

    length: Number of tokens of each row.
    """
    position = before.cache.get("positions", partial(_collect_positions, before, batch))
    alive = torch.zeros(batch, length + 1, dtype=torch.bool, device=position.device)
    # Padding is written to a scratch entry at the end.
    alive.index_put_((after.row_index, torch.where(after.mask, after.position, length)), alive.new_ones(()))
    return position, alive.gather(1, position.clamp(min=0)) & (position >= 0)


def _count_per_row(segments: Segments, batch: int) -> Tensor:
    """Return the number of visual tokens of each row, shape (batch,), int64, on the host."""
    counts = [0] * batch
    for row, count in zip(segments.row, segments.counts, strict=True):
        counts[row] += count
    return torch.tensor(counts, device="cpu")


def _evict(cache: Any, reduction: Reduction, state: DecodeState) -> None:
    """Remove the keys and values of dropped tokens from the layers after the cut, and free their memory.

    Rows with fewer tokens than the widest row get empty slots on the left.
    """
    ends = [*(first for first, _ in reduction.slots[1:]), len(cache.layers)]
    groups = []  # (index in reduction.slots, mask of kept slots, layers)
    for index, (first, slots) in enumerate(reduction.slots):
        if first >= state.layer:
            # Layers that attend to the keys of other layers hold no keys.
            holders = [layer for layer in cache.layers[first : ends[index]] if count_slots(layer)]
            groups.append((index, (slots >= 0) & ~state.pruned_mask(slots), holders))
    # A sliding layer holds only the last slots. If the new slots of a short row reach back to a slot that the layer has
    # lost, another slot replaces it. It is older than the window, so the window masks it.
    last = {
        (index, num_slots): kept[:, kept.shape[1] - num_slots :]
        for index, kept, layers in groups
        for num_slots in {kept.shape[1], *(layer.keys.shape[-2] for layer in layers)}
    }
    counts = torch.stack([kept.sum(1) for kept in last.values()]).tolist()  # a single transfer from the device
    views = {key: right_align(last[key], max(num_kept)) for key, num_kept in zip(last, counts, strict=True)}
    for index, kept, layers in groups:
        for layer in layers:
            view = views[index, layer.keys.shape[-2]][0]
            layer.keys, layer.values = gather_keys(layer.keys, view), gather_keys(layer.values, view)
        first, slots = reduction.slots[index]
        view, valid = views[index, kept.shape[1]]
        reduction.slots[index] = (first, slots.gather(1, view).masked_fill(~valid, -1))
        reduction.ragged = reduction.ragged or len(set(counts[list(last).index((index, kept.shape[1]))])) > 1
    state.available = state.kept
