# SPDX-License-Identifier: Apache-2.0
"""Remove visual tokens while the answer is written: the site DECODE.

What is needed for that lives on the cache, beside its `Reduction`, and follows it when rows are repeated, reordered or
selected. It is made by the cut in prefill. A later call with one new token observes the layer before the cut, decides,
and applies the decision to the layers from there on: `evict` takes keys and values out of the cache, `mask` hides them,
`index` keeps them and hands the attention a gathered view. Calls with several tokens (a user's next turn, drafts that
are not accepted yet) decide nothing: what was kept before stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tokenprune.base import top_mask
from tokenprune.decode import DecodeMethod, TokenType
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.hf import cutting
from tokenprune.integrations.hf.adapters import Adapter
from tokenprune.integrations.hf.layout import gather_tokens
from tokenprune.integrations.hf.observe import Observation
from tokenprune.integrations.hf.report import count_bytes
from tokenprune.statistics import Cut, Stats
from tokenprune.tokens import Segments, require

if TYPE_CHECKING:
    from tokenprune.integrations.hf.cache import Reduction
    from tokenprune.integrations.hf.call import Call


@dataclass
class DecodeState:
    """What a cache remembers between decode steps. B rows, N visual tokens in the row with most.

    stats: those of the prefill, which the steps go on. record: whether every cut is noted there.
    types: long `[B, prompt]`, the `TokenType` of each position of the prompt. real: bool, what of it is no padding.
    position: long `[B, N]`, logical position of each visual token, -1 = none. available: bool `[B, N]`, those whose
    keys and values the layers from the cut on hold; kept: those that they attend to.
    visual, start, count: long `[B]`, visual tokens of each row, kept by prefill, kept now; on the host, like
    rate: float64 `[B]`, the rate in force.
    masses: float32 `[B, 1 + T, H, 4]`, see `DecodeMethod.next_rate`; times: the logical position of each of the T steps.
    view: long `[B, K]`, the keys that the next layer is to see (mode "index"), None = all.
    """

    method: DecodeMethod
    stats: Stats
    record: bool
    types: Tensor
    real: Tensor
    position: Tensor
    available: Tensor
    kept: Tensor
    visual: Tensor
    start: Tensor
    count: Tensor
    rate: Tensor
    masses: Tensor
    times: list[int]
    view: Tensor | None = None

    @property
    def layer(self) -> int:
        return self.method.layer

    @property
    def prompt(self) -> int:
        return self.types.shape[1]

    @property
    def hides(self) -> bool:
        """Whether the cache holds tokens that its layers must not see."""
        return self.method.mode != "evict" and bool((self.count < self.start).any())

    # -- following the cache

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the cache's rows."""
        for item in dataclasses.fields(self):
            if isinstance(value := getattr(self, item.name), Tensor):
                setattr(self, item.name, change(value))

    def crop(self, length: int) -> None:
        """Forget the steps of tokens that were taken back; what these steps dropped stays dropped."""
        self.times = [time for time in self.times if time < length]
        self.masses = self.masses[:, : 1 + len(self.times)]

    def seen(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values `[B, H, K, D]` that the next layer is to see."""
        if self.view is None:
            return keys, values
        return _gather(keys, self.view), _gather(values, self.view)

    def arrange(self, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logical positions `[B, K]` of the keys that a layer from the cut on is to see out of `columns`, -1
        = hidden, and which of these keys they are (None: all)."""
        if not self.hides:
            return columns, None
        stays = (columns >= 0) & ~self._gone(columns)
        if self.method.mode == "mask":
            return columns.masked_fill(~stays, -1), None
        view, stays = _to_the_right(stays)
        return columns.gather(1, view).masked_fill(~stays, -1), view

    def _gone(self, columns: Tensor) -> Tensor:
        """bool like `columns` (logical positions): those of visual tokens that are available but not kept."""
        gone = self.available & ~self.kept
        # What is not gone is written to a scratch entry at the end.
        flags = gone.new_zeros(gone.shape[0], self.prompt + 1)
        flags.scatter_(1, torch.where(gone, self.position, self.prompt), True)[:, -1] = False
        return flags.to(columns.device).gather(1, columns.clamp(0, self.prompt))

    # -- a step

    def decide(self, row: Tensor, time: int) -> bool:
        """Take in a decode step; returns whether tokens are dropped (or return) by it.

        row: float32 `[B, H, time + 1]`, attention of the token at the logical position `time`.
        """
        self.masses = torch.cat([self.masses, _masses(row, self.types)[:, None].to(self.masses.device)], dim=1)
        self.times.append(time)
        changed = self.method.decides(len(self.times)) and self._choose(row)
        self.stats.decode_rates.append(self.rate.tolist())
        self.stats.decode_kept.append(self.count.tolist())
        if changed and self.record:
            step, kept = time - self.prompt + 1, self._kept_positions()
            self.stats.cuts.append(Cut(self.method.site, self.layer, self.method.name, kept, step=step))
        return changed

    def _choose(self, row: Tensor) -> bool:
        method, prunable = self.method, self.start < self.visual
        share = self.start.double() / self.visual.clamp(min=1)
        rate = method.next_rate(self.masses, share.to(self.masses.device)).double().cpu().clamp(0, method.max_rate)
        if method.batch_policy == "shared" and bool(prunable.any()):
            rate = rate.masked_fill(~prunable, 0).max().expand_as(rate)
        if method.monotone:
            rate = torch.maximum(rate, self.rate)
        self.rate = torch.where(prunable, rate, 0.0)
        count = ((1 - self.rate) * self.visual - 1e-6).ceil().long()
        count = torch.maximum(count, torch.tensor([method.fewest(number) for number in self.visual.tolist()]))
        count = torch.where(prunable, torch.minimum(count, self.start), self.start)
        if method.monotone:
            count = torch.minimum(count, self.count)
        if method.monotone and torch.equal(count, self.count):
            return False
        index = self.position.clamp(min=0)[:, None].expand(-1, row.shape[1], -1)
        score = row.to(index.device).gather(2, index).mean(1)
        pool = self.kept if method.monotone else self.available
        self.kept, before = top_mask(score, pool, count.to(score.device)), self.kept
        self.count = count
        return method.monotone or not torch.equal(self.kept, before)

    def _kept_positions(self) -> list[list[int]]:
        alive = self.real & (self.types != TokenType.IMG)
        alive = torch.cat([alive, alive.new_zeros(alive.shape[0], 1)], dim=1)
        alive.scatter_(1, torch.where(self.kept, self.position, self.prompt), True)
        return [row[:-1].nonzero().flatten().tolist() for row in alive]


# -- what the engine calls


def check(method: Any, decoder: Any, others: int) -> None:
    """Raise OptionError if `method` cannot act while decoding in this model. others: methods of that site beside it."""
    if not isinstance(method, DecodeMethod):
        raise OptionError(f"{method.name}: a method at the site DECODE must derive from tokenprune.decode.DecodeMethod")
    if others:
        raise OptionError(f"{method.name}: only one of the composed methods can act while decoding")
    method.check_model(decoder)


def check_setup(method: DecodeMethod, config: Any, batch: int) -> None:
    """Raise UnsupportedSetupError where rows of different lengths could not be told apart in a sliding window."""
    kinds = (getattr(config, "layer_types", None) or ())[method.layer :]
    sliding = any("sliding" in kind for kind in kinds) or (
        not kinds and getattr(config, "sliding_window", None) is not None
    )
    if method.mode == "evict" and sliding and batch > 1 and "flash" in config._attn_implementation:
        raise UnsupportedSetupError(
            f"{method.name}: mode='evict' with several rows, sliding-window layers and flash attention at once: flash "
            "kernels cannot leave out single slots of a window; use mode='mask', one row at a time, or sdpa"
        )


def cut(call: Call, step: cutting.Step, hidden: Tensor, adapter: Adapter, record: bool) -> Tensor:
    """Make the cut of the prefill, and note in `call.started` what the decode steps will need."""
    layout, before = call.layout.to(hidden.device), call.segments.to(hidden.device)
    query = cutting.Sources(call, hidden, adapter).last_slot()
    row = _row(call, query, call.past + layout.length)
    hidden = cutting.cut(call, step, hidden, adapter)
    call.started = _begin(call, step.method, row, before, record)
    return hidden


def decide(call: Call, flags: Tensor) -> None:
    """Decide at the input of the cut's layer. flags: any tensor on the device of the layer."""
    state = call.decode
    row = _row(call, torch.zeros(flags.shape[0], 1, dtype=torch.long, device=flags.device), call.past + 1)
    call.observation = None
    changed = state.decide(row, call.past)
    if changed and state.method.mode == "evict":
        _evict(call.cache, call.reduction, state)
        call.ragged = call.ragged or call.reduction.ragged
    call.ragged = call.ragged or state.hides


def finish(call: Call) -> Stats:
    """Return the statistics after a call that went on from an earlier prefill."""
    stats = call.decode.stats
    stats.kv_bytes, stats.kv_bytes_full = count_bytes(call.cache, call.past + call.layout.length)
    return stats


# -- the parts


def _row(call: Call, query: Tensor, length: int) -> Tensor:
    """float32 `[B, H, length]`: attention of one token (slot `query`, `[B, 1]`) over logical positions, in the layer
    before the current one."""
    seen: Observation = require(call.observation, "last_row_attention")
    with torch.no_grad():
        row = seen.rows(query.to(seen.query.device))[:, :, 0]
    columns = call.columns[-1][1].to(row.device)[:, -row.shape[2] :]  # a sliding layer sees the last ones
    target = torch.where(columns < 0, length, columns)[:, None].expand_as(row)
    return row.new_zeros(*row.shape[:2], length + 1).scatter_add_(2, target, row)[..., :length]


def _masses(row: Tensor, types: Tensor) -> Tensor:
    """float32 `[B, H, 4]`: a row of attention `[B, H, L]` summed over the types of its tokens; behind the prompt all is
    answer."""
    types = torch.nn.functional.pad(types.to(row.device), (0, row.shape[2] - types.shape[1]), value=int(TokenType.RES))
    masses = row.new_zeros(*row.shape[:2], len(TokenType))
    return masses.scatter_add_(2, types[:, None].expand_as(row), row)


def _begin(call: Call, method: DecodeMethod, row: Tensor, before: Segments, record: bool) -> DecodeState:
    """Return the state after the prefill's cut. before: the visual tokens that reached it."""
    device, past, previous = before.mask.device, call.past, call.decode
    visual = torch.stack([mask.to(device) for mask in call.visual.values()]).any(0)
    batch, length = visual.shape
    alive = visual.new_zeros(batch, length)
    now = call.segments
    alive[now.row_index.expand_as(now.position)[now.mask], now.position[now.mask]] = True
    places: list[list[Tensor]] = [[visual.new_zeros(0, dtype=torch.long)] for _ in range(batch)]
    for segment, number in enumerate(before.row):
        places[number].append(before.position[segment][before.mask[segment]])
    position = torch.nn.utils.rnn.pad_sequence([torch.cat(own) for own in places], True, -1)
    kept = alive.gather(1, position.clamp(min=0)) & (position >= 0)
    position = torch.where(position < 0, -1, position + past)
    padding = call.padding(length)
    real = torch.ones_like(visual) if padding is None else ~padding.to(device)
    text = torch.where(visual.cumsum(1) > 0, int(TokenType.INS), int(TokenType.SYS))
    types = torch.where(visual, int(TokenType.IMG), text)
    if past:
        # Whatever came before belongs to the prompt now; pictures of earlier turns compete with the new ones.
        earlier = torch.full((batch, past), int(TokenType.SYS), device=device)
        if previous is not None:
            earlier[:] = TokenType.INS
            earlier[:, : previous.prompt] = previous.types
            position = torch.cat([previous.position, position], dim=1)
            kept = torch.cat([previous.kept, kept], dim=1)
            types = types.masked_fill((types == TokenType.SYS) & (earlier == TokenType.IMG).any(1)[:, None], 2)
        types = torch.cat([earlier, types], dim=1)
        given = call.arguments.get("attention_mask")
        whole = isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] == past + length
        real = given.to(device).bool() if whole else torch.cat([real.new_ones(batch, past), real], dim=1)
    available = kept.clone()
    if previous is not None:
        available[:, : previous.position.shape[1]] = previous.available
    number, start = (position >= 0).sum(1).cpu(), available.sum(1).cpu()
    count = kept.sum(1).cpu()
    rate = 1 - count.double() / number.clamp(min=1)
    return DecodeState(
        method=method,
        stats=call.report.stats,
        record=record,
        types=types,
        real=real,
        position=position,
        available=available,
        kept=kept,
        visual=number,
        start=start,
        count=count,
        rate=torch.where(number > 0, rate, 0.0),
        masses=_masses(row, types)[:, None],
        times=[],
    )


