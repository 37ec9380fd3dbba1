# SPDX-License-Identifier: Apache-2.0
"""The stream of a session: feed blocks and text to the model, answer questions, and undo failed calls."""

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
from tokenprune.integrations.hf.sessions.checks import MASKS_BY_TYPE, check_generate_options, check_mode, get_placement
from tokenprune.integrations.hf.sessions.limits import Limits
from tokenprune.integrations.hf.sessions.memory import TOKEN, Memory
from tokenprune.integrations.hf.sessions.policies.base import Policy
from tokenprune.integrations.hf.sessions.policies.window import WindowPolicy
from tokenprune.integrations.hf.sessions.positions import (
    count_axes,
    find_frames_and_cells,
    make_block_positions,
    make_text_positions,
)
from tokenprune.integrations.hf.sessions.proxy import measure_proxy_attention

# Processor outputs that a session computes itself.
_PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class Progress:
    """Progress of a stream. Saved files contain its fields.

    Attributes:
        tokens: Number of tokens.
        frames: Number of decoder frames.
        shown: Number of input frames.
        next: Next position.
        compressions: Number of compressions.
        peak: Largest number of bytes of keys and values.
        reanchored: Number of times that positions were moved down.
        opened: Whether the first turn has begun.
    """

    tokens: int = 0
    frames: int = 0
    shown: int = 0
    next: int = 0
    compressions: int = 0
    peak: int = 0
    reanchored: int = 0
    opened: bool = False


