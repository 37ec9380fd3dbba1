# SPDX-License-Identifier: Apache-2.0
"""The stream of a session: blocks and text through the model, questions that leave no trace, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from tokenprune.errors import BudgetError, SessionError, UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.sessions.anchors import reanchor
from tokenprune.integrations.hf.sessions.attending import Attending
from tokenprune.integrations.hf.sessions.checks import MASKS_BY_TYPE, check_mode, generate_options, place_of
from tokenprune.integrations.hf.sessions.limits import Limits
from tokenprune.integrations.hf.sessions.memory import TOKEN, Memory
from tokenprune.integrations.hf.sessions.policies.base import Policy
from tokenprune.integrations.hf.sessions.policies.window import WindowPolicy
from tokenprune.integrations.hf.sessions.positions import (
    axes,
    block_positions,
    frames_and_cells,
    text_positions,
)
from tokenprune.integrations.hf.sessions.proxy import attention_of_proxy

# What a processor makes beside an encoder's arguments; a session finds them itself.
_PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class Progress:
    """Numbers of a stream: tokens and frames of the decoder seen, frames that were shown, the next position,
    compressions, the most bytes of keys and values at once, and how often positions moved down; opened: a first turn
    has begun."""

    tokens: int = 0
    frames: int = 0
    shown: int = 0
    next: int = 0
    compressions: int = 0
    peak: int = 0
    reanchored: int = 0
    opened: bool = False


class Stream:
    """A model, and the memory of what it has seen. Nothing is kept on the model."""

    def __init__(
        self, model: Any, adapter: Adapter, policy: Policy, limits: Limits, seed: int, proxy: Tensor | None = None
    ) -> None:
        self.model, self.adapter, self.policy, self.limits, self.seed = model, adapter, policy, limits, seed
        self.proxy = proxy  # ids, `[1, P]`, of a policy that needs their attention
        self.place = place_of(model)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.memory = Memory(self.adapter.text_config, axes(self.adapter), self.place[0])
        self.progress = Progress()

    @property
    def text(self) -> int:
        """The number of entries of text."""
        return self.memory.held - self.memory.visual

    @property
    def room(self) -> int:
        """The number of visual entries that may be held."""
        return self.limits.room(self.text)

    def open(self, shown: int = 0) -> None:
        """Note that the first turn has begun, and how many frames were shown."""
        self.progress = replace(self.progress, opened=True, shown=self.progress.shown + shown)

    def fork(self) -> Stream:
        """Return a stream that goes on from here, apart; the two share tensors until one of them goes on."""
        made = Stream(self.model, self.adapter, self.policy, self.limits, self.seed, self.proxy)
        made.memory, made.progress = self.memory.copy(), self.progress
        return made

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Leave the stream as it is where what is done in the block fails."""
        memory, progress = self.memory.copy(), self.progress
        try:
            yield
        except BaseException:
            self.memory, self.progress = memory, progress
            raise

    def check_model(self) -> None:
        """Raise UnsupportedSetupError where the model is no longer as it was when the session began."""
        check_mode(self.model)
        if place_of(self.model) != self.place:
            device, dtype = self.place
            raise UnsupportedSetupError(f"the model was {dtype} on {device} when the session began: move it back")

    def see(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Take in a block of frames, compress if the memory is over, and return the logits of the last token.

        ids: long `[1, n]`. inputs: arguments of the model. Raises SessionError, BudgetError or UnsupportedSetupError.
        """
        inputs = {name: self._placed(value) for name, value in inputs.items() if name not in _PER_TOKEN}
        of_frames, frames = frames_and_cells(self.adapter, ids, inputs)
        if not frames:
            raise SessionError("nothing to see: input_ids hold no placeholder of an image or video")
        if ids.shape[1] > self.room:
            raise BudgetError(
                f"a block of {frames} frames has {ids.shape[1]} tokens, and memory={self.limits.given!r} has room for "
                f"{self.room}: raise memory=, pass a smaller block=, or smaller frames"
            )
        of_frames[0] += self.progress.frames  # all tokens of a block belong to a frame
        try:
            logits = self._forward(ids, inputs, of_frames)
        except ValueError as error:
            raise SessionError(f"the model refuses this block: {' '.join(str(error).split())}") from error
        self.progress = replace(self.progress, frames=self.progress.frames + frames)
        self._compress()
        return logits

    def say(self, ids: Tensor) -> Tensor:
        """Take in text, and return the logits of the last token. ids: long `[1, n]`."""
        if any((ids == token).any() for token in self.adapter.placeholders.values()):
            raise SessionError("text holds the placeholder of an image or video: hand frames to see()")
        self.limits.check(self.text + ids.shape[1], self.policy.pinned)
        logits = self._forward(ids, {}, torch.full((2, ids.shape[1]), -1, device="cpu"))
        self._compress()
        return logits

    def _compress(self) -> None:
        """Have the policy choose what stays, where the memory is over."""
        if self.memory.visual > self.room:
            rows = None
            if self.proxy is not None:
                positions = text_positions(self.adapter, self.progress.next, self.proxy.shape[1], self.place[0])
                ask = partial(self._run, self.proxy.to(self.place[0]), positions)
                rows, size = attention_of_proxy(self.memory, self.adapter, ask)
                self.progress = replace(self.progress, peak=max(self.progress.peak, size))
            self._leave(self.policy, self.limits.target(self.text), rows)

    def _leave(self, policy: Policy, keep: int, rows: list[Tensor] | None = None) -> None:
        step = self.progress.compressions
        self.memory.compress(policy, keep, step, self.seed, rows)
        self.progress = replace(self.progress, compressions=step + 1)

    def _forward(self, ids: Tensor, inputs: Mapping[str, Any], of_frames: Tensor) -> Tensor:
        ids = ids.to(self.place[0])
        positions, behind = block_positions(self.adapter, ids, inputs, self.progress.next)
        if self._past(self._last(positions, behind)):
            positions, behind = block_positions(self.adapter, ids, inputs, self.progress.next)
        self.limits.check_position(self._last(positions, behind))
        output = self._run(ids, positions, **inputs)
        self._note(ids, positions, of_frames, behind)
        return output.logits[:, -1]

    @torch.no_grad()
    def _run(self, ids: Tensor, positions: Tensor, **inputs: Any) -> Any:
        return self.model(
            input_ids=ids,
            position_ids=positions if len(positions) > 1 else positions[0],
            use_cache=True,
            logits_to_keep=1,
            **{compat.CACHE: self.memory.cache},
            **inputs,
            **self._token_types(ids),
        )

    def _last(self, positions: Tensor, behind: int) -> int:
        """Return the greatest position of a block, or of the proxy that may follow it."""
        return max(int(positions.max()), behind - 1 + (0 if self.proxy is None else self.proxy.shape[1]))

    def _past(self, last: int) -> bool:
        """Return whether a position is past the horizon, and positions have moved down for it.

        Where a memory holds more than there are positions for, what came first leaves, as in a window.
        """
        if last <= self.limits.horizon or not self.limits.reanchor:
            return False
        down = reanchor(self.memory, self.adapter)
        while (over := last - down - self.limits.horizon) > 0:
            visual, pinned = self.memory.visual, self.policy.pinned
            keep = min(int(visual * self.limits.share), visual - over)
            if keep <= pinned:
                break
            self._leave(WindowPolicy(sink=pinned), keep)
            down += reanchor(self.memory, self.adapter)
        number = self.progress.reanchored + (down > 0)
        self.progress = replace(self.progress, next=self.progress.next - down, reanchored=number)
        return down > 0

    def _note(self, ids: Tensor, positions: Tensor, of_frames: Tensor, behind: int) -> None:
        """Note the tokens that were added to the cache."""
        index = torch.arange(self.progress.tokens, self.progress.tokens + ids.shape[1], device=ids.device)
        rows = torch.cat([index[None], of_frames.to(ids.device), ids, positions[:, 0]])
        kept = self.memory.entered(ids.shape[1])
        self.memory.append(rows if kept is None else rows[:, kept])
        peak = max(self.progress.peak, self.memory.bytes)
        self.progress = replace(self.progress, tokens=self.progress.tokens + ids.shape[1], next=behind, peak=peak)

    def _token_types(self, ids: Tensor) -> dict[str, Tensor]:
        """Return token types for a family that makes masks of them: transformers fills them up on the right to the
        length of the keys, so those of what the cache holds come in front."""
        if self.adapter.config.model_type not in MASKS_BY_TYPE:
            return {}
        types = (ids == self.adapter.placeholders["image"]).long()
        return {"token_type_ids": torch.cat([ids.new_zeros(1, self.memory.held), types], 1)}

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point() and value.device.type == "cpu" and not value.isfinite().all():
            raise SessionError("the pixels hold NaN or infinity")
        device, dtype = self.place
        return value.to(device, dtype if value.is_floating_point() else None)

    @torch.no_grad()
    def ask(self, ids: Tensor, options: Mapping[str, Any], attend: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the answer's tokens, long `[m]`, and their logits, `[m, V]`; the stream stays as it was.

        ids: long `[1, n]`. options: of the model's `generate`. attend: the visual entries of each layer that are read
        for all tokens but the first, None for all.
        """
        given = generate_options(self.model, dict(options))
        held, asked = self.memory.held, ids.shape[1]
        ids = ids.to(self.place[0])
        last = self.progress.next + asked + (given.get("max_new_tokens") or 1) - 1
        if last > self.limits.horizon and self.limits.reanchor:
            other = self.fork()  # a question moves nothing in the stream
            if other._past(last):
                answer = other.ask(ids, options, attend)
                self.progress = replace(self.progress, peak=other.progress.peak)
                return answer
        self.limits.check_position(last)
        # Ids of what is held stand for the cache, so that penalties for repetition read what they would in a prompt.
        known = self.memory.tables[0][TOKEN, :1].long()
        positions = text_positions(self.adapter, self.progress.next, asked, ids.device)
        before = torch.zeros(*positions.shape[:2], held, dtype=torch.long, device=ids.device)
        positions = torch.cat([before, positions], -1)
        # M-RoPE has an axis for text in front of the three.
        positions = torch.cat([positions[:1], positions]) if len(positions) > 1 else positions[0]
        prompt = torch.cat([known, ids], 1)
        start, narrowed = self.memory.copy(), ExitStack()
        try:
            if attend is not None:
                one = narrowed.enter_context(Attending(self.memory, self.adapter, attend))
                given["logits_processor"] = LogitsProcessorList([*(given.get("logits_processor") or []), one])
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                position_ids=positions,
                return_dict_in_generate=True,
                output_logits=True,
                cache_implementation=None,
                **{compat.CACHE: self.memory.cache},
                **self._token_types(ids),
                **given,
            )
        finally:
            narrowed.close()
            peak = max(self.progress.peak, self.memory.bytes)
            self.memory.take_back(start)
        self.progress = replace(self.progress, peak=peak)
        answer = output.sequences[0, prompt.shape[1] :]
        return answer, torch.cat(output.logits).float()