def _evict(cache: Cache, reduction: Reduction, state: DecodeState) -> None:
    """Take the keys and values of dropped tokens out of the layers from the cut on: memory is freed.

    Rows that hold fewer tokens than the widest are filled on the left with empty slots.
    """
    firsts = [first for first, _ in reduction.slots]
    for place, (first, slots) in enumerate(reduction.slots):
        if first < state.layer:
            continue
        stays = (slots >= 0) & ~state._gone(slots)
        views: dict[int, Tensor] = {}
        for layer in cache.layers[first : (firsts + [len(cache.layers)])[place + 1]]:
            held = layer.keys.shape[-2]
            if held not in views:
                # A sliding layer holds the last slots only. Where it has lost a slot that the new slots of a short row
                # reach back to, it gets another one there: too old for the window, and masked by it.
                views[held] = _to_the_right(stays[:, stays.shape[1] - held :])[0]
            layer.keys, layer.values = _gather(layer.keys, views[held]), _gather(layer.values, views[held])
        view, valid = _to_the_right(stays)
        reduction.slots[place] = (first, slots.gather(1, view).masked_fill(~valid, -1))
        reduction.ragged = reduction.ragged or not bool(valid.all())
    state.available = state.kept


def _to_the_right(stays: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots (long `[B, K']`) that bring those that stay to the right end, K' the most of a row, and which of
    them do stay."""
    width = int(stays.sum(1).max())
    view = stays.to(torch.uint8).argsort(dim=1, stable=True)[:, stays.shape[1] - width :]
    return view, stays.gather(1, view)


def _gather(states: Tensor, view: Tensor) -> Tensor:
    """`[B, H, K, D]` -> `[B, H, K', D]`, in memory of its own."""
    index = view.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
