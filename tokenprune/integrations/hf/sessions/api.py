# SPDX-License-Identifier: Apache-2.0
"""Sessions: hours of frames in a bounded visual memory, and questions that cost their own tokens only."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.errors import BudgetError, ConfigError, OptionError, SessionError, UnsupportedSetupError
from tokenprune.integrations.hf.processor_check import check_processor
from tokenprune.integrations.hf.sessions import storage
from tokenprune.integrations.hf.sessions.anchors import why_fixed
from tokenprune.integrations.hf.sessions.blocks import blocks_of
from tokenprune.integrations.hf.sessions.checks import adapter_of, check_patch, check_window, place_of
from tokenprune.integrations.hf.sessions.limits import Limits, entries_of
from tokenprune.integrations.hf.sessions.policies.registry import policy_named, policy_of
from tokenprune.integrations.hf.sessions.prompts import Words, as_frames
from tokenprune.integrations.hf.sessions.proxy import proxy_of
from tokenprune.integrations.hf.sessions.results import Answer, HeldEntries, SessionStats, held_of, stats_of
from tokenprune.integrations.hf.sessions.stream import Stream
from tokenprune.integrations.shared.attachment import get_attachment, is_patched
from tokenprune.selection.options import describe_type, matches_type

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tokenprune.integrations.hf.sessions.policies.base import Policy


class Session:
    """A stream of images and text that a model has seen, of which a bounded number of visual tokens is held.

    Made by `tokenprune.sessions.session`. It is a context manager, and leaves nothing on the model. One thread at a
    time: a call while another one is inside raises SessionError. Sessions on one model do not know of each other.
    """

    def __init__(self, stream: Stream, words: Words | None, block: int | None) -> None:
        self._stream, self._said, self._block = stream, words, block
        self._patch = _patch_of(stream.model)
        self._lock = threading.Lock()

    def see(self, frames: Any = None, *, fps: float | None = None, **inputs: Any) -> Session:
        """Take in frames, let the policy choose what stays where the memory is over, and return the session.

        frames: an image or a list of images, each of which enters as an image of the user's turn; or an array or
        tensor, `[T, H, W, 3]` or `[T, 3, H, W]`, uint8 or floats in [0, 1], which enters as a video where the model
        takes videos, else as T images. fps: frames a second of a video, None for what the processor takes for granted.
        inputs: in their place what a processor makes of one block: `input_ids`, `pixel_values` and the like.
        A failed call leaves the session as it was. Raises SessionError for nothing to see and for what the processor
        refuses, BudgetError for a block that is larger than the memory, UnsupportedSetupError past the horizon.
        """
        if (frames is None) == (not inputs):
            raise SessionError("nothing to see: hand over frames, or input_ids and pixel_values")
        if not matches_type(fps, Annotated[float, Gt(0)] | None):
            raise OptionError(f"fps={fps!r} must be a number of frames a second, or None")
        with self._inside(), self._stream.whole():
            if inputs:
                self._stream.see(_row(inputs.get("input_ids")), inputs)
                self._stream.open()
                return self
            video = not isinstance(frames, (list, tuple)) and getattr(frames, "ndim", 0) == 4
            images = as_frames(frames)
            if not self._stream.progress.opened:
                self._stream.say(self._words.opening())
            for block in blocks_of(images, self._words, self._stream, self._block, fps, video):
                self._stream.see(block["input_ids"], block)
            self._stream.open(len(images))
        return self

    def say(self, text: str | Sequence[int] | Tensor) -> Session:
        """Take in text of the user, or ids as they are, which stay, and return the session."""
        with self._inside(), self._stream.whole():
            self._stream.say(self._ids(text))
            self._stream.open()
        return self

    def ask(
        self,
        text: str | Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 64,
        attend: float | int = 1.0,
        remember: bool = False,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """Return the answer to a question: a str, or an `Answer` with `return_dict=True`. It leaves no trace.

        text: the question, or ids as they are. attend: the share of the visual tokens held, or how many, that each
        layer reads for all tokens of the answer but the first: those that the question attends to most (SparseVILA,
        arXiv 2510.17777, its decoding: a reconstruction from its abstract and others' code). remember: question and
        answer stay in the stream as text. options: of the model's `generate`; answers are greedy unless they say
        otherwise. Raises OptionError for an option that does not go with a session, such as beams, an assistant or
        another cache, BudgetError for an `attend` out of range or below a sliding window, UnsupportedSetupError past
        the horizon.
        """
        if not matches_type(max_new_tokens, Annotated[int, Ge(1)]):
            raise OptionError(f"max_new_tokens={max_new_tokens!r} must be an int >= 1")
        if self._said is None and not return_dict:
            raise SessionError("without a processor nothing turns ids into words: pass return_dict=True")
        with self._inside():
            read = self._read(attend, options)
            ids = self._ids(text, closing=True)
            given = {"max_new_tokens": max_new_tokens, "do_sample": False, **options}
            found, logits = self._stream.ask(ids, given, read)
            if remember:
                after = self._words.reopened(found) if isinstance(text, str) else found[None]
                with self._stream.whole():
                    self._stream.say(ids)
                    self._stream.say(after)
                    self._stream.open()
        answer = Answer(None if self._said is None else self._said.decode(found), found, logits)
        return answer if return_dict else answer.text

    def reset(self) -> Session:
        """Forget all that was seen and said, and return the session."""
        with self._inside():
            self._stream.reset()
        return self

    def fork(self) -> Session:
        """Return a session that goes on from here by itself. The two share memory until one of them goes on."""
        with self._inside():
            return Session(self._stream.fork(), self._said, self._block)

    def save(self, path: str | Path) -> Session:
        """Write the session to a safetensors file, and return it; raises ConfigError where that cannot be."""
        with self._inside():
            limits, policy = self._stream.limits, self._stream.policy
            settings = {
                "memory": limits.given,
                "target": limits.share,
                "horizon": limits.horizon,
                "reanchor": limits.reanchor,
                "block": self._block,
                "patch": self._patch,
                "seed": self._stream.seed,
                "policy": {"name": policy.name, "options": dataclasses.asdict(policy)},
            }
            storage.save(self._stream, path, settings)
        return self

    @classmethod
    def load(cls, path: str | Path, model: Any, processor: Any = None) -> Session:
        """Return the session of a file that `save` wrote, which answers as the saved one did, to the bit.

        model: the very model, patched as it was. Raises ConfigError for a file that cannot be read, is damaged, or is
        of another model, patch or dtype, UnknownPolicyError for a policy that is not registered here, and what
        `session` raises.
        """
        facts, tensors = storage.load(path)
        settings = dict(facts["settings"])
        try:
            chosen, patch = policy_named(settings.pop("policy")), settings.pop("patch")
            made = session(model, processor, policy=chosen, **settings)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: its settings are none of a session") from error
        if made._patch != patch:
            raise ConfigError(f"{path} is of a model with {patch or 'no patch'}, not {made._patch or 'none'}")
        storage.fill(made._stream, facts, tensors, str(path))
        return made

    @property
    def policy(self) -> Policy:
        """The policy that chooses what stays."""
        return self._stream.policy

    @property
    def stats(self) -> SessionStats:
        """Numbers of the session as it is."""
        return stats_of(self._stream)

    @property
    def held(self) -> list[HeldEntries]:
        """The entries of each layer with full attention."""
        return held_of(self._stream)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.reset()

    def __repr__(self) -> str:
        return f"Session({type(self._stream.model).__name__}, {self.policy!r}: {self.stats})"

    @contextmanager
    def _inside(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionError("another call is inside this session: wait for it, or use a session for each thread")
        try:
            if (now := _patch_of(self._stream.model)) != self._patch:
                raise UnsupportedSetupError(
                    f"the session began on a model with {self._patch or 'no patch'}, and now there is "
                    f"{now or 'none'}: put it back, or begin another session"
                )
            self._stream.check_model()
            yield
        finally:
            self._lock.release()

    @property
    def _words(self) -> Words:
        if self._said is None:
            raise SessionError(
                "without a processor a session takes ids: say([...]), ask([...]) and see(input_ids=..., "
                "pixel_values=...); or make it with session(model, processor, ...)"
            )
        return self._said

    def _read(self, attend: float | int, options: dict[str, Any]) -> int | None:
        """Return how many visual entries an answer reads, None for all."""
        if not (matches_type(attend, Annotated[int, Ge(1)]) or matches_type(attend, Annotated[float, Gt(0), Le(1)])):
            raise BudgetError(f"attend={attend!r} must be a share of the visual tokens in (0, 1], or a number of them")
        held = self._stream.memory.visual
        read = attend if isinstance(attend, int) else max(1, round(attend * held))
        if read >= held:
            return None
        if options.get("prefill_chunk_size") is not None:
            raise OptionError("attend= reads a question in one forward: leave out prefill_chunk_size")
        check_window(self._stream.adapter, read, f"attend={attend!r} reads", "raise it to at least {window}")
        return read

    def _ids(self, text: Any, closing: bool = False) -> Tensor:
        """Return ids of what is said, long `[1, n]`. closing: the user's turn ends."""
        if not isinstance(text, str):
            return _row(text)
        if not text.strip():
            raise SessionError("nothing to say: the text is empty")
        opening = [] if self._stream.progress.opened else [self._words.opening()]
        return torch.cat([*opening, self._words.said(text, closing)], 1)


def session(
    model: Any,
    processor: Any = None,
    *,
    memory: int | str,
    policy: str | Policy = "window",
    target: float = 0.75,
    block: int | None = None,
    horizon: int | None = None,
    reanchor: bool | None = None,
    seed: int = 0,
) -> Session:
    """Begin a session: `see` frames for hours, `ask` about them now and then, with a visual memory of one size.

    model: in eval mode, of a family with which sessions are tested (docs/guides/chats.md), unpatched, or patched by
    methods
    of the site PRE_LLM that read no question, which then choose in each block. processor: None for a session that takes
    ids and pixels. memory: the visual tokens that each layer and KV head holds, tokens that wrap frames among them;
    text is not counted, and stays; or bytes of keys and values, as in "2GiB", text included. policy: a name
    (`available_policies()`) or a configured `Policy`. target: share of the memory that a compression leaves, in (0, 1];
    1: one at each block. block: frames in one forward; None: as many as fill what a compression frees. horizon: the
    greatest position that the model may see; None: its config's `max_position_embeddings`. reanchor: at the horizon,
    positions of all that is held move down, which closes gaps: an approximation. None: where the model's can; False: an
    error there. seed: of policies that draw.
    Raises BudgetError, OptionError, UnknownPolicyError, SessionError, UnsupportedModelError or UnsupportedSetupError.
    """
    chosen = policy_of(policy)
    if not matches_type(target, Annotated[float, Gt(0), Le(1)]):
        raise BudgetError(f"target={target!r} must be a share of the memory, in (0, 1]")
    for name, value in (("block", block), ("horizon", horizon)):
        if not matches_type(value, Annotated[int, Ge(1)] | None):
            raise OptionError(f"{name}={value!r} must be an int >= 1, or None")
    for name, value, kind in (("seed", seed, int), ("reanchor", reanchor, bool | None)):
        if not matches_type(value, kind):
            raise OptionError(f"{name}={value!r} must be {describe_type(kind)}")
    adapter = adapter_of(model)
    if is_patched(model):
        check_patch(get_attachment(model), adapter)
    horizon = horizon or adapter.text_config.max_position_embeddings - 1
    entries = entries_of(memory, adapter, place_of(model)[1])
    limits = Limits(memory, entries, target, horizon, why_fixed(adapter, reanchor))
    limits.check(0, chosen.pinned)
    check_window(
        adapter,
        limits.target(0),
        "a compression leaves",
        "raise memory= (or target=) until their product is at least {window}",
    )
    check_processor(processor, adapter)
    words = None if processor is None else Words(processor)
    return Session(Stream(model, adapter, chosen, limits, seed, proxy_of(chosen, words, adapter)), words, block)


def _patch_of(model: Any) -> str:
    """Return what a model is patched with, "" for nothing."""
    return "; ".join(get_attachment(model).format_lines()) if is_patched(model) else ""


def _row(ids: Any) -> Tensor:
    """Return the caller's ids as long `[1, n]`."""
    found = torch.as_tensor(ids if ids is not None else [], device="cpu")
    found = found[None] if found.ndim == 1 else found
    if found.ndim != 2 or len(found) != 1 or not found.shape[1] or found.is_floating_point():
        raise SessionError(
            f"ids of shape {list(found.shape)} are not one row of at least one: a session has a batch of 1"
        )
    return found.long()