class Stream:
    """A model and its memory of a stream. The model itself does not change.

    Args:
        model: The model.
        adapter: Its adapter.
        policy: Selects the visual entries to keep.
        limits: Limits of the memory and of positions.
        seed: Seed of random policies.
        proxy: Token ids of the proxy question, shape (1, tokens), if the policy needs it.
    """

    def __init__(
        self, model: Any, adapter: Adapter, policy: Policy, limits: Limits, seed: int, proxy: Tensor | None = None
    ) -> None:
        self.model, self.adapter, self.policy, self.limits, self.seed = model, adapter, policy, limits, seed
        self.proxy = proxy
        self.placement = get_placement(model)
        self.reset()

    def reset(self) -> None:
        """Clear the memory."""
        self.memory = Memory(self.adapter.text_config, count_axes(self.adapter), self.placement[0])
        self.progress = Progress()

    @property
    def text(self) -> int:
        """Number of text entries."""
        return self.memory.held - self.memory.visual

    @property
    def room(self) -> int:
        """Maximum number of visual entries."""
        return self.limits.room(self.text)

    def record_shown(self, shown: int = 0) -> None:
        """Record that the first turn has begun, and add `shown` input frames."""
        self.progress = replace(self.progress, opened=True, shown=self.progress.shown + shown)

    def fork(self) -> Stream:
        """Return an independent copy of the stream. The copies share tensors until one of them continues."""
        copy = Stream(self.model, self.adapter, self.policy, self.limits, self.seed, self.proxy)
        copy.memory, copy.progress = self.memory.copy(), self.progress
        return copy

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Restore the stream if the `with` block fails."""
        memory, progress = self.memory.copy(), self.progress
        try:
            yield
        except BaseException:
            self.memory, self.progress = memory, progress
            raise

    def check_model(self) -> None:
        """Raise UnsupportedSetupError if the mode, device or dtype of the model has changed."""
        check_mode(self.model)
        if get_placement(self.model) != self.placement:
            device, dtype = self.placement
            raise UnsupportedSetupError(f"The model was {dtype} on {device} when the session began. Move it back.")

    def see(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Process a block of frames, and compress the memory if it is full.

        Args:
            ids: Token ids, shape (1, tokens), int64.
            inputs: Other model inputs.

        Returns:
            Logits of the last token, shape (1, vocabulary).

        Raises:
            SessionError: If the block has no frames, or the model does not accept it.
            BudgetError: If the block is larger than the memory.
            UnsupportedSetupError: If a position is beyond the horizon.
        """
        inputs = {name: self._move(value) for name, value in inputs.items() if name not in _PER_TOKEN}
        frame_table, frames = find_frames_and_cells(self.adapter, ids, inputs)
        if not frames:
            raise SessionError("input_ids have no image or video placeholder. Pass text to say().")
        if ids.shape[1] > self.room:
            raise BudgetError(
                f"A block of {frames} frames has {ids.shape[1]} tokens, and memory={self.limits.memory!r} has room for "
                f"{self.room}. Raise memory=, or pass a smaller block= or smaller frames."
            )
        frame_table[0] += self.progress.frames  # every token of a block belongs to a frame
        try:
            logits = self._forward(ids, inputs, frame_table)
        except ValueError as error:
            raise SessionError(f"The model does not accept this block: {' '.join(str(error).split())}") from error
        self.progress = replace(self.progress, frames=self.progress.frames + frames)
        self._compress()
        return logits

    def say(self, ids: Tensor) -> Tensor:
        """Process text, shape (1, tokens), and return the logits of the last token, shape (1, vocabulary)."""
        if any((ids == token).any() for token in self.adapter.placeholders.values()):
            raise SessionError("The text has an image or video placeholder. Pass frames to see().")
        self.limits.check(self.text + ids.shape[1], self.policy.pinned)
        logits = self._forward(ids, {}, torch.full((2, ids.shape[1]), -1, device="cpu"))
        self._compress()
        return logits

    def _compress(self) -> None:
        """Compress the memory if it is full."""
        if self.memory.visual > self.room:
            rows = None
            if self.proxy is not None:
                device = self.placement[0]
                positions = make_text_positions(self.adapter, self.progress.next, self.proxy.shape[1], device)
                run = partial(self._run, self.proxy.to(device), positions)
                rows, size = measure_proxy_attention(self.memory, self.adapter, run)
                self.progress = replace(self.progress, peak=max(self.progress.peak, size))
            self._compress_to(self.policy, self.limits.target(self.text), rows)

    def _compress_to(self, policy: Policy, keep: int, rows: list[Tensor] | None = None) -> None:
        step = self.progress.compressions
        self.memory.compress(policy, keep, step, self.seed, rows)
        self.progress = replace(self.progress, compressions=step + 1)

    def _forward(self, ids: Tensor, inputs: Mapping[str, Any], frame_table: Tensor) -> Tensor:
        ids = ids.to(self.placement[0])
        positions, next_position = make_block_positions(self.adapter, ids, inputs, self.progress.next)
        if self._reanchor(self._find_last(positions, next_position)):
            positions, next_position = make_block_positions(self.adapter, ids, inputs, self.progress.next)
        self.limits.check_position(self._find_last(positions, next_position))
        output = self._run(ids, positions, **inputs)
        self._record(ids, positions, frame_table, next_position)
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

    def _find_last(self, positions: Tensor, next_position: int) -> int:
        """Return the largest position of a block and of the proxy after it."""
        return max(int(positions.max()), next_position - 1 + (0 if self.proxy is None else self.proxy.shape[1]))

    def _reanchor(self, last: int) -> bool:
        """Move positions down if `last` is beyond the horizon, and return whether they moved.

        If the memory has more entries than there are positions, the oldest entries are dropped as with `window`.
        """
        if last <= self.limits.horizon or not self.limits.reanchor:
            return False
        down = reanchor(self.memory, self.adapter)
        while (excess := last - down - self.limits.horizon) > 0:
            visual, pinned = self.memory.visual, self.policy.pinned
            keep = min(int(visual * self.limits.share), visual - excess)
            if keep <= pinned:
                break
            self._compress_to(WindowPolicy(sink=pinned), keep)
            down += reanchor(self.memory, self.adapter)
        reanchored = self.progress.reanchored + (down > 0)
        self.progress = replace(self.progress, next=self.progress.next - down, reanchored=reanchored)
        return down > 0

    def _record(self, ids: Tensor, positions: Tensor, frame_table: Tensor, next_position: int) -> None:
        """Add the cached tokens to the tables of the memory."""
        index = torch.arange(self.progress.tokens, self.progress.tokens + ids.shape[1], device=ids.device)
        rows = torch.cat([index[None], frame_table.to(ids.device), ids, positions[:, 0]])
        kept = self.memory.finish_forward(ids.shape[1])
        self.memory.append(rows if kept is None else rows[:, kept])
        peak = max(self.progress.peak, self.memory.bytes)
        num_tokens = self.progress.tokens + ids.shape[1]
        self.progress = replace(self.progress, tokens=num_tokens, next=next_position, peak=peak)

    def _token_types(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the token types for a family whose masks need them.

        transformers pads token types on the right to the length of the keys, so the cached tokens are added in front.
        """
        if self.adapter.config.model_type not in MASKS_BY_TYPE:
            return {}
        types = (ids == self.adapter.placeholders["image"]).long()
        return {"token_type_ids": torch.cat([ids.new_zeros(1, self.memory.held), types], 1)}

    def _move(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point() and value.device.type == "cpu" and not value.isfinite().all():
            raise SessionError("The pixels contain NaN or infinity.")
        device, dtype = self.placement
        return value.to(device, dtype if value.is_floating_point() else None)

    @torch.no_grad()
    def ask(self, ids: Tensor, options: Mapping[str, Any], attend: int | None = None) -> tuple[Tensor, Tensor]:
        """Answer a question without changing the stream.

        Args:
            ids: Token ids of the question, shape (1, tokens), int64.
            options: Options of the model's `generate`.
            attend: Number of visual entries per layer that all answer tokens but the first read. None for all entries.

        Returns:
            Token ids of the answer, shape (answer tokens,), and their logits, shape (answer tokens, vocabulary).
        """
        arguments = check_generate_options(self.model, dict(options))
        held, question_length = self.memory.held, ids.shape[1]
        ids = ids.to(self.placement[0])
        last = self.progress.next + question_length + (arguments.get("max_new_tokens") or 1) - 1
        if last > self.limits.horizon and self.limits.reanchor:
            fork = self.fork()  # a question does not move the positions of the stream
            if fork._reanchor(last):
                answer = fork.ask(ids, options, attend)
                self.progress = replace(self.progress, peak=fork.progress.peak)
                return answer
        self.limits.check_position(last)
        # The ids of the cached tokens are part of the prompt, because repetition penalties read them.
        cached_ids = self.memory.tables[0][TOKEN, :1].long()
        positions = make_text_positions(self.adapter, self.progress.next, question_length, ids.device)
        cached_positions = torch.zeros(*positions.shape[:2], held, dtype=torch.long, device=ids.device)
        positions = torch.cat([cached_positions, positions], -1)
        # M-RoPE has a text axis in front of the three axes.
        positions = torch.cat([positions[:1], positions]) if len(positions) > 1 else positions[0]
        prompt = torch.cat([cached_ids, ids], 1)
        before_question, contexts = self.memory.copy(), ExitStack()
        try:
            if attend is not None:
                attending = contexts.enter_context(Attending(self.memory, self.adapter, attend))
                processors = [*(arguments.get("logits_processor") or []), attending]
                arguments["logits_processor"] = LogitsProcessorList(processors)
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                position_ids=positions,
                return_dict_in_generate=True,
                output_logits=True,
                cache_implementation=None,
                **{compat.CACHE: self.memory.cache},
                **self._token_types(ids),
                **arguments,
            )
        finally:
            contexts.close()
            peak = max(self.progress.peak, self.memory.bytes)
            self.memory.restore(before_question)
        self.progress = replace(self.progress, peak=peak)
        answer = output.sequences[0, prompt.shape[1] :]
        return answer, torch.cat(output.logits).float()
